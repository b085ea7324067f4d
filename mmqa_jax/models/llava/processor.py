"""transformers' image processor of models whose pictures are tiles or have any size, both ways."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.llama4_vision import Llama4VisionConfig
from mmqa_jax.models.llava.tiles import CanvasTiles, RatioTiles, RowTiles, Split, UnitTiles
from mmqa_jax.models.two_towers.config import SIGLIP_MEAN, SiglipVisionConfig
from mmqa_jax.models.two_towers.processor import check_numbers, processors
from mmqa_jax.weights.config_json import check_keys, kinds

_KINDS = {
    RowTiles: kinds(object_or_null="size max_image_size"),
    RatioTiles: kinds(object_or_null="size", size_or_null="min_patches max_patches"),
    CanvasTiles: kinds(object_or_null="size", size_or_null="max_patches"),
    UnitTiles: kinds(
        size_or_null="max_image_tokens max_tiles min_image_tokens min_tiles tile_size",
        number="max_pixels_tolerance",
        flag="use_thumbnail do_image_splitting",
    ),
}
_LARGEST = 8192  # pixels of a side
_STEPS = ("do_rescale", "do_normalize", "do_convert_rgb", "do_resize")
# Pillow's number of the filter; `crop_to_patches` is what InternVL's processor sets itself.
_FIXED: Mapping[type[Split], Mapping[str, tuple[Any, ...]]] = {
    RowTiles: {"do_image_splitting": (True,), "resample": (1,)},
    RatioTiles: {"crop_to_patches": (True, False), "resample": (3,)},
    CanvasTiles: {"resize_to_max_canvas": (False,), "resample": (2,)},
    UnitTiles: {"use_image_special_tokens": (True,), "resample": (2,)},
}
# Fields of UnitTiles -> their keys.
_OF_UNITS = {
    **{"least": "min_tiles", "most": "max_tiles", "side": "tile_size"},
    **{"least_tokens": "min_image_tokens", "most_tokens": "max_image_tokens"},
    **{"tolerance": "max_pixels_tolerance", "has_whole": "use_thumbnail"},
}
# What a processor's file says beside what is read: of videos, and what every picture's tiles are.
_HARMLESS = (
    *("image_processor_type", "processor_class", "rescale_factor", "image_mean", "image_std"),
    *("do_pad", "pad_size", "video_sampling", "data_format", "return_row_col_info"),
    *("feature_extractor_type", "image_seq_len", "input_data_format", "device", "return_tensors"),
    *("disable_grouping", "default_to_square", "do_center_crop", "crop_size", "image_seq_length"),
    *("image_token", "image_break_token", "image_end_token", "chat_template"),
)


def with_split(folder: Path, config: Any) -> Any:
    """The config with how the processor's file in a folder cuts and colors pictures.

    config: LlavaConfig, or another with `vision` and `split`, which is that of published models.
    """
    split, vision, side = config.split, config.vision, config.vision.image_size
    for processor, file in processors(folder):
        if not processor:
            continue
        fixed = {**dict.fromkeys(_STEPS, (True,)), **_FIXED[type(split)]}
        harmless = _HARMLESS
        if isinstance(split, UnitTiles):
            patch, merge = config.units[:2]
            fixed |= {"encoder_patch_size": (patch,), "downsample_factor": (merge,)}
            fixed["do_convert_rgb"] = (True, None)
            harmless += ("size", "max_num_patches")  # which its class does not read
        check_keys(processor, str(file), read=_KINDS[type(split)], harmless=harmless, fixed=fixed)
        if isinstance(vision, SiglipVisionConfig | Llama4VisionConfig):
            check_numbers(processor, file, "SigLIP", SIGLIP_MEAN, SIGLIP_MEAN)
        else:
            vision = _with_colors(vision, processor, file)
        if isinstance(split, RowTiles):
            _check_side(processor, "max_image_size", ("longest_edge",), side, file)
            size = processor.get("size") or {}
            longest = size.get("longest_edge", split.longest)
            if type(longest) is not int:
                raise _refusal(file, "size", size, "a longest_edge in pixels")
            split = RowTiles(longest)
        elif isinstance(split, UnitTiles):
            read = {field: processor.get(key) for field, key in _OF_UNITS.items()}
            read = {field: value for field, value in read.items() if value is not None}
            if processor.get("do_image_splitting") is False:
                read |= {"least": 1, "most": 1}
            split = dataclasses.replace(split, **read)
        else:
            _check_side(processor, "size", ("height", "width"), side, file)
            names = {"least": "min_patches", "most": "max_patches"}
            names = {"tiles": "max_patches"} if isinstance(split, CanvasTiles) else names
            sizes = {field: processor[key] for field, key in names.items() if processor.get(key)}
            split = dataclasses.replace(split, **sizes)
    return dataclasses.replace(config, split=split, vision=vision)


def colored(folder: Path, config: LlavaConfig) -> Any:
    """The tower of a model whose pictures have any size, with the longest side and the colors that
    the processor's files in a folder say (transformers' PixtralImageProcessor)."""
    vision, patch = config.vision, config.vision.patch_size
    for processor, file in processors(folder):
        fixed = {
            **dict.fromkeys(_STEPS, (True,)),
            "resample": (3,),
            "patch_size": (patch, {"height": patch, "width": patch}),
            "spatial_merge_size": (config.merge,),
        }
        check_keys(
            processor,
            str(file),
            read=kinds(object_or_null="size"),
            harmless=_HARMLESS,
            fixed=fixed,
        )
        longest = (processor.get("size") or {}).get("longest_edge", vision.image_size)
        if type(longest) is not int or not patch <= longest <= _LARGEST:
            wanted = f"a longest_edge of {patch} to {_LARGEST} pixels"
            raise _refusal(file, "size", processor["size"], wanted)
        vision = dataclasses.replace(_with_colors(vision, processor, file), image_size=longest)
    return vision


def with_budget(folder: Path, config: LlavaConfig) -> LlavaConfig:
    """The config with the most tokens of a picture that the processor's files in a folder say
    (transformers' Gemma4ImageProcessor)."""
    fixed = {
        **dict.fromkeys(_STEPS, (True,)),
        "do_normalize": (False, True),  # by the mean and deviation below, which change nothing
        "image_mean": ([0.0] * 3, [0] * 3),
        "image_std": ([1.0] * 3, [1] * 3),
        "resample": (3,),
        "patch_size": (config.units.patch,),
        "pooling_kernel_size": (config.units.merge,),
    }
    harmless = tuple(key for key in _HARMLESS if key not in fixed)
    harmless += ("audio_seq_length", "audio_ms_per_token", "size")
    for processor, file in processors(folder):
        read = kinds(size_or_null="max_soft_tokens")
        check_keys(processor, str(file), read=read, harmless=harmless, fixed=fixed)
        budget = processor.get("max_soft_tokens") or config.budget
        config = dataclasses.replace(config, budget=budget)
    window = min((window for window in config.llama.windows if window), default=config.budget)
    if config.llama.picture_sight == "both" and config.budget > window:
        raise UserError(
            f"{folder}: a picture has up to {config.budget} tokens, expected at most the window of "
            f"{window}, beyond which they would have to see each other; lower max_soft_tokens of "
            "its processor's file."
        )
    return config


def processor_of_sizes(config: LlavaConfig) -> dict[str, Any]:
    """transformers' preprocessor_config.json of a model whose pictures have any size."""
    vision = config.vision
    return {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": vision.image_size},
        "patch_size": {"height": vision.patch_size, "width": vision.patch_size},
        "resample": 3,
        "image_mean": list(vision.pixel_mean),
        "image_std": list(vision.pixel_std),
        "rescale_factor": 1 / 255,
        **dict.fromkeys(_STEPS, True),
    }


def _with_colors(vision: Any, processor: Mapping[str, Any], file: Path) -> Any:
    mean = _colors(processor, "image_mean", vision.pixel_mean, file)
    std = _colors(processor, "image_std", vision.pixel_std, file)
    return dataclasses.replace(vision, pixel_mean=mean, pixel_std=std)


def _check_side(
    processor: Mapping[str, Any], key: str, names: tuple[str, ...], side: int, file: Path
) -> None:
    size = processor.get(key)
    if size is not None and [size.get(name) for name in names] != [side] * len(names):
        raise _refusal(file, key, size, f"{' and '.join(names)} of {side}, the tower's pixels")


def _colors(
    processor: Mapping[str, Any], key: str, usual: tuple[float, float, float], file: Path
) -> tuple[float, float, float]:
    value = processor.get(key)
    if value is None:
        return usual
    fits = isinstance(value, list) and len(value) == 3
    if not fits or not all(isinstance(part, int | float) and 0 < part < 1 for part in value):
        raise _refusal(file, key, value, "three numbers between 0 and 1")
    return tuple(map(float, value))


def _refusal(file: Path, key: str, value: Any, wanted: str) -> UserError:
    return UserError(
        f"{file}: {key} is {value!r}, expected {wanted}; use a checkpoint as it was published."
    )


def processor_to_hf(config: LlavaConfig) -> dict[str, Any] | None:
    """transformers' preprocessor_config.json; None for squares, of which the source has one."""
    if config.budget is not None:
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            "max_soft_tokens": config.budget,
            "patch_size": config.units.patch,
            "pooling_kernel_size": config.units.merge,
            "resample": 3,
            "image_mean": [0.0] * 3,
            "image_std": [1.0] * 3,
            "rescale_factor": 1 / 255,
            **dict.fromkeys(_STEPS, True),
            "do_normalize": False,
        }
    side, split = config.units.side, config.split
    if split is None:
        return None
    if isinstance(split, RowTiles):
        of_kind: dict[str, Any] = {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": split.longest},
            "max_image_size": {"longest_edge": side},
            "do_pad": True,
        }
    elif isinstance(split, UnitTiles):
        of_kind = {
            "image_processor_type": "Lfm2VlImageProcessor",
            **{key: getattr(split, field) for field, key in _OF_UNITS.items()},
            "do_image_splitting": split.most > 1,
            "encoder_patch_size": config.units.patch,
            "downsample_factor": config.units.merge,
            "do_pad": True,
        }
    elif isinstance(split, CanvasTiles):
        of_kind = {
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": side, "width": side},
            "max_patches": split.tiles,
        }
    else:
        of_kind = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": side, "width": side},
            "min_patches": split.least,
            "max_patches": split.most,
        }
    return {
        **of_kind,
        **{key: values[0] for key, values in _FIXED[type(split)].items()},
        "image_mean": list(config.vision.pixel_mean),
        "image_std": list(config.vision.pixel_std),
        "rescale_factor": 1 / 255,
        **dict.fromkeys(_STEPS, True),
    }
