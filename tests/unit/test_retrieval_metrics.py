"""Retrieval metrics by hand and by properties."""

import numpy as np
import pytest

from mmqa_jax.evaluation.retrieval import score_rankings
from tests.refusals import refuses

GOLD = [{"a", "b"}, {"c"}, set(), {"d"}]
RANKINGS = [["x", "a", "y", "b"], ["c"], ["a"], []]


def test_scores_by_hand():
    scored = score_rankings(GOLD, RANKINGS, ks=(1, 2, 4))
    assert (scored.n, scored.excluded, scored.rows) == (3, 1, (0, 1, 3))
    per = scored.per_question
    np.testing.assert_allclose(per["recall@1"], [0, 1, 0])
    np.testing.assert_allclose(per["recall@2"], [0.5, 1, 0])
    np.testing.assert_allclose(per["recall@4"], [1, 1, 0])
    np.testing.assert_allclose(per["hit_any@2"], [1, 1, 0])
    np.testing.assert_allclose(per["hit_all@2"], [0, 1, 0])
    np.testing.assert_allclose(per["mrr"], [1 / 2, 1, 0])
    # Gold at ranks 2 and 4; the ideal has them at 1 and 2.
    ideal = 1 + 1 / np.log2(3)
    found = 1 / np.log2(3) + 1 / np.log2(5)
    np.testing.assert_allclose(per["ndcg@4"], [found / ideal, 1, 0])
    # At k = 1 the ideal ranking has one gold source.
    np.testing.assert_allclose(per["ndcg@1"], [0, 1, 0])
    assert scored.scores["recall@2"] == 0.5
    assert scored.scores["recall@4"] == pytest.approx(2 / 3)


def test_a_source_ranked_twice_counts_once():
    scored = score_rankings([{"a", "b"}], [["a", "a", "a"]], ks=(3,))
    assert scored.scores["recall@3"] == 0.5


def test_ndcg_of_whole_rankings_and_recall_that_grows_with_k():
    rng = np.random.default_rng(1)
    names = [str(i) for i in range(30)]
    gold = [set(rng.choice(names, rng.integers(1, 5), replace=False)) for _ in range(50)]
    rankings = [list(rng.permutation(names)) for _ in gold]
    ks = (1, 3, 10, 30)
    per = score_rankings(gold, rankings, ks).per_question
    recalls = np.stack([per[f"recall@{k}"] for k in ks])
    assert (np.diff(recalls, axis=0) >= 0).all()
    assert (recalls[-1] == 1).all()
    gains = np.array([[name in g for name in r] for g, r in zip(gold, rankings, strict=True)])
    discounts = 1 / np.log2(np.arange(2, 32))
    best = np.array([discounts[: len(g)].sum() for g in gold])
    np.testing.assert_allclose(per["ndcg@30"], gains @ discounts / best)


def test_ndcg_compares_with_the_best_k_sources():
    scored = score_rankings([{"a", "b", "c"}], [["c", "a", "x"]], ks=(2, 3)).scores
    assert scored["ndcg@2"] == 1
    assert scored["ndcg@3"] == pytest.approx((1 + 1 / np.log2(3)) / (1.5 + 1 / np.log2(3)))


@pytest.mark.parametrize(
    ("gold", "rankings", "ks", "word"),
    [
        (GOLD, RANKINGS[:2], (1,), "4 questions but 2 rankings"),
        (GOLD, RANKINGS, (0, 1), "k must be 1 or more"),
        ([set()], [["a"]], (1,), "none of the 1 questions has gold sources"),
    ],
)
def test_bad_input(gold, rankings, ks, word):
    refuses(word, score_rankings, gold, rankings, ks)


def test_k_ends_with_the_longest_ranking():
    gold, names = [{"a"}, {"b"}], [str(i) for i in range(60)]
    scores = score_rankings(gold, [[*names, "a"], ["b"]]).scores
    recalls = {name: value for name, value in scores.items() if name.startswith("recall@")}
    assert recalls == {f"recall@{k}": 0.5 for k in (1, 2, 5, 10, 20, 50)}
    assert "recall@1" in score_rankings(gold, [[], []]).scores
    full = [[*map(str, range(3000))], ["b"]]
    assert {"recall@200", "recall@500", "recall@1000", "recall@2000"} <= score_rankings(
        gold, full
    ).scores.keys()
