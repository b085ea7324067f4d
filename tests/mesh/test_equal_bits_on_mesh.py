"""An answer's bits do not depend on how many copies of the weights serve."""

import jax
import pytest

from mmqa_jax.core.mesh import make_mesh
from tests.equal_bits import KINDS, answers, assert_same, engine, policy_step, requests, scorings

# Compiled as for users: other programs have other bits.
pytestmark = pytest.mark.optimized


def mesh_of(data: int, tensor: int = 1) -> jax.sharding.Mesh:
    return make_mesh({"data": data, "tensor": tensor}, devices=jax.devices()[: data * tensor])


@pytest.mark.parametrize(
    ("kind", "dtype", "counts"),
    [
        ("dense", "float32", (1, 2, 4, 8)),
        ("dense", "bfloat16", (1, 2, 4, 8)),
        *((kind, "bfloat16", (8,)) for kind in KINDS if kind != "dense"),
    ],
)
def test_data(kind, dtype, counts):
    """On one, two, four and eight devices; on one also layer by layer, without a mesh."""
    asked = [*requests(9, kind), *scorings(2)]
    expected = answers(engine(dtype, kind, slots=16), *asked)
    for data in counts:
        served = engine(dtype, kind, slots=16, mesh=mesh_of(data))
        assert_same(expected, answers(served, *asked), data)


@pytest.mark.parametrize(("kind", "dtype"), [("dense", "float32"), ("experts", "bfloat16")])
def test_data_of_split_weights(kind, dtype):
    """Each copy over two devices: one, two and four copies, fewer prompts and slots."""
    asked = [*requests(9, kind), *scorings(2)]
    first = engine(dtype, kind, slots=16, mesh=mesh_of(1, tensor=2))
    expected = answers(first, *asked)
    assert_same(expected, answers(first, *requests(2, kind)), "prefixes that are there")
    for data, slots in ((1, 4), (2, 16), (4, 16)):
        served = engine(dtype, kind, slots=slots, mesh=mesh_of(data, tensor=2))
        assert_same(expected, answers(served, *asked), (data, slots))


@pytest.mark.parametrize(("dtype", "counts"), [("float32", (1, 2, 4, 8)), ("bfloat16", (8,))])
def test_a_policys_first_ratio_is_one(dtype, counts):
    for data in counts:
        step = policy_step(dtype, mesh=mesh_of(data), slots=16)
        assert step.answered.sum() == 48
        assert (step.logprobs[step.answered] == step.drawn[step.answered]).all(), data
        assert (step.ratios[step.answered] == 1).all()
