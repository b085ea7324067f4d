"""The TPU's product with MXFP4's experts, interpreted, beside the dequantized matrices'."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mmqa_jax.models.llama.mxfp4_kernel import fits, multiply

pytestmark = pytest.mark.slow
EXPERTS = 2


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(8, 128, 256), (16, 320, 192), (8, 64, 3200)]
)
def test_a_product_is_that_of_the_dequantized_matrices(rows, inputs, outputs, own):
    rng = np.random.default_rng(inputs)
    shape = (3, EXPERTS, inputs, outputs)
    codes = rng.integers(0, 16, shape).astype(np.uint8)  # all of them
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * np.where(codes > 7, -1, 1)
    scale = 2.0 ** rng.integers(-12, 3, (3, EXPERTS, inputs // 32, outputs))
    states = (EXPERTS, rows, inputs) if own else (rows, inputs)
    x = rng.standard_normal(states).astype(ml_dtypes.bfloat16)

    kernels = jnp.asarray(numbers, jnp.float4_e2m1fn)
    arrays = jnp.asarray(x), kernels, jnp.asarray(scale, jnp.bfloat16)
    y = multiply(*arrays, jnp.int32(2), interpret=True)

    whole = numbers[2] * np.repeat(scale[2], 32, axis=1)
    wide = x.astype(np.float64)
    exact = wide @ whole
    of_sums = 2**-22 * (np.abs(wide) @ np.abs(whole))  # float32's, of the terms
    of_result = 2**-8 * np.abs(exact)  # half a place of bfloat16's
    assert (np.abs(np.asarray(y, np.float64) - exact) <= of_sums + of_result).all()
    assert np.abs(exact).max() > 100 * of_sums.max()


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "does"),
    [(2880, 2880, 90, True), (2880, 3200, 90, True), (96, 128, 3, False), (128, 128, 8, False)],
)
def test_sizes_that_fit(inputs, outputs, groups, does):
    assert fits(inputs, outputs, groups) == does
