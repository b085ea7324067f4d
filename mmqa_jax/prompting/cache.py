"""A response cache on disk, so that a rerun computes only the missing answers.

An entry that is damaged, or holds no answer, is removed and asked for again, and counted.

One SQLite file in WAL mode: an answer survives a killed process as soon as it is returned, and
several processes may read and write at once (on one machine: SQLite's WAL does not work over
network file systems). The file holds answers and hashes of queries, neither prompts nor API keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.decoding.requests import Result, Score, Scores
from mmqa_jax.prompting.backends import (
    Around,
    Backend,
    Chat,
    Choices,
    Failure,
    Message,
    Picture,
    Query,
)
from mmqa_jax.prompting.kept_answers import Unkeepable, keep, restore

_APPLICATION = 0x6D6D7161  # "mmqa", in the file's header
_VERSION = 1
_TIMEOUT_SECONDS = 60.0  # for another process's write
_OTHER = "with --cache (of a row: parts.llm.cache)"  # how to name another file


class ResponseCache:
    """Answers by key.

    Args:
      path: of the file; if missing, the first `put` creates it, so that a file holds answers.

    Raises:
      UserError: a file that cannot be opened or created, is damaged, or is not a response cache.
      RunError: another process keeps the file locked for a minute.
      sqlite3.OperationalError: the disk is full or fails.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._connection: sqlite3.Connection | None = None
        with self._errors_named():
            if self._opened() is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if not os.access(self.path.parent, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def get(self, key: str) -> Any:
        """The text that is kept for a key, as bytes, or None; of a damaged row anything."""
        with self._errors_named():
            connection = self._opened()
            if connection is None:
                return None
            row = connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
            return None if row is None else row[0]

    def put(self, key: str, text: str) -> None:
        """Keeps a text; it is on disk when this returns. An existing one stays."""
        with self._errors_named():
            connection = self._opened() or self._open()
            connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, text))

    def discard(self, key: str) -> None:
        """Removes what is kept for a key."""
        with self._errors_named():
            if (connection := self._opened()) is not None:
                connection.execute("DELETE FROM answers WHERE key = ?", (key,))

    def __len__(self) -> int:
        with self._errors_named():
            connection = self._opened()
            if connection is None:
                return 0
            return connection.execute("SELECT count(*) FROM answers").fetchone()[0]

    def close(self) -> None:
        """Closes the file."""
        if self._connection is not None:
            self._connection.close()

    def _opened(self) -> sqlite3.Connection | None:
        """The open file; None while there is none (another process may create it at any time)."""
        if self._connection is None and self.path.exists():
            self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        """Opens the file, or creates it."""
        connection = sqlite3.connect(self.path, timeout=_TIMEOUT_SECONDS, isolation_level=None)
        connection.text_factory = bytes  # of a damaged row it may be no UTF-8
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        run = connection.execute
        run("BEGIN")  # one view of the file: another process may be creating it
        application = run("PRAGMA application_id").fetchone()[0]
        version = run("PRAGMA user_version").fetchone()[0]
        tables = run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        run("COMMIT")
        if (application, version) != (_APPLICATION, _VERSION):
            if application or version or tables:
                raise UserError(
                    f"{self.path}: not a response cache of this version; name another {_OTHER}."
                )
            self._switch_to_wal(connection)
            run("BEGIN IMMEDIATE")  # another process may make the same table
            run("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
            run(f"PRAGMA application_id = {_APPLICATION}")
            run(f"PRAGMA user_version = {_VERSION}")
            run("COMMIT")
        # With WAL a killed process loses nothing, and a power cut at most the last answers.
        run("PRAGMA synchronous = NORMAL")

    def _switch_to_wal(self, connection: sqlite3.Connection) -> None:
        """WAL stays set in the file. SQLite does not wait if another process is setting it."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:  # a bug of ours
            raise
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "SQLITE_CORRUPT")
            if name == "SQLITE_FULL" or name.startswith("SQLITE_IOERR"):
                error.filename = str(self.path)  # for core.disk_errors: the disk is at fault
                raise
            if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise RunError(
                    f"{self.path}: another process has locked the response cache for "
                    f"{_TIMEOUT_SECONDS:.0f} s; end it, or name another {_OTHER}."
                ) from error
            if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
                raise UserError(
                    f"{self.path}: the response cache cannot be written there; name another path "
                    f"{_OTHER}."
                ) from error
            raise UserError(
                f"{self.path}: the response cache is damaged ({error}); delete this file and those "
                "beside it that end in -wal and -shm (its answers are computed again), or name "
                f"another {_OTHER}."
            ) from error
        except OSError as error:
            raise UserError(
                f"{self.path}: the response cache cannot be created there ({error.strerror}); name "
                f"another path {_OTHER}."
            ) from error


@dataclasses.dataclass
class Work:
    """What answers cost, as if every draw and every continuation were asked for alone.

    It does not depend on what a cache holds: a rerun counts the same.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0  # generated, or scored

    def add(self, answer: Result | Scores) -> None:
        """Counts one answer."""
        rows = answer.scores if isinstance(answer, Scores) else answer.candidates
        self.calls += len(rows)
        self.prompt_tokens += len(rows) * answer.prompt_tokens
        self.completion_tokens += sum(
            len(row.logprobs if isinstance(row, Score) else row.tokens) for row in rows
        )


class Cached(Around):
    """A backend with a response cache.

    A query's key is made of the backend's fingerprint, the decoding parameters and the whole query,
    with pictures by the hash of their content. The seed is part of it whenever tokens are drawn,
    even if a server does not promise the same draw for the same seed.

    Args:
      backend: answers what is not in the cache.
      cache: may be shared with other backends and processes.

    Attributes:
      work: of all answers that were given, kept ones included.
    """

    def __init__(self, backend: Backend, cache: ResponseCache):
        super().__init__(backend)
        self._cache = cache
        self.work = Work()

    def close(self) -> None:
        """Closes the cache's file."""
        self._cache.close()

    def find(self, request: Query) -> Result | Scores | None:
        """The cached answer to a query, or None; an entry that cannot be read is removed."""
        restored = self._kept(request_key(self.fingerprint, request), request)
        if restored is None and not isinstance(request, Choices):
            older = self._kept(request_key(self.fingerprint, request, of_text=False), request)
            restored = older if _is_of_text(older) else None
        if restored is None:
            return None
        self.usage.cached += 1
        self.work.add(restored)
        return restored

    def _kept(self, key: str, request: Query) -> Result | Scores | None:
        kept = self._cache.get(key)
        try:
            return None if kept is None else restore(key, request, kept)
        except Unkeepable:  # a damaged row, or one that a faulty version kept
            self.usage.unreadable += 1
            self._cache.discard(key)
            return None

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """Cached answers first, then the backend's, which are stored.

        An answer of the backend's that cannot be kept is a failure.
        """
        missing: dict[Any, Query] = {}
        for query in queries:
            found = self.find(query)
            if found is None:
                missing[query.id] = query
            else:
                yield found
        if missing:
            for result in self._backend.answer(missing.values()):
                query = missing[result.id]
                key = request_key(self.fingerprint, query)
                try:
                    text = keep(key, query, result)
                except Unkeepable as error:
                    reason = f"its answer cannot be written ({error})"
                    self.failures.append(Failure(query.id, reason))
                    self.usage.failures += 1
                    continue
                self._cache.put(key, text)
                self.work.add(result)
                yield result


def request_key(fingerprint: str, request: Query, *, of_text: bool = True) -> str:
    """SHA-256 of all that an answer depends on.

    Args:
      of_text: a candidate's total is of its text's tokens. Without it: the key of older caches,
        whose totals hold an end token's or a stop string's log-probability as well.
    """
    parts: dict[str, Any] = {"kind": type(request).__name__}
    if isinstance(request, Chat):
        parts["messages"] = _messages(request.messages)
    else:
        text = isinstance(request.prompt, str)
        parts["prompt"] = request.prompt if text else _messages(request.prompt)
        parts["images"] = [picture.digest for picture in request.images]
    if isinstance(request, Choices):
        parts["continuations"] = list(request.continuations)
    else:
        decoding = dataclasses.asdict(request.decoding)
        decoding["stop"] = list(decoding["stop"])
        if not decoding["temperature"]:  # greedy: nothing is drawn
            for name in ("top_k", "top_p", "seed"):
                del decoding[name]
        parts["decoding"] = decoding
        if of_text:
            parts["total"] = "text"
    text = json.dumps([fingerprint, parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_of_text(older: Result | Scores | None) -> bool:
    """Whether an older cache's answer would be the same today: no total, or no token to cut."""
    return isinstance(older, Result) and all(
        math.isnan(one.total) or one.finish == "length" for one in older.candidates
    )


def _messages(messages: Iterable[Message]) -> list[Any]:
    def part(content: str | Picture):
        return content if isinstance(content, str) else {"picture": content.digest}

    return [[message.role, [part(content) for content in message.content]] for message in messages]
