"""Tensors and metadata of llama.cpp's GGUF files, dequantized one tensor at a time.

What is not a whole file, or has a tensor of a kind that is not known, is refused before any tensor
is read (llama.cpp docs/gguf.md).
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_claim
from mmqa_jax.weights.config_json import check_keys
from mmqa_jax.weights.formats.gguf_blocks import Kind, dequantize, kind_of


class GGUFSource:
    """A GGUF file; every tensor reads as float32, rows first."""

    def __init__(self, path: str | os.PathLike):
        self.name = str(path)
        try:
            facts = os.stat(path)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; check the path.") from None
        self._fields, self._tensors = _header(Path(path), facts.st_size, facts.st_mtime_ns)
        if self.metadata("split.count", 1) > 1:
            raise UserError(
                f"{path}: one of {self.metadata('split.count')} parts; join them with "
                "`llama-gguf-split --merge` and give the whole file."
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
        tensor = self._tensors[key]
        kind, values = tensor.kind, np.empty(math.prod(tensor.shape), np.float32)
        with open(self.name, "rb") as file:
            file.seek(tensor.offset)
            for first in range(0, len(values), kind.piece * kind.values):
                piece = values[first : first + kind.piece * kind.values]
                raw = np.fromfile(file, np.uint8, len(piece) // kind.values * kind.bytes)
                dequantize(kind, raw, piece)
        return values.reshape(tensor.shape)


class _Tensor(NamedTuple):
    """Where a tensor is in its file, and how."""

    shape: tuple[int, ...]  # rows first
    kind: Kind
    offset: int  # from the file's beginning


# The header of a GGUF file. Each length is compared with what is left of the file before it is
# believed: an array of 2^50 values would keep a reader busy for minutes.

# Types of metadata; the others are strings and arrays.
_NUMBERS = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_STRING, _ARRAY = 8, 9
_LEAST_PAIR, _LEAST_TENSOR = 13, 24  # bytes of an entry with empty names
_MOST_AXES = 4
_VERSIONS = (2, 3)
_LENGTH = struct.Struct("<Q")


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

    def numbers(self, form: str, count: int, what: str) -> list[Any]:
        start, form = self.at, np.dtype(form)
        self.skip(count * form.itemsize, what)
        return np.frombuffer(self.data, form, count, start).tolist()

    def texts(self, count: int, what: str) -> list[str]:
        """Strings, of which a vocabulary has hundreds of thousands."""
        check_claim(f"{self.where}, {what}", self.at + 8 * count, self.size)
        data, at, end, length_at = self.data, self.at, self.size - 8, _LENGTH.unpack_from
        texts = []
        for _ in range(count):
            if at > end:
                break
            start = at + 8
            at = start + length_at(data, at)[0]
            texts.append(data[start:at])
        check_claim(f"{self.where}, {what}", at + 8 * (count - len(texts)), self.size)
        self.at = at
        try:
            return list(map(bytes.decode, texts))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where}, {what} ({error}); fetch or convert it again."
            ) from error


@functools.lru_cache(maxsize=8)  # weights, config and tokenizer are read of one file
def _header(path: Path, size: int, changed: int) -> tuple[Mapping[str, Any], Mapping[str, _Tensor]]:
    """Metadata and tensors of a file of this size and time of change."""
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path}: not a whole GGUF file; fetch or convert it again.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            fields, tensors = _read_header(_Cursor(path, data))
    return MappingProxyType(fields), MappingProxyType(tensors)


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, _Tensor]]:
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
    fields = {}
    for _ in range(pairs):
        (key,) = cursor.texts(1, "a metadata's name")
        what = f"metadata {key[:60]!r}"
        fields[key] = _value(cursor, cursor.number("<I", what), what)
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= cursor.size:
        raise UserError(f"{cursor.path}: general.alignment is {alignment}; fetch it again.")
    tensors = dict(_tensor(cursor) for _ in range(tensors))
    start = -(-cursor.at // alignment) * alignment
    for name, tensor in tensors.items():
        offset = start + tensor.offset
        end = offset + math.prod(tensor.shape) // tensor.kind.values * tensor.kind.bytes
        check_claim(f"{cursor.where}, tensor {name!r}", end, cursor.size)
        tensors[name] = tensor._replace(offset=offset)
    return fields, tensors


def _value(cursor: _Cursor, kind: int, what: str) -> Any:
    """A metadata value."""
    if kind in _NUMBERS:
        return cursor.numbers(_NUMBERS[kind], 1, what)[0]
    if kind == _STRING:
        return cursor.texts(1, what)[0]
    if kind != _ARRAY:
        raise UserError(f"{cursor.path}, {what}: of type {kind}; fetch or convert the file again.")
    of, count = cursor.number("<I", what), cursor.number("<Q", what)
    if of in _NUMBERS:
        return cursor.numbers(_NUMBERS[of], count, what)
    if of != _STRING:
        raise UserError(
            f"{cursor.path}, {what}: an array of type {of}; fetch or convert the file again."
        )
    return cursor.texts(count, what)


def _tensor(cursor: _Cursor) -> tuple[str, _Tensor]:
    """A tensor's name, and what the header says of it; its offset is from the header's end."""
    (name,) = cursor.texts(1, "a tensor's name")
    what = f"tensor {name!r}"
    axes = cursor.number("<I", what)
    if axes > _MOST_AXES:
        raise UserError(f"{cursor.path}, {what}: has {axes} axes; fetch or convert it again.")
    shape = tuple(cursor.number("<Q", what) for _ in range(axes))[::-1]
    number, offset = cursor.number("<I", what), cursor.number("<Q", what)
    kind = kind_of(number, f"{cursor.path}, {what}")
    if shape and shape[-1] % kind.values:
        raise UserError(
            f"{cursor.path}, {what}: rows of {shape[-1]} values are no whole blocks of "
            f"{kind.name}; fetch or convert it again."
        )
    return name, _Tensor(shape, kind, offset)


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
