"""Prediction files that are odd: mixed, of unknown keys, of other benchmarks, with null answers."""

import json
import os
import subprocess
import sys

import pytest
from cli_runs import done, mmqa, write_rows
from test_scienceqa import PROBLEMS
from test_seed_bench import NAMES, QUESTIONS
from vqa_files import soft_labels, write, write_aokvqa, write_okvqa

from mmqa_jax.evaluation.scores import id_of
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def science(tmp_path):
    """Flags that evaluate ScienceQA's four test problems, whose answers are A, B, A, A."""
    (tmp_path / "problems.json").write_text(json.dumps(PROBLEMS))
    return ("evaluate", "scienceqa", f"--references={tmp_path / 'problems.json'}")


@pytest.fixture
def seed(tmp_path):
    """Flags that evaluate SEED-Bench's four questions, whose answers are A, B, C, D."""
    data = {"questions": QUESTIONS, "question_type": NAMES}
    (tmp_path / "SEED-Bench.json").write_text(json.dumps(data))
    return ("evaluate", "seedbench", f"--references={tmp_path / 'SEED-Bench.json'}")


# Lines of several kinds


def lines(key: str, *said) -> list[dict]:
    return [{"question_id": q, key: x} for q, x in zip("3456", said, strict=False)]


@pytest.mark.parametrize("key", ["text", "prediction"])
@pytest.mark.parametrize("last", [{}, {"answer": "A"}, {"losses": [1, 2]}])
def test_a_line_of_another_kind_is_named(key, last, science, tmp_path, refused):
    """It used to make every other line an empty answer."""
    path = write_rows(
        tmp_path / "p.jsonl", [*lines(key, "A", "B", "A"), {"question_id": "6", **last}]
    )
    message = (
        rf"p\.jsonl, line 4: its keys are question_id.* but those of the first line are .*{key}"
    )
    refused(*science, f"--predictions={path}", message=message)


def test_the_first_line_decides(science, seed, tmp_path, refused):
    path = write_rows(
        tmp_path / "p.jsonl", [*lines("answer", "A", "B"), *lines("text", "A", "A", "A")]
    )
    message = r"p\.jsonl, line 3: has `text`, but other lines have `answer`, `choice` or `sources`"
    refused(*science, f"--predictions={path}", message=message)
    rows = [{"q_id": "101", "prediction": "A"}, {"question_id": "102", "prediction": "B"}]
    path = write_rows(tmp_path / "q.jsonl", rows)
    refused(
        *seed, f"--predictions={path}", message=r"q\.jsonl, line 2: its keys are question_id, p"
    )
    # A question of which nothing more is known is an empty answer.
    path = write_rows(tmp_path / "p.jsonl", [*lines("answer", "A", "B", "A"), {"question_id": "6"}])
    result = done(*science, f"--predictions={path}")
    assert (result["missing"], result["empty"]) == (0, 1)
    assert result["scores"]["scienceqa/letter_or_wrong"] == 3 / 4


@pytest.mark.parametrize("benchmark", ["scienceqa", "aokvqa", "okvqa"])
def test_lines_of_an_unknown_key_are_refused(benchmark, science, tmp_path, refused):
    references = {"aokvqa": write_aokvqa, "okvqa": write_okvqa}
    flags = science
    if benchmark in references:
        raw = references[benchmark](tmp_path / "raw")
        flags = ("evaluate", benchmark, f"--references={raw}")
    path = write_rows(tmp_path / "p.jsonl", lines("response", "A", "B", "A", "A"))
    message = r"p\.jsonl: no line has `answer`, `choice` or `sources` \(.* question_id, response\)"
    refused(*flags, f"--predictions={path}", message=message)


# Answers that are none


def test_null_and_choices_out_of_range_are_counted(science, tmp_path):
    rows = [*lines("choice", 0, 7, None), {"question_id": "6", "answer": None}]
    path = write_rows(tmp_path / "p.jsonl", rows)
    ended = mmqa(*science, f"--predictions={path}", "--json")
    result = ended.value
    assert result["scores"]["scienceqa/recorded_choice"] == 1 / 4
    assert (result["missing"], result["empty"]) == (0, 2)
    assert set(result["unparsed"].values()) == {3}
    assert ended.err.splitlines()[0] == "2 of 4 answers are empty"
    assert ended.err.splitlines()[1].startswith("3 predictions name no choice (scienceqa/letter")
    submission = tmp_path / "submission.json"
    done(*science, f"--predictions={path}", f"--submission={submission}")
    assert json.loads(submission.read_text())["results"].keys() == {"3", "4", "5", "6"}


@pytest.mark.parametrize("key", ["text", "prediction"])
def test_null_texts_are_empty(key, science, tmp_path):
    path = write_rows(tmp_path / "p.jsonl", lines(key, "A", "B", "A", None))
    result = done(*science, f"--predictions={path}")
    assert (result["empty"], result["unparsed"]["scienceqa/letter_or_wrong"]) == (1, 1)
    assert result["scores"]["scienceqa/letter_or_wrong"] == 3 / 4


def test_losses_that_are_not_numbers_choose_nothing(seed, tmp_path):
    losses = ([1, 2, 2, 2], [float("nan"), 2, 2, 2], [None, 2, 2, 2], None)
    rows = [
        {"question_id": q["question_id"], "losses": x}
        for q, x in zip(QUESTIONS, losses, strict=True)
    ]
    path = write_rows(tmp_path / "p.jsonl", rows)
    result = done(*seed, f"--predictions={path}")
    assert result["scores"]["seed_bench/likelihood"] == 1 / 4
    assert result["unparsed"]["seed_bench/likelihood"] == 3
    assert result["empty"] == 1
    assert result["notes"][0].startswith("seed_bench/likelihood: the predictions are choices (`cho")
    # Nothing is chosen at all: this scorer still says so.
    path = write_rows(tmp_path / "p.jsonl", rows[1:3])
    assert done(*seed, f"--predictions={path}")["scores"]["seed_bench/likelihood"] == 0.0


def test_null_in_okvqas_and_aokvqas_own_formats(tmp_path):
    raw = write_okvqa(tmp_path / "okvqa")
    path = write(tmp_path / "r.json", [{"question_id": 25, "answer": None}])
    result = done("evaluate", "okvqa", f"--references={raw}", f"--predictions={path}")
    assert (result["empty"], result["missing"]) == (1, 2)
    assert result["scores"]["vqa_accuracy/official"] == 0.0
    raw = write_aokvqa(tmp_path / "aokvqa")
    rows = {
        "q1": {"direct_answer": None, "multiple_choice": "the moon above"},
        "q2": {"direct_answer": "moon", "multiple_choice": None},
        "q3": {"multiple_choice": "Moon"},
    }
    path = write(tmp_path / "a.json", rows)
    result = done("evaluate", "aokvqa", f"--references={raw}", f"--predictions={path}")
    # No choice matches, and none is a mere letter or number: all are wrong.
    assert result["scores"]["a_okvqa_mc/official"] == 0.0
    assert result["unparsed"] == {"a_okvqa_mc/official": 3}
    assert result["empty"] == 0


def test_null_answers_of_a_corpus(data, tmp_path):
    path = write_rows(tmp_path / "p.jsonl", [{"question_id": "test0", "answer": None}])
    flags = (f"--references={data}", f"--predictions={path}", "--only_given")
    ended = mmqa("evaluate", "corpus", *flags, "--json")
    assert ended.value["empty"] == 1
    assert "1 of 1 answers is empty" in ended.err


# Other benchmarks' files


def test_prepared_from_another_corpus(data, seed, tmp_path, refused):
    path = write_rows(tmp_path / "p.jsonl", [{"question_id": "test0", "answer": "A"}])
    flags = (f"--references={data}", f"--predictions={path}")
    for benchmark in ("seedbench", "scienceqa", "mmbench", "okvqa"):
        refused(
            "evaluate", benchmark, *flags,
            message=rf"was prepared from raw; evaluate corpus instead of {benchmark}, or give the re",
        )  # fmt: skip
    assert done("evaluate", "corpus", *flags)["n"] == 5


@pytest.mark.parametrize("suffix", [".xlsx", ".csv", ".tsv", ".pkl", ".pickle"])
@pytest.mark.parametrize("benchmark", ["okvqa", "aokvqa", "scienceqa", "seedbench"])
def test_tables_are_read_of_mmbench_alone(benchmark, suffix, science, seed, tmp_path, refused):
    raw = {"okvqa": write_okvqa, "aokvqa": write_aokvqa}
    flags = {"scienceqa": science, "seedbench": seed}.get(benchmark)
    if flags is None:
        flags = ("evaluate", benchmark, f"--references={raw[benchmark](tmp_path / 'raw')}")
    path = tmp_path / f"p{suffix}"
    path.write_bytes(b"PK\x03\x04\xff")
    message = (
        rf"p\{suffix}: predictions of {benchmark} are not read from \{suffix} files; give pred"
    )
    refused(*flags, f"--predictions={path}", message=message)


def test_one_file_of_okvqa_is_answered_with_its_folder(tmp_path, refused):
    labels = write(tmp_path / "val_soft_labels.json", soft_labels())
    path = write(tmp_path / "r.json", [{"question_id": 25, "answer": "ride"}])
    for benchmark in ("okvqa", "vqav2"):
        flags = ("evaluate", benchmark, f"--references={labels}", f"--predictions={path}")
        refused(*flags, message=rf"is one file, and {benchmark} .*; give --references={tmp_path}\.")
    result = done("evaluate", "okvqa", f"--references={tmp_path}", f"--predictions={path}")
    assert "vqa_accuracy/soft_labels" in result["scores"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question_id": "9", "answer": "A"}, r"prediction 2: no question has the id '9'"),
        ({"question_id": "3", "answer": "A"}, r"prediction 2: question '3' is answered twice"),
    ],
)
def test_the_file_of_a_wrong_prediction_is_named(row, message, science, tmp_path, refused):
    good = write_rows(tmp_path / "good.jsonl", lines("answer", "A"))
    bad = write_rows(tmp_path / "bad.jsonl", [*lines("answer", "A"), row])
    refused(*science, f"--predictions={bad}", message=rf"bad\.jsonl, {message}")
    flags = (f"--predictions={good}", f"--against={bad}")
    refused(*science, *flags, message=rf"bad\.jsonl, {message}")


@pytest.mark.parametrize("flag", ["--markdown", "--json"])
def test_a_reader_that_has_gone_is_no_error(flag, science, tmp_path):
    path = write_rows(tmp_path / "p.jsonl", lines("choice", 0, 1, 0, 0))
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mmqa_jax.cli", *science, f"--predictions={path}", flag]
    ended = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, check=False)
    os.close(written)
    assert (ended.returncode, ended.stderr) == (0, "")


# Ids as numbers


def test_ids_that_pandas_wrote_as_floats(science, seed, tmp_path, refused):
    """11.0 is 11, as in the official vqa.py, which compares sets; 11.5 is named with its place."""
    okvqa = ("evaluate", "okvqa", f"--references={write_okvqa(tmp_path / 'okvqa')}")
    rows = [{"question_id": n, "answer": "two"} for n in (25.0, "26.0", 35)]
    path = write(tmp_path / "okvqa.json", rows)
    whole = done(*okvqa, f"--predictions={path}")
    assert (whole["n"], whole["missing"]) == (3, 0)
    assert done(*okvqa, f"--predictions={write_rows(tmp_path / 'o.jsonl', rows)}") == whole
    write(path, [*rows[:2], {"question_id": 35.5, "answer": "two"}])
    refused(*okvqa, f"--predictions={path}", message=r"okvqa\.json, entry 3: ")
    write_rows(tmp_path / "o.jsonl", [{"question_id": 1e300, "answer": "two"}])
    message = r"o\.jsonl, line 1: question_id is 1e\+300; text or a whole number was expected"
    refused(*okvqa, f"--predictions={tmp_path / 'o.jsonl'}", message=message)

    choices = dict(zip("3456", (0, 1, 0, 0), strict=True))
    results = {"results": {f"{q}.0": x for q, x in choices.items()}, "outputs": {"3.00": "A"}}
    given = write(tmp_path / "s.json", results)
    found = done(*science, f"--predictions={given}")
    assert found["scores"]["scienceqa/recorded_choice"] == 1.0
    write(given, {"results": {"3": 0, "3.0": 1}})
    refused(
        *science, f"--predictions={given}", message=r"s\.json, results: problem 3 is there twice"
    )
    texts = [{"question_id": float(q), "text": "ABCD"[x]} for q, x in choices.items()]
    found = done(*science, f"--predictions={write_rows(tmp_path / 's.jsonl', texts)}")
    assert found["scores"]["scienceqa/letter_or_wrong"] == 1.0

    letters = {101.0: "A", "102.0": "B", 103: "C", "v9": "D"}
    rows = [{"question_id": q, "prediction": x} for q, x in letters.items()]
    found = done(*seed, f"--predictions={write_rows(tmp_path / 'b.jsonl', rows)}")
    assert found["scores"] == {"seed_bench/letter": 1.0}
    rows[1]["question_id"] = 102.5
    path = write_rows(tmp_path / "b.jsonl", rows)
    refused(
        *seed, f"--predictions={path}", message=r"b\.jsonl, line 2: question_id is 102\.5; text"
    )


def test_a_corpus_of_ones_own_may_have_an_id_that_looks_like_a_float():
    assert id_of("1.0", "here", {"1.0", "1"}) == "1.0"
    assert id_of("1.0", "here", {"2"}) == "1.0"
    assert id_of("1.0", "here", {"1"}) == id_of(1.0, "here") == id_of(1, "here") == "1"
    for value in (True, None, -1, "", 2.0**60, [1]):
        refuses(r"here: question_id is .* a whole number was expected", id_of, value, "here")
