"""What a policy's trainer computes for a drawn token is what its engine computed, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.equal_bits import drawn_model, policy_step

# Compiled as for users: other programs have other bits.
pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "windows"])
def test_the_first_ratio_is_one_and_gradients_are_those_of_training(kind, dtype):
    step = policy_step(dtype, kind, slots=4)
    assert step.answered.sum() > 40
    assert (step.logprobs[step.answered] == step.drawn[step.answered]).all()
    assert (step.ratios[step.answered] == 1).all()
    if dtype == "bfloat16":  # gradients of two orders of roundings say little
        return

    model = drawn_model(dtype, kind)
    graphdef, state = nnx.split(model)

    def loss(state):
        logits = nnx.merge(graphdef, state)(step.tokens)[:, :-1]
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), step.tokens[:, 1:, None], -1)
        return -jnp.where(step.answered, jnp.exp(found[..., 0] - step.drawn), 0).sum()

    wanted = jax.jit(jax.grad(loss))(state)
    for number, layer in enumerate(step.gradient.layers.values()):
        for name in ("q", "k", "v", "out"):
            want = np.asarray(getattr(wanted.layers, name).kernel[...][number], np.float32)
            got = np.asarray(getattr(layer, name).kernel[...], np.float32).T
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
