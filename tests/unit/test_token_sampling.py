"""The threshold of top_k and top_p on every platform, against a sorted vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.decoding import sampling


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_fewest_highest_scores(platform, monkeypatch):
    """Digits of one bit and of two; scores of both signs, and two equal ones at the threshold."""
    monkeypatch.setattr(sampling, "platform", lambda: platform)
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4, 1000)).astype(np.float32)
    order = np.argsort(-scores, axis=1)
    scores[0, order[0, 7]] = scores[0, order[0, 6]]
    share = np.asarray(jax.nn.softmax(scores), np.float64)
    for weights, targets in (
        (np.ones_like(share), [7, 1, 40, 999]),
        (share, [0.5, 0.9, 0.1, 0.99]),
    ):
        kept = sampling._heaviest(
            jnp.asarray(scores),
            jnp.asarray(weights, jnp.float32),
            jnp.asarray(targets, jnp.float32),
        )
        for row, target in enumerate(targets):
            sums = np.cumsum(weights[row, order[row]])
            lowest = scores[row, order[row, np.searchsorted(sums, target)]]
            np.testing.assert_array_equal(kept[row], scores[row] >= lowest)
