"""transformers' image processor beside a Qwen-VL: which sizes and colors its pictures get."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.qwen_vl_vision import QwenVisionConfig
from mmqa_jax.weights.models.clip_processor import close

_FILES = ("preprocessor_config.json", "processor_config.json")  # before transformers 5, and since
# Of transformers' Qwen2VLImageProcessor, where a file does not say otherwise.
_LEAST, _MOST = 56 * 56, 28 * 28 * 1280
_LARGEST = 1 << 28  # pixels; smaller pictures are drawn up to the least
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "resample": (3, "bicubic", "BICUBIC"),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True,),
}


def with_processor(config: QwenVisionConfig, folder: Path) -> QwenVisionConfig:
    """The tower's config with the sizes and colors that the files of a folder say.

    Without such a file they are transformers' Qwen2VLImageProcessor's own.
    """
    found: dict[str, Any] = {}
    where = folder / _FILES[0]
    for name in reversed(_FILES):
        if (folder / name).is_file():
            content = read_json(folder / name)
            if not isinstance(content, dict):
                raise UserError(
                    f"{folder / name}: is no JSON object of an image processor; fetch the file "
                    "again."
                )
            inner = content.get("image_processor", content if name == _FILES[0] else {})
            if isinstance(inner, dict) and inner:
                found, where = inner, folder / name
    _check(found, where, config)
    size = found.get("size") or {}
    if not isinstance(size, dict) or set(size) - {
        *("shortest_edge", "longest_edge", "min_pixels", "max_pixels")
    }:
        raise UserError(
            f"{where}: size is {size!r}, expected shortest_edge and longest_edge, the least and "
            "the most pixels; use a checkpoint of Qwen2.5-VL or Qwen3-VL."
        )
    least = found.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or _LEAST
    most = found.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or _MOST
    for keys, value in (
        ("min_pixels or shortest_edge", least),
        ("max_pixels or longest_edge", most),
    ):
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise UserError(
                f"{where}: {keys} is {value!r}, expected a whole number from 1 to {_LARGEST:,}; "
                "fetch the file again."
            )
    changes: dict[str, Any] = {"min_pixels": least, "max_pixels": most}
    for key, field in (("image_mean", "pixel_mean"), ("image_std", "pixel_std")):
        if found.get(key) is not None:
            changes[field] = _of_channels(found[key], f"{where}: {key}")
    if 0.0 in changes.get("pixel_std", ()):
        raise UserError(f"{where}: image_std has a 0, which divides; fetch the file again.")
    return dataclasses.replace(config, **changes)


def processor_to_hf(config: QwenVisionConfig) -> dict[str, Any]:
    """transformers' preprocessor_config.json."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        **{key: values[0] for key, values in _FIXED.items()},
        "rescale_factor": 1 / 255,
        "patch_size": config.patch,
        "merge_size": config.merge,
        "temporal_patch_size": config.temporal,
        "image_mean": list(config.pixel_mean),
        "image_std": list(config.pixel_std),
        "size": {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
    }


def _check(found: Mapping[str, Any], where: Path, config: QwenVisionConfig) -> None:
    expected = {
        **_FIXED,
        "patch_size": (config.patch,),
        "merge_size": (config.merge,),
        "temporal_patch_size": (config.temporal,),
    }
    for key, values in expected.items():
        value = found.get(key)
        if value is not None and value not in values:
            raise UserError(
                f"{where}: {key} is {value!r}, expected {values[0]!r}, as Qwen's pictures are "
                "prepared here; use a checkpoint that was trained so."
            )
    factor = found.get("rescale_factor")
    if factor is not None and not close(factor, 1 / 255):
        raise UserError(
            f"{where}: rescale_factor is {factor!r}, expected 1/255; use a checkpoint that was "
            "trained so."
        )


def _of_channels(value: Any, where: str) -> tuple[float, float, float]:
    fits = isinstance(value, list) and len(value) == 3
    if not fits or not all(isinstance(one, int | float) for one in value):
        raise UserError(f"{where} is {value!r}, expected three numbers; fetch the file again.")
    return tuple(map(float, value))
