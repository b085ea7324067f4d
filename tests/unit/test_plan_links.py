"""What a mesh has to exchange, and how a slice's links bound it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mmqa_jax.core.chips import GPUS, TPUS, chip_of_kind, fewest_links, wraps
from mmqa_jax.core.config import load_config
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.plan.exchange import Exchange, Placement, groups_along, least_exchanges
from mmqa_jax.plan.programs import make_program
from mmqa_jax.plan.topology import open_topology
from mmqa_jax.plan.verdict import place

V5E, V5P = TPUS["v5e"], TPUS["v5p"]


def grid(*shape):
    places = [()]
    for size in shape:
        places = [(*place, n) for place in places for n in range(size)]
    return places


@pytest.mark.parametrize(
    ("shape", "chip", "ends"),
    [
        ((2, 4), V5E, (False, False)),
        ((8, 16), V5E, (False, True)),
        ((16, 16), TPUS["v6e"], (True, True)),
        ((2, 2, 1), V5P, (False,) * 3),
        ((2, 4, 4), V5P, (False,) * 3),
        ((4, 4, 8), V5P, (True,) * 3),
    ],
)
def test_which_slices_wrap_around(shape, chip, ends):
    assert wraps(shape, chip) == ends


@pytest.mark.parametrize(
    ("group", "shape", "chip", "links"),
    [
        (grid(2, 4), (2, 4), V5E, 2),  # a corner
        (grid(16, 16), (16, 16), V5E, 4),
        (grid(1, 4), (2, 4), V5E, 1),  # a line's end
        ([(0, n) for n in range(16)], (16, 16), V5E, 2),  # a ring
        ([(0, 0), (0, 2)], (2, 4), V5E, 1),  # over the chip between them
        (grid(4, 4, 4), (4, 4, 4), V5P, 6),
        (grid(2, 2, 1), (2, 2, 1), V5P, 2),
    ],
)
def test_links_of_the_worst_placed_chip(group, shape, chip, links):
    assert fewest_links(group, shape, chip) == links


def test_a_line_takes_twice_as_long_as_a_ring():
    ring, line = (Exchange("all-gather", "data", 16, 16e9, links=n) for n in (2, 1))
    assert line.seconds(V5E) == 2 * ring.seconds(V5E) == 15e9 / 50e9
    of_gpus = Exchange("all-gather", "data", 16, 16e9)
    assert of_gpus.seconds(GPUS["h100"]) == 15e9 / 450e9


def test_groups_along_the_axes_of_a_mesh():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    assert groups_along(mesh, ["tensor"]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_along(mesh, ["data", "fsdp"]) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_mesh_lies_on_the_links_that_it_has():
    slice_ = open_topology("v5e:2x4")

    def placed(**mesh):
        return list(make_mesh(mesh, slice_.devices).devices.flat)

    assert slice_.placement(placed(tensor=8)).links(range(8)) == 2
    parts = slice_.placement(placed(data=2, tensor=4))
    assert {parts.links(range(n, n + 4)) for n in (0, 4)} == {2}  # 2 x 2 chips
    assert {*slice_.placement(slice_.devices).hosts} == {0}
    measured = dataclasses.replace(slice_, data_sheet=GPUS["h100"])
    assert measured.placement(placed(data=8)).links is None


@pytest.mark.parametrize(
    ("kind", "inside", "across"),
    [
        # 16 GB over 4 x 16 chips: rings of the 16, then each sends its 1 GB to three other slices.
        ("all-reduce", 2 * 15, 2 * 3 / 4),
        ("all-gather", 15, 3 / 4),
        ("reduce-scatter", 15, 3 / 4),
    ],
)
def test_slices_exchange_what_each_chip_has_a_part_of(kind, inside, across):
    """By hand: Thakur et al., 2005, of a ring; what XLA makes of it is in test_slices_program.py."""
    one = Exchange(kind, "data", 64, 16e9, slices=4, links=2)
    assert one.seconds(V5E) == pytest.approx(inside * 1e9 / 100e9)
    assert one.network_bytes == pytest.approx(across * 1e9)
    alone = one._replace(members=4)  # one chip of each slice
    assert (alone.seconds(V5E), alone.network_bytes) == (0, pytest.approx(16 * across * 1e9))


@pytest.mark.parametrize(
    ("shape", "crossed"),
    [({"data": 2, "fsdp": 16}, {"data"}), ({"dcn_fsdp": 2, "data": 2, "fsdp": 16}, {"fsdp"})],
)
def test_which_exchanges_reach_over_slices(shape, crossed):
    slices = open_topology("2xv5e:4x4")
    mesh = make_mesh(shape, slices.devices)
    placement = slices.placement(list(mesh.devices.flat))
    reach = {axis: placement.reach(groups_along(mesh.shape, [axis]))[0] for axis in mesh.shape}
    assert {axis for axis, count in reach.items() if count == 2} == crossed
    assert sum(reach.values()) == 4
    assert placement.reach([range(32)]) == (2, 2)  # corners of 4 x 4 chips in either slice


@pytest.mark.parametrize(
    ("name", "host"),
    [("v5e:4x4", "v5e:2x4"), ("v5e:2x2", "v5e:2x2"), ("v5p:2x2x2", "v5p:2x2x1"), ("v4:2x2x1", "v4:2x2x1"),
     ("2xv5e:4x4", "v5e:2x4"), ("2xv5e:2x2", "v5e:2x2"), ("2xv5e-4", "v5e:2x2"),
     ("v7x:2x2x2", "v7x:2x2x1")],
)  # fmt: skip
def test_the_devices_of_one_host_are_a_slice(name, host):
    """The TPU's compiler refuses a mesh of some devices of a larger one."""
    assert open_topology(name).host.name == host


@pytest.mark.parametrize(
    ("name", "shape", "devices"),
    [("v5e-1", "1x1", 1), ("v5e-8", "2x4", 8), ("v5litepod-16", "4x4", 16), ("v6e-256", "16x16", 256),
     # Google counts TensorCores where a chip has two: of a v5p they are one device.
     ("v4-8", "2x2x1", 8), ("v5p-8", "2x2x1", 4), ("v5p-16", "2x2x2", 8), ("v5p-64", "2x4x4", 32),
     ("v5p-12288", "16x16x24", 6144), ("tpu7x-8", "2x2x1", 8), ("2xv5p-64", "2x4x4", 64)],
)  # fmt: skip
def test_slices_as_google_names_them(name, shape, devices):
    """Shapes as its pages of v4, v5e, v5p, v6e and TPU7x list them."""
    listed = open_topology(name).devices
    assert len(listed) == devices
    sides = [1 + max(side) for side in zip(*(device.coords for device in listed), strict=True)]
    assert "x".join(map(str, sides[: shape.count("x") + 1])) == shape


@pytest.mark.parametrize("name", TPUS)
def test_a_chip_is_known_by_its_compilers_name(name):
    host = open_topology(f"{name}:{TPUS[name].host}")
    assert all(chip_of_kind(device.device_kind) == TPUS[name] for device in host.devices)
    assert len(host.devices[0].coords) >= TPUS[name].dimensions


def test_an_encoder_of_a_pods_run_is_planned_on_one_host():
    """The mesh of training, here fsdp=8 over 64 chips, is no mesh of the four of a host."""
    config = load_config("configs/webqa/contrastive.py:pod")
    slice_ = open_topology("v5p:4x4x4")
    assert place("train", config, slice_) is slice_
    host = place("embed", config, slice_)
    program = make_program("embed", config, host.devices)
    assert program.mesh == {"data": 4, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        ({}, 8),
        ({"data": 1, "tensor": 16}, 16),  # fsdp is left at auto
        ({"data": 2, "fsdp": 1, "tensor": 8}, 16),
        ({"data": 1, "tensor": 8}, 8),
    ],
)
def test_an_engine_spans_hosts_where_its_mesh_takes_all_devices(mesh, devices):
    changes = {f"model.mesh.{axis}": size for axis, size in mesh.items()}
    config = load_config("configs/prompt/default.py", changes)
    assert len(place("decode", config, open_topology("v5e:4x4")).devices) == devices


def weight(mesh, shape, *split, dtype=jnp.float32):
    sharding = NamedSharding(mesh, PartitionSpec(*split))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def exchanges_of(function, weights, x, shape, *, trained=()):
    """What a function of weights and rows exchanges on a mesh: (kind, axis) -> bytes."""
    jaxpr = jax.make_jaxpr(function)(weights, x).jaxpr
    leaves = jax.tree.leaves(weights)
    found = least_exchanges(jaxpr, [*leaves, x], leaves, trained, shape, Placement((0,) * 8))
    return {(one.kind, one.axis): one.bytes for one in found}


MESH = {"data": 2, "fsdp": 2, "tensor": 2}
ROWS = jax.ShapeDtypeStruct((64, 16), jnp.bfloat16)


@pytest.fixture(scope="module")
def mesh():
    return AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))


def test_what_comes_from_the_host_is_gathered(mesh):
    up = weight(mesh, (16, 16), "fsdp", None, dtype=jnp.bfloat16)

    def layer(weights, x):
        return x @ jax.device_put(weights, jax.memory.Space.Device)

    assert exchanges_of(layer, up, ROWS, MESH) == {("all-gather", "fsdp"): 16 * 16 * 2}


def test_a_layers_partial_sums_are_added_up_once(mesh):
    """Two products that are added are one sum; a residual stream is none of them."""
    down = [weight(mesh, (16, 16), "tensor", None, dtype=jnp.bfloat16) for _ in range(2)]

    def layer(weights, x):
        return x + (x @ weights[0] + (2.0 * x) @ weights[1]).astype(jnp.bfloat16)

    rows = 64 // 4  # of a device
    assert exchanges_of(layer, down, ROWS, MESH) == {("all-reduce", "tensor"): rows * 16 * 2}
    up = weight(mesh, (16, 16), None, "tensor", dtype=jnp.bfloat16)
    assert exchanges_of(lambda w, x: x @ w, up, ROWS, MESH) == {}


def test_weights_are_gathered_where_they_are_used(mesh):
    """A layer of a stack in the type of its product, once a turn; merged heads are one dimension."""
    stack = weight(mesh, (3, 16, 4, 8), None, "fsdp", "tensor", None)

    def layers(stack, x):
        def layer(x, w):
            y = x @ w.astype(jnp.bfloat16).reshape(16, 32)
            return y[:, :16], None

        return jax.lax.scan(layer, x, stack)[0]

    gathered = 3 * 16 * 4 * 8 * 2 / 2  # half of them over `tensor`
    assert exchanges_of(layers, stack, ROWS, MESH) == {("all-gather", "fsdp"): gathered}
    frozen = exchanges_of(lambda s, x: layers(jax.lax.stop_gradient(s), x), stack, ROWS, MESH)
    assert frozen == {("all-gather", "fsdp"): gathered}
    one = exchanges_of(lambda s, x: x @ s[1].reshape(16, 32), stack, ROWS, MESH)
    assert one == {("all-gather", "fsdp"): 16 * 4 * 8 * 4 / 2}
    assert exchanges_of(layers, stack, ROWS, {"data": 8, "fsdp": 1, "tensor": 1}) == {}


def test_a_shard_map_gathers_what_it_takes_whole_and_says_what_it_adds_up(mesh):
    """Experts split over `tensor`, their rows over `fsdp`; sums over the batch are gradients."""
    experts = weight(mesh, (4, 16, 8), "tensor", "fsdp", None, dtype=jnp.bfloat16)

    def mixed(experts, x):
        def local(experts, x):
            y = jnp.einsum("th,ehf->tf", x, experts)
            jax.lax.psum(y, ("data", "fsdp"))
            return jax.lax.psum(y, "tensor")

        rows, split = PartitionSpec(("data", "fsdp")), PartitionSpec("tensor")
        run = jax.shard_map(
            local, mesh=mesh, in_specs=(split, rows), out_specs=rows, check_vma=False
        )
        return run(experts, x)

    assert exchanges_of(mixed, experts, ROWS, MESH) == {
        ("all-gather", "fsdp"): 4 * 16 * 8 * 2 / 2,
        ("all-reduce", "tensor"): 64 // 4 * 8 * 2,
    }


def test_gradients_are_added_up_over_the_devices_that_share_the_batch(mesh):
    split, frozen = (weight(mesh, (16, 16), "fsdp", "tensor") for _ in range(2))
    whole = weight(mesh, (16,), None)

    def loss(weights, x):
        return (x @ weights[0].astype(jnp.bfloat16) + weights[1].astype(jnp.bfloat16)).sum()

    found = exchanges_of(loss, [split, whole, frozen], ROWS, MESH, trained=[split, whole])
    half = 16 * 16 * 2 / 2  # in bfloat16, in which the product is
    assert found == {
        ("all-gather", "fsdp"): half,
        ("reduce-scatter", "fsdp"): half,
        ("all-reduce", "data"): half / 2,
        ("all-reduce", "data+fsdp"): 16 * 2,
    }
