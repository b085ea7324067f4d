"""Bootstrap and permutation against scipy, exact enumeration and properties."""

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqa_jax.evaluation import significance
from tests.refusals import refuses


def test_interval_agrees_with_scipy():
    values = np.random.default_rng(3).random(300)
    ours = significance.bootstrap_interval(values, seed=1)
    peer = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(7)
    ).confidence_interval
    assert ours.mean == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx((peer.low, peer.high), abs=2e-3)


def test_interval_of_right_and_wrong_agrees_with_the_binomial():
    values = np.repeat([0.0, 1.0], [210, 90])
    ours = significance.bootstrap_interval(values)
    exact = scipy.stats.binom(300, 0.3).ppf([0.025, 0.975]) / 300
    # Resampled means lie 1/300 apart, so the percentile may fall on a neighbor.
    assert (ours.low, ours.high) == pytest.approx(tuple(exact), abs=1.01 / 300)


def test_interval_is_seeded_and_shrinks_with_the_sample():
    values = np.random.default_rng(0).random(100)
    small = significance.bootstrap_interval(values, seed=5)
    assert small == significance.bootstrap_interval(values, seed=5)
    assert small != significance.bootstrap_interval(values, seed=6)
    large = significance.bootstrap_interval(np.tile(values, 4))
    ratio = (small.high - small.low) / (large.high - large.low)
    assert ratio == pytest.approx(2, rel=0.1)  # width ~ 1 / sqrt(n)


def test_interval_of_equal_values_is_a_point():
    interval = significance.bootstrap_interval([0.25] * 7)
    assert (interval.mean, interval.low, interval.high) == (0.25, 0.25, 0.25)


def test_resampling_in_blocks_keeps_the_law():
    # Wide enough that 10,000 resamples do not fit one block.
    values = np.random.default_rng(0).normal(size=1000)
    interval = significance.bootstrap_interval(values, resamples=4000)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.08)


def test_paired_tests_see_a_small_but_steady_difference():
    rng = np.random.default_rng(2)
    first = rng.random(400)
    second = first - 0.02 + rng.normal(scale=0.05, size=400)  # unpaired noise would hide it
    found = significance.paired_bootstrap(first, second)
    assert found.low > 0
    assert found.difference == pytest.approx((first - second).mean())
    assert found.p_value < 0.01
    assert significance.permutation_test(first, second) < 0.01
    back = significance.paired_bootstrap(second, first)
    assert back.difference == pytest.approx(-found.difference)


def test_equal_systems_are_not_told_apart():
    values = np.random.default_rng(0).random(50)
    assert significance.permutation_test(values, values) == 1.0
    assert significance.paired_bootstrap(values, values).p_value == 1.0


def test_permutation_agrees_with_exact_enumeration():
    first = np.array([0.9, 0.8, 1.0, 0.5, 0.7, 0.6, 1.0, 0.3, 0.4])
    second = np.array([0.4, 0.9, 0.5, 0.5, 0.2, 0.5, 0.6, 0.1, 0.5])
    difference = first - second
    signs = np.array(list(itertools.product([-1, 1], repeat=len(difference))))
    exact = (np.abs(signs @ difference) >= abs(difference.sum()) - 1e-9).mean()
    assert 0.01 < exact < 0.2
    assert significance.permutation_test(first, second, resamples=40_000) == pytest.approx(
        exact, abs=4e-3
    )


def test_permutation_p_values_are_uniform_under_the_null():
    rng = np.random.default_rng(11)
    p_values = [
        significance.permutation_test(rng.random(30), rng.random(30), resamples=400, seed=i)
        for i in range(200)
    ]
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize("values", [[], [np.nan, 1.0], [[1.0, 2.0]]])
def test_bad_scores_are_refused(values):
    refuses("one finite score per question", significance.bootstrap_interval, values)


def test_bad_settings_are_refused():
    refuses("same questions", significance.paired_bootstrap, [1.0], [1.0, 0.0])
    refuses("confidence", significance.bootstrap_interval, [1.0], confidence=95)
    refuses("resamples", significance.bootstrap_interval, [1.0], resamples=0)


PAIRS = st.lists(st.tuples(*(st.integers(0, 4).map(lambda n: n / 4),) * 2), min_size=1, max_size=30)
QUICK = {"resamples": 200}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PAIRS, st.randoms(use_true_random=False))
def test_tests_are_symmetric_and_know_no_order(pairs, random):
    first, second = np.array(pairs).T
    interval = significance.bootstrap_interval(first, **QUICK)
    assert first.min() - 1e-9 <= interval.low <= interval.high <= first.max() + 1e-9
    assert interval.mean == pytest.approx(first.mean())
    there = significance.paired_bootstrap(first, second, **QUICK)
    assert there.difference == pytest.approx(first.mean() - second.mean())
    assert there.low <= there.high
    assert 0 < there.p_value <= 1
    p_value = significance.permutation_test(first, second, **QUICK)
    assert 1 / 201 <= p_value <= 1
    assert significance.permutation_test(second, first, **QUICK) == p_value
    random.shuffle(pairs)
    first, second = np.array(pairs).T
    assert significance.paired_bootstrap(first, second, **QUICK) == there
    assert significance.permutation_test(first, second, **QUICK) == p_value
    nothing = significance.paired_bootstrap(first, first, **QUICK)
    assert (nothing.difference, nothing.low, nothing.high, nothing.p_value) == (0, 0, 0, 1)
    assert significance.permutation_test(first, first, **QUICK) == 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_mcnemar_counts_the_questions_that_one_system_has_right(pairs):
    first, second = np.array(pairs, float).T
    wins, losses = int((first > second).sum()), int((first < second).sum())
    p_value, logarithm = significance.mcnemar(first, second)
    assert significance.mcnemar(second, first) == pytest.approx((p_value, logarithm))
    assert 10**logarithm == pytest.approx(p_value)
    # Twice the smaller tail of a fair coin.
    tail = scipy.stats.binom.cdf(min(wins, losses), wins + losses, 0.5)
    assert p_value == pytest.approx(min(1.0, 2 * tail))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_is_bonferroni_of_every_set_that_holds_the_hypothesis(p_values):
    """The closed test (Marcus, Peritz and Gabriel 1976), of which Holm's method is the short cut."""
    numbers = range(len(p_values))
    sets = [s for size in numbers for s in itertools.combinations(numbers, size + 1)]
    for i, corrected in enumerate(significance.holm(p_values)):
        of_sets = [min(1.0, len(s) * min(p_values[j] for j in s)) for s in sets if i in s]
        assert corrected == pytest.approx(max(of_sets))
