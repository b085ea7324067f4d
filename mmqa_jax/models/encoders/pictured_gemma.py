"""EmbeddingGemma 2 with its pictures: Gemma 4's tower in front of the encoder of texts.

A picture's tokens stand among words that see them, and are seen, both ways. Original: transformers
models/embedding_gemma2/modular_embedding_gemma2.py. What it hears by is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.encoders import embedding_gemma, text_encoders
from mmqa_jax.models.encoders.embedding_gemma import MODEL_TYPE
from mmqa_jax.models.encoders.heads import PooledHead
from mmqa_jax.models.encoders.text_encoders import for_reading_prompts
from mmqa_jax.models.llava import families
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.connectors import UnitPooled
from mmqa_jax.models.llava.gemma4_vision import Gemma4Vision
from mmqa_jax.models.llava.keys import check_published, fields_from_hf, llava_key_map
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.llava.processor import with_budget
from mmqa_jax.models.qwen_vl.network import PatchBatch
from mmqa_jax.weights import layouts
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule
from mmqa_jax.weights.published import load_checkpoint

_PROJECTION = Rule(
    "language_model.model.embedding_projection.weight", "llama/projection/kernel", TRANSPOSE
)


class GemmaReader(Llava):
    """Tower, connector and encoder, whose tokens' vectors are asked for."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        self.vision = Gemma4Vision(config.vision, rngs=rngs)
        self.projector = UnitPooled(config, rngs=rngs)
        self.llama = embedding_gemma.EmbeddingGemma(config.llama, rngs=rngs)
        self.config = config

    def states(
        self,
        input_ids: jax.Array,
        mask: jax.Array,
        pictures: PatchBatch | None = None,
        rows: jax.Array | None = None,
    ) -> jax.Array:
        """Right-padded prompts -> the vectors of their tokens [B, L, projected].

        Args:
          input_ids: int [B, L], one placeholder for each token of a picture.
          mask: bool [B, L], true at real tokens.
          pictures: K of each prompt, arrays [B, K, ...] of one bucket of U units; None: none has
            any, and `rows` is not needed.
          rows: int [B, L], which of its pictures' K * U units a token takes; -1: none.
        """
        words = jnp.where(input_ids == self.config.image_token, 0, input_ids)
        tokens = self.llama.words_of(words)
        if pictures is not None:
            assert rows is not None, "pictures have places in the prompt"
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pictures)
            features = self.encode_images(self.vision.normalize(flat))  # [B * K, U, H]
            features = features.reshape(len(input_ids), -1, features.shape[-1])
            units = jnp.take_along_axis(features, jnp.maximum(rows, 0)[..., None], axis=1)
            tokens = jnp.where(rows[..., None] >= 0, units.astype(tokens.dtype), tokens)
        encoded = self.llama.encode(self.llama.with_side(tokens, words), mask)
        return self.llama.projection(encoded)


class GemmaEncoder(PooledHead, GemmaReader):
    """EmbeddingGemma 2."""

    def __init__(self, config: LlavaConfig, truncate_dim: int | None = None, *, rngs: nnx.Rngs):
        super().__init__(config, truncate_dim, "mean", rngs=rngs)


def sees_pictures(folder: Path) -> bool:
    """Whether a published folder holds an EmbeddingGemma 2 with its tower for pictures."""
    published = read_json(folder / text_encoders.CONFIG)
    return published.get("model_type") == MODEL_TYPE and bool(published.get("vision_config"))


def read_pictured_config(folder: Path) -> LlavaConfig:
    """Our config of a folder's files; absent values are transformers' defaults."""
    published = read_json(folder / text_encoders.CONFIG)
    return with_budget(folder, pictured_config(published, str(folder / text_encoders.CONFIG)))


def pictured_config(published: Mapping[str, Any], where: str = text_encoders.CONFIG) -> LlavaConfig:
    """Our config from a `config.json`."""
    family = families.ALL[MODEL_TYPE]
    check_published(published, where, family)
    if published.get("audio_config"):
        logging.getLogger(__name__).warning(
            "%s: this EmbeddingGemma 2 embeds texts and pictures here; its audio tower is left "
            "out, so that it embeds no sound",
            where,
        )
    text, projected = embedding_gemma.text_as_gemma4(published, where)
    fields = fields_from_hf({**published, "text_config": text}, where, family)
    llama = embedding_gemma.as_encoder(fields.pop("llama"), projected, where)
    return LlavaConfig(**fields, llama=llama, family=MODEL_TYPE)


def embedding_gemma_2() -> LlavaConfig:
    """google/embeddinggemma-2: transformers' defaults."""
    return pictured_config({"text_config": {"vocab_size": 262144}, "vision_config": {}})


def pictured_key_map(config: LlavaConfig) -> KeyMap:
    """Key map of transformers' EmbeddingGemma2Model with its tower for pictures."""
    of_llava = llava_key_map(config)
    rename = ((r"^model\.", ""), (r"\.ple\.", "."), (r"\.ple_block\.", "."), *of_llava.rename)
    return dataclasses.replace(
        of_llava,
        rules=[*of_llava.rules, _PROJECTION],
        rename=rename,
        ignore=[*of_llava.ignore, r"^(audio_tower|embed_audio)\."],
        tied=(),
    )


def published_pictured(config: LlavaConfig, state: nnx.State) -> TensorSource:
    """A model's parameters as transformers names them."""
    family = text_encoders.FAMILIES[MODEL_TYPE]
    return text_encoders.published_tensors(family, config, state, pictured_key_map(config))


def load_pictured(
    folder: Path, truncate_dim: int | None = None, mesh: Mesh | None = None
) -> GemmaEncoder:
    """The encoder in a folder; it computes in bfloat16 on accelerators.

    Args:
      folder: of transformers.
      truncate_dim: the first so many values are kept (Matryoshka); None: all.
      mesh: where the parameters go; None: the default device.
    """
    config = for_reading_prompts(read_pictured_config(folder), platform())
    checkpoint = layouts.Checkpoint(
        config, pictured_key_map, layouts.open_source(folder), "transformers"
    )
    build = functools.partial(GemmaEncoder, truncate_dim=truncate_dim)
    return load_checkpoint(build, checkpoint, config, mesh, config.llama.dtype)
