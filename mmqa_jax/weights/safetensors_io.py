"""Safetensors files read and written one tensor at a time.

Nothing here holds more than one tensor in memory: files are memory-mapped, headers read
first, tensors on request.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with numpy
import numpy as np
from safetensors import SafetensorError, safe_open

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_json

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_CODES = {name: code for code, name in _DTYPES.items()}


class TensorSource(Protocol):
    """A checkpoint as the key maps see it: named tensors, described first, read on request."""

    name: str

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor."""


class ArraySource:
    """Tensors that are in memory already (a loaded torch file, a test's dictionary)."""

    def __init__(self, arrays: Mapping[str, np.ndarray], name: str = "the given arrays"):
        self.name = name
        self._arrays = dict(arrays)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key."""
        return {k: jax.ShapeDtypeStruct(a.shape, a.dtype) for k, a in self._arrays.items()}

    def read(self, key: str) -> np.ndarray:
        """Returns one tensor."""
        return np.asarray(self._arrays[key])


class SafetensorsSource:
    """A safetensors file, or a folder with model.safetensors or its sharded index.

    Args:
      path: the file, or a folder as `save_pretrained` writes it.

    Raises:
      UserError: nothing there, a truncated or foreign file, an index that names a missing file.
    """

    def __init__(self, path: str | os.PathLike):
        self.name = str(path)
        self._files = {}
        self._specs: dict[str, jax.ShapeDtypeStruct] = {}
        for file in _files_of(Path(path)):
            handle = _open(file)
            for key in handle.keys():  # noqa: SIM118  not a dict
                view = handle.get_slice(key)
                code = view.get_dtype()
                if code not in _DTYPES:
                    raise UserError(
                        f"{file}, tensor {key!r}: type {code} is not supported; convert it to "
                        "float32, float16 or bfloat16."
                    )
                if key in self._specs:
                    raise UserError(
                        f"{path}: tensor {key!r} lies in two of its files; keep one of them."
                    )
                shape = tuple(view.get_shape())
                self._specs[key] = jax.ShapeDtypeStruct(shape, np.dtype(_DTYPES[code]))
                self._files[key] = handle

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        return dict(self._specs)

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from the file."""
        return self._files[key].get_tensor(key)


def write_safetensors(
    path: str | os.PathLike,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Iterable[tuple[str, np.ndarray]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file, one tensor in memory at a time, whole or not at all.

    Args:
      path: the file to write.
      specs: shape and dtype of every tensor (the header comes before the data).
      tensors: the tensors, each key of `specs` once, in any order.
      metadata: strings for the header; {"format": "pt"} is what transformers asks for.
    """
    header: dict = {"__metadata__": dict(metadata or {"format": "pt"})}
    position = 0
    for key, spec in specs.items():
        size = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
        header[key] = {
            "dtype": _CODES[np.dtype(spec.dtype).name],
            "shape": list(spec.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # the format wants the data aligned to 8 bytes
    missing = dict.fromkeys(specs)
    with atomic_write(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)))
        file.write(head)
        start = file.tell()
        for key, array in tensors:
            spec = specs[key]
            array = np.asarray(array)
            if array.shape != tuple(spec.shape) or array.dtype != spec.dtype:
                raise ValueError(f"{key}: {array.dtype}{array.shape} is not {spec}")
            del missing[key]
            file.seek(start + header[key]["data_offsets"][0])
            file.write(np.ascontiguousarray(array).tobytes())
        if missing:
            raise ValueError(f"no tensor given for {', '.join(missing)}")


def _open(file: Path):
    try:
        return safe_open(file, framework="numpy")
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; check the path.") from error
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: not a whole safetensors file ({error}); fetch or convert it again."
        ) from error


def _files_of(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if single.exists():
        yield single
    elif index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: has no `weight_map`; fetch the index file again.")
        yield from (path / name for name in sorted(set(weight_map.values())))
    else:
        raise UserError(
            f"{path}: holds neither model.safetensors nor model.safetensors.index.json; "
            "give the folder or file of a safetensors checkpoint."
        )
