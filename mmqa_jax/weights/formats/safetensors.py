"""Safetensors files read and written one tensor at a time.

Nothing here holds more than one tensor in memory: headers are read first, tensors on request,
each by its offset in the file. (Pages of a mapping would stay resident once they are touched.)
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with numpy
import numpy as np
from safetensors import SafetensorError, safe_open

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, check_within, read_json, write_json

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
    "F8_E8M0": "float8_e8m0fnu",
}
_CODES = {name: code for code, name in _DTYPES.items()}

SAFETENSORS = "model.safetensors"  # transformers' name in a folder
SHARD_BYTES = 5_000_000_000  # of a file that is written, transformers' own limit


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


class DerivedSource:
    """Tensors that are made from those of other sources when they are read.

    Args:
      name: what messages call it.
      tensors: by key, shape and dtype, and a function that reads the tensor.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, tuple[jax.ShapeDtypeStruct, Callable[[], np.ndarray]]],
    ):
        self.name = name
        self._tensors = tensors

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        return {key: spec for key, (spec, _) in self._tensors.items()}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor."""
        return self._tensors[key][1]()


class _Location(NamedTuple):
    """Where a tensor is: its file, the first byte, and what it is."""

    file: Path
    offset: int
    spec: jax.ShapeDtypeStruct


class SafetensorsSource:
    """A safetensors file, the index of a sharded one, or a folder with either.

    `path`: the file, an index (`*.index.json`), or a folder as `save_pretrained` writes it.
    """

    def __init__(self, path: str | os.PathLike):
        self.name = str(path)
        self._locations: dict[str, _Location] = {}
        for file in _files_of(Path(path)):
            for key, location in _locations(file).items():
                if key in self._locations:
                    raise UserError(
                        f"{path}: tensor {key!r} is in two of its files; keep one of them."
                    )
                self._locations[key] = location

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        return {key: location.spec for key, location in self._locations.items()}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from the file."""
        path, offset, spec = self._locations[key]
        data = np.empty(math.prod(spec.shape) * spec.dtype.itemsize, np.uint8)
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                size = file.readinto(data)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read any more ({error.strerror}); load it again."
            ) from error
        if size != data.nbytes:
            raise UserError(
                f"{path}, tensor {key!r}: {size} bytes are left of {data.nbytes}; the file "
                "changed while it was read, load it again."
            )
        return data.view(spec.dtype).reshape(spec.shape)


def write_safetensors(
    path: str | os.PathLike,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes a safetensors file, one tensor in memory at a time, whole or not at all.

    Args:
      path: the file to write.
      specs: shape and dtype of every tensor (the header comes before the data).
      tensors: the tensors, each key of `specs` once, in any order.
    """
    header: dict = {"__metadata__": {"format": "pt"}}  # which transformers requires
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
            fits = array.shape == tuple(spec.shape) and array.dtype == spec.dtype
            assert fits, f"{key}: {array.dtype}{array.shape} is not {spec}"
            del missing[key]
            file.seek(start + header[key]["data_offsets"][0])
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        assert not missing, f"no tensor given for {', '.join(missing)}"


def write_sharded(
    folder: str | os.PathLike,
    source: TensorSource,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> None:
    """Writes model.safetensors or, of a bigger model, shards and their index.

    One tensor is in memory at a time.

    Args:
      folder: made if absent.
      source: what is written, under its keys.
      shard_bytes: largest file.
      on_bytes: called with the size of each tensor that is written.
    """
    folder = Path(folder)
    shards: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    size = total = 0
    for key, spec in source.specs().items():
        tensor = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
        if shards[-1] and size + tensor > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = spec
        size += tensor
        total += tensor
    names = [SAFETENSORS]
    if len(shards) > 1:
        stem, suffix = SAFETENSORS.split(".")
        names = [f"{stem}-{n:05d}-of-{len(shards):05d}.{suffix}" for n in range(1, len(shards) + 1)]

    def tensors(keys: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        for key in keys:
            tensor = source.read(key)
            yield key, tensor
            on_bytes(tensor.nbytes)

    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, tensors(shard))
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{SAFETENSORS}.index.json", index)


def files_in(folder: Path, name: str) -> list[Path]:
    """Files of a checkpoint in a folder: `name` itself or its shards; none if it has neither."""
    index = folder / f"{name}.index.json"
    if (folder / name).exists():
        return [folder / name]
    return indexed_files(index) if index.exists() else []


def indexed_files(index: Path) -> list[Path]:
    """The files that an index names: {"weight_map": {tensor: file beside the index}}."""
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{index}: has no `weight_map` of tensors to files; fetch the index file again."
        )
    files = sorted(set(names))
    for name in files:
        check_within(name, index)
    return [index.parent / name for name in files]


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir() and not path.name.endswith(".index.json"):
        return [path]
    files = files_in(path, SAFETENSORS) if path.is_dir() else indexed_files(path)
    if missing := [file.name for file in files if not file.exists()]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{path}: lacks {missing[0]}{more}, which its index names; fetch the missing files, or "
            "give --source=ORG/NAME with --download."
        )
    if not files:
        raise UserError(
            f"{path}: holds neither {SAFETENSORS} nor {SAFETENSORS}.index.json; "
            "give the folder or file of a safetensors checkpoint."
        )
    return files


def _locations(path: Path) -> dict[str, _Location]:
    """Reads a file's header."""
    try:
        # The library checks that header and size agree; it does not say where tensors are.
        with safe_open(path, framework="numpy"), open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check the path.") from error
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a whole safetensors file ({error}); fetch or convert it again."
        ) from error
    header.pop("__metadata__", None)
    locations = {}
    for key, entry in header.items():
        code = entry["dtype"]
        if code not in _DTYPES:
            raise UserError(
                f"{path}, tensor {key!r}: type {code} is not supported; convert it to "
                "float32, float16 or bfloat16."
            )
        spec = jax.ShapeDtypeStruct(tuple(entry["shape"]), np.dtype(_DTYPES[code]))
        locations[key] = _Location(path, 8 + length + entry["data_offsets"][0], spec)
    return locations
