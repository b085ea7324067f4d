"""A scanned training step on eight devices: what is counted of its program (`tests/hlo`), and what
`mmqa plan` reads from its jaxpr."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.plan.exchange import Placement, least_exchanges
from tests.hlo.counts import count

LAYERS, WIDTH, HIDDEN, ROWS = 3, 32, 64, 16


@pytest.fixture(scope="module")
def found():
    """The counts of the compiled step, its collectives, and the least exchanges of its jaxpr."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})

    def struct(shape, *names):
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    up = struct((LAYERS, WIDTH, HIDDEN), None, "fsdp", "tensor")
    down = struct((LAYERS, HIDDEN, WIDTH), None, "tensor", "fsdp")
    x = struct((ROWS, WIDTH), ("data", "fsdp"))

    def loss(weights, x):
        def layer(x, pair):
            return jnp.tanh(x @ pair[0]) @ pair[1], None

        return jnp.square(jax.lax.scan(layer, x, weights)[0]).sum()

    step = jax.jit(jax.grad(loss), out_shardings=(up.sharding, down.sharding))
    traced = step.trace((up, down), x)
    counts = count(traced.lower().compile().as_text())
    least = least_exchanges(
        traced.jaxpr.jaxpr, (up, down, x), (up, down), (up, down), mesh.shape, Placement((0,) * 8)
    )
    return counts, counts.on_mesh(dict(mesh.shape)), least


def test_collectives_of_a_real_program(found):
    counts, collectives, _ = found
    rows, sizes = ROWS // 4, (WIDTH, HIDDEN // 2)
    assert set(counts.loops) == {LAYERS}
    # Two products forward, four backward, of which one device does an eighth.
    product = 2 * ROWS * WIDTH * HIDDEN
    assert counts.total_flops == 6 * LAYERS * product / 8
    seen = {(one.kind, one.axis) for one in collectives}
    assert ("all-gather", "fsdp") in seen  # the weights
    assert ("all-reduce", "tensor") in seen  # the products over the hidden side
    assert any("data" in axis for _, axis in seen)  # the gradients
    gathered = next(one for one in collectives if one.kind == "all-gather")
    assert gathered.members == 2
    weight = sizes[0] * sizes[1] * 4
    assert gathered.bytes == gathered.count * weight
    assert gathered.count % LAYERS == 0
    reduced = next(one for one in collectives if one.axis == "tensor")
    assert reduced.bytes == reduced.count * rows * sizes[0] * 4


def test_the_least_exchanges_of_a_plan_are_those_of_the_compiled_program(found):
    """The CPU's compiler adds gradients up whole, of which a part would do."""
    _, collectives, least = found
    counted = {(one.kind, one.axis): one.bytes for one in collectives}
    counted["reduce-scatter", "fsdp"] = counted.pop(("all-reduce", "fsdp"))
    assert {(one.kind, one.axis): one.bytes for one in least} == counted
