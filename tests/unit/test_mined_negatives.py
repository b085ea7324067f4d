"""Hard negatives from rankings, and questions that are passages of the corpus."""

import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.retrieval.rankings import with_mined_negatives, without_own_source, write_rankings
from tests.refusals import refuses

QUESTIONS = [
    Question("q0", "train", "?", positives=("a",), negatives=("b",)),
    Question("q1", "train", "?", positives=("c", "d"), extra={"from_source": "b"}),
]


def ranking(question_id, names):
    return Ranking(question_id, tuple(names), tuple(float(-n) for n in range(len(names))))


def test_what_is_found_and_not_gold_is_a_negative(tmp_path):
    write_rankings(tmp_path / "one.jsonl", [ranking("q1", "dbc"), ranking("q0", "cab")])
    write_rankings(tmp_path / "two.jsonl", [ranking("q0", "d"), ranking("q1", "")])
    files = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    mined = with_mined_negatives(QUESTIONS, files, set("abcd"))
    assert [question.negatives for question in mined] == [("b", "c", "d"), ("b",)]
    assert [question.positives for question in mined] == [("a",), ("c", "d")]
    assert with_mined_negatives(QUESTIONS, (), set("abcd")) == QUESTIONS


def test_rankings_of_other_questions_or_sources_are_refused(tmp_path):
    path = tmp_path / "test.jsonl"
    write_rankings(path, [ranking("q0", "a"), ranking("q7", "a")])
    with pytest.raises(UserError, match=r"test\.jsonl, line 2: question 'q7' is not among the 2"):
        with_mined_negatives(QUESTIONS, [str(path)], set("abcd"))
    write_rankings(path, [ranking("q0", "z"), ranking("q1", "a")])
    refuses(r"line 1: source 'z' is not", with_mined_negatives, QUESTIONS, [str(path)], set("abcd"))


def test_the_passage_that_is_asked_is_no_hit():
    found = [ranking("q0", "abc"), ranking("q1", "abc")]
    kept = without_own_source(QUESTIONS, found, 2)
    assert [(r.sources, r.scores) for r in kept] == [(("a", "b"), (0, -1)), (("a", "c"), (0, -2))]
