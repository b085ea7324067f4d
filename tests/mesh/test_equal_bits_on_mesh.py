"""An answer's bits do not depend on how many copies of the weights serve."""

from __future__ import annotations

import jax
import pytest

from mmqa_jax.core.mesh import make_mesh
from tests.equal_bits import answers, engine, requests, scorings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_data(dtype):
    """On one, two, four and eight devices; on one also layer by layer, without a mesh."""
    asked = [*requests(9), *scorings(2)]
    expected = answers(engine(dtype, slots=16), *asked)
    for data in (1, 2, 4, 8):
        mesh = make_mesh({"data": data}, devices=jax.devices()[:data])
        found = answers(engine(dtype, slots=16, mesh=mesh), *asked)
        assert [key for key in found if found[key] != expected[key]] == [], data
        assert len(found) == len(asked)
