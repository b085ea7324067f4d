"""transformers' image processor of a model whose pictures are cut into tiles, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llava.config import LlavaConfig, RowTiles, Split
from mmqa_jax.models.two_towers.config import SIGLIP_MEAN
from mmqa_jax.models.two_towers.processor import check_numbers, processors
from mmqa_jax.weights.config_json import check_keys, kinds

_KINDS = kinds(object_or_null="size max_image_size", integer_or_null="resample")
_STEPS = ("do_rescale", "do_normalize", "do_convert_rgb")
# What a processor's file says beside what is read: of videos, and what every picture's tiles are.
_HARMLESS = (
    *("image_processor_type", "processor_class", "rescale_factor", "image_mean", "image_std"),
    *("do_resize", "do_pad", "pad_size", "video_sampling", "data_format", "return_row_col_info"),
    *("feature_extractor_type", "image_seq_len", "input_data_format", "device", "return_tensors"),
    *("disable_grouping", "default_to_square", "do_center_crop", "crop_size"),
)
_LANCZOS = 1


def read_split(folder: Path, config: LlavaConfig, kind: type[Split]) -> Split:
    """How the processor's file in a folder cuts pictures; without one, as the published models."""
    side = config.vision.image_size
    split: Split = RowTiles(longest=4 * side)
    for processor, file in processors(folder):
        if not processor:
            continue
        check_numbers(processor, file, kind.__name__, config.vision.pixel_mean, SIGLIP_MEAN)
        fixed: dict[str, tuple[Any, ...]] = dict.fromkeys(_STEPS, (True,))
        fixed |= {"do_image_splitting": (True,), "resample": (_LANCZOS,)}
        check_keys(processor, str(file), read=_KINDS, harmless=_HARMLESS, fixed=fixed)
        tile = _longest(processor, "max_image_size", side, file)
        if tile != side:
            raise UserError(
                f"{file}: max_image_size is {tile}, but the tower's pictures have {side} pixels; "
                "use a checkpoint as it was published."
            )
        split = RowTiles(longest=_longest(processor, "size", split.longest, file))
    return split


def _longest(processor: Mapping[str, Any], key: str, usual: int, file: Path) -> int:
    size = processor.get(key)
    value = usual if size is None else size.get("longest_edge")
    if type(value) is not int:
        raise UserError(
            f"{file}: {key} is {size!r}, expected a longest_edge in pixels; use a checkpoint as it "
            "was published."
        )
    return value


def processor_to_hf(config: LlavaConfig) -> dict[str, Any] | None:
    """transformers' preprocessor_config.json; None for squares, of which the source has one."""
    if config.split is None:
        return None
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": config.split.longest},
        "max_image_size": {"longest_edge": config.vision.image_size},
        "do_image_splitting": True,
        "resample": _LANCZOS,
        "image_mean": list(config.vision.pixel_mean),
        "image_std": list(config.vision.pixel_std),
        "rescale_factor": 1 / 255,
        **dict.fromkeys(("do_resize", "do_pad", *_STEPS), True),
    }
