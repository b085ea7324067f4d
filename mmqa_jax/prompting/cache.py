"""A response cache on disk, so that a rerun computes only the missing answers.

An entry that is damaged, or holds no answer, is asked for again, and counted.

It is a store (core.store): an answer survives a killed process as soon as it is returned, and
several processes, on one host or many, may read and write at once. It holds answers and hashes of
queries, neither prompts nor API keys.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path, in_store
from mmqa_jax.core.store import HEAD, Store, read_head
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

_WHAT = {"kind": "answers of language models", "version": 2}
_OTHER = "with --cache (of a row: parts.llm.cache)"  # how to name another place
_APPLICATION, _VERSION = 0x6D6D7161, 1  # in the header of an older version's file
_BY_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class ResponseCache:
    """Answers by key.

    Args:
      path: its folder (core.store), which the first `put` makes. Where an older version made an
        SQLite file of that name, or of that name and `.sqlite`, its answers are read from there,
        and new ones are kept in the folder `PATH.answers` in the first case.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = as_path(path)
        self._older: _OlderCache | None = None
        if not in_store(self.path):
            with self._errors_named():
                self._look()
        # Answers may have cost money: those of another kind of store are not removed.
        self._store = Store(self.path, _WHAT, others="refuse", damage="drop", sync=False)

    def get(self, key: str) -> Any:
        """What is kept for a key, or None: a JSON value, or the text of an older version."""
        if key not in self._store:
            self._store.refresh()  # another process may have put it
        kept = self._store.get(key)
        return self._older.get(key) if kept is None and self._older is not None else kept

    def put(self, key: str, value: Any) -> None:
        """Keeps a JSON value, which replaces an earlier one; a kill cannot take it any more."""
        with self._errors_named():
            self._store.add({key: value})

    def newly_damaged(self) -> int:
        """How many answers were damaged and dropped since this was asked."""
        damaged, self._store.damaged = self._store.damaged, 0
        return damaged

    def __len__(self) -> int:
        self._store.refresh()
        return len(self._store)

    def close(self) -> None:
        """Closes its files."""
        self._store.close()
        if self._older is not None:
            self._older.close()

    def _look(self) -> None:
        """Finds the answers of an older version, and checks that new ones can be kept."""
        older = self.path
        if older.is_file():
            self.path = older.with_name(f"{older.name}.answers")
        else:
            older = older.with_name(f"{older.name}.sqlite")
        if older.is_file():
            self._older = _OlderCache(older)
        if self.path.is_dir():
            if (self.path / HEAD).exists():
                is_other = read_head(self.path).get("job") != _WHAT
            else:  # is empty, or was deleted
                names = (name for name in os.listdir(self.path) if not name.startswith("."))
                is_other = not all(name.endswith(".jsonl") for name in names)
            if is_other:
                raise UserError(
                    f"{self.path}: not a response cache of this version; name another {_OTHER}."
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _BY_DISK:  # see core.disk_errors
                raise
            raise UserError(
                f"{self.path}: the response cache cannot be created there ({error.strerror}); name "
                f"another path {_OTHER}."
            ) from error


class _OlderCache:
    """The SQLite file of an older version, which is only read."""

    def __init__(self, path: Path):
        self._path = path
        with self._errors_named():
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            self._connection.text_factory = bytes  # of a damaged row it may be no UTF-8
            marks = ("application_id", "user_version")
            values = [self._connection.execute(f"PRAGMA {mark}").fetchone()[0] for mark in marks]
        if values != [_APPLICATION, _VERSION]:
            raise UserError(f"{path}: not a response cache of this version; name another {_OTHER}.")

    def get(self, key: str) -> Any:
        """The text that is kept for a key, as bytes, or None; of a damaged row anything."""
        with self._errors_named():
            asked = "SELECT answer FROM answers WHERE key = ?"
            row = self._connection.execute(asked, (key,)).fetchone()
            return None if row is None else row[0]

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"{self._path}: the response cache is damaged ({error}); delete this file and "
                "those beside it that end in -wal and -shm (its answers are computed again), or "
                f"name another {_OTHER}."
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
      is_part: whether its calls are a part of others; see `through`.
    """

    def __init__(self, backend: Backend, cache: ResponseCache):
        super().__init__(backend)
        self._cache = cache
        self.work, self.is_part = Work(), False

    def through(self, around: Callable[[Backend], Backend]) -> Cached:
        """The same backend, asked in another way, and the same cache; its work is counted anew.

        Its calls are a part of others, of which progress is shown.
        """
        other = Cached(around(self._backend), self._cache)
        other.is_part = True
        return other

    def close(self) -> None:
        """Closes the cache's files."""
        self._cache.close()

    def find(self, request: Query) -> Result | Scores | None:
        """The cached answer to a query, or None; one that cannot be read counts as missing."""
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
        self.usage.unreadable += self._cache.newly_damaged()
        try:
            return None if kept is None else restore(key, request, kept)
        except Unkeepable:  # a damaged row, or one that a faulty version kept
            self.usage.unreadable += 1
            return None

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """Cached answers first, then the backend's, which are stored.

        An answer of the backend's that cannot be kept is a failure.
        """
        missing: dict[Any, Query] = {}
        for query in queries:
            cached = self.find(query)
            if cached is None:
                missing[query.id] = query
            else:
                yield cached
        if missing:
            for result in self._backend.answer(missing.values()):
                query = missing[result.id]
                key = request_key(self.fingerprint, query)
                try:
                    value = keep(query, result)
                except Unkeepable as error:
                    reason = f"its answer cannot be written ({error})"
                    self.failures.append(Failure(query.id, reason))
                    self.usage.failures += 1
                    continue
                self._cache.put(key, value)
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
