"""LLaVA-OneVision's checkpoints: transformers' layouts, and export to them.

Keys and config are LLaVA's (`models.llava.keys`) with a newline and the resolutions beside. The
authors' folders (lmms-lab/llava-onevision-qwen2-*) are refused: those on the hub under llava-hf are
the same weights.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.common import comparison
from mmqa_jax.models.llama.keys import to_published_tensors, to_rule_tensors
from mmqa_jax.models.llava import keys
from mmqa_jax.models.llava.families import ALL
from mmqa_jax.models.onevision import network as onevision
from mmqa_jax.models.two_towers.config import SIGLIP_MEAN, SIGLIP_STD
from mmqa_jax.models.two_towers.processor import read_preparation
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import kinds
from mmqa_jax.weights.keymap import KeyMap, Rule, untied_source

_NEWLINE = "image_newline"
_READ = kinds(
    integer="video_token_index video_token_id",
    list_or_null="image_grid_pinpoints",
    name="vision_aspect_ratio",
)
_ANYRES = "anyres_max_"


def onevision_key_map(config: onevision.OnevisionConfig) -> KeyMap:
    """Key map of every layout, see the module."""
    llava = keys.llava_key_map(config)
    return dataclasses.replace(
        llava,
        rules=[*llava.rules, Rule(_NEWLINE, "newline")],
        rename=((rf"^model\.{_NEWLINE}$", _NEWLINE), *llava.rename),
    )


def open_onevision(path: Path) -> layouts.Checkpoint:
    """Opens a checkpoint of LLaVA-OneVision, reading headers only.

    `path`: transformers' folder.
    """
    file = layouts.config_file(path)
    published = layouts.read_hf_config(path, "llava_onevision")
    published, make_whole = layouts.read_rounding(published, str(file))
    config = onevision_config(published, str(file))  # refused before the tensors are opened
    _check_processor(file.parent, config)
    source = to_rule_tensors(make_whole(layouts.open_source(path)), config.llama)
    return layouts.Checkpoint(config, onevision_key_map, source, "transformers")


def publish_onevision(config: onevision.OnevisionConfig, state: nnx.State) -> layouts.Published:
    """LlavaOnevisionForConditionalGeneration."""
    source = untied_source(state, onevision_key_map(config))
    source = to_published_tensors(source, config.llama, keys.LLAMA_PREFIX)
    return layouts.Published(source, onevision_to_hf(config))


def onevision_config(
    published: Mapping[str, Any], where: str = "config.json"
) -> onevision.OnevisionConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    layouts.check_model_type(published, where, "llava_onevision")
    family = ALL["onevision"]
    keys.check_published(published, where, family, _READ)
    resolutions = published.get("image_grid_pinpoints") or onevision.RESOLUTIONS
    return onevision.OnevisionConfig(
        **keys.fields_from_hf(published, where, family),
        resolutions=_resolutions(resolutions, where),
        most_tiles=_most_tiles(published.get("vision_aspect_ratio", f"{_ANYRES}9"), where),
        video_token=published.get("video_token_index", published.get("video_token_id", 151647)),
    )


def onevision_to_hf(config: onevision.OnevisionConfig) -> dict[str, Any]:
    """transformers' `config.json`, without token ids but the placeholders'."""
    return {
        **keys.llava_to_hf(config),
        "model_type": "llava_onevision",
        "video_token_index": config.video_token,
        "image_grid_pinpoints": [list(pair) for pair in config.resolutions],
        "vision_aspect_ratio": f"{_ANYRES}{config.most_tiles}",
    }


def _resolutions(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    pairs = [tuple(pair) if isinstance(pair, list | tuple) else () for pair in value]
    if not all(len(pair) == 2 and all(type(side) is int for side in pair) for pair in pairs):
        raise UserError(
            f"{where}: image_grid_pinpoints is {value!r}, expected pairs of a height and a width; "
            "fetch the file again."
        )
    return tuple(pairs)


def _most_tiles(value: str, where: str) -> int:
    match = re.fullmatch(rf"{_ANYRES}(\d{{1,4}})", value)
    if match is None:
        raise UserError(
            f"{where}: vision_aspect_ratio is {value!r}, expected {_ANYRES}NUMBER; use a "
            "checkpoint of LLaVA-OneVision."
        )
    return int(match[1])


def _check_processor(folder: Path, config: onevision.OnevisionConfig) -> None:
    """Checks that the processor's files in a folder say of pictures what the config does."""
    preparation = read_preparation(folder, config.vision)
    if preparation.resample != "bicubic":
        raise UserError(
            f"{folder}: its processor's resample is {preparation.resample}, expected bicubic; use "
            "a checkpoint of LLaVA-OneVision."
        )
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        content = read_json(file) if file.is_file() else {}
        ratio = content.get("vision_aspect_ratio")
        pinpoints = {**content, **(content.get("image_processor") or {})}.get(
            "image_grid_pinpoints"
        )
        if ratio is not None and _most_tiles(ratio, str(file)) != config.most_tiles:
            raise UserError(
                f"{file}: vision_aspect_ratio is {ratio!r}, but config.json says "
                f"{_ANYRES}{config.most_tiles}; make them equal."
            )
        if pinpoints is not None and _resolutions(pinpoints, str(file)) != config.resolutions:
            raise UserError(
                f"{file}: image_grid_pinpoints are not those of config.json; make them equal."
            )


# Beside transformers.


def _inputs(config: onevision.OnevisionConfig) -> dict[str, np.ndarray]:
    """A picture of a tile's size: the tokens of all tiles, which are no padding."""
    side, sizes = config.vision.image_size, config.tiles
    tiles = 1 + math.prod(sizes.grid(onevision.best_resolution((side, side), sizes.resolutions)))
    pixels = comparison.noise().integers(0, 256, (tiles, side, side, 3), np.uint8)
    picture = onevision.TiledPicture(pixels, (side, side))
    tokens = config.picture_tokens(picture.shape)
    batch = onevision.lay_out([picture], sizes, tiles)
    row = comparison.around_a_picture(config, tokens)
    return {
        "ids": np.repeat(row, np.where(np.equal(row, config.image_token), tokens, 1))[None],
        "pixels": batch.pixels,
        "rows": batch.rows[:, :tokens],
        "weights": batch.weights[:, :tokens],
        "size": np.array([picture.size]),
    }


def _run(model: onevision.Onevision, inputs: Mapping[str, Any]) -> comparison.Outputs:
    batch = onevision.TileBatch(inputs["pixels"], inputs["rows"], inputs["weights"])
    pixels = model.vision.normalize(batch.pixels[0])
    return keys.run_pictured(model, inputs["ids"], batch, pixels)


def _given(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    mean, std = np.float32(SIGLIP_MEAN), np.float32(SIGLIP_STD)
    pixels = (inputs["pixels"][0].astype(np.float32) / 255 - mean) / std
    return {
        "input_ids": inputs["ids"],
        "pixel_values": comparison.channels_first(pixels)[None],
        "image_sizes": inputs["size"],
    }


CHECK = comparison.Check(
    "LlavaOnevisionForConditionalGeneration",
    _run,
    {"logits": "logits"},
    keys.STACKS,
    _inputs,
    _given,
)
