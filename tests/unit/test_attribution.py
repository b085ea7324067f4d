"""Citation precision and recall, and refusals, beside figures worked out by hand."""

import json

import pytest

from mmqa_jax.data.formats.interchange import read_interchange
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Question, is_answerable
from mmqa_jax.evaluation.scoring import (
    is_refusal,
    score_citations,
    score_predictions,
    score_refusals,
)
from tests.refusals import refuses

KNOWN = [
    Question("both", "test", "?", answers=("a",), keywords="a", positives=("x", "y")),
    Question("one", "test", "?", answers=("b",), keywords="b", positives=("x",)),
    Question("none", "test", "?", answers=("c",), keywords="c", positives=("z",)),
    Question("hidden", "test", "?", answers=("d",), keywords="d"),
]
FOREIGN = [Question(f"f{n}", "test", "?", extra={"answerable": False}) for n in range(2)]
ANSWERS = [
    Prediction("both", "a", ("x", "w", "y", "v")),  # 2 of 4 right, both found
    Prediction("one", "wrong", ("x",)),
    Prediction("none", NOT_FOUND),
    Prediction("hidden", "d", ("x",)),
    Prediction("f0", NOT_FOUND),
    Prediction("f1", "made up", ("x",)),
]


def test_citations():
    scores = score_citations(KNOWN, ANSWERS[:4])
    assert scores.question_ids == ("both", "one", "none")
    assert scores.unscored == 1
    assert scores.per_question["citation_precision"].tolist() == [0.5, 1.0, 0.0]
    assert scores.per_question["citation_recall"].tolist() == [1.0, 1.0, 0.0]


def test_a_source_that_is_cited_twice_counts_once():
    (value,) = score_citations(KNOWN[1:2], [Prediction("one", "b", ("x", "x", "w"))]).per_question[
        "citation_precision"
    ]
    assert value == 0.5


def test_refusals():
    answerable, unanswerable = score_refusals([*KNOWN, *FOREIGN], ANSWERS)
    assert answerable.per_question["refused/answerable"].tolist() == [0, 0, 1, 0]
    assert unanswerable.per_question["refused/unanswerable"].tolist() == [1, 0]
    (alone,) = score_refusals(FOREIGN, [])
    assert alone.per_question["refused/unanswerable"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("prediction", "refused"),
    [
        (Prediction("q", ""), True),
        (Prediction("q", "  "), True),
        (Prediction("q", '"Not found." '), True),
        (Prediction("q", "Not foundry workers, but miners."), False),
        (Prediction("q", "It was not found."), False),
        (Prediction("q", "", choice=0), False),
    ],
)
def test_what_a_refusal_is(prediction, refused):
    assert is_refusal(prediction) == refused


def test_questions_without_an_answer_count_for_refusals_alone():
    mixed = score_predictions("atlas", [*KNOWN, *FOREIGN], ANSWERS, lemmatizer="none").summary()
    others = score_predictions("atlas", KNOWN, ANSWERS[:4], lemmatizer="none").summary()
    assert mixed["scores"] == {
        **others["scores"], "refused/answerable": 0.25, "refused/unanswerable": 0.5
    }  # fmt: skip
    assert others["scores"]["citation_precision"] == 0.5
    assert mixed["n_by_scorer"]["webqa_acc/no_lemma"] == 4
    only = score_predictions("atlas", FOREIGN, ANSWERS[4:], lemmatizer="none").summary()
    assert only["scores"] == {"refused/unanswerable": 0.5}


def test_citations_of_another_corpus_are_not_scored():
    scores = score_predictions("atlas", KNOWN, ANSWERS[:4], lemmatizer="none", citations=False)
    assert "citation_precision" not in scores.summary()["scores"]
    given = [Prediction("one", "b", ("x",))]  # a trained reader was given its sources
    scores = score_predictions("atlas", KNOWN[1:2], given, lemmatizer="none", sources=False)
    assert "citation_precision" not in scores.summary()["scores"]


def corpus_of(folder, **question):
    folder.mkdir(exist_ok=True)
    source = {"id": "x", "modality": "text", "text": "t"}
    (folder / "sources.jsonl").write_text(json.dumps(source) + "\n")
    row = {"id": "q", "question": "?", **question}
    (folder / "questions.jsonl").write_text(json.dumps(row) + "\n")
    return read_interchange(folder).questions[0]


def test_the_key_of_a_corpus(tmp_path):
    assert not is_answerable(corpus_of(tmp_path, answerable=False))
    assert is_answerable(corpus_of(tmp_path, answerable=True))
    assert is_answerable(corpus_of(tmp_path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answerable": "no"}, "line 1: `answerable` is 'no'; expected true or false"),
        ({"answerable": 0}, "line 1: `answerable` is 0; expected true or false"),
        ({"choices": ["c"] * 27}, "line 1: `choices` are 27; 26 at most"),
        ({"answerable": False, "positives": ["x"]}, "is false, but there are `positives`"),
    ],
)
def test_bad_keys(row, message, tmp_path):
    refuses(message, corpus_of, tmp_path, **row)
