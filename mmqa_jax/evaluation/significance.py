"""Bootstrap intervals of a mean, and tests of the difference between two systems.

Resampling n values with replacement is a multinomial draw over their distinct values. Scores of
single questions take few distinct values, so counts are drawn instead of rows: the same
distribution from far fewer random numbers.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mmqa_jax.core.errors import UserError

# Random numbers drawn at once, at most.
_MAX_DRAWN = 2_000_000
# With more distinct values than this, drawing rows is faster.
_MAX_DISTINCT = 128


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Mean difference of two systems, its bootstrap interval and a two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the mean of one score per question."""
    values = _checked(values, "values")
    means = _resampled_means(values, resamples, seed)
    low, high = _percentiles(means, confidence)
    return Interval(float(values.mean()), low, high)


def paired_bootstrap(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Bootstrap over questions of mean(first) - mean(second), scores paired by question.

    p is twice the smaller share of resamples on one side of zero (counting the sample
    itself once, so that p is never 0).
    """
    difference = _paired(first, second)
    means = _resampled_means(difference, resamples, seed)
    low, high = _percentiles(means, confidence)
    below = (1 + (means <= 0).sum()) / (1 + resamples)
    above = (1 + (means >= 0).sum()) / (1 + resamples)
    p_value = min(1.0, 2 * float(min(below, above)))
    return Comparison(float(difference.mean()), low, high, p_value)


def permutation_test(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> float:
    """Two-sided p-value of the paired permutation test (random sign flips).

    Under the null hypothesis each question's two scores may be swapped freely.
    """
    difference = _paired(first, second)
    observed = abs(difference.sum())
    sizes, counts = np.unique(np.abs(difference[difference != 0]), return_counts=True)
    if len(sizes) == 0:
        return 1.0
    rng = np.random.default_rng(seed)
    extreme = 0
    for n in _blocks(resamples, len(sizes)):
        # Of the m differences of one size, Binomial(m, 1/2) keep a positive sign.
        positive = rng.binomial(counts, 0.5, size=(n, len(sizes)))
        sums = np.abs((2 * positive - counts) @ sizes)
        extreme += int((sums >= observed - 1e-9 * max(observed, 1.0)).sum())
    return (1 + extreme) / (1 + resamples)


def mcnemar(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray
) -> tuple[float, float]:
    """Two-sided p-value of McNemar's exact test; scores are 0 or 1, paired by question.

    Under the null hypothesis, when exactly one system is right, it is equally likely to be either.

    Returns:
      The p-value, which is 0 below 1e-308, and its logarithm to base 10.
    """
    import scipy.special
    import scipy.stats

    difference = _paired(first, second)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    tail = scipy.stats.binom.logpmf(np.arange(min(wins, losses) + 1), wins + losses, 0.5)
    log_p = min(0.0, math.log(2) + float(scipy.special.logsumexp(tail)))
    return math.exp(log_p), log_p / math.log(10)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for the number of tests by Holm's step-down method (1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def _resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means [resamples] of samples of len(values) drawn with replacement."""
    distinct, counts = np.unique(values, return_counts=True)
    rng, n = np.random.default_rng(seed), len(values)
    if len(distinct) <= _MAX_DISTINCT:
        shares = counts / n
        blocks = _blocks(resamples, len(distinct))
        drawn = [rng.multinomial(n, shares, size=rows) @ distinct / n for rows in blocks]
    else:
        blocks = _blocks(resamples, n)
        drawn = [values[rng.integers(n, size=(rows, n))].mean(axis=1) for rows in blocks]
    return np.concatenate(drawn)


def _blocks(resamples: int, width: int) -> list[int]:
    """Splits `resamples` into blocks, so that [block, width] stays small."""
    if resamples < 1:
        raise UserError(f"resamples: must be 1 or more, not {resamples}; 10,000 is usual.")
    rows = max(1, _MAX_DRAWN // width)
    return [min(rows, resamples - start) for start in range(0, resamples, rows)]


def _percentiles(means: np.ndarray, confidence: float) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise UserError(f"confidence: must be between 0 and 1, not {confidence}; 0.95 is usual.")
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _paired(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray):
    first, second = _checked(first, "the first system"), _checked(second, "the second system")
    if len(first) != len(second):
        raise UserError(
            f"the systems were scored on {len(first)} and {len(second)} questions; compare them "
            "on the same questions."
        )
    return first - second


def _checked(values: Sequence[float] | np.ndarray, name: str) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise UserError(
            f"{name}: expected one finite score per question and at least one question, found an "
            f"array of shape {values.shape}; check the scores."
        )
    return values
