"""The fuzz of scorers (`tests.fuzz_scorers`), with a small official scorer in a folder of its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.fuzz_scorers import __main__ as fuzz
from tests.fuzz_scorers.case import Case, Known, always
from tests.fuzz_scorers.cases import CASES
from tests.fuzz_scorers.official import definitions, run_script

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


def test_equal_scores_pass(folder, capsys):
    assert fuzz.run([CASE], folder, count=50, seed=0) == 0
    out = capsys.readouterr().out
    assert "| `lower` | someone/scorer, eval.py | 50 | 0 | 0 | 0 |" in out
    # What tests/long.py shows.
    assert out.splitlines()[-1].startswith("1 of 1 cases compared: 50 inputs")


def test_a_difference_fails_with_the_smallest_input(folder, capsys):
    assert fuzz.run([KEEPS_HYPHENS], folder, count=50, seed=0) == 1
    out = capsys.readouterr().out
    assert "lower: '-'\n    official ''\n    ours     ' '" in out


def test_a_known_difference_passes_with_its_reason(folder, capsys):
    known = Known("hyphens are spaces", lambda text: "-" in text)
    case = dataclasses.replace(KEEPS_HYPHENS, known=(known,))
    assert fuzz.run([case], folder, count=50, seed=0) == 0
    assert "known: hyphens are spaces" in capsys.readouterr().out


def test_a_known_difference_does_not_hide_another(folder, capsys):
    known = Known("hyphens are spaces", lambda text: "-" in text)
    case = dataclasses.replace(CASE, ours=lambda text: text, known=(known,))
    assert fuzz.run([case], folder, count=50, seed=0) == 1
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lower: '")]
    assert shown
    assert not any("-" in line for line in shown)


def test_an_error_of_the_official_code(folder, capsys):
    """Ours is compared with what the case says of such inputs; a case that says nothing fails."""
    stops = dataclasses.replace(CASE, draw=lambda draw: draw.choice(("stop", "go")))
    assert fuzz.run([stops], folder, count=20, seed=0) == 1
    assert "official ends with ValueError" in capsys.readouterr().out
    told = dataclasses.replace(stops, at_error=always("stop"))
    assert fuzz.run([told], folder, count=20, seed=0) == 0
    other = dataclasses.replace(stops, at_error=always(""))
    assert fuzz.run([other], folder, count=20, seed=0) == 1


def test_an_error_of_ours_is_a_difference(folder, capsys):
    case = dataclasses.replace(CASE, ours=lambda text: text.index("dog"))
    assert fuzz.run([case], folder, count=20, seed=0) == 1
    assert "ours     ends with ValueError" in capsys.readouterr().out


def test_numbers_differ_by_more_than_the_tolerance(folder):
    case = dataclasses.replace(CASE, official=lambda file: len, ours=lambda text: len(text) + 1e-9)
    assert fuzz.run([case], folder, count=20, seed=0) == 1
    assert fuzz.run([dataclasses.replace(case, tolerance=1e-6)], folder, count=20, seed=0) == 0


def test_whole_files_count_for_their_rows(folder, capsys):
    assert fuzz.run([dataclasses.replace(CASE, rows=20)], folder, count=50, seed=0) == 0
    assert "eval.py | 2 | 0 | 0 | 0 |" in capsys.readouterr().out


def test_a_repository_that_is_not_there_fails(folder, capsys):
    absent = dataclasses.replace(CASE, name="other", repository="someone/else")
    assert fuzz.run([CASE, absent], folder, count=20, seed=0) == 1
    out = capsys.readouterr().out
    assert "| `other` | someone/else, eval.py | not there |" in out
    assert "clone someone/else" in out
    assert out.splitlines()[-1].startswith("1 of 2 cases compared")


def test_definitions_run_without_the_rest_of_the_file(folder):
    file = folder / "someone/scorer/eval.py"
    with pytest.raises(AssertionError):
        definitions(file, "accuracy").accuracy([1, 0])
    assert definitions(file, "accuracy", asserts=False).accuracy([1, 0]) == 0.5
    assert definitions(file, "old", a_package_that_is_not_there=np)
    assert definitions(file, "normalized", MARKS={"d"}).normalized("dog!") == "og!"
    with pytest.raises(ModuleNotFoundError):
        definitions(file, "Trainer")
    with pytest.raises(KeyError, match="nowhere"):
        definitions(file, "nowhere")


def test_a_script_imports_its_neighbours_anew(tmp_path):
    (tmp_path / "counted_neighbour.py").write_text("count = []\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport counted_neighbour\ncounted_neighbour.count.append(1)\n"
        "print(len(counted_neighbour.count), sys.argv[1])\n"
    )
    assert [run_script(script, "--x") for _ in range(2)] == ["1 --x\n"] * 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["nothing"], "nothing: no such case"), (["vqa", "--official=absent"], "--official=absent")],
)
def test_what_the_command_line_refuses(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", *arguments])
    with pytest.raises(SystemExit) as ended:
        fuzz.main()
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_each_case_has_a_name_of_its_own():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(case.repository.count("/") == 1 for case in CASES)
