"""LLaMA weights of llama.cpp's GGUF files, dequantized one tensor at a time.

The `gguf` package reads the container and dequantizes; what it cannot dequantize is refused
before any tensor is read. Names and row order: llama.cpp gguf-py/gguf/tensor_mapping.py and
convert_hf_to_gguf.py (LlamaModel.permute).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmqa_jax.core.errors import UserError


class GGUFSource:
    """A GGUF file; every tensor reads as float32, rows first.

    Raises:
      UserError: the package gguf is not installed, no such file, a broken or foreign one, one
        part of a split file, or a quantization that the package cannot dequantize.
    """

    def __init__(self, path: str | os.PathLike):
        self.name = str(path)
        reader = _open(Path(path))
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.metadata("split.count", 1) > 1:
            raise UserError(
                f"{path}: one of {self.metadata('split.count')} parts; join them with "
                "`llama-gguf-split --merge` and give the whole file."
            )
        for tensor in reader.tensors:
            if not _dequantizes(tensor.tensor_type):
                raise UserError(
                    f"{path}, tensor {tensor.name!r}: quantization {tensor.tensor_type.name} is "
                    "not supported; convert the file to F16, Q8_0, Q4_0, Q4_1 or Q6_K."
                )

    def metadata(self, key: str, default: Any = None) -> Any:
        """A metadata value.

        Raises:
          UserError: it is absent and no default is given.
        """
        if key in self._fields:
            return self._fields[key].contents()
        if default is None:
            raise UserError(f"{self.name}: lacks the metadata {key!r}; convert the model again.")
        return default

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
            key: jax.ShapeDtypeStruct(tuple(reversed(tensor.shape.tolist())), np.float32)
            for key, tensor in self._tensors.items()
        }

    def read(self, key: str) -> np.ndarray:
        """Reads and dequantizes one tensor."""
        from gguf import quants

        tensor = self._tensors[key]
        # Not through the reader's mapping: its pages would stay resident.
        raw = np.fromfile(self.name, np.uint8, tensor.n_bytes, offset=tensor.data_offset)
        stored = raw.view(tensor.data.dtype).reshape(tensor.data.shape)
        return quants.dequantize(stored, tensor.tensor_type)


def _open(path: Path):
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path.")
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            f"{path}: reading a GGUF file needs the package gguf; run `pip install gguf`."
        ) from error
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not a whole GGUF file ({error}); fetch or convert it again."
        ) from error
    if reader.byte_order == "S":
        raise UserError(
            f"{path}: written in the other byte order; convert it with gguf's "
            "`gguf-convert-endian`."
        )
    return reader


@functools.cache
def _dequantizes(quantization) -> bool:
    """Whether the package can dequantize, tried on one block of zeros."""
    from gguf import GGML_QUANT_SIZES, quants

    _, size = GGML_QUANT_SIZES[quantization]
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), quantization)
    except NotImplementedError:
        return False
    return True
