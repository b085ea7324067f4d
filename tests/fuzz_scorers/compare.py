"""Compares both scores of a case on many inputs, and shrinks the inputs at which they differ."""

import contextlib
import copy
import io
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz_scorers.case import Case, Raised, Score

_SHOWN = 3  # differences of a case that are shrunk and shown
_TRIES = 2000  # smaller inputs that are tried for one difference
_LONGEST = 60  # characters of a text of which single ones are dropped


class Difference(NamedTuple):
    """An input and its two scores."""

    given: Any
    official: Any
    ours: Any


class Outcome(NamedTuple):
    """What came of a case.

    Attributes:
      compared: number of inputs; files count once.
      errors: how many of them the official code ends with an error at.
      known: why -> number of differences that a known deviation explains.
      differing: number of other differences.
      shown: some of these, shrunk.
    """

    compared: int
    errors: int
    known: Counter[str]
    differing: int
    shown: list[Difference]


class _Judge:
    """Both scores of inputs."""

    def __init__(self, case: Case, file: Path):
        self._case = case
        self._official = case.official(file)
        self._at_error = case.at_error(file) if case.at_error is not None else None

    def difference(self, given: Any) -> tuple[Difference | None, bool]:
        """What differs, if anything, and whether the official code ends with an error."""
        expected = _result(self._official, given)
        ours = _result(self._case.ours, given)
        failed = isinstance(expected, Raised)
        wanted = _result(self._at_error, given) if failed and self._at_error else expected
        if failed and self._at_error is None:
            return Difference(given, expected, ours), True
        same = _equal(wanted, ours, self._case.tolerance)
        return (None if same else Difference(given, expected, ours)), failed

    def why_known(self, given: Any) -> str | None:
        return next((known.why for known in self._case.known if known.applies(given)), None)

    def shrunk(self, found: Difference) -> Difference:
        """The smallest input found at which both scores still differ in the same way."""
        tries = 0
        smaller: Iterator[Any] = _smaller(found.given)
        while tries < _TRIES and (given := next(smaller, None)) is not None:
            tries += 1
            difference, _ = self.difference(given)
            if difference is None or self.why_known(given) is not None:
                continue
            if _kind(difference) == _kind(found):
                found, smaller = difference, _smaller(given)
        return found


def compare(case: Case, file: Path, count: int, seed: int) -> Outcome:
    """Compares `count` inputs, or as many whole files as have that many rows.

    Args:
      file: the official file.
    """
    judge = _Judge(case, file)
    known: Counter[str] = Counter()
    inputs = max(1, count // case.rows)
    errors, differing, shown = 0, 0, []
    for number in range(inputs):
        given = case.draw(random.Random(f"{seed}:{case.name}:{number}"))
        difference, failed = judge.difference(given)
        errors += failed
        if difference is None:
            continue
        why = judge.why_known(given)
        if why is not None:
            known[why] += 1
            continue
        differing += 1
        if len(shown) < _SHOWN:
            shown.append(judge.shrunk(difference))
    return Outcome(inputs, errors, known, differing, shown)


def _result(score: Score, given: Any) -> Any:
    """A score of a copy of the input, which official code may change; what is printed is lost."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return score(copy.deepcopy(given))
    except Exception as error:
        return Raised(type(error).__name__)


def _kind(difference: Difference) -> tuple[Raised | None, Raised | None]:
    """The errors that both scores end with."""
    scores = (difference.official, difference.ours)
    official, ours = (one if isinstance(one, Raised) else None for one in scores)
    return official, ours


def _equal(first: Any, second: Any, tolerance: float) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _equal(first[key], second[key], tolerance) for key in first
        )
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(
            _equal(one, other, tolerance) for one, other in zip(first, second, strict=True)
        )
    try:
        if math.isnan(first) or math.isnan(second):
            return math.isnan(first) and math.isnan(second)
        return first == second or abs(first - second) <= tolerance
    except TypeError:  # texts
        return first == second


def _smaller(given: Any) -> Iterator[Any]:
    """Inputs with an item, a word or a character less."""
    if isinstance(given, str):
        words = given.split(" ")
        if len(words) > 1:
            yield from (" ".join(words[:n] + words[n + 1 :]) for n in range(len(words)))
        if len(given) <= _LONGEST:
            yield from (given[:n] + given[n + 1 :] for n in range(len(given)))
    elif isinstance(given, list):
        yield from (given[:n] + given[n + 1 :] for n in range(len(given)))
        for n, item in enumerate(given):
            yield from ([*given[:n], small, *given[n + 1 :]] for small in _smaller(item))
    elif isinstance(given, dict):
        for key, item in given.items():
            yield from ({**given, key: small} for small in _smaller(item))
