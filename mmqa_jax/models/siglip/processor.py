"""How the pictures of a SigLIP are prepared: what transformers' image processor beside it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.clip.processor import close, processors
from mmqa_jax.models.siglip.network import PIXEL_MEAN, PIXEL_STD, SiglipVisionConfig

_NUMBERS = {"image_mean": PIXEL_MEAN, "image_std": PIXEL_STD, "rescale_factor": 1 / 255}
_FILTERS: Mapping[Any, str] = {
    2: "bilinear",
    "bilinear": "bilinear",
    "BILINEAR": "bilinear",
    3: "bicubic",
    "bicubic": "bicubic",
    "BICUBIC": "bicubic",
}
_MOST_PATCHES = 256  # of NaFlex, in transformers where the file says nothing


@dataclasses.dataclass(frozen=True)
class Preparation:
    """How pictures are made ready for a vision tower.

    Attributes:
      resample: Pillow's filter, `bicubic` or `bilinear`.
      most_patches: of a picture for NaFlex; 0: pictures have a fixed size.
    """

    resample: str
    most_patches: int = 0


def read_preparation(folder: Path, config: SiglipVisionConfig) -> Preparation:
    """What the processor's file in a folder says; without one what transformers does without."""
    resample = "bilinear" if config.flexible else "bicubic"
    most = _MOST_PATCHES if config.flexible else 0
    for processor, file in processors(folder):
        _check(processor, file, config)
        named = processor.get("resample")
        if named is not None:
            if not isinstance(named, int | str) or named not in _FILTERS:
                raise _refusal(file, "resample", named, "bicubic (3) or bilinear (2)")
            resample = _FILTERS[named]
        if config.flexible:
            most = processor.get("max_num_patches") or most
            if type(most) is not int or most < 1:
                raise _refusal(file, "max_num_patches", most, "a whole number of at least 1")
    return Preparation(resample, most)


def _check(processor: Mapping[str, Any], file: Path, config: SiglipVisionConfig) -> None:
    for key, wanted in _NUMBERS.items():
        if processor.get(key) is not None and not close(processor[key], wanted):
            raise _refusal(file, key, processor[key], wanted)
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if processor.get(key) is False:
            raise _refusal(file, key, False, True)
    if processor.get("do_center_crop"):
        raise _refusal(file, "do_center_crop", True, False)
    if config.flexible:
        if processor.get("patch_size", config.patch_size) != config.patch_size:
            raise _refusal(file, "patch_size", processor["patch_size"], config.patch_size)
        return
    size = processor.get("size")
    if size is not None:
        sides = list(size.values()) if isinstance(size, dict) else [size]
        if not sides or any(side != config.image_size for side in sides):
            raise _refusal(file, "size", size, config.image_size)


def _refusal(file: Path, key: str, found: Any, wanted: Any) -> UserError:
    return UserError(
        f"{file}: {key} is {found!r}, expected {wanted}; use a checkpoint whose pictures are "
        "prepared as SigLIP's, or move the file away if the model is fed so."
    )
