"""Reciprocal-rank fusion against values worked out by hand; two-pass search."""

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Ranking
from mmqa_jax.retrieval.fusion import reciprocal_rank_fusion
from mmqa_jax.retrieval.two_pass import two_pass_search


def ranking(question, *sources):
    return Ranking(question, sources, tuple(float(-i) for i in range(len(sources))))


def test_hand_computed():
    fused = reciprocal_rank_fusion(
        [[ranking("q", "a", "b", "c")], [ranking("q", "c", "a", "d")]], k=60
    )[0]
    assert fused.sources == ("a", "c", "b", "d")
    np.testing.assert_allclose(
        fused.scores, [1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62, 1 / 63], rtol=1e-12
    )


def test_weights_k_and_top_k():
    runs = [[ranking("q", "a", "b")], [ranking("q", "b", "c")]]
    fused = reciprocal_rank_fusion(runs, k=0, weights=[1, 0.25], top_k=2)[0]
    assert fused.sources == ("a", "b")  # 1 against 1/2 + 1/4
    np.testing.assert_allclose(fused.scores, [1.0, 0.75])


def test_ties_go_to_the_better_rank_then_the_smaller_id():
    # x and y both once at rank 1: smaller id first, whatever the order of the runs.
    runs = [[ranking("q", "y", "m")], [ranking("q", "x", "n")]]
    assert reciprocal_rank_fusion(runs)[0].sources == ("x", "y", "m", "n")
    assert reciprocal_rank_fusion(runs[::-1])[0].sources == ("x", "y", "m", "n")
    # k = 0: a = 1/2 + 1/2 equals b = 1 but b has the better best rank.
    runs = [[ranking("q", "b", "a")], [ranking("q", "c", "a")]]
    assert reciprocal_rank_fusion(runs, k=0)[0].sources == ("b", "c", "a")


def test_questions_are_matched_by_id():
    first = [ranking("q1", "a"), ranking("q2", "b")]
    second = [ranking("q2", "b"), ranking("q1", "a")]
    fused = reciprocal_rank_fusion([first, second])
    assert [(r.question_id, r.sources) for r in fused] == [("q1", ("a",)), ("q2", ("b",))]
    assert fused[0].scores == pytest.approx((2 / 61,))


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], {}, "at least one"),
        ([[ranking("q1", "a")], [ranking("q2", "a")]], {}, "different questions"),
        ([[ranking("q1", "a")]], {"weights": [1, 2]}, "weights"),
        ([[ranking("q1", "a")]], {"weights": [-1]}, "weights"),
        ([[ranking("q1", "a")]], {"k": -1}, "k=-1"),
        ([[ranking("q1", "a")]], {"top_k": 0}, "top_k=0"),
    ],
)
def test_bad_input(runs, options, message):
    with pytest.raises(UserError, match=message):
        reciprocal_rank_fusion(runs, **options)


# Rows 0..9; the answer to "q" lies in row 7, which only the title "Peru" finds.
TITLES = ["", "Peru", "Peru", "Chile", "x", "x", "x", "x", "x", "x"]
ANSWERS = {
    "q": ([0, 1, 2, 3], [9.0, 8.0, 7.0, 6.0]),
    "q Peru": ([7, 1, 6, 5], [20.0, 8.5, 5.0, 4.0]),
    "q Chile": ([8, 9, 3, 0], [6.5, 3.0, 2.0, 1.0]),
    "untitled": ([0, 0, 0, 0], [1.0, 1.0, 1.0, 1.0]),
}


class FakeSearch:
    def __init__(self):
        self.asked = []

    def __call__(self, texts, top_k):
        self.asked.append(list(texts))
        found = [ANSWERS[text] for text in texts]
        rows = np.array([rows[:top_k] for rows, _ in found], np.int32)
        return rows, np.array([scores[:top_k] for _, scores in found], np.float32)


def test_interleave_keeps_the_first_hit_first():
    search = FakeSearch()
    rows, scores = two_pass_search(search, ["q"], TITLES, 4)
    assert search.asked == [["q"], ["q Peru"]]  # row 0 has no title
    assert rows.tolist() == [[0, 7, 1, 2]]  # 0 | 7, 1 | (1), 2 | 6, ...
    np.testing.assert_allclose(scores, [[1, 1 / 2, 1 / 3, 1 / 4]])


def test_score_merge_takes_the_higher_score():
    rows, scores = two_pass_search(FakeSearch(), ["q"], TITLES, 4, merge="score")
    assert rows.tolist() == [[7, 0, 1, 2]]
    assert scores.tolist() == [[20.0, 9.0, 8.5, 7.0]]


def test_several_titles_and_given_first_pass():
    search = FakeSearch()
    first = search(["q"], 4)
    search.asked.clear()
    rows, _ = two_pass_search(search, ["q"], TITLES, 4, num_titles=2, first=first)
    assert search.asked == [["q Peru", "q Chile"]]
    assert rows.tolist() == [[0, 7, 8, 1]]


def test_fewer_titles_than_asked_for_and_none_at_all():
    search = FakeSearch()
    two_pass_search(search, ["q"], [*TITLES[:3], "", *TITLES[4:]], 4, num_titles=2)
    assert search.asked[1] == ["q Peru", "q Peru"]
    search = FakeSearch()
    rows, _ = two_pass_search(search, ["q"], [""] * 10, 4)
    assert search.asked[1] == ["q"]
    assert rows.tolist() == [[0, 1, 2, 3]]


def test_two_pass_bad_input():
    with pytest.raises(UserError, match="num_titles=0"):
        two_pass_search(FakeSearch(), ["q"], TITLES, 4, num_titles=0)
    with pytest.raises(UserError, match="merge='rrf'"):
        two_pass_search(FakeSearch(), ["q"], TITLES, 4, merge="rrf")
