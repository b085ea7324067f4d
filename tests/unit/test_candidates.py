"""Files of answer candidates and answer-aware examples, in the layout of Prophet's authors."""

import json

import pytest

from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.vqa import RECALL_AT, score_candidates
from mmqa_jax.prompting.examples.side_files import (
    load_answer_aware,
    load_candidates,
    write_answer_aware,
    write_candidates,
)
from tests.refusals import refuses

# As heuristics.py writes them: string ids, float(float32) confidences, indent 4 and none.
AUTHORS_CANDIDATES = {
    "2971475": [
        {"answer": "race", "confidence": 0.9935420155525208},
        {"answer": "motocross", "confidence": 0.21407994627952576},
    ],
    "3397615": [{"answer": "vine", "confidence": 0.5}, {"answer": "ivy", "confidence": 0.0}],
}
AUTHORS_EXAMPLES = {"2971475": ["516065", "817215"], "3397615": ["81721"]}


def test_authors_files(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(AUTHORS_CANDIDATES, indent=4))
    (tmp_path / "e.json").write_text(json.dumps(AUTHORS_EXAMPLES))
    assert load_candidates(tmp_path / "c.json") == {
        "2971475": [("race", 0.9935420155525208), ("motocross", 0.21407994627952576)],
        "3397615": [("vine", 0.5), ("ivy", 0.0)],
    }
    assert load_answer_aware(tmp_path / "e.json") == AUTHORS_EXAMPLES


def test_written_files_are_the_authors(tmp_path):
    write_candidates(tmp_path / "c.json", {"1": [("a cat", 0.75), ("dog", 0.25)]})
    write_answer_aware(tmp_path / "e.json", {"1": ["3", "2"]})
    assert json.loads((tmp_path / "c.json").read_text()) == {
        "1": [{"answer": "a cat", "confidence": 0.75}, {"answer": "dog", "confidence": 0.25}]
    }
    assert json.loads((tmp_path / "e.json").read_text()) == {"1": ["3", "2"]}


def test_best_first_and_numbers_as_ids(tmp_path):
    rows = [{"answer": "a", "confidence": 0.1}, {"answer": "b", "confidence": 0.9}]
    (tmp_path / "c.json").write_text(json.dumps({"1": rows}))
    (tmp_path / "e.json").write_text('{"1": [5, 6]}')
    assert load_candidates(tmp_path / "c.json") == {"1": [("b", 0.9), ("a", 0.1)]}
    assert load_answer_aware(tmp_path / "e.json") == {"1": ["5", "6"]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "an object of question id"),
        ("{}", "an object of question id"),
        ('{"7": "cat"}', "question 7: a list of candidates"),
        ('{"7": ["cat"]}', "question 7, candidate 1"),
        ('{"7": [{"answer": "cat", "confidence": 0.1}, {"answer": "dog"}]}', "candidate 2"),
        ('{"7": [{"answer": "cat", "confidence": 1.5}]}', "confidence"),
        ('{"7": [{"answer": "cat", "confidence": NaN}]}', "confidence"),
        ('{"7": [', "line 1"),
    ],
)
def test_malformed_candidates(tmp_path, text, told):
    (tmp_path / "c.json").write_text(text)
    refuses(told, load_candidates, tmp_path / "c.json")


@pytest.mark.parametrize("text", ['{"7": [["1"]]}', '{"7": [true]}', '{"7": {"1": 2}}'])
def test_malformed_examples(tmp_path, text):
    (tmp_path / "e.json").write_text(text)
    refuses("question 7", load_answer_aware, tmp_path / "e.json")


def test_scores_of_candidates_in_any_place():
    wrong = [("no", 0.1)]
    questions = [Question(f"q{n}", "val", "?", answers=("yes",) * 10) for n in range(4)]
    places = dict(zip((q.id for q in questions), (0, 3, 9, 10), strict=True))
    candidates = {name: wrong * place + [("yes", 0.05)] for name, place in places.items()}
    scores = score_candidates(questions, candidates)
    assert scores["accuracy"] == 0.25
    assert [scores[f"recall@{k}"] for k in RECALL_AT] == [0.25, 0.25, 0.5, 0.75]
    assert [scores[f"oracle@{k}"] for k in RECALL_AT] == [0.25, 0.25, 0.5, 0.75]
