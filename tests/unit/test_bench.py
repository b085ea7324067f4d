"""`tests.bench`: how it times and measures memory, what its rows say, what it needs to run."""

import importlib
import re

import pytest

from mmqa_jax.data.documents.document import READERS, ending_of
from tests.bench import BENCHES, Options
from tests.bench.__main__ import main
from tests.bench.timing import interleave, speed_ratio

pytestmark = pytest.mark.slow


def worker(now: list[float], seconds: list[float]):
    """Work of which each call takes the next of `seconds`, by the clock `now`."""
    left = iter(seconds)

    def work():
        now[0] += next(left)

    return work


def test_the_first_round_is_not_counted():
    now = [0.0]
    sides = {"ours": worker(now, [9.0, 1.0, 2.0, 3.0]), "peer": worker(now, [9.0, 4.0, 4.0, 9.0])}
    measured = interleave(sides, 3, clock=lambda: now[0])
    assert measured == {"ours": [1.0, 2.0, 3.0], "peer": [4.0, 4.0, 9.0]}
    assert speed_ratio(measured["ours"], measured["peer"]) == (3.0, 2.0, 4.0)


def test_rows_follow_from_what_was_timed():
    from tests.bench.runner import Case, row_of

    class Peak:
        best = 1e9

    seconds = {"ours": [0.5, 0.2, 0.1], "peer": [0.5, 0.3, 0.4], "ours_bfloat16": [0.1] * 3}
    case = Case("bert", "ms", None, flops=1e8, read_bytes=1000, notes={"work": "some"})
    assert row_of(case, seconds, Peak(), 5000.0) == {
        "name": "bert", "ours": 200.0, "peer": 400.0, "ratio": 1.5, "unit": "ms", "floor": 200.0,
        "work": "some", "ratio_range": [1.0, 4.0], "gflops": 0.5, "of_peak": 0.5,
        "peer_of_peak": 0.25, "ours_bfloat16": 100.0,
    }  # fmt: skip
    case = Case("decode", "tokens/s", None, count=10, read_bytes=100)
    row = row_of(case, {"ours": [0.2]}, None, 1000.0)
    assert (row["ours"], row["floor"], row["of_floor"]) == (50.0, 100.0, 0.5)
    memory = Case("load", "MiB", 200, 300, notes={"of_p": 1.5})
    assert row_of(memory, {}) == {
        "name": "load", "ours": 200, "peer": 300, "ratio": 1.5, "unit": "MiB", "floor": None,
        "of_p": 1.5,
    }  # fmt: skip
    assert row_of(Case("scann", "queries/s", 200, 100), {})["ratio"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: NAME"),
        (["modles"], "argument NAME: invalid choice: 'modles'.*models.*convert"),
        (["convert", "--only=lod"], "--only=lod: no such row; use one of .*load"),
        (["convert", "--rounds=0"], "--rounds=0: at least 1 was expected"),
        (["convert", "--size=huge"], "--size: invalid choice: 'huge'"),
        (["convert", "--data=x"], "--data=x: .* generates its data; leave it out"),
    ],
)
def test_wrong_commands(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(f"tests.bench: .*{message}.*\n", printed.err)


def test_the_verb_names_the_new_command(refused):
    refused("bench", "models", message="mmqa bench: is `python -m tests.bench` now")


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_is_there(name):
    assert callable(importlib.import_module(f"tests.bench.{name}").run)


def test_parsers_are_measured_beside_ours():
    from tests.bench.parsers import license_of, run

    rows = run(Options(rounds=1, only=("text",)))["rows"]
    assert [row["name"] for row in rows] == ["text: ours", "text: decoded"]
    assert {(row["of_held"], row["words"], row["failed"]) for row in rows} == {(1.0, 1.0, None)}
    assert rows[0]["letters"] == rows[1]["letters"] > 1000
    assert all(row["peak_mib"] > 5 for row in rows)
    assert license_of("lxml") == "BSD-3-Clause"


@pytest.mark.parametrize("form", ["csv", "docx", "odt", "pptx", "xlsx"])
def test_samples_of_the_parsers_trial_are_read_by_ours(form):
    module = importlib.import_module(f"tests.bench.parsers.{form}")
    for name, data in module.SAMPLES().items():
        document = READERS[ending_of(name)].read(data)
        assert document.letters_read > 20, name
        assert document.missing == 0, name
