"""The engine's programs and their arguments as shapes: compiled without weights or devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import DEFAULT_RULES, Rules, state_shardings
from mmqa_jax.decoding.cached_segments import Branches
from mmqa_jax.decoding.key_heads import repeat_key_heads
from mmqa_jax.decoding.quantize import quantize_weights
from mmqa_jax.decoding.slot_runner import EngineConfig, Programs, scans
from mmqa_jax.models.llama import Llama, unstack_layers
from mmqa_jax.models.llama_config import LlamaConfig


class Program(NamedTuple):
    """A jitted function and what it is called with: `function.lower(*arguments).compile()`."""

    function: Any
    arguments: tuple[Any, ...]


def engine_programs(
    config: LlamaConfig,
    sizes: EngineConfig,
    mesh: Mesh,
    *,
    columns: int | None = None,
    rules: Rules = DEFAULT_RULES,
) -> dict[str, Program]:
    """What an engine runs for a LLaMA: a step of all slots, and a batch of prompts' chunks.

    Args:
      config: parameters are in its compute dtype.
      sizes: of the engine, whose weights are "given" or "int8".
      mesh: of real devices, or of `jax.experimental.topologies`.
      columns: how far the longest sequence reaches; None is `sizes.length`. A prompt's chunk is
        the last of such a sequence.
      rules: of the parameters' sharding.

    Returns:
      {"decode": Program, "prefill": Program}.
    """

    def build() -> Llama:
        model = Llama(config, rngs=nnx.Rngs(0))
        nnx.update(model, jax.tree.map(lambda x: x.astype(config.dtype), nnx.state(model)))
        repeat_key_heads(model, mesh, rules)
        if not scans(sizes, mesh):
            unstack_layers(model)
        if sizes.weights == "int8":
            quantize_weights(model)
        return model

    model = nnx.eval_shape(build)
    state = nnx.state(model)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        state_shardings(state, mesh, rules),
    )
    programs = Programs(model, sizes, mesh)

    def array(kind: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(kind), sharding=programs.rows)

    columns, bucket = columns or sizes.length, sizes.buckets[-1]
    rows = sizes.rows(bucket, programs.shards)
    of_row = array("int32", rows)
    branches = None
    if not programs.scanned:
        branches = Branches(of_row, array("int32", rows, bucket))
    limit = sizes.read(columns)
    before = max(columns - bucket, 0)  # columns in front of the chunk
    chunk = (array("int32", rows, bucket), of_row, of_row, of_row, branches, None)
    active = jax.ShapeDtypeStruct((sizes.slots,), bool, sharding=programs.whole)
    of_prompt = sizes.read(before if programs.scanned else columns)
    return {
        "decode": Program(programs.step, (state, programs.cache, programs.slots, active, limit)),
        "prefill": Program(programs.encode, (state, programs.cache, *chunk, of_prompt)),
    }
