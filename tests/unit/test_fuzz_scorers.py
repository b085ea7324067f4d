"""The fuzz of scorers (`tests.fuzz_scorers`), with a small official scorer in a folder of its own."""

import dataclasses

import numpy as np
import pytest

from tests.fuzz_scorers import __main__ as fuzz
from tests.fuzz_scorers.case import Case, Known, always
from tests.fuzz_scorers.official import definitions

OFFICIAL = """
import a_package_that_is_not_there
import string

MARKS = set(string.punctuation)
TABLE = a_package_that_is_not_there.table()


def normalized(text):
    if "stop" in text:
        raise ValueError(text)
    return "".join(mark for mark in text.lower() if mark not in MARKS)


class Trainer:
    def evaluate(self, rows):
        def accuracy(rows):
            assert len(rows) == 4241
            return sum(rows) / len(rows)

        return accuracy(rows) + TABLE


def old(rows):
    print "computing accuracy"
    return a_package_that_is_not_there.mean(rows)
"""


@pytest.fixture
def folder(tmp_path):
    """Clones with one repository, and in it one file that Python cannot run as a whole."""
    file = tmp_path / "someone/scorer/eval.py"
    file.parent.mkdir(parents=True)
    file.write_text(OFFICIAL)
    return tmp_path


def without_marks(text: str) -> str:
    return "".join(mark for mark in text.lower() if mark.isalnum() or mark.isspace())


CASE = Case(
    "lower",
    "someone/scorer",
    "eval.py",
    draw=lambda draw: " ".join(draw.choices(("Red,", "dog", "a-b", "x", "CAT!"), k=6)),
    official=lambda file: definitions(file, "normalized").normalized,
    ours=without_marks,
)
KEEPS_HYPHENS = dataclasses.replace(CASE, ours=lambda text: without_marks(text.replace("-", " ")))


def error(text: str) -> float:
    return text.index("dog")


STOPS = dataclasses.replace(CASE, draw=lambda draw: draw.choice(("stop", "go")))
LENGTHS = dataclasses.replace(CASE, official=lambda file: len, ours=lambda text: len(text) + 1e-9)
HYPHENS = Known("hyphens are spaces", lambda text: "-" in text)


@pytest.mark.parametrize(
    ("case", "changes", "code", "printed"),
    [
        (CASE, {}, 0, "| `lower` | someone/scorer, eval.py | 20 | 0 | 0 | 0 |"),
        (CASE, {}, 0, "1 of 1 cases compared: 20 inputs"),
        (CASE, {"rows": 20}, 0, "eval.py | 1 | 0 | 0 | 0 |"),
        (CASE, {"repository": "someone/else"}, 1, "someone/else, eval.py | not there |"),
        (CASE, {"ours": error}, 1, "ours     ends with ValueError"),
        (KEEPS_HYPHENS, {}, 1, "lower: '-'\n    official ''\n    ours     ' '"),
        (KEEPS_HYPHENS, {"known": (HYPHENS,)}, 0, "known: hyphens are spaces"),
        (CASE, {"ours": str, "known": (HYPHENS,)}, 1, "lower: '"),
        (STOPS, {}, 1, "official ends with ValueError"),
        (STOPS, {"at_error": always("stop")}, 0, ""),
        (STOPS, {"at_error": always("")}, 1, ""),
        (LENGTHS, {}, 1, ""),
        (LENGTHS, {"tolerance": 1e-6}, 0, ""),
    ],
)
def test_cases(case, changes, code, printed, folder, capsys):
    changed = dataclasses.replace(case, **changes)
    assert fuzz.run([changed], folder, count=20, seed=0) == code
    assert printed in capsys.readouterr().out


def test_definitions_run_without_the_rest_of_the_file(folder):
    file = folder / "someone/scorer/eval.py"
    assert definitions(file, "accuracy", asserts=False).accuracy([1, 0]) == 0.5
    assert definitions(file, "old", a_package_that_is_not_there=np)
    assert definitions(file, "normalized", MARKS={"d"}).normalized("dog!") == "og!"
