"""The TPU's product with codes, interpreted, beside the dequantized matrix's product in float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mmqa_jax.models.llama.codes_kernel import fits, multiply

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "has_zero"),
    [("int4", False), ("int4", True), ("int8", True), ("float8_e4m3fn", False)],
)
@pytest.mark.parametrize(
    ("rows", "inputs", "groups", "outputs"), [(8, 512, 4, 384), (40, 2048, 8, 256)]
)
def test_a_product_is_that_of_the_dequantized_matrix(kind, rows, inputs, groups, outputs, has_zero):
    rng = np.random.default_rng(rows)
    dtype = getattr(ml_dtypes, kind, kind)
    codes = rng.integers(0, 256, (3, inputs, outputs), np.uint8)
    if kind == "float8_e4m3fn":
        codes = np.where(codes & 127 == 127, 1, codes).view(ml_dtypes.float8_e4m3fn)  # no NaN
    else:
        codes = (codes.view(np.int8) >> (4 if kind == "int4" else 0)).astype(dtype)
    scale = rng.uniform(0.001, 0.02, (3, groups, outputs)).astype(np.float32)
    zero = rng.integers(-8, 8, scale.shape, np.int8) if has_zero else None
    if kind == "float8_e4m3fn":  # as checkpoints have them
        scale = scale.astype(ml_dtypes.bfloat16)
    x = rng.standard_normal((rows, inputs)).astype(ml_dtypes.bfloat16)

    arrays = (jnp.asarray(array) for array in (x, codes, scale))
    y = multiply(*arrays, None if zero is None else jnp.asarray(zero), jnp.int32(1), interpret=True)

    whole = codes[1].astype(np.float64)
    if zero is not None:
        whole -= np.repeat(zero[1], inputs // groups, 0)
    whole *= np.repeat(scale[1].astype(np.float64), inputs // groups, 0)
    wide = x.astype(np.float64)
    exact = wide @ whole
    of_sums = 2**-22 * (np.abs(wide) @ np.abs(whole))  # float32's, of the terms
    of_result = 2**-8 * np.abs(exact)  # half a place of bfloat16's
    assert (np.abs(np.asarray(y, np.float64) - exact) <= of_sums + of_result).all()
    assert np.abs(exact).max() > 100 * of_sums.max()


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "does"),
    [(512, 256, 4, True), (512, 200, 4, False), (512, 256, 8, False), (2880, 2880, 90, False)],
)
def test_sizes_that_fit(inputs, outputs, groups, does):
    assert fits(inputs, outputs, groups) == does
