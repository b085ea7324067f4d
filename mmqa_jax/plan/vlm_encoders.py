"""The programs that embed texts, and pages that are pictures, by a Qwen3-VL-Embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import (
    DEFAULT_DEVICE,
    RowPlacement,
    batch_sharding,
    on_shardings,
    state_shardings,
)
from mmqa_jax.core.serving import AUTO, Serving, planned_batch_size, serving_mesh
from mmqa_jax.models.qwen_vl import QwenVLConfig, qwen3_vl_2b, qwen3_vl_8b
from mmqa_jax.models.vlm_encoder import QwenVLEncoder
from mmqa_jax.plan.encoders import TEXTS
from mmqa_jax.plan.program import Program, shard_bytes, tree_bytes
from mmqa_jax.retrieval.embedder import FULL_LENGTH, rows_of_length
from mmqa_jax.retrieval.picture_batches import PicturePrompt, attended, prompt_batches
from mmqa_jax.retrieval.text_encoder import encoder_cost, length_buckets
from mmqa_jax.retrieval.vlm_encoder import LONGEST, make_encode_prompts
from mmqa_jax.weights.vlm_encoders import for_encoding

PAGES = "pages"  # the program of the largest pictures; that of texts is TEXTS
_AROUND = 60  # tokens around a picture: an instruction and a title
# By name: sizes of its config.json.
VLM_ENCODERS: Mapping[str, Callable[[], QwenVLConfig]] = {
    "qwen3_vl_embedding_2b": qwen3_vl_2b,
    "qwen3_vl_embedding_8b": qwen3_vl_8b,
}


def vlm_encoder_program(name: str, model: str, devices: Sequence[jax.Device]) -> Program:
    """A full batch as `mmqa embed` makes it on devices of one process.

    Args:
      name: TEXTS, of 512 tokens; or PAGES, pictures of as many tokens as a picture may have.
      model: of VLM_ENCODERS.
    """
    config = for_encoding(VLM_ENCODERS[model](), devices[0].platform)
    mesh = serving_mesh(None, devices)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: QwenVLEncoder(config, rngs=nnx.Rngs())))
    # Parameters are of the type that they are computed in.
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, config.llama.dtype), state)
    state = on_shardings(state, state_shardings(state, mesh))
    held, lengths = shard_bytes(state), length_buckets(LONGEST, config.llama.positions)
    cost = encoder_cost(config.llama, lengths[-1], TEXTS)
    size = planned_batch_size(AUTO, cost, mesh, held)
    prompt = PicturePrompt([0] * min(FULL_LENGTH, lengths[-1]))
    if name == PAGES:
        prompt = PicturePrompt([config.image_token, *[0] * _AROUND], (_largest(config),))
    alone = Serving(DEFAULT_DEVICE, 1, name)
    ((_, one),) = prompt_batches([prompt], config, alone, lengths, pad_token=0)
    bucket = 0 if one.pictures is None else one.pictures.order.shape[-1]
    full = Serving(RowPlacement(mesh), size, name)
    count = rows_of_length(full, attended(config, bucket, one.input_ids.shape[1]))
    rows = batch_sharding(mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=rows), one
    )
    return Program.of(
        name,
        make_encode_prompts(graphdef),
        (state, batch),
        mesh,
        parameters=held,
        examples=count,
        unit=name,
        input_bytes=tree_bytes(batch),
    )


def _largest(config: QwenVLConfig) -> np.ndarray:
    """Pixels of as many units as a picture may have, nearly square."""
    rows = math.isqrt(config.vision.most_units)
    unit = config.vision.unit
    return np.zeros((rows * unit, config.vision.most_units // rows * unit, 3), np.uint8)
