"""The program of `mmqa prompt` with a T5: a batch of the longest prompts, answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.mesh import (
    batch_blocks,
    batch_sharding,
    make_mesh,
    on_shardings,
    state_shardings,
)
from mmqa_jax.decoding.sampling import SamplingParameters
from mmqa_jax.decoding.t5_engine import room
from mmqa_jax.decoding.t5_generate import draw
from mmqa_jax.models.t5 import T5
from mmqa_jax.models.t5_config import PUBLISHED
from mmqa_jax.models.t5_inputs import Texts
from mmqa_jax.plan.program import Program, shard_bytes, tree_bytes
from mmqa_jax.prompting.local_t5 import engine_sizes, mesh_of

GENERATE = "generate"


def generation_program(config: ConfigDict, devices: Sequence[jax.Device], model: str) -> Program:
    """Encoding and decoding of a batch, with sources as long as `engine.length`.

    Its loop is counted once: FLOPs and time are those of the encoder and of one token.

    Args:
      config: as configs/prompt/default.py.
      model: a name of PUBLISHED.
    """
    on_cpu = devices[0].platform == "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    shape = dataclasses.replace(PUBLISHED[model](), dtype=dtype)
    sizes = engine_sizes(config.engine.to_dict(), on_cpu=on_cpu)
    mesh = mesh_of(config.model.mesh.to_dict(), devices) or make_mesh({"data": 1}, devices[:1])
    graphdef, state = nnx.split(nnx.eval_shape(lambda: T5(shape, rngs=nnx.Rngs())))
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), state)
    state = on_shardings(state, state_shardings(state, mesh))
    length, blocks = sizes.padded(sizes.length), batch_blocks(mesh)
    rows = -(-max(1, min(sizes.slots, sizes.tokens // length)) // blocks) * blocks
    sharding = batch_sharding(mesh)

    def one(*more: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *more), dtype, sharding=sharding)

    drawn = SamplingParameters(
        one(dtype=jnp.float32), one(), one(dtype=jnp.float32), one(2, dtype=jnp.uint32)
    )
    batch = (Texts(one(length), one()), drawn, one())
    most = room(config.decoding.max_new_tokens)
    return Program.of(
        GENERATE,
        draw,
        (graphdef, state, *batch),
        mesh,
        {"end_ids": (1,), "max_new_tokens": most},
        parameters=shard_bytes(state),
        examples=rows,
        unit="answers",
        input_bytes=tree_bytes(batch),
    )
