"""Reciprocal-rank fusion against values worked out by hand; search with a second hop."""

import numpy as np
import pytest

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.retrieval.fusion import reciprocal_rank_fusion
from mmqa_jax.systems.extensions.second_hop import SecondHopRetriever


def ranking(question, *sources):
    return Ranking(question, sources, tuple(float(-i) for i in range(len(sources))))


def test_hand_computed():
    fused = reciprocal_rank_fusion([[ranking("q", "a", "b", "c")], [ranking("q", "c", "a", "d")]])[
        0
    ]
    assert fused.sources == ("a", "c", "b", "d")
    np.testing.assert_allclose(
        fused.scores, [1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62, 1 / 63], rtol=1e-12
    )


def test_top_k_keeps_the_best():
    runs = [[ranking("q", "a", "b")], [ranking("q", "b", "c")]]
    assert reciprocal_rank_fusion(runs, top_k=2)[0].sources == ("b", "a")  # 1/62 + 1/61 > 1/61


def test_ties_go_to_the_better_rank_then_the_smaller_id():
    # x and y both once at rank 1: smaller id first, whatever the order of the runs.
    runs = [[ranking("q", "y", "m")], [ranking("q", "x", "n")]]
    assert reciprocal_rank_fusion(runs)[0].sources == ("x", "y", "m", "n")
    assert reciprocal_rank_fusion(runs[::-1])[0].sources == ("x", "y", "m", "n")


def test_runs_of_other_questions_are_refused():
    with pytest.raises(ValueError, match=r"too many values|unpack"):
        reciprocal_rank_fusion([[ranking("q1", "a")], [ranking("q2", "a")]])
    with pytest.raises(ValueError, match="zip"):
        reciprocal_rank_fusion([[ranking("q1", "a")], []])


# The answer to "q" is the source "seven", which only the title "Peru" finds.
SOURCES = [
    Source(name, "text", "", title)
    for name, title in (("zero", ""), ("one", "Peru"), ("two", "Peru"), ("three", "Chile"))
] + [Source(name, "text", "", "x") for name in ("four", "five", "six", "seven")]
FOUND = {
    "q": ("zero", "one", "two", "three"),
    "q Peru": ("seven", "one", "six", "five"),
    "titled": ("three", "one", "zero", "two"),
    "titled Chile": ("three", "four", "five", "six"),
    "untitled": ("zero",) * 1,
}


class Scripted:
    """A retriever that finds what FOUND lists, and notes the questions."""

    def __init__(self):
        self.asked: list[list[Question]] = []

    def search(self, questions, top_k):
        self.asked.append(list(questions))
        return [
            Ranking(q.id, FOUND[q.question][:top_k], (1.0,) * len(FOUND[q.question][:top_k]))
            for q in questions
        ]


def test_a_second_hop_searches_with_the_first_title_and_interleaves():
    retriever = Scripted()
    hop = SecondHopRetriever(retriever, Corpus(SOURCES))
    asked = [Question("1", "", "q", image="shown"), Question("2", "", "titled")]
    first, second = hop.search(asked, 4)
    # "zero" has no title, so that the next one's is taken; the picture is not asked about again.
    assert [q.question for q in retriever.asked[1]] == ["q Peru", "titled Chile"]
    assert [q.image for q in retriever.asked[1]] == [None, None]
    assert first.sources == ("zero", "seven", "one", "two")  # zero | seven, one | (one), two | six
    assert first.scores == (1, 1 / 2, 1 / 3, 1 / 4)
    assert second.sources == ("three", "one", "four", "zero")


def test_without_any_title_the_question_is_asked_again():
    retriever = Scripted()
    (found,) = SecondHopRetriever(retriever, Corpus(SOURCES)).search(
        [Question("1", "", "untitled")], 4
    )
    assert [q.question for q in retriever.asked[1]] == ["untitled"]
    assert found.sources == ("zero",)
