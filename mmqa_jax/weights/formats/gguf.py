"""LLaMA weights of llama.cpp's GGUF files, dequantized one tensor at a time.

The `gguf` package reads the container and dequantizes; what it cannot dequantize is refused
before any tensor is read. Names and row order: llama.cpp gguf-py/gguf/tensor_mapping.py and
convert_hf_to_gguf.py (LlamaModel.permute).

The package takes seconds to read a vocabulary of 50,000 tokens, so that what it found (metadata,
and where each tensor is) is kept in the cache folder under the SHA-256 of the file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import mmap
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_claim, read_json, write_json
from mmqa_jax.core.host import cache_dir
from mmqa_jax.weights.config_json import check_keys

_ROW_VALUES = 16_384  # of a row that is dequantized, at most
_READ_BYTES = 1 << 18  # dequantized at a time, in several copies


class GGUFSource:
    """A GGUF file; every tensor reads as float32, rows first."""

    def __init__(self, path: str | os.PathLike):
        self.name = str(path)
        index = _index(Path(path))
        self._fields: dict[str, Any] = index["fields"]
        self._tensors = {name: _Tensor(*values) for name, values in index["tensors"].items()}
        if self.metadata("split.count", 1) > 1:
            raise UserError(
                f"{path}: one of {self.metadata('split.count')} parts; join them with "
                "`llama-gguf-split --merge` and give the whole file."
            )
        for name, tensor in self._tensors.items():
            if not _dequantizes(tensor.quantization):
                raise UserError(
                    f"{path}, tensor {name!r}: quantization {tensor.quantization} is not "
                    "supported; convert the file to F16, Q8_0, Q4_0, Q4_1 or Q6_K."
                )

    def metadata(self, key: str, default: Any = None) -> Any:
        """A metadata value."""
        if key in self._fields:
            return self._fields[key]
        if default is None:
            raise UserError(f"{self.name}: lacks the metadata {key!r}; convert the model again.")
        return default

    def metadata_keys(self) -> list[str]:
        """Names of the metadata."""
        return list(self._fields)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of the metadata."""
        value = self.metadata(key, default)
        if not isinstance(value, int) or abs(value) >= 2**31:
            raise UserError(
                f"{self.name}: metadata {key!r} is {value!r}, expected one number below 2^31; use "
                "a model whose layers are alike, or fetch the file again."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 of the metadata as the decimal that was meant: 1e-05, not 9.99999975e-06."""
        value = self.metadata(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(
                f"{self.name}: metadata {key!r} is {value!r}, expected a number; convert the model "
                "again."
            )
        return float(str(np.float32(value)))

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        return {
            key: jax.ShapeDtypeStruct(tuple(tensor.shape), np.float32)
            for key, tensor in self._tensors.items()
        }

    def read(self, key: str) -> np.ndarray:
        """Reads and dequantizes one tensor, piece by piece."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        tensor = self._tensors[key]
        kind = GGMLQuantizationType[tensor.quantization]
        # The package works on 16 rows at a time, too few of most models' short ones to be fast;
        # blocks do not depend on each other, so that rows may be of any length.
        values, size = GGML_QUANT_SIZES[kind]
        blocks = tensor.bytes // size
        together = min(blocks, max(1, _ROW_VALUES // values))
        while blocks % together:
            together -= 1
        row = together * size
        found = np.empty((blocks // together, together * values), np.float32)
        step = max(1, _READ_BYTES // row)
        with open(self.name, "rb") as file:
            file.seek(tensor.offset)
            for first in range(0, len(found), step):
                piece = found[first : first + step]
                raw = np.fromfile(file, np.uint8, len(piece) * row).reshape(-1, row)
                piece[...] = quants.dequantize(raw.view(tensor.dtype), kind)
        return found.reshape(tensor.shape)


class _Tensor(NamedTuple):
    """Where a tensor is in its file, and how."""

    shape: list[int]  # rows first
    quantization: str  # a name of gguf.GGMLQuantizationType
    offset: int
    bytes: int
    dtype: str


def _index(path: Path) -> dict[str, Any]:
    """Metadata and tensors of a file; from the cache if a file of this content was read before."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path.")
    try:
        import gguf  # noqa: F401 - dequantizes later
    except ImportError as error:
        raise UserError(
            f"{path}: reading a GGUF file needs the package gguf; run `pip install gguf`."
        ) from error
    facts = path.stat()
    kept = cache_dir() / "gguf-tensors" / f"{_sha256(path, facts.st_size, facts.st_mtime_ns)}.json"
    if kept.is_file():
        try:
            return read_json(kept)
        except UserError:  # damaged: written again
            kept.unlink(missing_ok=True)
    check_gguf_header(path)
    reader = _open(path)
    index = {
        "fields": {name: field.contents() for name, field in reader.fields.items()},
        "tensors": {
            tensor.name: _Tensor(
                shape=tensor.shape.tolist()[::-1],
                quantization=tensor.tensor_type.name,
                offset=int(tensor.data_offset),
                bytes=int(tensor.n_bytes),
                dtype=str(tensor.data.dtype),
            )
            for tensor in reader.tensors
        },
    }
    with contextlib.suppress(OSError):  # a read-only home: it is read again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, index)
    return index


@functools.lru_cache(maxsize=8)
def _sha256(path: Path, size: int, changed: int) -> str:
    """SHA-256 of a file of this size and time of change."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path):
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not a whole GGUF file ({error}); fetch or convert it again."
        ) from error
    return reader


@functools.cache
def _dequantizes(quantization: str) -> bool:
    """Whether the package can dequantize, tried on one block of zeros."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType[quantization]
    _, size = GGML_QUANT_SIZES[kind]
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


# The header of a GGUF file, walked through before the package gguf reads it.
#
# The package believes every length: an array of 2^50 values keeps it busy for minutes. Here nothing
# is read but lengths, each compared with what is left of the file (llama.cpp docs/gguf.md).

# Types of metadata -> bytes of a value; the others are strings and arrays.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_LEAST_PAIR, _LEAST_TENSOR = 13, 24  # bytes of an entry with empty names
_MOST_AXES = 4
_VERSIONS = (2, 3)
_ALIGNMENT = b"general.alignment"


class _Cursor:
    """Walks through a file; what would go past its end is refused by name."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.where = f"{path}: not a whole GGUF file"
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def skip(self, count: int, what: str) -> None:
        check_claim(f"{self.where}, {what}", self.at + count, self.size)
        self.at += count

    def number(self, form: str, what: str) -> int:
        start = self.at
        self.skip(struct.calcsize(form), what)
        return struct.unpack_from(form, self.data, start)[0]

    def text(self, what: str) -> bytes:
        length = self.number("<Q", what)
        start = self.at
        self.skip(length, what)
        return self.data[start : self.at]


def check_gguf_header(path: Path) -> None:
    """Checks every length, count and offset of a header against the size of the file."""
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            return  # the package says so
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _walk(_Cursor(path, data))


def _walk(cursor: _Cursor) -> None:
    cursor.at = 4
    version = cursor.number("<I", "version")
    if version and version & 0xFFFF == 0:
        raise UserError(
            f"{cursor.path}: written in the other byte order; convert it with gguf's "
            "`gguf-convert-endian`."
        )
    if version not in _VERSIONS:
        raise UserError(
            f"{cursor.where} (version {version}); fetch it again, or convert the model again."
        )
    tensors, pairs = cursor.number("<Q", "header"), cursor.number("<Q", "header")
    least = pairs * _LEAST_PAIR + tensors * _LEAST_TENSOR
    counts = f"{cursor.where}, {pairs:,} metadata and {tensors:,} tensors"
    check_claim(counts, cursor.at + least, cursor.size)
    alignment = 32
    for _ in range(pairs):
        key = cursor.text("a metadata's name")
        what = f"metadata {key[:60].decode(errors='replace')!r}"
        kind, start = cursor.number("<I", what), cursor.at
        _skip_value(cursor, kind, what)
        if key == _ALIGNMENT and kind == 4:
            (alignment,) = struct.unpack_from("<I", cursor.data, start)
    if not 0 < alignment <= cursor.size:
        raise UserError(f"{cursor.path}: general.alignment is {alignment}; fetch it again.")
    ends = [_tensor_end(cursor) for _ in range(tensors)]
    start = -(-cursor.at // alignment) * alignment
    for name, end in ends:
        check_claim(f"{cursor.where}, tensor {name!r}", start + end, cursor.size)


def _skip_value(cursor: _Cursor, kind: int, what: str) -> None:
    if kind in _SIZES:
        cursor.skip(_SIZES[kind], what)
    elif kind == _STRING:
        cursor.text(what)
    elif kind == _ARRAY:
        of, count = cursor.number("<I", what), cursor.number("<Q", what)
        if of in _SIZES:
            cursor.skip(count * _SIZES[of], what)
        elif of == _STRING:
            check_claim(f"{cursor.where}, {what}", cursor.at + 8 * count, cursor.size)
            for _ in range(count):
                cursor.text(what)
        else:
            raise UserError(
                f"{cursor.path}, {what}: an array of type {of}; fetch or convert the file again."
            )
    else:
        raise UserError(f"{cursor.path}, {what}: of type {kind}; fetch or convert the file again.")


def _tensor_end(cursor: _Cursor) -> tuple[str, int]:
    """A tensor's name, and where it ends after the header."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.text("a tensor's name").decode(errors="replace")
    what = f"tensor {name!r}"
    axes = cursor.number("<I", what)
    if axes > _MOST_AXES:
        raise UserError(f"{cursor.path}, {what}: has {axes} axes; fetch or convert it again.")
    values = math.prod(cursor.number("<Q", what) for _ in range(axes))
    kind, offset = cursor.number("<I", what), cursor.number("<Q", what)
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{cursor.path}, {what}: quantization {kind} is not known; convert the file to F16."
        ) from error
    return name, offset + values // block * size


# What the readers of GGUF files of several architectures have in common.


def check_metadata(
    source: GGUFSource, of: str, read: Collection[str], fixed: Mapping[str, tuple[Any, ...]]
) -> None:
    """Checks that no metadata of an architecture changes what is computed without being read.

    Args:
      source: the file.
      of: in front of the architecture's keys; ends in a dot.
      read: keys, without `of`, that are read or harmless.
      fixed: keys, without `of`, that have only these values here.
    """
    known = {f"{of}{key}": values for key, values in fixed.items()}
    for key in source.metadata_keys():
        if key.startswith(of) and key.removeprefix(of) not in read:
            check_keys({key: source.metadata(key)}, source.name, read=(), fixed=known)


def vocabulary_of(source: GGUFSource) -> int:
    """Rows of the embedding table."""
    specs = source.specs()
    if "token_embd.weight" not in specs:
        raise UserError(f"{source.name}: holds no token_embd.weight; fetch the file again.")
    return specs["token_embd.weight"].shape[0]


def layers_of(source: GGUFSource, key: str, default: int | None = None) -> int:
    """A number of layers."""
    layers, most = source.integer(key, default), len(source.specs())
    if not 1 <= layers <= most:
        raise UserError(
            f"{source.name}: {key} is {layers:,}, expected 1 to {most:,}, the number of the file's "
            "tensors; fetch the file again."
        )
    return layers


def heads_of(source: GGUFSource, of: str) -> int:
    """Heads of a layer."""
    heads = source.integer(f"{of}attention.head_count")
    if heads < 1:
        raise UserError(
            f"{source.name}: {of}attention.head_count is {heads}, expected at least 1; convert the "
            "model again."
        )
    return heads


def head_size_of(source: GGUFSource, of: str, usual: int) -> int:
    """Dimensions of a head, `usual` where nothing says it."""
    size = source.integer(f"{of}attention.key_length", usual)
    values = source.integer(f"{of}attention.value_length", size)
    if values != size:
        raise UserError(
            f"{source.name}: {of}attention.value_length is {values}, a head has {size}; use "
            "a model whose keys and values are of one size."
        )
    return size
