"""Meshes and the rules that map logical axes to their axes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh, partition_spec, slice_of
from tests.refusals import refuses

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


def test_a_mesh_has_the_axis_sequence_on_request():
    """It splits parameters as `fsdp` does, and other meshes know nothing of it."""
    devices = jax.devices()[:1] * 8
    mesh = make_mesh({"fsdp": 2, "sequence": -1}, devices)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "sequence": 4, "tensor": 1}
    want = PartitionSpec(None, ("fsdp", "sequence"))
    assert partition_spec(("layers", "embed"), (2, 16), mesh) == want
    assert "sequence" not in make_mesh({"data": -1, "sequence": 1}, devices).shape


def test_axes_of_size_one_are_left_out():
    mesh = AbstractMesh((4, 1, 1), ("data", "fsdp", "tensor"))
    assert partition_spec(("batch", "embed"), (8, 8), mesh) == PartitionSpec("data", None)


def test_every_parameter_name_has_a_rule():
    names = {"batch", "layers", "embed", "mlp", "heads", "head_dim", "vocab", "positions"}
    assert {name for name, _ in DEFAULT_RULES} == names | {"patch", "proj", "experts"}


def test_bad_rules_name_the_axis():
    refuses("no rule for logical axis 'embde'", partition_spec, ("embde",), (8,), MESH)
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


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh asks of a device."""

    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "cpu"
    device_kind: str = "any"


def on_slices(*sizes, platform="cpu"):
    owners = [n for n, size in enumerate(sizes) for _ in range(size)]
    return [Device(n, owner, owner, platform) for n, owner in enumerate(owners)]


@pytest.mark.parametrize(
    ("shape", "slices", "crossed"),
    [
        (None, 2, ("data", {0: 0, 7: 0, 8: 1, 15: 1})),
        ({"data": 2, "fsdp": -1}, 2, ("data", {0: 0, 1: 1})),
        ({"data": 1, "fsdp": 4, "tensor": -1}, 2, ("fsdp", {0: 0, 1: 0, 2: 1, 3: 1})),
        ({"data": 4, "fsdp": 4, "dcn_fsdp": 2}, 2, ("fsdp", {1: 0, 2: 1})),
        ({"data": 4, "fsdp": 4, "dcn_data": 1}, 2, ("fsdp", {1: 0, 2: 1})),
        ({"data": 4, "fsdp": -1, "dcn_data": -1, "dcn_fsdp": 2}, 4, ("data", {0: 0, 1: 0, 2: 2})),
        ({"data": 2, "fsdp": -1}, 4, ("fsdp", {0: 0, 7: 0, 8: 1, 15: 1})),
    ],
)
def test_axes_cross_slices(shape, slices, crossed):
    """`tensor` and the inner part of each axis stay in a slice."""
    mesh = make_mesh(shape, on_slices(*[8] * slices))
    owners = np.vectorize(slice_of)(mesh.devices)  # [data, fsdp, tensor]
    axis, wanted = crossed
    along = owners[:, 0, 0] if axis == "data" else owners[0, :, 0]
    assert {place: along[place] for place in wanted} == wanted
    assert (owners == owners[..., :1]).all()
    assert len({device.id for device in mesh.devices.flat}) == 8 * slices


@pytest.mark.parametrize(
    ("shape", "devices", "message"),
    [
        (None, on_slices(8, 4), "the 2 slices have 4 and 8 devices; start the run on slices of"),
        (
            {"tensor": -1},
            on_slices(8, 8),
            "fsdp=1 cannot be split over 2 slices .* mesh.tensor at most 8",
        ),
        (
            {"data": 1, "sequence": 16},
            on_slices(8, 8),
            "fsdp=1 cannot be split over 2 slices .* mesh.sequence x mesh.tensor at most 8",
        ),
        ({"dcn_data": 2, "fsdp": -1}, on_slices(8, 8), "data=1 cannot be split over 2 slices"),
        ({"dcn_data": 2}, on_slices(1), "mesh: dcn_data=2 does not fit 1 slice: .*leave"),
        ({"data": -1, "dcn_data": 3}, on_slices(8, 8), "dcn_data=3 does not fit 2 slices"),
        ({"data": -1, "dcn_fsdp": 0}, on_slices(8, 8), "dcn_fsdp=0 does not fit 2 slices"),
        ({"data": -1, "dcn_tensor": 2}, on_slices(8, 8), "unknown axis 'dcn_tensor'; .*dcn_fsdp"),
    ],
)
def test_slices_that_cannot_be_crossed(shape, devices, message):
    refuses(message, make_mesh, shape, devices)


def test_gpus_of_several_hosts_keep_their_order_unless_the_config_names_slices():
    """An engine's `tensor` may span two hosts."""
    devices = on_slices(4, 4, platform="gpu")
    assert [d.id for d in make_mesh({"tensor": 8}, devices).devices.flat] == list(range(8))
    mesh = make_mesh({"data": 2, "fsdp": 4, "dcn_fsdp": 2}, devices)
    assert [device.slice_index for device in mesh.devices[0, :, 0]] == [0, 0, 1, 1]


def test_processes_are_slices_by_name(monkeypatch):
    devices = [dataclasses.replace(one, slice_index=0) for one in on_slices(2, 2)]
    assert {slice_of(one) for one in devices} == {0}
    monkeypatch.setenv("MMQA_PROCESS_IS_SLICE", "1")
    mesh = make_mesh({"data": 2, "fsdp": 2, "dcn_fsdp": 2}, devices)
    assert [device.process_index for device in mesh.devices[0, :, 0]] == [0, 1]
    of_tpu = dataclasses.replace(devices[3], platform="tpu", slice_index=7)
    assert slice_of(of_tpu) == 7
