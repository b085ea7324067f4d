"""The engine's programs and their arguments as shapes: compiled without weights or devices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import DEFAULT_RULES, Rules, replicated, state_shardings
from mmqa_jax.decoding.cached_attention import Branches
from mmqa_jax.decoding.image_tower import SizedTower, model_of, tower_of, tower_programs_of
from mmqa_jax.decoding.sizes import repeat_key_heads
from mmqa_jax.decoding.slot_runner import EngineConfig, Programs, scans, slot_shards
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama, unstack_layers
from mmqa_jax.models.llama.quantize import quantize_weights
from mmqa_jax.models.llava.network import Llava, LlavaConfig
from mmqa_jax.models.qwen_vl.network import QwenVLConfig


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
        model = Llama(config, rngs=nnx.Rngs())
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
    shifts = array("int32", rows, bucket, 3) if config.mrope else None
    chunk = (array("int32", rows, bucket), of_row, of_row, of_row, branches, None, shifts, None)
    active = jax.ShapeDtypeStruct((sizes.slots,), bool, sharding=programs.whole)
    of_prompt = sizes.read(before if programs.scanned else columns)
    greedy = programs.sampled(np.zeros(sizes.slots))
    step = (state, programs.cache, programs.slots, active, None, limit, greedy)
    return {
        "decode": Program(programs.step, step),
        "prefill": Program(programs.encode, (state, programs.cache, *chunk, of_prompt)),
    }


# A tower and its arguments as shapes: compiled without weights or devices.


def tower_programs(
    config: LlavaConfig | QwenVLConfig, sizes: EngineConfig, mesh: Mesh
) -> dict[str, Program]:
    """What an engine runs for pictures, beside `abstract_programs.engine_programs` of its LLaMA.

    Args:
      config: parameters are in the LLaMA's compute dtype. Where pictures have several sizes, these
        have a usual one (`SizedTower.shown`).
      sizes: of the engine.
      mesh: of real devices, or of `jax.experimental.topologies`.

    Returns:
      {"tower": Program of a full batch of pictures, "gather": of the patches in a batch of chunks,
      where pictures have several sizes those of one picture}.
    """
    tower = nnx.eval_shape(lambda: tower_of(model_of(config)(config, rngs=nnx.Rngs())))
    programs = tower_programs_of(tower, config, replicated(mesh), mesh)
    dtype = np.dtype(config.llama.dtype)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=programs.parameters),
        nnx.state(tower),
    )
    bucket = sizes.buckets[-1]
    rows = sizes.rows(bucket, slot_shards(sizes.slots, mesh))
    index = jax.ShapeDtypeStruct((rows, bucket), np.int32, sharding=programs.parameters)
    if isinstance(programs, SizedTower):
        shown = programs.shown()
        inputs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (programs.batches[-1], *x.shape[1:]), x.dtype, sharding=programs.pixels
            ),
            programs.laid([shown]),
        )
        of_picture = jax.ShapeDtypeStruct(
            (programs.length(programs.kind(shown)), programs.width),
            dtype,
            sharding=programs.features,
        )
        placed = jax.ShapeDtypeStruct((rows, bucket, programs.width), dtype, sharding=programs.rows)
        return {
            "tower": Program(programs.encode, (state, inputs)),
            "gather": Program(programs.put, (placed, of_picture, index)),
        }
    size = config.vision.image_size
    shape = (programs.batches[-1], size, size, 3)
    pixels = jax.ShapeDtypeStruct(shape, np.uint8, sharding=programs.pixels)
    patches = (config.features, config.llama.hidden)
    picture = jax.ShapeDtypeStruct(patches, dtype, sharding=programs.features)
    pictures = (picture,) * (rows * programs.in_chunk(bucket))
    return {
        "tower": Program(programs.encode, (state, pixels)),
        "gather": Program(programs.gather, (pictures, index)),
    }


def feature_bytes(
    config: LlavaConfig | QwenVLConfig, sizes: EngineConfig, mesh: Mesh, pictures: int = 1
) -> int:
    """The most bytes that features take on a device, where prompts have up to `pictures` pictures.

    Parameters and temporaries of the tower come on top: they are its program's.
    """
    programs = tower_programs(config, sizes, mesh)
    if model_of(config) is Llava:
        (picture, *_), _ = programs["gather"].arguments
    else:
        _, picture, _ = programs["gather"].arguments
    _, pixels = programs["tower"].arguments
    batch = jax.tree.leaves(pixels)[0].shape[0]
    most = sizes.slots * max(1, pictures) + batch  # see image_features
    shard = picture.sharding.shard_shape(picture.shape)
    return most * math.prod(shard) * picture.dtype.itemsize
