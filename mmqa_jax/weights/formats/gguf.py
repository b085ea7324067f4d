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
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.host import cache_dir
from mmqa_jax.weights.formats.gguf_header import check_gguf_header

_ROW_VALUES = 16_384  # of a row that is dequantized, at most


class GGUFSource:
    """A GGUF file; every tensor reads as float32, rows first.

    Raises:
      UserError: the package gguf is not installed, no such file, a broken or foreign one, one
        part of a split file, or a quantization that the package cannot dequantize.
    """

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
        """A metadata value.

        Raises:
          UserError: it is absent and no default is given.
        """
        if key in self._fields:
            return self._fields[key]
        if default is None:
            raise UserError(f"{self.name}: lacks the metadata {key!r}; convert the model again.")
        return default

    def metadata_keys(self) -> list[str]:
        """Names of the metadata."""
        return list(self._fields)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of the metadata.

        Raises:
          UserError: it is absent without a default, or one number per layer.
        """
        value = self.metadata(key, default)
        if not isinstance(value, int):
            raise UserError(
                f"{self.name}: metadata {key!r} is {value!r}, expected one number; use a model "
                "whose layers are alike."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 of the metadata as the decimal that was meant: 1e-05, not 9.99999975e-06."""
        return float(str(np.float32(self.metadata(key, default))))

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        return {
            key: jax.ShapeDtypeStruct(tuple(tensor.shape), np.float32)
            for key, tensor in self._tensors.items()
        }

    def read(self, key: str) -> np.ndarray:
        """Reads and dequantizes one tensor."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        tensor = self._tensors[key]
        kind = GGMLQuantizationType[tensor.quantization]
        raw = np.fromfile(self.name, np.uint8, tensor.bytes, offset=tensor.offset)
        if tensor.dtype != "uint8":  # not in blocks
            return quants.dequantize(raw.view(tensor.dtype).reshape(tensor.stored_shape), kind)
        # The package works on 16 rows at a time, too few of most models' short ones to be fast;
        # blocks do not depend on each other, so that rows may be of any length.
        values, size = GGML_QUANT_SIZES[kind]
        blocks = len(raw) // size
        together = min(blocks, max(1, _ROW_VALUES // values))
        while blocks % together:
            together -= 1
        return quants.dequantize(raw.reshape(-1, together * size), kind).reshape(tensor.shape)


class _Tensor(NamedTuple):
    """Where a tensor is in its file, and how."""

    shape: list[int]  # rows first
    quantization: str  # a name of gguf.GGMLQuantizationType
    offset: int
    bytes: int
    dtype: str
    stored_shape: list[int]


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
    kept = cache_dir() / "gguf" / f"{_sha256(path, facts.st_size, facts.st_mtime_ns)}.json"
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
                stored_shape=list(tensor.data.shape),
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
