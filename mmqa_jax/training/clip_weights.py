"""A converted CLIP that a model starts from: the dual encoder whole, VLP's frontend its eyes.

`mmqa convert --model=clip` made the folder. Only training reads it; a trained run holds its own
copy.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.presets import clip_vision
from mmqa_jax.weights.converted import is_converted, load_converted, read_record

# How it is computed, not what: may differ between the folder and the config.
_COMPUTE = ("dtype", "remat", "attention", "unroll")


def check_clip_start(config: ConfigDict, model: DualEncoderConfig) -> None:
    """Refuses an `init` from which the config's CLIP cannot start.

    Raises:
      UserError: no converted folder, another model's, or a CLIP of other sizes.
    """
    if config.init == "scratch":
        return
    place = f"config key init={config.init}"
    if not is_converted(config.init):
        raise UserError(
            f"{place}: model.clip={config.model.clip} starts from a folder of `mmqa convert "
            "--model=clip`, or from `scratch`; name one."
        )
    _check(
        place,
        config.init,
        {"text": model.text, "vision": model.vision},
        "set model.clip, model.changes (text) and model.vision to its sizes",
        free=(*_COMPUTE, "eos_token_id"),  # the folder's own tokenizer settles the last
    )


def check_clip_frontend(config: ConfigDict) -> None:
    """Refuses a `features.root` that does not hold the CLIP that the config's VLP looks through.

    Raises:
      UserError: no converted folder, another model's, or a CLIP of other sizes.
    """
    _check(
        f"config key features.root={config.features.root}",
        config.features.root,
        {"vision": clip_vision(config.model)},
        "set model.clip, model.vision and pictures.size to its sizes",
    )


def fill_dual_encoder(model: DualEncoder, folder: str | os.PathLike) -> None:
    """Puts a converted CLIP's towers and temperature into a dual encoder of its sizes, in place."""
    nnx.update(model, nnx.state(load_converted(folder, param_dtype="float32")))


def fill_frontend(vlp: Any, folder: str | os.PathLike) -> None:
    """Puts a converted CLIP's vision tower in front of a VLP, in place."""
    clip = load_converted(folder, param_dtype="float32")
    nnx.update(vlp.region_content.tower, nnx.state(clip.vision))


def _check(
    place: str,
    folder: str,
    towers: Mapping[str, Any],
    remedy: str,
    free: Collection[str] = _COMPUTE,
) -> None:
    """Compares the folder's towers with the wanted configs, but for the fields in `free`."""
    record = read_record(folder)
    if record.architecture.name != "clip":
        raise UserError(
            f"{place}: holds a model of kind {record.architecture.name!r}, clip was expected; "
            "convert one with `mmqa convert --model=clip`."
        )
    differing = []
    for tower, wanted in towers.items():
        found = dataclasses.asdict(getattr(record.config, tower))
        for name, value in dataclasses.asdict(wanted).items():
            if name not in free and found[name] != value:
                differing.append(f"{tower}.{name} {found[name]} (config: {value})")
    if differing:
        raise UserError(
            f"{place}: this CLIP has {', '.join(differing)}; {remedy}, or give another folder."
        )
