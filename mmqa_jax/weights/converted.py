"""Folders that `mmqa convert` writes: Orbax weights, config.json, and the tokenizer's files.

`load_converted` opens one on any mesh; each device reads its own shards, so that no host holds
the whole model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.trees import flatten_named, unflatten_named
from mmqa_jax.weights.config_json import config_from_json, config_to_json
from mmqa_jax.weights.keymap import abstract_model
from mmqa_jax.weights.orbax_io import read_weights, stored_specs
from mmqa_jax.weights.registry import Architecture, architecture

FORMAT = "mmqa_jax weights 1"
WEIGHTS = "weights"
MIB = 1 << 20
_CONFIG = "config.json"
_SHOWN = 5  # offenders listed of each kind


@dataclasses.dataclass(frozen=True)
class Converted:
    """What a converted folder says of itself.

    Attributes:
      architecture: the registry's entry.
      config: the model's.
      dtype: of all parameters.
      record: the whole config.json, e.g. `source` and `token_ids`.
    """

    architecture: Architecture
    config: Any
    dtype: str
    record: Mapping[str, Any]


def is_converted(path: str | os.PathLike) -> bool:
    """Whether a path is a folder that `mmqa convert` wrote."""
    file = Path(path) / _CONFIG
    if not (Path(path) / WEIGHTS).is_dir() or not file.is_file():
        return False
    content = read_json(file)
    return isinstance(content, dict) and str(content.get("format", "")).startswith("mmqa_jax")


def write_record(
    folder: Path, entry: Architecture, config: Any, dtype: str, more: Mapping[str, Any]
) -> None:
    """Writes config.json, after the weights: a folder with it is whole."""
    record = {
        "format": FORMAT,
        "model": entry.name,
        "dtype": dtype,
        "config": config_to_json(config),
        **more,
    }
    write_json(folder / _CONFIG, record)


def read_record(folder: str | os.PathLike) -> Converted:
    """Reads config.json of a converted folder.

    Raises:
      UserError: another folder, of another version, or a damaged config.
    """
    file = Path(folder) / _CONFIG
    record = read_json(file)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise UserError(
            f"{file}: format is {found!r}, expected {FORMAT!r}; give a folder of `mmqa convert`, "
            "or convert the model again."
        )
    entry = architecture(str(record.get("model")), f"{file}: model")
    config = config_from_json(entry.part("config"), record.get("config"), f"{file}, key config")
    dtype = record.get("dtype")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"{file}: dtype is {dtype!r}: convert the model again.")
    return Converted(entry, config, dtype, record)


def load_converted(
    folder: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    param_dtype: str | None = None,
    config: Any = None,
) -> nnx.Module:
    """Opens a converted model.

    Args:
      folder: as `mmqa convert` wrote it.
      mesh: where the parameters go; each device reads its own shards. None is the default
        device.
      rules: logical axis -> mesh axis.
      param_dtype: of the parameters; None keeps the stored one.
      config: instead of the stored one (`read_record(folder).config`), with other values of what
        the weights do not decide: dtype, attention, remat.

    Raises:
      UserError: no converted folder, a damaged one, or arrays that are not the config's.
    """
    folder = Path(folder)
    found = read_record(folder)
    config = found.config if config is None else config
    model = found.architecture.part("model")
    graphdef, state = abstract_model(
        lambda: model(config, rngs=nnx.Rngs(0)), mesh, rules, param_dtype or found.dtype
    )
    target = flatten_named(state)
    _check_same_arrays(folder / WEIGHTS, target)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in target.values())
    with Progress(f"Loading {folder.name}", total // MIB, "MiB") as progress:
        arrays = read_weights(folder / WEIGHTS, target, on_bytes=in_mebibytes(progress))
    return nnx.merge(graphdef, unflatten_named(state, arrays))


def in_mebibytes(progress: Progress) -> Callable[[int], None]:
    """What advances `progress` by whole MiB when it is told numbers of bytes."""
    done = 0

    def on_bytes(size: int) -> None:
        nonlocal done
        progress.advance((done + size) // MIB - done // MIB)
        done += size

    return on_bytes


def _check_same_arrays(weights: Path, target: Mapping[str, Any]) -> None:
    stored = stored_specs(weights)
    problems = [f"{name} is missing" for name in target if name not in stored]
    problems += [f"{name} is not in the model" for name in stored if name not in target]
    problems += [
        f"{name} is {list(stored[name].shape)}, the config asks for {list(leaf.shape)}"
        for name, leaf in target.items()
        if name in stored and stored[name].shape != leaf.shape
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(
            f"{weights}: not the arrays of {weights.parent / _CONFIG}: "
            f"{'; '.join(problems[:_SHOWN])}{more}; convert the model again."
        )
