"""Answers as JSON values that are kept, and back: what cannot be read or written is not kept."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.json_text import parse_json
from mmqa_jax.decoding.requests import Candidate, Result, Score, Scores
from mmqa_jax.prompting.backends import Choices, Query

_CHECK = "crc32"  # in texts of older versions, of the key and the JSON of everything else


class Unkeepable(Exception):
    """A text is no answer to the query, or an answer cannot be written; the message says why."""


def keep(request: Query, answer: Result | Scores) -> dict[str, Any]:
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


def restore(key: str, request: Query, kept: Any) -> Result | Scores:
    """The answer to a query that a kept value holds.

    Args:
      key: that it was kept under.
      kept: a JSON value; an older version kept texts, with a checksum of key and value in them, or
        without one.

    Raises:
      Unkeepable: it holds none, or is damaged.
    """
    value = _of_text(key, kept) if isinstance(kept, str | bytes) else kept
    if not isinstance(value, dict):
        raise Unkeepable("it is no object")
    try:
        return _scores(request, value) if isinstance(request, Choices) else _result(request, value)
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


def _scores(request: Choices, value: dict[str, Any]) -> Scores:
    _check(value.keys() <= {"scores", "prompt_tokens"}, "its keys")
    _check(len(value["scores"]) == len(request.continuations), "another number of scores")
    scores = []
    for row in value["scores"]:
        _check(row.keys() == {"total", "logprobs", "greedy"}, "a score's keys")
        _check(isinstance(row["greedy"], bool) and _is_number(row["total"]), "a score")
        _check(not math.isnan(row["total"]) and row["logprobs"] != [], "a score of no number")
        scores.append(Score(row["total"], _numbers(row["logprobs"]), row["greedy"]))
    tokens = value.get("prompt_tokens", 0)
    _check(_is_count(tokens), "its tokens")
    return Scores(request.id, tuple(scores), tokens)


def _result(request: Query, value: dict[str, Any]) -> Result:
    _check(value.keys() == {"candidates", "prompt_tokens"}, "its keys")
    _check(_is_count(value["prompt_tokens"]), "its tokens")
    _check(isinstance(value["candidates"], list) and value["candidates"] != [], "no candidates")
    fields = {field.name for field in dataclasses.fields(Candidate)}
    candidates = []
    for row in value["candidates"]:
        _check(row.keys() == fields, "a candidate's keys")
        _check(isinstance(row["text"], str | None) and isinstance(row["finish"], str), "a text")
        _check(isinstance(row["tokens"], list) and all(map(_is_count, row["tokens"])), "a token")
        _check(_is_number(row["total"]), "a total")
        logprobs = None if row["logprobs"] is None else _numbers(row["logprobs"])
        kept = {**row, "tokens": tuple(row["tokens"]), "logprobs": logprobs}
        candidates.append(Candidate(**kept))
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
