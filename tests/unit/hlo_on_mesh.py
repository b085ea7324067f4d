"""Compiles a scanned training step on eight CPU devices and prints what is counted of it, and
what `mmqa plan` reads from its jaxpr."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.plan.exchange import Placement, least_exchanges
from tests.hlo.counts import count

LAYERS, WIDTH, HIDDEN, ROWS = 3, 32, 64, 16


def main() -> None:
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
    found = [one._asdict() for one in counts.on_mesh(dict(mesh.shape))]
    least = least_exchanges(
        traced.jaxpr.jaxpr, (up, down, x), (up, down), (up, down), mesh.shape, Placement((0,) * 8)
    )
    print(
        json.dumps(
            {
                "flops": counts.total_flops,
                "loops": counts.loops,
                "collectives": found,
                "least": [one._asdict() for one in least],
            }
        )
    )


if __name__ == "__main__":
    main()
