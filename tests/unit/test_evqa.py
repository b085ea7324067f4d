"""Encyclopedic-VQA: its files, its score."""

import csv
import json
from pathlib import Path

import pytest
from cli_runs import mmqa, png, succeeded, write_rows

from mmqa_jax.benchmarks.evqa import matches, read_evqa, score_evqa
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction, Question

pytestmark = pytest.mark.usefixtures("quiet")

GOLDEN = Path(__file__).parent / "golden" / "evqa_exact_match.jsonl"
LION, CAT = "https://en.wikipedia.org/wiki/Lion", "https://en.wikipedia.org/wiki/Cat"


def row(kind: str, answer: str, pictures: str, dataset: str = "inaturalist", **more: str) -> dict:
    return {
        "question": "How heavy, in kg, is it?",
        "answer": answer,
        "question_type": kind,
        "dataset_name": dataset,
        "dataset_image_ids": pictures,
        "wikipedia_url": LION,
        "wikipedia_title": "Lion",
        "evidence_section_id": "3",
        "wikipedia_url_used_in_train": "False",
        **more,
    }


ROWS = [
    row("templated", "190|190 kg", "7|12"),
    row("multi_answer", "Asia&&Africa", "0a1b", "landmarks"),
    row("2_hop", "Paris, city", "8", wikipedia_url=f"{LION}|{CAT}", evidence_section_id="1|0"),
]
PLACES = {"7": "train/felidae/x.jpg", "12": "val/felidae/y.jpg"}


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    for split, name in (("train", "7"), ("val", "12")):
        images = [{"id": int(name), "file_name": PLACES[name]}, {"id": 99, "file_name": "no.jpg"}]
        (folder / "inaturalist" / PLACES[name]).parent.mkdir(parents=True)
        (folder / "inaturalist" / PLACES[name]).write_bytes(png((int(name), 0, 0)))
        (folder / "inaturalist" / f"{split}.json").write_text(json.dumps({"images": images}))
    landmark = folder / "landmarks" / "train" / "0" / "a" / "1" / "0a1b.jpg"
    landmark.parent.mkdir(parents=True)
    landmark.write_bytes(png((1, 2, 3)))
    write_csv(folder / "test.csv", ROWS)
    return folder


def test_prepare_official_files(raw, tmp_path):
    ended = succeeded("prepare", "evqa", f"--raw={raw}", f"--out={tmp_path / 'out'}", "--json")
    found = ended.value["found"]
    assert (found["test rows"], found["test questions"], found["picture files"]) == (3, 4, 3)
    corpus = open_corpus(tmp_path / "out")
    first, second, several, hops = corpus.questions("test")
    assert [q.id for q in (first, second, several, hops)] == [
        *("test_0_0", "test_0_1", "test_1_0", "test_2_0")
    ]
    assert first.answers == ("190", "190 kg")
    assert corpus.question_picture(first) == png((7, 0, 0))
    assert corpus.question_picture(second) == png((12, 0, 0))
    assert corpus.question_picture(several) == png((1, 2, 3))
    assert (first.extra["wikipedia_url"], first.extra["evidence_section_id"]) == ([LION], [3])
    assert (first.extra["hops"], first.extra["unseen_entity"]) == (1, True)
    assert (hops.image, hops.extra["wikipedia_url"], hops.extra["hops"]) == (None, [LION, CAT], 2)
    assert hops.extra["evidence_section_id"] == [1, 0]


def test_exact_match_is_the_authors():
    """Made-up pairs; `right` is what exact_match_scoring_function of evaluation_utils.py gives."""
    rows = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    assert len(rows) == 240
    judged = [matches(x["candidate"], x["reference"], x["question_type"]) for x in rows]
    assert judged == [x["right"] for x in rows]


def test_an_alternative_of_nothing_matches_nothing():
    assert not matches("the", "The.", "templated")
    assert not matches("", "a && the", "multi_answer")


def test_scores_by_type(raw, tmp_path):
    mmqa("prepare", "evqa", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    data, said = tmp_path / "out", tmp_path / "said.jsonl"
    answers = {"test_0_0": "The 190 kg.", "test_0_1": "200", "test_1_0": "africa and Europe, Asia"}
    write_rows(said, [{"question_id": k, "answer": answer} for k, answer in answers.items()])
    ended = succeeded("evaluate", "evqa", f"--references={data}", f"--predictions={said}", "--json")
    assert ended.value["scores"] == {"evqa/exact_match": 0.5}
    by = {name: scores["evqa/exact_match"] for name, scores in ended.value["by_category"].items()}
    assert by["templated"] == 0.5
    assert (by["multi_answer"], by["2_hop"], by["single hop"]) == (1.0, 0.0, pytest.approx(2 / 3))
    assert any("BEM" in note for note in ended.value["notes"])
    ended = mmqa(
        "evaluate", "evqa", f"--references={data}", f"--predictions={said}", "--submission=x.json"
    )
    assert ended.code == 2


def test_bem_judges_what_does_not_match():
    questions = [
        Question("a", "test", "Who?", answers=("x", "y"), category="templated"),
        Question("b", "test", "Which?", answers=("x&&y",), category="multi_answer"),
        Question("c", "test", "What?", answers=("z",), category="automatic"),
    ]
    asked = []

    def judge(pairs):
        asked.extend(pairs)
        return [alternative == "y" for _, alternative, _ in pairs]

    given = [Prediction("a", "w"), Prediction("b", "q"), Prediction("c", "Z")]
    (scores,) = score_evqa(questions, given, judge).scored
    assert asked == [("Who?", "x", "w"), ("Who?", "y", "w"), ("Which?", "x,y", "q")]
    assert scores.per_question["evqa/bem"].tolist() == [1, 0, 1]
    assert scores.per_question["evqa/exact_match"].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"question_type": "hard"}, ("row 2", "question_type", "2_hop")),
        ({"dataset_name": "coco"}, ("row 2", "dataset_name", "landmarks")),
        ({"dataset_image_ids": "../x"}, ("row 2", "dataset_image_ids")),
        ({"answer": " "}, ("row 2", "answer is empty")),
    ],
)
def test_malformed_rows(raw, tmp_path, changes, words):
    write_csv(raw / "test.csv", [{**ROWS[0], **changes}])
    ended = mmqa("prepare", "evqa", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("inaturalist/val.json", '{"images": [{"id": 7, "file_name": "z"}]}', ("id 7", "twice")),
        ("inaturalist/val.json", '{"images": [{"id": "12"}]}', ("entry 1", "file_name")),
        ("inaturalist/val.json", "{}", ('an object with a list "images"',)),
        ("test.csv", "question,answer\nx,y\n", ("no column", "question_type")),
    ],
)
def test_malformed_files(raw, tmp_path, file, content, words):
    (raw / file).write_text(content)
    ended = mmqa("prepare", "evqa", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err


@pytest.mark.parametrize("dataset", ["infoseek", "webqa"])
def test_bem_judges_no_other_benchmark(dataset, tmp_path, refused):
    said = write_rows(tmp_path / "said.jsonl", [{"question_id": "a", "answer": "x"}])
    flags = ("evaluate", dataset, f"--references={tmp_path}", f"--predictions={said}", "--bem=x")
    refused(*flags, message=f"--bem: BEM judges answers of evqa; leave it out for {dataset}")


def test_flags_of_answers_are_refused_with_rankings(tmp_path, refused):
    found = write_rows(
        tmp_path / "found.jsonl", [{"question_id": "a", "sources": [], "scores": []}]
    )
    for flag in ("bem", "bart"):
        flags = (f"--references={tmp_path}", f"--predictions={found}", f"--{flag}=x")
        refused("evaluate", "evqa", *flags, message=f"--{flag}: .*found.jsonl holds rankings; give")


def test_a_folder_without_questions(tmp_path):
    with pytest.raises(UserError, match=r"holds none of Encyclopedic-VQA's questions; put test\."):
        read_evqa(tmp_path)
