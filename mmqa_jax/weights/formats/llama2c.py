"""Files of karpathy/llama2.c: one `.bin` of a header and float32 arrays.

Layouts of export.py: version 0 (`legacy_export`, stories260K and the other stories) and version
1 (`version1_export`). Names and row order of the tensors are Meta's.
"""

import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_claim

_MAGIC = 0x616B3432  # "ak42", versions from 1 on
_HEADER = struct.Struct("<7i")  # dim, hidden_dim, layers, heads, kv_heads, vocab, context
_V1_BYTES = 256


class Header(NamedTuple):
    """The sizes in the header of a file."""

    dim: int
    hidden_dim: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    context: int
    tied: bool  # the head is the embedding table


class Llama2cSource:
    """A llama2.c file, its tensors under Meta's names."""

    def __init__(self, path: str | os.PathLike):
        self.name = str(path)
        path = Path(path)
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(_V1_BYTES).ljust(_V1_BYTES, b"\0")
        magic, version = struct.unpack_from("<Ii", head)
        if magic == _MAGIC and version != 1:
            raise UserError(
                f"{path}: llama2.c version {version} (int8 weights) is not supported; export the "
                "model with --version 1."
            )
        legacy = magic != _MAGIC
        start = 0 if legacy else 8
        numbers = _HEADER.unpack_from(head, start)
        dim, mlp, layers, heads, kv_heads, vocab, context = numbers
        # In version 0, a negative vocabulary says that the head is not the embedding table.
        tied = vocab > 0 if legacy else bool(head[start + _HEADER.size])
        sizes = (dim, mlp, layers, heads, kv_heads, abs(vocab), context)
        if min(sizes) < 1 or dim % heads or heads % kv_heads or dim // heads % 2:
            raise UserError(f"{path}: not a llama2.c file (header {numbers}); check the path.")
        self.header = Header(*sizes, tied)  # the sizes
        # One layer's bytes for each of as many as the header says, before any is listed.
        with_one_layer, with_two_layers = (
            _total(_order(self.header._replace(layers=n), legacy)) for n in (1, 2)
        )
        check_claim(
            str(path), with_one_layer + (with_two_layers - with_one_layer) * (layers - 1), size
        )
        self._tensors: dict[str, tuple[int, tuple[int, ...]]] = {}  # key -> offset, shape
        offset = _HEADER.size if legacy else _V1_BYTES
        for key, shape in _order(self.header, legacy):
            self._tensors[key] = (offset, shape)
            offset += 4 * math.prod(shape)
        if offset != size:
            raise UserError(
                f"{path}: {size} bytes, its header requires {offset}; the file is truncated or "
                "not llama2.c's, fetch it again."
            )

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key."""
        return {
            key: jax.ShapeDtypeStruct(shape, np.float32)
            for key, (_, shape) in self._tensors.items()
            if not key.startswith("freqs_")
        }

    def cosines(self) -> np.ndarray | None:
        """float32 [context, head_dim / 2] of the rotary angles; None in a file without them."""
        return self.read("freqs_cos") if "freqs_cos" in self._tensors else None

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from the file."""
        offset, shape = self._tensors[key]
        return np.fromfile(self.name, "<f4", math.prod(shape), offset=offset).reshape(shape)


def _total(tensors: list[tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of float32 tensors."""
    return sum(4 * math.prod(shape) for _, shape in tensors)


def _order(header: Header, legacy: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Keys and shapes in the order of the file."""
    dim, mlp, head_size = header.dim, header.hidden_dim, header.dim // header.heads
    kv_width = header.kv_heads * head_size
    table = [("tok_embeddings.weight", (header.vocab_size, dim))]
    norm = [("norm.weight", (dim,))]
    head = [] if header.tied else [("output.weight", (header.vocab_size, dim))]

    def each_layer(name: str, *shape: int):
        return [(f"layers.{n}.{name}.weight", shape) for n in range(header.layers)]

    attention_norms, mlp_norms = each_layer("attention_norm", dim), each_layer("ffn_norm", dim)
    attention = [
        *each_layer("attention.wq", dim, dim),
        *each_layer("attention.wk", kv_width, dim),
        *each_layer("attention.wv", kv_width, dim),
        *each_layer("attention.wo", dim, dim),
    ]
    feed_forward = [
        *each_layer("feed_forward.w1", mlp, dim),
        *each_layer("feed_forward.w2", dim, mlp),
        *each_layer("feed_forward.w3", mlp, dim),
    ]
    if not legacy:
        norms = [*attention_norms, *mlp_norms, *norm]
        return [*norms, *table, *attention, *feed_forward, *head]
    angles = (header.context, head_size // 2)  # of cosines and sines, which the model computes
    freqs = [("freqs_cos", angles), ("freqs_sin", angles)]
    return [
        *table,
        *attention_norms,
        *attention,
        *mlp_norms,
        *feed_forward,
        *norm,
        *freqs,
        *head,
    ]
