"""Qwen3-VL-Embedding, Qwen3-VL-Reranker and ColQwen, opened from a published folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.encoders.heads import QwenVLEncoder, QwenVLTokens, QwenVLYesNo
from mmqa_jax.models.encoders.text_encoders import CONFIG, for_reading, model_type_of
from mmqa_jax.models.qwen_vl.keys import open_qwen_vl, qwen_vl_key_map
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import KeyMap, linear_rules
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
    return _load(folder, build, _headless_key_map, mesh)


def load_vlm_yes_no(folder: Path, yes: int, no: int, mesh: Mesh | None = None) -> QwenVLYesNo:
    """The Qwen3-VL-Reranker in a folder, which judges by the tokens `yes` and `no`."""
    return _load(folder, functools.partial(QwenVLYesNo, yes=yes, no=no), _key_map, mesh)


# ColQwen 2, 2.5, 3, 3.5: transformers' class, and those of colpali_engine by their architecture.
_COLQWEN, _ENGINE = "colqwen2", ("ColQwen2", "ColQwen2_5", "ColQwen3", "ColQwen3_5")
_PROJECTIONS = ("embedding_proj_layer", "custom_text_proj")  # of transformers, of colpali_engine


class ColQwen(NamedTuple):
    """A ColQwen's folder: its model, and whether transformers' class has written it."""

    model: QwenVLTokens
    of_transformers: bool


def is_colqwen(folder: Path) -> bool:
    """Whether a published folder holds a ColQwen."""
    published = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not isinstance(published, dict):
        return False
    classes = published.get("architectures") or ()
    return published.get("model_type") == _COLQWEN or any(name in _ENGINE for name in classes)


def load_colqwen(folder: Path, mesh: Mesh | None = None) -> ColQwen:
    """The ColQwen in a folder, merged with its adapter; it computes in bfloat16 on accelerators."""
    published, of_vlm = read_json(folder / CONFIG), None
    of_transformers = published.get("model_type") == _COLQWEN
    if of_transformers:
        of_vlm = published.get("vlm_config")
        known = kinds(object="vlm_config", size="embedding_dim", number="initializer_range")
        check_keys(published, str(folder / CONFIG), read=known)
        if not isinstance(of_vlm, dict):
            raise UserError(f"{folder / CONFIG}: lacks its vlm_config; fetch the file again.")
        if "text_config" in of_vlm:  # transformers writes the size there, too
            of_vlm = {key: x for key, x in of_vlm.items() if key != "vocab_size"}
    checkpoint = open_qwen_vl(folder, of_vlm)
    specs = checkpoint.source.specs()
    names = [name for name in _PROJECTIONS if f"{name}.weight" in specs]
    if not names:
        raise UserError(
            f"{checkpoint.source.name}: lacks {' and '.join(_PROJECTIONS)}, which make a ColQwen's "
            "vectors; use a checkpoint that is merged with its adapter."
        )
    dim = specs[f"{names[0]}.weight"].shape[0]
    config = _for_reading(checkpoint.config, platform())

    def key_map(config: QwenVLConfig) -> KeyMap:
        of_qwen = _headless_key_map(config)
        rename = ((r"^vlm\.", ""), *of_qwen.rename)
        rules = [*of_qwen.rules, *linear_rules(names[0], "projection")]
        return dataclasses.replace(of_qwen, rules=rules, rename=rename)

    build = functools.partial(QwenVLTokens, dim=dim)
    checkpoint = checkpoint._replace(config=config, key_map=key_map)
    model = load_checkpoint(build, checkpoint, config, mesh, config.llama.dtype)
    return ColQwen(model, of_transformers)


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
    """As `_for_reading`; pictures have the originals' least and most tokens."""
    config, unit = _for_reading(config, device), config.vision.unit
    bounds = {"min_pixels": _LEAST * unit**2, "max_pixels": _MOST * unit**2}
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, **bounds))


def _for_reading(config: QwenVLConfig, device: str) -> QwenVLConfig:
    """See text_encoders.for_reading; the tower computes in the decoder's precision."""
    llama = for_reading(config.llama, device)
    vision = dataclasses.replace(config.vision, dtype=llama.dtype)
    return dataclasses.replace(config, llama=llama, vision=vision)


def _key_map(config: QwenVLConfig) -> KeyMap:
    """Also of a model that was saved without its head, whose keys lack `model.`."""
    key_map = qwen_vl_key_map(config)
    bare = (r"^language_model\.", "model.")
    return dataclasses.replace(key_map, rename=[*key_map.rename, bare])


def _headless_key_map(config: QwenVLConfig) -> KeyMap:
    tied = dataclasses.replace(config, llama=dataclasses.replace(config.llama, tied=True))
    key_map = _key_map(tied)
    return dataclasses.replace(key_map, tied=(), ignore=[*key_map.ignore, r"^lm_head\."])
