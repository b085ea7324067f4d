"""LLaVA's tower and its arguments as shapes: compiled without weights or devices."""

from __future__ import annotations

import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import replicated
from mmqa_jax.decoding.abstract_programs import Program
from mmqa_jax.decoding.image_patches import PatchIds
from mmqa_jax.decoding.image_tower import TowerPrograms, tower_of
from mmqa_jax.decoding.slot_runner import EngineConfig, slot_shards
from mmqa_jax.models.llava import Llava, LlavaConfig


def tower_programs(config: LlavaConfig, sizes: EngineConfig, mesh: Mesh) -> dict[str, Program]:
    """What an engine runs for pictures, beside `abstract_programs.engine_programs` of its LLaMA.

    Args:
      config: parameters are in the LLaMA's compute dtype.
      sizes: of the engine.
      mesh: of real devices, or of `jax.experimental.topologies`.

    Returns:
      {"tower": Program of a full batch of pictures, "gather": of the patches in a batch of chunks}.
    """
    tower = nnx.eval_shape(lambda: tower_of(Llava(config, rngs=nnx.Rngs(0))))
    programs = TowerPrograms(tower, config, replicated(mesh), mesh)
    dtype, size = np.dtype(config.llama.dtype), config.vision.image_size
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=programs.parameters),
        nnx.state(tower),
    )
    shape = (programs.batches[-1], size, size, 3)
    pixels = jax.ShapeDtypeStruct(shape, np.uint8, sharding=programs.pixels)
    patches = (config.vision.patches, config.llama.hidden)
    picture = jax.ShapeDtypeStruct(patches, dtype, sharding=programs.features)
    bucket = sizes.buckets[-1]
    rows = sizes.rows(bucket, slot_shards(sizes.slots, mesh))
    index = jax.ShapeDtypeStruct((rows, bucket), np.int32, sharding=programs.parameters)
    pictures = (picture,) * (rows * PatchIds(config).in_chunk(bucket))
    return {
        "tower": Program(programs.encode, (state, pixels)),
        "gather": Program(programs.gather, (pictures, index)),
    }


def feature_bytes(config: LlavaConfig, sizes: EngineConfig, mesh: Mesh, pictures: int = 1) -> int:
    """The most bytes that features take on a device, where prompts have up to `pictures` pictures.

    Parameters and temporaries of the tower come on top: they are its program's.
    """
    programs = tower_programs(config, sizes, mesh)
    (picture, *_), _ = programs["gather"].arguments
    _, pixels = programs["tower"].arguments
    most = sizes.slots * max(1, pictures) + pixels.shape[0]  # see image_features
    shard = picture.sharding.shard_shape(picture.shape)
    return most * math.prod(shard) * picture.dtype.itemsize
