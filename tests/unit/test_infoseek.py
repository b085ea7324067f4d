"""InfoSeek: its files, its score, its prediction file."""

import json

import pytest
from cli_runs import mmqa, png, write_rows

from mmqa_jax.benchmarks import infoseek
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction, Question
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("quiet")


def row(number: int, unseen: str, answer: list, counted: list) -> dict:
    return {
        "data_id": f"infoseek_val_{number}",
        "image_id": f"oven_{number}",
        "question": "Who?",
        "answer": answer,
        "answer_eval": counted,
        "data_split": f"val_{unseen}",
    }


VAL = [
    row(0, "unseen_question", ["Paris"], ["City of Paris", "Paris"]),
    row(1, "unseen_entity", ["1889"], ["1889", "year 1889"]),
    row(2, "unseen_entity", ["3.0"], [{"wikidata": 3.0, "range": [2.7, 3.3]}]),
]
KINDS = [
    {"data_id": f"infoseek_val_{n}", "question_type": kind}
    for n, kind in enumerate(("String", "Time", "Numerical"))
]
TEST = [{"data_id": "infoseek_test_0", "image_id": "oven_9", "question": "Where?"}]


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    (folder / "oven_images" / "01").mkdir(parents=True)
    (folder / "oven_images" / "01" / "oven_0.jpg").write_bytes(png((1, 0, 0)))
    write_rows(folder / "infoseek_val.jsonl", VAL)
    write_rows(folder / "infoseek_val_qtype.jsonl", KINDS)
    write_rows(folder / "infoseek_test.jsonl", TEST)
    entity = {"data_id": "infoseek_val_0", "entity_id": "Q90", "entity_text": "Paris"}
    write_rows(folder / "infoseek_val_withkb.jsonl", [entity])
    return folder


def test_prepare_official_files(raw, tmp_path):
    ended = mmqa("prepare", "infoseek", f"--raw={raw}", f"--out={tmp_path / 'out'}", "--json")
    assert ended.code == 0, ended.err
    found = ended.value["found"]
    assert (found["val questions"], found["val unseen_entity"], found["picture files"]) == (3, 2, 1)
    corpus = open_corpus(tmp_path / "out")
    first, _, number = corpus.questions("val")
    assert first.answers == ("Paris", "City of Paris")
    assert (first.category, first.extra["entity_id"]) == ("string", "Q90")
    assert corpus.question_picture(first) == png((1, 0, 0))
    assert (number.image, number.extra["answer_range"]) == (None, [2.7, 3.3])
    (hidden,) = corpus.questions("test")
    assert (hidden.answers, hidden.category) == ((), "")


# What infoseek_eval.py gives: process_numerical_answer, then metric_numerical_range.
@pytest.mark.parametrize(
    ("text", "bounds", "right"),
    [
        ("about 3 km", [2.7, 3.3], True),
        ("3-4", [2.7, 3.3], False),
        ("2.8-3.2", [2.7, 3.3], True),
        ("10-20", [12.0, 22.0], True),
        ("1,234.5", [1111.0, 1358.0], True),
        ("no number", [-1.0, 1.0], True),
        ("no number", [1.0, 2.0], False),
        ("4 3", [3.5, 4.5], True),
        ("-5", [-6.0, -4.0], True),
        ("1.2.3", [1.1, 3.1], True),
    ],
)
def test_numbers(text, bounds, right):
    assert infoseek.numbers_match(infoseek.numbers_of(text), bounds) is right


def test_spellings():
    question = Question("q", "val", "?", answers=("The Louvre",), category="string")
    assert infoseek.is_right("louvre.", question)
    assert not infoseek.is_right("the Louvre museum", question)


def test_the_final_score_is_a_harmonic_mean(raw, tmp_path):
    mmqa("prepare", "infoseek", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    questions = open_corpus(tmp_path / "out").questions("val")
    given = [Prediction("infoseek_val_0", "paris"), Prediction("infoseek_val_2", "2.9")]
    evaluation = infoseek.score_infoseek(questions, given)
    (scores,) = evaluation.scored
    assert scores.scores == {"infoseek/official": pytest.approx(2 / 3)}
    assert scores.by_category["unseen entity"] == {"infoseek/official": 0.5}
    assert scores.missing == 1
    assert any("66.67 %" in note for note in evaluation.notes)


def test_official_lines_in_and_out(raw, tmp_path):
    data, lines = tmp_path / "out", tmp_path / "lines.jsonl"
    mmqa("prepare", "infoseek", f"--raw={raw}", f"--out={data}")
    write_rows(lines, [{"data_id": "infoseek_val_1", "prediction": "Year 1889"}])
    flags = f"--references={data}", f"--predictions={lines}", "--json"
    written = tmp_path / "submission.jsonl"
    ended = mmqa("evaluate", "infoseek", *flags, f"--submission={written}")
    assert ended.code == 0, ended.err
    assert ended.value["scores"]["infoseek/official"] == pytest.approx(1 / 3)
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert rows[1] == {"data_id": "infoseek_val_1", "prediction": "Year 1889"}
    assert rows[0]["prediction"] == ""
    write_rows(lines, [{"data_id": 1, "prediction": "x"}])
    ended = mmqa("evaluate", "infoseek", *flags)
    assert ended.code == 2
    assert "line 1" in ended.err


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        (
            "infoseek_val.jsonl",
            [{**VAL[0], "answer_eval": "Paris"}],
            ("line 1", "answer_eval is 'Paris'; a list of texts"),
        ),
        ("infoseek_val.jsonl", [{**VAL[2], "answer_eval": ["3"]}], ("line 1", "`range`")),
        ("infoseek_val.jsonl", [VAL[0], VAL[0]], ("line 2", "twice")),
        ("infoseek_val.jsonl", [{**VAL[0], "question": ""}], ("line 1", "question")),
        ("infoseek_val_qtype.jsonl", KINDS[:1], ("line 2", "no type of infoseek_val_1")),
    ],
)
def test_malformed_files(raw, tmp_path, name, rows, words):
    write_rows(raw / name, rows)
    ended = mmqa("prepare", "infoseek", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err


def test_rankings_of_questions_whose_articles_are_not_known(raw, tmp_path):
    (raw / "infoseek_val_withkb.jsonl").unlink()
    data = f"--references={tmp_path / 'data'}"
    assert mmqa("prepare", "infoseek", f"--raw={raw}", f"--out={tmp_path / 'data'}").code == 0
    ranked = [{"question_id": "infoseek_val_0", "sources": ["a"], "scores": [1.0]}]
    found = write_rows(tmp_path / "found.jsonl", ranked)
    ended = mmqa("evaluate", "infoseek", data, f"--predictions={found}")
    assert ended.code == 2
    assert f"{data}: the articles of these questions are not known; give files that" in ended.err


def test_a_folder_without_questions(tmp_path):
    refuses(r"holds none of InfoSeek's questions; put", infoseek.read_infoseek, tmp_path)
