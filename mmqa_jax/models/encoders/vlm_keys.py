"""Qwen3-VL-Embedding and Qwen3-VL-Reranker, opened from a published folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.encoders.heads import QwenVLEncoder, QwenVLYesNo
from mmqa_jax.models.encoders.text_encoders import for_reading, model_type_of
from mmqa_jax.models.qwen_vl.keys import open_qwen_vl, qwen_vl_key_map
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.weights.keymap import KeyMap
from mmqa_jax.weights.published import load_checkpoint

FAMILY = "qwen3_vl"
# Vision-language models that others make vectors with, by recipes of their own.
OTHERS = ("qwen2_vl", "qwen2_5_vl")
# Tokens of the smallest and the largest picture: MIN_PIXELS and MAX_PIXELS of the originals.
_LEAST, _MOST = 4, 1800


def load_vlm_encoder(
    folder: Path, truncate_dim: int | None = None, mesh: Mesh | None = None
) -> QwenVLEncoder:
    """The encoder of a Qwen3-VL-Embedding; it computes in bfloat16 on accelerators.

    Args:
      folder: of transformers, with or without an output head.
      truncate_dim: see QwenVLEncoder.
      mesh: where the parameters go; None: the default device.
    """
    build = functools.partial(QwenVLEncoder, truncate_dim=truncate_dim)
    return _load(folder, build, headless_key_map, mesh)


def load_vlm_yes_no(folder: Path, yes: int, no: int, mesh: Mesh | None = None) -> QwenVLYesNo:
    """The Qwen3-VL-Reranker in a folder, which judges by the tokens `yes` and `no`."""
    return _load(folder, functools.partial(QwenVLYesNo, yes=yes, no=no), reader_key_map, mesh)


def read_vlm_config(folder: Path) -> QwenVLConfig:
    """Our config of a folder's Qwen3-VL, with the bounds that its pictures have as an encoder."""
    return for_encoding(open_qwen_vl(folder).config, platform())


def check_family(folder: Path) -> None:
    """UserError for a vision-language model that makes vectors by another recipe."""
    kind = model_type_of(folder)
    if kind in OTHERS:
        raise UserError(
            f"{folder}: holds a {kind}, which GME and others embed with by recipes that are not "
            "known here; use a Qwen3-VL-Embedding."
        )


def _load(
    folder: Path, build: Callable[..., nnx.Module], key_map: Callable[[Any], KeyMap], mesh: Any
) -> Any:
    checkpoint = open_qwen_vl(folder)
    config = for_encoding(checkpoint.config, platform())
    checkpoint = checkpoint._replace(config=config, key_map=key_map)
    return load_checkpoint(build, checkpoint, config, mesh, config.llama.dtype)


def for_encoding(config: QwenVLConfig, device: str) -> QwenVLConfig:
    """As `for_reading_prompts`; pictures have the originals' least and most tokens."""
    config, unit = for_reading_prompts(config, device), config.vision.unit
    bounds = {"min_pixels": _LEAST * unit**2, "max_pixels": _MOST * unit**2}
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, **bounds))


def for_reading_prompts(config: Any, device: str) -> Any:
    """See text_encoders.for_reading, of a config with a `vision` and a `llama`; the tower computes
    in the decoder's precision."""
    llama = for_reading(config.llama, device)
    vision = dataclasses.replace(config.vision, dtype=llama.dtype)
    return dataclasses.replace(config, llama=llama, vision=vision)


def reader_key_map(config: QwenVLConfig) -> KeyMap:
    """Also of a model that was saved without its head, whose keys lack `model.`."""
    key_map = qwen_vl_key_map(config)
    bare = (r"^language_model\.", "model.")
    return dataclasses.replace(key_map, rename=[*key_map.rename, bare])


def headless_key_map(config: QwenVLConfig) -> KeyMap:
    """Key map of a model whose output head, if there is one, is left out."""
    tied = dataclasses.replace(config, llama=dataclasses.replace(config.llama, tied=True))
    key_map = reader_key_map(tied)
    return dataclasses.replace(key_map, tied=(), ignore=[*key_map.ignore, r"^lm_head\."])
