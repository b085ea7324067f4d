"""The header of a GGUF file, walked through before the package gguf reads it.

The package believes every length: an array of 2^50 values keeps it busy for minutes. Here nothing
is read but lengths, each compared with what is left of the file (llama.cpp docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from mmqa_jax.core.claims import check_claim
from mmqa_jax.core.errors import UserError

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
    """Checks every length, count and offset of a header against the size of the file.

    Raises:
      UserError: one is more than the file holds, or the file is of another version or byte order.
    """
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
