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
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json
from mmqa_jax.core.paths import as_path, in_store
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.store import HEAD, Store, read_head
from mmqa_jax.decoding.requests import Candidate, Result, Score, Scores, Unanswerable
from mmqa_jax.prompting import backends
from mmqa_jax.prompting.backends import thinking

_WHAT = {"kind": "answers of language models", "version": 2}
_OTHER = "with --cache (of a row: parts.llm.cache)"  # how to name another place
_APPLICATION, _VERSION = 0x6D6D7161, 1  # in the header of an older version's file
_BY_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class ResponseCache:
    """Keeps answers by key in a folder (core.store), which the first `put` makes. Where an older
    version made an SQLite file of that name, or of that name and `.sqlite`, its answers are read
    from there, and new ones are kept in the folder `PATH.answers` in the first case."""

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
        value = self._store.get(key)
        return self._older.get(key) if value is None and self._older is not None else value

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
            if error.errno in _BY_DISK:  # see core.errors
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
    thinking_tokens: int = 0  # of these, before answers, as far as they are counted

    def add(self, answer: Result | Scores) -> None:
        """Counts one answer."""
        rows = answer.scores if isinstance(answer, Scores) else answer.candidates
        self.calls += len(rows)
        self.prompt_tokens += len(rows) * answer.prompt_tokens
        self.completion_tokens += sum(
            len(row.logprobs if isinstance(row, Score) else row.tokens) for row in rows
        )
        if isinstance(answer, Result):
            self.thinking_tokens += sum(row.thinking_tokens or 0 for row in answer.candidates)


class Cached(backends.Around):
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

    def __init__(self, backend: backends.Backend, cache: ResponseCache):
        super().__init__(backend)
        self._cache = cache
        self.work = Work()

    def close(self) -> None:
        """Closes the cache's files."""
        self._cache.close()

    def find(self, request: backends.Query) -> Result | Scores | None:
        """The cached answer to a query, or None; one that cannot be read counts as missing."""
        restored = self._kept(request_key(self.fingerprint, request), request)
        if restored is None and not isinstance(request, backends.Choices):
            older = self._kept(request_key(self.fingerprint, request, of_text=False), request)
            restored = older if _is_of_text(older) else None
        if restored is None:
            return None
        self.usage.cached += 1
        self.work.add(restored)
        return restored

    def _kept(self, key: str, request: backends.Query) -> Result | Scores | None:
        value = self._cache.get(key)
        self.usage.unreadable += self._cache.newly_damaged()
        try:
            return None if value is None else restore(key, request, value)
        except Unkeepable:  # a damaged row, or one that a faulty version kept
            self.usage.unreadable += 1
            return None

    def answer(self, queries: Iterable[backends.Query]) -> Iterator[Result | Scores]:
        """Cached answers first, then the backend's, which are stored.

        An answer of the backend's that cannot be kept is a failure.
        """
        missing: dict[Any, backends.Query] = {}
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
                    self.failures.append(backends.Failure(query.id, reason))
                    self.usage.failures += 1
                    continue
                self._cache.put(key, value)
                self.work.add(result)
                yield result


_PLAIN = backends.Decoding()
_SHAPE = (
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "top_logprobs", "grammar",
)  # fmt: skip


def request_key(fingerprint: str, request: backends.Query, *, of_text: bool = True) -> str:
    """Makes the SHA-256 of all that an answer depends on. Without `of_text` it is the key of older
    caches, whose totals hold an end token's or a stop string's log-probability as well."""
    parts: dict[str, Any] = {"kind": type(request).__name__}
    if isinstance(request, backends.Chat):
        parts["messages"] = _messages(request.messages)
        if request.begun:
            parts["begun"] = request.begun
        if request.thinking is not None:
            parts["thinking"] = dataclasses.asdict(request.thinking)
    else:
        text = isinstance(request.prompt, str)
        parts["prompt"] = request.prompt if text else _messages(request.prompt)
        parts["images"] = [picture.digest for picture in request.images]
    if isinstance(request, backends.Choices):
        parts["continuations"] = list(request.continuations)
        if request.hidden:
            parts["hidden"] = list(request.hidden)
    else:
        decoding = dataclasses.asdict(request.decoding)
        decoding["stop"] = list(decoding["stop"])
        for name in _SHAPE:  # which older caches have no key for
            if decoding[name] == getattr(_PLAIN, name):
                del decoding[name]
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
        math.isnan(candidate.total) or candidate.finish == "length"
        for candidate in older.candidates
    )


def _messages(messages: Iterable[backends.Message]) -> list[Any]:
    def part(content: str | backends.Picture):
        return content if isinstance(content, str) else {"picture": content.digest}

    return [[message.role, [part(content) for content in message.content]] for message in messages]


# Answers as JSON values that are kept, and back: what cannot be read or written is not kept.


_CHECK = "crc32"  # in texts of older versions, of the key and the JSON of everything else


class Unkeepable(Exception):
    """A text is no answer to the query, or an answer cannot be written; the message says why."""


def keep(request: backends.Query, answer: Result | Scores) -> dict[str, Any]:
    """An answer as a JSON value, without its id.

    Raises:
      Unkeepable: it would not come back from there, or could not be written into a file.
    """
    value = _plain(answer)
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Unkeepable(str(error)) from error
    restore("", request, json.loads(text))
    return value


def restore(key: str, request: backends.Query, cached: Any) -> Result | Scores:
    """Reads the answer to a query from the JSON value that a key holds, or from the text of an
    older version, with a checksum of both in it or without; Unkeepable where it holds none, or is
    damaged."""
    value = _of_text(key, cached) if isinstance(cached, str | bytes) else cached
    if not isinstance(value, dict):
        raise Unkeepable("it is no object")
    try:
        return (
            _scores(request, value)
            if isinstance(request, backends.Choices)
            else _result(request, value)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unkeepable(f"it is no answer ({type(error).__name__}: {error})") from error


def _of_text(key: str, text: str | bytes) -> Any:
    """The value that an older version kept as text."""
    try:
        value = parse_json(text, "it", remedy="")
    except UserError as error:
        raise Unkeepable(str(error)) from error
    check = value.pop(_CHECK, None) if isinstance(value, dict) else None
    if check is not None and check != _checksum(key, value):
        raise Unkeepable("its checksum is another")
    return value


def _checksum(key: str, value: dict[str, Any]) -> int:
    return zlib.crc32(f"{key} {json.dumps(value)}".encode())


def _plain(answer: Result | Scores) -> dict[str, Any]:
    rows = answer.scores if isinstance(answer, Scores) else answer.candidates
    name = "scores" if isinstance(answer, Scores) else "candidates"
    plain = [dataclasses.asdict(row) for row in rows]
    for row in plain:
        row.pop("likeliest", None)
    return {name: plain, "prompt_tokens": answer.prompt_tokens}


def _scores(request: backends.Choices, value: dict[str, Any]) -> Scores:
    _check(value.keys() <= {"scores", "prompt_tokens"}, "its keys")
    count = len(request.continuations) * (1 + len(request.hidden))
    _check(len(value["scores"]) == count, "another number of scores")
    scores = []
    for row in value["scores"]:
        _check(row.keys() == {"total", "logprobs", "greedy"}, "a score's keys")
        _check(isinstance(row["greedy"], bool) and _is_number(row["total"]), "a score")
        _check(not math.isnan(row["total"]) and row["logprobs"] != [], "a score of no number")
        scores.append(Score(row["total"], _numbers(row["logprobs"]), row["greedy"]))
    tokens = value.get("prompt_tokens", 0)
    _check(_is_count(tokens), "its tokens")
    return Scores(request.id, tuple(scores), tokens)


def _result(request: backends.Query, value: dict[str, Any]) -> Result:
    _check(value.keys() == {"candidates", "prompt_tokens"}, "its keys")
    _check(_is_count(value["prompt_tokens"]), "its tokens")
    _check(isinstance(value["candidates"], list) and value["candidates"] != [], "no candidates")
    fields = {field.name for field in dataclasses.fields(Candidate)} - {"likeliest"}
    candidates = []
    for row in value["candidates"]:
        row = {"thinking": "", "thinking_tokens": None, **row}  # which older versions did not keep
        _check(row.keys() == fields, "a candidate's keys")
        _check(isinstance(row["text"], str | None) and isinstance(row["finish"], str), "a text")
        _check(isinstance(row["thinking"], str), "thoughts")
        _check(row["thinking_tokens"] is None or _is_count(row["thinking_tokens"]), "their tokens")
        _check(isinstance(row["tokens"], list) and all(map(_is_count, row["tokens"])), "a token")
        _check(_is_number(row["total"]), "a total")
        logprobs = None if row["logprobs"] is None else _numbers(row["logprobs"])
        values = {**row, "tokens": tuple(row["tokens"]), "logprobs": logprobs}
        candidates.append(Candidate(**values))
    return Result(request.id, tuple(candidates), value["prompt_tokens"], 0)


def _numbers(values: Any) -> tuple[float, ...]:
    _check(isinstance(values, list) and all(map(_is_number, values)), "a log-probability")
    return tuple(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


# All prompts of a stage as one stream to the backend.


class Answers(NamedTuple):
    """What a backend made of a stage's queries.

    Attributes:
      by_id: Result or Scores of every query that was answered.
      failed: query id -> why it has no answer.
      not_sent: the ids of failed queries that the backend cannot take, such as too long ones.
    """

    by_id: dict[Hashable, Any]
    failed: dict[Hashable, str]
    not_sent: Set[Hashable] = frozenset()


def answer_all(
    backend: backends.Backend | Cached,
    queries: Sequence[backends.Query],
    title: str = "Answering",
    *,
    checked: bool = False,
    thoughts_apart: bool = True,
    quiet: bool | None = None,
) -> Answers:
    """Answers queries with unique ids; those in the response cache first.

    A query that the backend cannot take, because of its own length, text or picture, has failed
    and does not end the run. The others are sent in the order of their texts, so that prompts with
    a common beginning follow each other and the engine computes it once.

    Args:
      checked: all queries passed `backend.check`, as those of `few_shot` did; an engine chooses its
        sizes for as many as were checked.
      thoughts_apart: whether candidates' texts are answers alone; else with the thoughts that a
        model marks in them.
      quiet: see Progress.
    """
    not_sent: dict[Hashable, str] = {}
    for query in () if checked else queries:
        try:
            backend.check(query)
        except Unanswerable as error:
            not_sent[query.id] = str(error)
    queries = [query for query in queries if query.id not in not_sent]
    answers: dict[Hashable, Result | Scores] = {}
    if isinstance(backend, Cached):
        for query in queries:
            if (cached := backend.find(query)) is not None:
                answers[query.id] = cached
    missing = sorted((query for query in queries if query.id not in answers), key=text_of)
    before = len(backend.failures)
    if missing:
        start = len(answers)
        with Progress(title, len(queries), "requests", start=start, quiet=quiet) as progress:
            failed = 0
            for result in backend.answer(missing):
                answers[result.id] = result
                rates = {kind: f"{rate:.0f} tokens/s" for kind, rate in backend.rates().items()}
                fresh, failed = backend.usage.failures - failed, backend.usage.failures
                progress.advance(1 + fresh, **rates, **({"failed": failed} if failed else {}))
    reasons = {failure.id: failure.reason for failure in backend.failures[before:]}
    if thoughts_apart:
        answers = {
            name: thinking.thoughts_apart(answer) if isinstance(answer, Result) else answer
            for name, answer in answers.items()
        }
    return Answers(answers, not_sent | reasons, not_sent.keys())


def text_of(query: backends.Query) -> str:
    """A query's whole text, without its pictures."""
    content = query.messages if isinstance(query, backends.Chat) else query.prompt
    if isinstance(content, str):
        return content
    texts = [message.text for message in content]
    return "\n".join([*texts, query.begun] if isinstance(query, backends.Chat) else texts)
