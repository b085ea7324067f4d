"""The program that embeds texts by a published encoder, of sizes that are known without weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core import mesh as meshes
from mmqa_jax.core.serving import AUTO, Serving, planned_batch_size, serving_mesh
from mmqa_jax.models.bert import network as bert
from mmqa_jax.models.bert.mpnet import MPNet
from mmqa_jax.models.bert.rotary import GTE, JINA_V3, NOMIC, RotaryBert, rotary_config
from mmqa_jax.models.encoders.heads import QwenVLEncoder, SentenceEncoder, TextDecoder
from mmqa_jax.models.encoders.text_encoders import for_reading
from mmqa_jax.models.encoders.vlm_keys import for_encoding
from mmqa_jax.models.llama.config import RELATIVES, LlamaConfig
from mmqa_jax.models.modernbert.network import (
    ModernBert,
    ModernBertConfig,
    modernbert_base,
    modernbert_large,
)
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.models.qwen_vl.presets import qwen3_vl_2b, qwen3_vl_8b
from mmqa_jax.plan.program import Program, shard_bytes, tree_bytes
from mmqa_jax.retrieval.embedder import (
    FULL_LENGTH,
    make_encode_text,
    rows_of_length,
)
from mmqa_jax.retrieval.picture_batches import PicturePrompt, attended, prompt_batches
from mmqa_jax.retrieval.text_encoder import encoder_cost, length_buckets
from mmqa_jax.retrieval.vlm_encoder import LONGEST, make_encode_prompts

if TYPE_CHECKING:
    from mmqa_jax.retrieval.embedder import TextEncoderConfig

TEXTS = "texts"  # the program


def _xlm_roberta(
    base: Callable[..., bert.BertConfig], positions: int = 512
) -> Callable[[], bert.BertConfig]:
    """XLM-R's sizes: BERT's with a larger vocabulary."""
    sizes = {"vocab_size": 250002, "types": 1, "eps": 1e-5, "positions": positions}
    return functools.partial(base, **sizes)


def _rotary(family: RotaryBert) -> Callable[[], bert.BertConfig]:
    """The sizes that a family's config.json need not state."""
    return functools.partial(rotary_config, family, {}, "config.json")


_SMALL = functools.partial(bert.minilm_l6, layers=12)
_QWEN3 = {"positions": 32768, "vocab_size": 151665}
_QWEN3_8B = {**_QWEN3, "tied": True}  # without a head, as all of them
# By name: sizes of its config.json.
ENCODERS: Mapping[str, Callable[[], TextEncoderConfig]] = {
    "minilm_l6": bert.minilm_l6,
    "bge_small": _SMALL,
    "e5_small": _SMALL,
    **dict.fromkeys(("bge_base", "e5_base", "gte_base", "arctic_m"), bert.bert_base_uncased),
    **dict.fromkeys(("bge_large", "e5_large", "gte_large", "arctic_l"), bert.bert_large_uncased),
    "multilingual_e5_base": _xlm_roberta(bert.bert_base_uncased),
    "multilingual_e5_large": _xlm_roberta(bert.bert_large_uncased),
    "bge_m3": _xlm_roberta(bert.bert_large_uncased, positions=8192),
    "mpnet_base": functools.partial(bert.bert_base_uncased, vocab_size=30527, types=1, eps=1e-5),
    **dict.fromkeys(("modernbert_base", "gte_modernbert_base"), modernbert_base),
    "modernbert_large": modernbert_large,
    "nomic_embed": _rotary(NOMIC),
    **dict.fromkeys(("gte_multilingual_base", "arctic_m_v2"), _rotary(GTE)),
    "jina_v3": _rotary(JINA_V3),
    "qwen3_embedding_06b": functools.partial(
        RELATIVES["qwen3_06b"], positions=32768, vocab_size=151669
    ),
    "qwen3_embedding_4b": functools.partial(RELATIVES["qwen3_4b"], **_QWEN3),
    "qwen3_embedding_8b": functools.partial(RELATIVES["qwen3_8b"], **_QWEN3_8B),
}


def encoder_program(name: str, devices: Sequence[jax.Device]) -> Program:
    """A full batch of texts of 512 tokens, as `mmqa embed` makes it for one of ENCODERS."""
    config, mesh = ENCODERS[name](), serving_mesh(None, devices)
    if isinstance(config, LlamaConfig):
        config = for_reading(config, devices[0].platform)
    kind: type[nnx.Module] = MPNet if name.startswith("mpnet") else bert.Bert
    if isinstance(config, ModernBertConfig):
        kind = ModernBert
    elif isinstance(config, LlamaConfig):
        kind = TextDecoder

    def build() -> nnx.Module:
        return SentenceEncoder(kind(config, rngs=nnx.Rngs()))

    graphdef, state = nnx.split(nnx.eval_shape(build))
    if isinstance(config, LlamaConfig):  # whose parameters are of the type that it computes in
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, config.dtype), state)
    state = meshes.on_shardings(state, meshes.state_shardings(state, mesh))
    held, length = shard_bytes(state), min(FULL_LENGTH, config.positions)
    examples = planned_batch_size(AUTO, encoder_cost(config, length, TEXTS), mesh, held)
    rows = meshes.batch_sharding(mesh)
    batch = tuple(
        jax.ShapeDtypeStruct((examples, length), kind, sharding=rows)
        for kind in (np.int32, np.bool_)
    )
    return Program.of(
        TEXTS,
        make_encode_text(graphdef),
        (state, *batch),
        mesh,
        parameters=held,
        examples=examples,
        unit=TEXTS,
        input_bytes=tree_bytes(batch),
    )


# The programs that embed texts, and pages that are pictures, by a Qwen3-VL-Embedding.

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
    state = meshes.on_shardings(state, meshes.state_shardings(state, mesh))
    held, lengths = shard_bytes(state), length_buckets(LONGEST, config.llama.positions)
    cost = encoder_cost(config.llama, lengths[-1], TEXTS)
    size = planned_batch_size(AUTO, cost, mesh, held)
    prompt = PicturePrompt([0] * min(FULL_LENGTH, lengths[-1]))
    if name == PAGES:
        prompt = PicturePrompt([config.image_token, *[0] * _AROUND], (_largest(config),))
    alone = Serving(meshes.DEFAULT_DEVICE, 1, name)
    ((_, prompts),) = prompt_batches([prompt], config, alone, lengths, pad_token=0)
    bucket = 0 if prompts.pictures is None else prompts.pictures.order.shape[-1]
    full = Serving(meshes.RowPlacement(mesh), size, name)
    count = rows_of_length(full, attended(config, bucket, prompts.input_ids.shape[1]))
    rows = meshes.batch_sharding(mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=rows), prompts
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
