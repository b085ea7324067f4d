"""Adapters: the additions of LoRA without their base, as training and PEFT keep them.

The weights folder of a LoRA run holds the trained parameters alone; model.json names their base
and its fingerprint. PEFT's folder (huggingface/peft, src/peft/tuners/lora/config.py and
utils/save_and_load.py) is turned into such a folder, and written from one, by `mmqa convert`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.weights.bundled import LANGUAGE_MODELS
from mmqa_jax.weights.formats.safetensors import (
    DerivedSource,
    SafetensorsSource,
    TensorSource,
    write_safetensors,
)

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields of adapter_config.json that change what an adapter computes, with the values that are read.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "lora_bias": (False, None),
}


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What model.json says of an adapter, under the key `adapter`."""

    base: str  # what the additions were trained on: a name of LANGUAGE_MODELS, ORG/NAME or a path
    fingerprint: str  # of the base's files (`folder.weights_hash`); "" where it was not at hand
    # rank, alpha, targets: see LoraConfig.
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, record: Mapping[str, Any], where: Path) -> Adapter | None:
        """The adapter of a model.json; None: the folder holds a whole model."""
        entry = record.get("adapter")
        if entry is None:
            return None
        try:
            adapter = cls(**{**entry, "targets": tuple(entry["targets"])})
            texts = (adapter.base, adapter.fingerprint, *adapter.targets)
            fits = all(isinstance(text, str) for text in texts)
            fits = fits and isinstance(adapter.rank, int) and adapter.rank >= 1
            fits = fits and isinstance(adapter.alpha, int | float)
        except (TypeError, KeyError, AttributeError):
            fits = False
        if not fits:
            raise UserError(
                f"{where}, key adapter: base, fingerprint, rank, alpha and targets were expected; "
                "copy the folder again."
            )
        return adapter

    def base_path(self, where: Path) -> Path:
        """Where the base lies (`where`: the adapter's folder, for messages)."""
        from mmqa_jax.weights.hub import find_model, is_hub_name

        if self.base in LANGUAGE_MODELS:
            path = LANGUAGE_MODELS[self.base]()
        elif is_hub_name(self.base):
            path = find_model(self.base, f"{where}: base")
        else:
            path = Path(self.base)
            if not path.exists():
                raise UserError(
                    f"{where}: is an adapter of {self.base}, which is not there; put the base "
                    "there, or change `base` in model.json and delete SHA256SUMS beside it."
                )
        return path


# PEFT's folders.


def is_peft(path: str | os.PathLike) -> bool:
    """Whether a path is a folder that PEFT's `save_pretrained` wrote."""
    return (Path(path) / PEFT_CONFIG).is_file()


def open_peft(folder: Path, linears: Mapping[str, str]) -> tuple[Adapter, TensorSource]:
    """Opens a PEFT folder of LoRA; headers are read.

    linears: names of projections there -> here.
    """
    base, rank, alpha = read_peft_config(folder / PEFT_CONFIG)
    source = SafetensorsSource(folder / PEFT_WEIGHTS)
    names = {key.split(".")[-3] for key in source.specs()}
    if unknown := sorted(names - linears.keys()):
        raise UserError(
            f"{folder / PEFT_WEIGHTS}: changes {', '.join(unknown)}, and LoRA of "
            f"{', '.join(linears)} is read; merge the adapter with PEFT's merge_and_unload, and "
            "convert the model."
        )
    targets = tuple(linear for name, linear in linears.items() if name in names)
    return Adapter(base, "", rank, alpha, targets), source


def read_peft_config(file: Path) -> tuple[str, int, float]:
    """The base, the rank and alpha of an adapter_config.json of plain LoRA."""
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file}: is not an object; fetch the file again.")
    for key, values in _PLAIN.items():
        if config.get(key) not in values:
            raise UserError(
                f"{file}: {key} is {config.get(key)!r}, and plain LoRA with {values[0]!r} is read; "
                "merge the adapter with PEFT's merge_and_unload, and convert the model."
            )
    rank, alpha, base = (config.get(key) for key in ("r", "lora_alpha", "base_model_name_or_path"))
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not isinstance(rank, int) or rank < 1 or not is_number or not isinstance(base, str):
        raise UserError(
            f"{file}: r, lora_alpha and base_model_name_or_path were expected, a number above 0, a "
            "number and a name; fetch the file again."
        )
    if config.get("use_rslora"):  # its factor is alpha / sqrt(r)
        alpha = alpha * math.sqrt(rank)
    return base, rank, float(alpha)


_OF_TASK = re.compile(
    r"base_model\.model\.(.{1,200})\.lora_([AB])\.(?:default\.)?(\w{1,40}|text-matching)\.weight"
)


def with_task(source: TensorSource, folder: Path, task: str) -> TensorSource:
    """A checkpoint's tensors with the additions of one task of an adapter that has several
    (jina-embeddings-v4's `custom_lora_module.py`): W + alpha / r B A.

    Args:
      source: of the base.
      folder: of adapter_config.json and adapter_model.safetensors.
      task: the name behind `lora_A` and `lora_B` in its keys.
    """
    _, rank, alpha = read_peft_config(folder / PEFT_CONFIG)
    added = SafetensorsSource(folder / PEFT_WEIGHTS)
    keys: dict[str, dict[str, str]] = {}  # of a linear: A and B
    for key in added.specs():
        match = _OF_TASK.fullmatch(key)
        if match and match[3] == task:
            keys.setdefault(_plain_name(match[1]), {})[match[2]] = key
    tensors: dict[str, Any] = {}
    for key, spec in source.specs().items():
        pair = keys.pop(_plain_name(key.removesuffix(".weight")), None)
        tensors[key] = (
            spec,
            functools.partial(_with_addition, source, key, added, pair, alpha / rank),
        )
    if keys or not tensors:
        raise UserError(
            f"{folder / PEFT_WEIGHTS}: changes {', '.join(sorted(keys)[:3])}, which its base does "
            "not have; fetch both again."
        )
    return DerivedSource(source.name, tensors)


def _plain_name(key: str) -> str:
    """A linear's name in every version of transformers."""
    return key.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")


def _with_addition(
    source: TensorSource, key: str, added: TensorSource, pair: Mapping[str, str] | None, by: float
) -> np.ndarray:
    whole = source.read(key)
    if pair is None:
        return whole
    a, b = (added.read(pair[part]).astype(np.float32) for part in "AB")
    return (whole.astype(np.float32) + by * (b @ a)).astype(whole.dtype)


def write_peft(
    folder: Path, adapter: Adapter, source: TensorSource, linears: Mapping[str, str]
) -> list[str]:
    """Writes an adapter as PEFT reads it; returns the names of the files.

    Args:
      source: the additions under PEFT's keys.
      linears: see `open_peft`.
    """
    specs = source.specs()
    write_safetensors(folder / PEFT_WEIGHTS, specs, ((key, source.read(key)) for key in specs))
    kernels = {ours: theirs for theirs, ours in linears.items()}
    write_json(
        folder / PEFT_CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": adapter.base,
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": sorted(kernels[target] for target in adapter.targets),
            "inference_mode": True,
        },
    )
    return [PEFT_CONFIG, PEFT_WEIGHTS]
