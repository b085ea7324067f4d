"""Where a chain loses its answers: stages by hand."""

import pytest

from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.scoring import losses_by_stage, losses_tables, stage_of

# question -> gold sources, candidates, what the reader was given, score of the answer.
ASKED = {
    "found": (("a", "b"), ("b", "x", "a"), ("a", "b", "x"), 1.0),
    "misread": (("a",), ("a", "x"), ("a",), 0.25),
    "not_selected": (("a", "b"), ("a", "b"), ("a",), 0.5),
    "not_found": (("a", "b"), ("a", "x"), ("a",), 0.0),
    "right_all_the_same": (("a",), ("x",), ("x",), 1.0),
    "without_gold": ((), ("x",), ("x",), 0.0),
    "not_scored": (("a",), ("a",), ("a",), None),
}
STAGES = {
    "found": "reading",
    "misread": "reading",
    "not_selected": "selection",
    "not_found": "retrieval",
    "right_all_the_same": "retrieval",
}


def ranking(name: str, sources: tuple[str, ...]) -> Ranking:
    return Ranking(name, sources, (1.0,) * len(sources))


QUESTIONS = [Question(name, "test", "?", positives=gold) for name, (gold, _, _, _) in ASKED.items()]
FOUND = [ranking(name, found) for name, (_, found, _, _) in ASKED.items()]
PREDICTIONS = [Prediction(name, "!", read=read) for name, (_, _, read, _) in ASKED.items()]
RIGHT = {name: score for name, (_, _, _, score) in ASKED.items() if score is not None}


def test_a_question_is_of_the_first_stage_that_loses_a_source():
    found = {
        question.id: stage_of(question, candidates, prediction)
        for question, candidates, prediction in zip(QUESTIONS, FOUND, PREDICTIONS, strict=True)
        if question.id in STAGES
    }
    assert found == STAGES


def test_what_was_cited_was_read_where_nothing_else_is_said():
    question = Question("q", "test", "?", positives=("a",))
    cited = Prediction("q", "!", sources=("a",))
    assert stage_of(question, ranking("q", ("a",)), cited) == "reading"


def test_losses_and_score_add_up():
    losses = losses_by_stage(QUESTIONS, FOUND, PREDICTIONS, RIGHT)
    assert {stage: values["questions"] for stage, values in losses.items()} == {
        "retrieval": 2,
        "selection": 1,
        "reading": 2,
    }
    assert [values["score"] for values in losses.values()] == [0.5, 0.5, 0.625]
    assert [values["lost"] for values in losses.values()] == [0.2, 0.1, 0.15]
    (table,) = losses_tables({"lost": {"scorer": "webqa_acc/no_lemma", "stages": losses}})
    assert table.rows[-1] == ["all", 5, pytest.approx(0.55), pytest.approx(0.45)]
    assert sum(RIGHT[name] for name in STAGES) / 5 == pytest.approx(0.55)


def test_without_gold_sources_or_scores_there_is_nothing_to_say():
    assert losses_by_stage(QUESTIONS, FOUND, PREDICTIONS, {}) == {}
    assert losses_tables({}) == []
