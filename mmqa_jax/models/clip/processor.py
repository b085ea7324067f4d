"""transformers' image processor beside a CLIP or a LLaVA: checked, since pictures are prepared here
as CLIP's are, whatever the file says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.clip.network import PIXEL_MEAN, PIXEL_STD

_FILES = ("preprocessor_config.json", "processor_config.json")  # before transformers 5, and since
_NUMBERS = {"image_mean": PIXEL_MEAN, "image_std": PIXEL_STD, "rescale_factor": 1 / 255}
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "resample": (3, "bicubic", "BICUBIC"),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
}


def check_processor(folder: Path, image_size: int | None = None) -> None:
    """Checks that a folder's pictures are scaled and normalized as CLIP's.

    Args:
      folder: of the checkpoint; one without a processor's file passes.
      image_size: side of the center crop in pixels; None: a model with another crop (LLaVA's).
    """
    for processor, file in processors(folder):
        _check(processor, file, image_size)


def processors(folder: Path) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """The image processors in a folder, by the files of old and new versions of transformers."""
    for name in _FILES:
        file = folder / name
        content = read_json(file) if file.is_file() else {}
        if not isinstance(content, dict):
            raise UserError(
                f"{file}: is no JSON object of an image processor; fetch the file again."
            )
        inner = content.get("image_processor")
        yield (inner if isinstance(inner, dict) else content), file


def _check(processor: Mapping[str, Any], file: Path, image_size: int | None) -> None:
    allowed: dict[str, bool] = {
        key: close(processor[key], numbers)
        for key, numbers in _NUMBERS.items()
        if processor.get(key) is not None
    }
    allowed |= {
        key: processor[key] in values
        for key, values in _VALUES.items()
        if processor.get(key) is not None
    }
    if image_size is not None:
        allowed["do_center_crop"] = processor.get("do_center_crop", True) is not False
        for key in ("size", "crop_size"):
            if processor.get(key) is not None:
                sides = processor[key]
                sides = list(sides.values()) if isinstance(sides, dict) else [sides]
                allowed[key] = bool(sides) and all(side == image_size for side in sides)
    for key, right in allowed.items():
        if not right:
            raise UserError(
                f"{file}: {key} is {processor.get(key)!r}, but pictures are prepared here as "
                "OpenAI's CLIP prepares them; use a checkpoint that was trained so, or move the "
                "file away if the model is fed otherwise."
            )


def close(value: Any, wanted: Any) -> bool:
    """Whether a value of a file is the number, or the list of numbers, that is wanted."""
    try:
        found = np.asarray(value, float)
    except (TypeError, ValueError):
        return False
    return found.shape == np.shape(wanted) and bool(np.allclose(found, wanted, atol=1e-6))
