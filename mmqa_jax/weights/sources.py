"""Checkpoints of any format, opened by what is at a path."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.safetensors import (
    SAFETENSORS,
    SafetensorsSource,
    TensorSource,
    files_in,
    indexed_files,
)
from mmqa_jax.weights.formats.torch import TORCH_SUFFIXES, TorchSource

TORCH = "pytorch_model.bin"


def open_source(path: str | os.PathLike) -> TensorSource:
    """Opens a checkpoint's tensors, reading headers only.

    Args:
      path: a safetensors file; a torch file (`.bin`, `.pkl`, `.pt`, `.pth`; see TorchFile for
        what it may hold); the index of either's shards (`*.index.json`); or a folder with
        transformers' `model.safetensors` or `pytorch_model.bin`, whole or as shards with their
        index. Where a folder has both, safetensors are read. A file's content says which of the
        two it is, and its name where the content does not (a truncated file).
    """
    path = Path(path)
    if path.is_dir():
        if files_in(path, SAFETENSORS):
            return SafetensorsSource(path)
        files = files_in(path, TORCH)
        if not files:
            raise UserError(
                f"{path}: holds neither {SAFETENSORS} nor {TORCH}, nor an index of their "
                "shards; give the folder or the file of a checkpoint."
            )
        return TorchSource(files, str(files[0] if len(files) == 1 else path))
    if path.name.endswith(".bin.index.json"):
        return TorchSource(indexed_files(path), str(path))
    kind = read_magic(path) if path.is_file() else "other"
    if kind == "torch" or (kind != "safetensors" and path.suffix in TORCH_SUFFIXES):
        return TorchSource([path])
    return SafetensorsSource(path)


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only one of a folder without config.json.

    Returns:
      None: it names another checkpoint. A broken file that is called `.gguf` is one.
    """
    if path.is_dir():
        found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(found) > 1:
            raise UserError(
                f"{path}: holds {len(found)} .gguf files; give one of them, e.g. {found[0]}."
            )
        return found[0] if found else None
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
