"""Meshes and the rules that map logical axes to their axes."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh, partition_spec

MESH = AbstractMesh((2, 2, 4), ("data", "fsdp", "tensor"))


@pytest.mark.parametrize(
    ("names", "shape", "want"),
    [
        (("layers", "embed", "mlp"), (6, 8, 16), (None, "fsdp", "tensor")),
        (("vocab", "embed"), (32, 8), ("tensor", "fsdp")),
        (("vocab", "embed"), (30522, 8), (None, "fsdp")),  # 30522 is not a multiple of 4
        (("embed", None), (8, 2), ("fsdp", None)),
        (("embed",), (9,), (None,)),
        (("batch", None), (8, 3), (("data", "fsdp"), None)),
        (("batch", "embed"), (8, 8), (("data", "fsdp"), None)),  # fsdp is taken
        (("embed", "embed"), (8, 8), ("fsdp", None)),
        ((), (), ()),
        (None, (4, 4), ()),
    ],
)
def test_logical_names_become_mesh_axes(names, shape, want):
    assert partition_spec(names, shape, MESH) == PartitionSpec(*want)


def test_axes_of_size_one_are_left_out():
    mesh = AbstractMesh((4, 1, 1), ("data", "fsdp", "tensor"))
    assert partition_spec(("batch", "embed"), (8, 8), mesh) == PartitionSpec("data", None)


def test_every_parameter_name_has_a_rule():
    names = {"batch", "layers", "embed", "mlp", "heads", "head_dim", "vocab", "positions"}
    assert {name for name, _ in DEFAULT_RULES} == names | {"patch", "proj", "experts"}


def test_bad_rules_name_the_axis():
    with pytest.raises(UserError, match="no rule for logical axis 'embde'"):
        partition_spec(("embde",), (8,), MESH)
    with pytest.raises(UserError, match="mapped to 'model', which is not a mesh axis"):
        partition_spec(("embed",), (8,), MESH, rules=[("embed", "model")])


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ({"data": 3, "tensor": -1}, "data=3, fsdp=1, tensor=-1 does not fit 8 devices"),
        ({"data": 2, "fsdp": 2}, "does not fit 8 devices"),
        ({"data": 16}, "does not fit 8 devices"),
        ({"data": -1, "fsdp": -1}, "at most one -1"),
        ({"data": 0}, "sizes must be positive"),
        ({"data": -1, "model": 2}, "unknown axis 'model'"),
    ],
)
def test_meshes_that_cannot_be(shape, match):
    with pytest.raises(UserError, match=match):
        make_mesh(shape, devices=jax.devices()[:1] * 8)
