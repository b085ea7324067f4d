"""transformers' image processor beside a CLIP, a SigLIP or a LLaVA: how pictures are prepared.

CLIP's are prepared here as OpenAI's code does, whatever the file says, so that it is only checked.
Of SigLIP's the filter, and NaFlex's number of patches, are read.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.two_towers import config as sizes

_FILES = ("preprocessor_config.json", "processor_config.json")  # before transformers 5, and since
_STEPS = ("do_resize", "do_rescale", "do_normalize")
_FILTERS = {
    **dict.fromkeys((2, "bilinear", "BILINEAR"), "bilinear"),
    **dict.fromkeys((3, "bicubic", "BICUBIC"), "bicubic"),
}
_MOST_PATCHES = 256  # of NaFlex, in transformers where the file says nothing


@dataclasses.dataclass(frozen=True)
class Preparation:
    """How pictures are made ready for a SigLIP's vision tower: Pillow's `bicubic` or `bilinear`.

    NaFlex gives a picture `most_patches`; 0: pictures have a fixed size.
    """

    resample: str
    most_patches: int = 0


def check_processor(folder: Path, image_size: int | None = None) -> None:
    """Checks that a folder's pictures are scaled and normalized as CLIP's.

    A folder without a processor's file passes. Without the center crop's `image_size` in pixels
    the model has another crop (LLaVA's).
    """
    for processor, file in processors(folder):
        check_numbers(processor, file, "CLIP", sizes.PIXEL_MEAN, sizes.PIXEL_STD)
        if _resample(processor, file, "CLIP", "bicubic") != "bicubic":
            raise _refusal(file, "resample", processor["resample"], "bicubic (3)", "CLIP")
        if image_size is not None:
            if processor.get("do_center_crop", True) is False:
                raise _refusal(file, "do_center_crop", False, True, "CLIP")
            for key in ("size", "crop_size"):
                _check_sides(processor, file, key, image_size, "CLIP")


def read_preparation(
    folder: Path, config: sizes.SiglipVisionConfig, usual: str = "bicubic"
) -> Preparation:
    """What the processor's file in a folder says; without one what transformers does without.

    usual: the filter of pictures of a fixed size where the file does not say it.
    """
    resample = "bilinear" if config.flexible else usual
    most = _MOST_PATCHES if config.flexible else 0
    for processor, file in processors(folder):
        check_numbers(processor, file, "SigLIP", sizes.SIGLIP_MEAN, sizes.SIGLIP_STD)
        if processor.get("do_center_crop"):
            raise _refusal(file, "do_center_crop", True, False, "SigLIP")
        resample = _resample(processor, file, "SigLIP", resample)
        if not config.flexible:
            _check_sides(processor, file, "size", config.image_size, "SigLIP")
            continue
        patch = processor.get("patch_size", config.patch_size)
        if patch != config.patch_size:
            raise _refusal(file, "patch_size", patch, config.patch_size, "SigLIP")
        most = processor.get("max_num_patches") or most
        if type(most) is not int or most < 1:
            wanted = "a whole number of at least 1"
            raise _refusal(file, "max_num_patches", most, wanted, "SigLIP")
    return Preparation(resample, most)


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


def check_numbers(
    processor: Mapping[str, Any],
    file: Path,
    model: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> None:
    """Checks what every processor does, and its numbers; `model`: for messages."""
    numbers = {"image_mean": mean, "image_std": std, "rescale_factor": 1 / 255}
    for key, wanted in numbers.items():
        if processor.get(key) is not None and not close(processor[key], wanted):
            raise _refusal(file, key, processor[key], wanted, model)
    for key in _STEPS:
        if processor.get(key) not in (None, True):
            raise _refusal(file, key, processor[key], True, model)


def _resample(processor: Mapping[str, Any], file: Path, model: str, usual: str) -> str:
    named = processor.get("resample")
    if named is None:
        return usual
    if not isinstance(named, int | str) or named not in _FILTERS:
        raise _refusal(file, "resample", named, "bicubic (3) or bilinear (2)", model)
    return _FILTERS[named]


def _check_sides(
    processor: Mapping[str, Any], file: Path, key: str, image_size: int, model: str
) -> None:
    size = processor.get(key)
    if size is not None:
        sides = list(size.values()) if isinstance(size, dict) else [size]
        if not sides or any(side != image_size for side in sides):
            raise _refusal(file, key, size, image_size, model)


def _refusal(file: Path, key: str, value: Any, wanted: Any, model: str) -> UserError:
    return UserError(
        f"{file}: {key} is {value!r}, expected {wanted}; use a checkpoint whose pictures are "
        f"prepared as {model}'s, or move the file away if the model is fed otherwise."
    )


def close(value: Any, wanted: Any) -> bool:
    """Whether a value of a file is the number, or the list of numbers, that is wanted."""
    try:
        numbers = np.asarray(value, float)
    except (TypeError, ValueError):
        return False
    return numbers.shape == np.shape(wanted) and bool(np.allclose(numbers, wanted, atol=1e-6))
