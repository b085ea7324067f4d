"""Products rounded to bfloat16 on CPU: values, gradients, and what XLA makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.models.common.layers import product

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 8)).astype(np.float32)
DY = RNG.normal(size=(2, 3, 5)).astype(np.float32)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def value_and_gradients(matrix, axis):
    y, back = jax.vjp(lambda x, matrix: product(x, matrix, axis), jnp.array(X), jnp.array(matrix))
    return [np.asarray(a) for a in (y, *back(jnp.array(DY)))]


@pytest.mark.parametrize("axis", [0, 1])
def test_operands_are_rounded_forward_and_backward(axis):
    matrix = RNG.normal(size=(8, 5)).astype(np.float32)  # [K, N]
    given = matrix if axis == 0 else np.ascontiguousarray(matrix.T)
    with jax.default_matmul_precision("bfloat16"):
        y, dx, dmatrix = value_and_gradients(given, axis)
    np.testing.assert_allclose(y, rounded(X) @ rounded(matrix), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, rounded(DY) @ rounded(matrix).T, rtol=1e-5, atol=1e-5)
    wanted = np.einsum("abk,abn->kn", rounded(X), rounded(DY))
    dmatrix = dmatrix if axis == 0 else dmatrix.T
    np.testing.assert_allclose(dmatrix, wanted, rtol=1e-5, atol=1e-5)


def test_without_that_setting_nothing_is_rounded():
    matrix = RNG.normal(size=(8, 5)).astype(np.float32)
    y, dx, _ = value_and_gradients(matrix, 0)
    np.testing.assert_allclose(y, X @ matrix, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, DY @ matrix.T, rtol=1e-5, atol=1e-5)
    assert np.abs(y - rounded(X) @ rounded(matrix)).max() > 1e-3


def test_the_compiled_program_multiplies_bfloat16_forward_and_backward():
    def loss(x, matrix):
        return jnp.sin(product(jnp.cos(x), 2 * matrix, 0)).sum()

    with jax.default_matmul_precision("bfloat16"):
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(X, np.ones((8, 5), np.float32))
        program = lowered.compile().as_text()
    products = [line for line in program.splitlines() if " dot(" in line]
    assert len(products) == 3
    assert program.count("bf16[") >= 2 * len(products)
