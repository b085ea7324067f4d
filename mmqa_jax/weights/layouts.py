"""What the readers and writers of published checkpoints (models/FAMILY/keys.py) have in common."""

import functools
import os
import re
import struct
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.weights.config_json import ForeignModel, config_from_json, config_to_json
from mmqa_jax.weights.formats import safetensors
from mmqa_jax.weights.formats.torch import TORCH_SUFFIXES, TorchSource
from mmqa_jax.weights.keymap import KeyMap
from mmqa_jax.weights.output_folder import TORCH
from mmqa_jax.weights.quantization import read_rounding

# Key in the config.json of an exported model that transformers does not have.
OWN_CONFIG = "mmqa_jax"
Shapes = Mapping[str, tuple[int, ...]]


class Checkpoint(NamedTuple):
    """A published checkpoint, opened; only headers have been read."""

    # Of the model. Where the layout has a config file, it decides; where it has none (research code
    # saves only tensors), the shapes determine the sizes. What no shape shows (the number of heads)
    # is known where the sizes are a published model's, and is in `unknown` otherwise.
    config: Any
    key_map: Callable[[Any], KeyMap]  # config -> the key map of the layout
    source: safetensors.TensorSource  # the tensors
    layout: str  # what was recognized, for the record
    # (source, config) -> None, raises UserError where tensors that are not parameters contradict
    # the config.
    check: Callable[[safetensors.TensorSource, Any], None] | None = None
    # Fields of the config (`vision.heads`) that nothing at the path shows, each with a value that
    # is usual; their values in `config` stand for nothing. See `require_given`.
    unknown: Mapping[str, Any] = types.MappingProxyType({})
    remedy: str = ""  # what else than `--set` gives them, for a message: `put its config beside it`


def require_given(
    checkpoint: Checkpoint, fields: Iterable[str], remedy: str = "add `{flags}`"
) -> None:
    """Raises UserError unless all `unknown` fields of a checkpoint are among `fields`.

    Args:
      checkpoint: as it was opened.
      fields: names of fields, whole, or their last parts for all configs within.
      remedy: what gives the fields, with `{flags}` for those of `mmqa convert`.
    """
    fields = set(fields)
    missing = {
        field: usual
        for field, usual in checkpoint.unknown.items()
        if not fields & {field, field.rpartition(".")[2]}
    }
    if missing:
        flags = " ".join(f"--set {field}={usual}" for field, usual in missing.items())
        given_by = remedy.replace("{flags}", flags)
        other = f"{checkpoint.remedy}, or " if checkpoint.remedy else ""
        raise UserError(
            f"{checkpoint.source.name}: nothing in it or beside it says what {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'}; {other}{given_by} with "
            f"this model's own value{'s' * (len(missing) > 1)} (those here are only usual)."
        )


class Published(NamedTuple):
    """A model under published keys, with the config.json that goes with it."""

    source: safetensors.TensorSource
    config: dict[str, Any]
    # preprocessor_config.json, where its config says how pictures are resized; None: it is that of
    # its source.
    processor: dict[str, Any] | None = None


def config_file(path: Path) -> Path:
    """Where the config.json of a checkpoint is: in the folder, or beside the file."""
    return (path.parent if path.is_file() else path) / "config.json"


def check_model_type(published: Any, where: str, *expected: str) -> None:
    """Raises ForeignModel unless `model_type` of a config.json is one of `expected`."""
    model_type = published.get("model_type") if isinstance(published, dict) else None
    if model_type not in expected:
        names = [*map(repr, expected)]
        if len(names) > 6:
            names = [names[0], f"another of the {len(names)} that `mmqa models` lists"]
        raise ForeignModel(where, model_type, " or ".join(names))


def read_hf_config(path: Path, *model_types: str) -> dict[str, Any]:
    """transformers' config.json in the folder or beside the file.

    model_types: of which it is one.
    """
    file = config_file(path)
    if not file.exists():
        raise UserError(
            f"{file}: no such file; the config.json of transformers must be beside the weights."
        )
    published = read_json(file)
    check_model_type(published, str(file), *model_types)
    return published


def open_hf(path: Path, *model_types: str) -> tuple[dict[str, Any], safetensors.TensorSource]:
    """transformers' config.json in the folder or beside the file, and the tensors.

    Matrices that `quantization_config` says are rounded are whole; see `read_rounding`.

    model_types: of which it is one.
    """
    published = read_hf_config(path, *model_types)
    published, make_whole = read_rounding(published, str(config_file(path)))
    return published, make_whole(open_source(path))


def own_config(name: str, config: Any) -> dict[str, Any]:
    """Entries of config.json for a model that transformers does not have."""
    return {OWN_CONFIG: {"model": name, "config": config_to_json(config)}}


def read_own_config(read: type | Callable[[Any, str], Any], path: Path) -> Any:
    """The config that an export wrote beside tensors of research code; None if there is none.

    `read` is its dataclass, or a function in place of `config_from_json`.
    """
    file = config_file(path)
    if not file.exists():
        return None
    content = read_json(file)
    stated = content.get(OWN_CONFIG) if isinstance(content, dict) else None
    if stated is None:
        return None
    if isinstance(read, type):
        read = functools.partial(config_from_json, read)
    if not isinstance(stated, dict):
        raise UserError(f"{file}: {OWN_CONFIG} is {stated!r}, expected an object; export it again.")
    return read(stated.get("config"), f"{file}, key {OWN_CONFIG}.config")


def shapes_of(source: safetensors.TensorSource, rename: Iterable[tuple[str, str]] = ()) -> Shapes:
    """Shapes by key, after the renames of a KeyMap."""
    shapes = {}
    for key, spec in source.specs().items():
        for pattern, replacement in rename:
            key = re.sub(pattern, replacement, key)
        shapes[key] = spec.shape
    return shapes


def require_keys(
    shapes: Mapping[str, Any], keys: Iterable[str], source: safetensors.TensorSource, what: str
) -> None:
    """Raises UserError if a checkpoint lacks the tensors that show the model's sizes."""
    missing = [key for key in keys if key not in shapes]
    if missing:
        others = ", ".join(list(shapes)[:3]) or "no tensors"
        raise UserError(
            f"{source.name}: no checkpoint of {what}: it lacks {', '.join(missing[:6])}, and "
            f"begins with {others}; give a checkpoint of that model, or the --model of this one."
        )


def numbered_keys(shapes: Shapes, pattern: str) -> list[str]:
    """Keys that match, in the order of the number in them."""
    key_of_number = {int(match[1]): key for key in shapes if (match := re.fullmatch(pattern, key))}
    return [key_of_number[number] for number in sorted(key_of_number)]


def renames(prefixes: Mapping[str, str]) -> list[tuple[str, str]]:
    """`KeyMap.rename` that turns published prefixes into ours.

    Research code does not always number layers as our stacks do: Prophet counts attention and
    MLP as layers of their own, CLIP's ResNet counts the first block of a stage, which differs
    from the others. A table of prefixes, published -> ours, says how they correspond.
    """
    return [(f"^{re.escape(theirs)}", ours) for theirs, ours in prefixes.items()]


def with_prefixes(
    source: safetensors.TensorSource, prefixes: Mapping[str, str]
) -> safetensors.TensorSource:
    """A model's tensors under published prefixes: undoes `renames`."""
    published = {ours: theirs for theirs, ours in prefixes.items()}
    tensors = {}
    for key, spec in source.specs().items():
        prefix = next((p for p in published if key.startswith(p)), "")
        renamed = published.get(prefix, "") + key[len(prefix) :]
        tensors[renamed] = spec, functools.partial(source.read, key)
    return safetensors.DerivedSource(source.name, tensors)


def with_arrays(
    source: safetensors.TensorSource, arrays: Mapping[str, np.ndarray]
) -> safetensors.TensorSource:
    """The tensors of a source, and others that are in memory."""
    return joined(source.name, source, safetensors.ArraySource(arrays))


def joined(name: str, *sources: safetensors.TensorSource) -> safetensors.TensorSource:
    """The tensors of all sources."""
    return safetensors.DerivedSource(
        name,
        {
            key: (spec, functools.partial(source.read, key))
            for source in sources
            for key, spec in source.specs().items()
        },
    )


# Checkpoints of any format, opened by what is at a path.


def open_source(path: str | os.PathLike) -> safetensors.TensorSource:
    """Opens a checkpoint's tensors, reading headers only.

    `path`: a safetensors file; a torch file (`.bin`, `.pkl`, `.pt`, `.pth`; see TorchFile for what
    it may hold); the index of either's shards (`*.index.json`); or a folder with transformers'
    `model.safetensors` or `pytorch_model.bin`, whole or as shards with their index. Where a folder
    has both, safetensors are read. A file's content says which of the two it is, and its name where
    the content does not (a truncated file).
    """
    path = Path(path)
    if path.is_dir():
        if safetensors.files_in(path, safetensors.SAFETENSORS):
            return safetensors.SafetensorsSource(path)
        files = safetensors.files_in(path, TORCH)
        if not files:
            raise UserError(
                f"{path}: holds neither {safetensors.SAFETENSORS} nor {TORCH}, nor an index of "
                "their shards; give the folder or the file of a checkpoint."
            )
        return TorchSource(files, str(files[0] if len(files) == 1 else path))
    if path.name.endswith(".bin.index.json"):
        return TorchSource(safetensors.indexed_files(path), str(path))
    kind = read_magic(path) if path.is_file() else "other"
    if kind == "torch" or (kind != "safetensors" and path.suffix in TORCH_SUFFIXES):
        return TorchSource([path])
    return safetensors.SafetensorsSource(path)


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only one of a folder without config.json.

    Returns:
      None: it names another checkpoint. A broken file that is called `.gguf` is one.
    """
    if path.is_dir():
        files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise UserError(
                f"{path}: holds {len(files)} .gguf files; give one of them, e.g. {files[0]}."
            )
        return files[0] if files else None
    return path if path.suffix == ".gguf" or read_magic(path) == "gguf" else None


def read_magic(path: Path) -> str:
    """What a file's first bytes say: gguf, safetensors, torch, index (JSON of shards) or other."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions."
        ) from error
    if path.name.endswith(".index.json"):
        return "index"
    if head.startswith(b"GGUF"):
        return "gguf"
    # The length of a JSON header, and its brace; a pickle may begin with the same two bytes.
    if head[8:] == b"{" and struct.unpack("<Q", head[:8])[0] <= size - 8:
        return "safetensors"
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "torch"
    return "other"
