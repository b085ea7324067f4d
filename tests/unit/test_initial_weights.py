"""Parameters are drawn from the keys that NNX's streams give."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.models.layers import param

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stream", ["default", "params"])
def test_keys_are_nnxs_own(stream):
    """As many as are drawn; whoever asks for the next goes on from there."""

    def bits(key, shape, dtype=None):
        return jax.random.bits(key, shape)

    @jax.jit
    def drawn():
        ours, theirs = nnx.Rngs(**{stream: 3}), nnx.Rngs(**{stream: 3})
        found = [param(ours, bits, (2,), (None,))[...] for _ in range(3)]
        return [*found, bits(ours.params(), (2,))], [bits(theirs.params(), (2,)) for _ in range(4)]

    found, wanted = drawn()
    np.testing.assert_array_equal(found, wanted)
    assert len(np.unique(wanted)) == 8
