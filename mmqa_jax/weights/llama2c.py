"""LLaMA weights of karpathy/llama2.c: one `.bin` file of a header and float32 arrays.

Layouts of export.py: version 0 (`legacy_export`, stories260K and the other stories) and version
1 (`version1_export`). Names and row order of the tensors are Meta's.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.weights.llama import LlamaCheckpoint, meta_key_map

_MAGIC = 0x616B3432  # "ak42", versions from 1 on
_HEADER = struct.Struct("<7i")  # dim, hidden_dim, layers, heads, kv_heads, vocab, context
_V1_BYTES = 256


class Llama2cSource:
    """A llama2.c file, its tensors under Meta's names.

    Raises:
      UserError: no such file, one that is not llama2.c's, int8 weights, or a file whose size is
        not what its header asks for.
    """

    def __init__(self, path: str | os.PathLike):
        self.name = str(path)
        path = Path(path)
        if not path.is_file():
            raise UserError(f"{path}: no such file; check the path.")
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(_V1_BYTES)
        magic, version = struct.unpack_from("<Ii", head.ljust(8, b"\0"))
        if magic == _MAGIC and version != 1:
            raise UserError(
                f"{path}: llama2.c version {version} (int8 weights) is not supported; export the "
                "model with --version 1."
            )
        legacy = magic != _MAGIC
        start = 0 if legacy else 8
        numbers = _HEADER.unpack_from(head.ljust(_V1_BYTES, b"\0"), start)
        dim, mlp, layers, heads, kv_heads, vocab, context = numbers
        # Version 0 says by a negative vocabulary that the head is not the token table.
        tied = vocab > 0 if legacy else bool(head[start + _HEADER.size])
        sizes = (dim, mlp, layers, heads, kv_heads, abs(vocab), context)
        if min(sizes) < 1 or dim % heads or heads % kv_heads or dim // heads % 2:
            raise UserError(f"{path}: not a llama2.c file (header {numbers}); check the path.")
        self.config = LlamaConfig(
            vocab_size=abs(vocab),
            hidden=dim,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            mlp=mlp,
            positions=context,
            tied=tied,
        )
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}  # key -> offset, shape
        offset = _HEADER.size if legacy else _V1_BYTES
        for key, shape in _order(self.config, legacy):
            self._places[key] = (offset, shape)
            offset += 4 * math.prod(shape)
        if offset != size:
            raise UserError(
                f"{path}: {size} bytes, its header asks for {offset}; the file is cut short or "
                "not llama2.c's, fetch it again."
            )

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key."""
        return {
            key: jax.ShapeDtypeStruct(shape, np.float32)
            for key, (_, shape) in self._places.items()
            if not key.startswith("freqs_")
        }

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from the file."""
        offset, shape = self._places[key]
        return np.fromfile(self.name, "<f4", math.prod(shape), offset=offset).reshape(shape)


def open_llama2c(path: str | os.PathLike) -> LlamaCheckpoint:
    """Opens a llama2.c file of float32 weights; eps (1e-5) and theta (10,000) are run.c's.

    Raises:
      UserError: as Llama2cSource.
    """
    source = Llama2cSource(path)
    return LlamaCheckpoint(source.config, meta_key_map(source.config), source, "llama2.c")


def _order(config: LlamaConfig, legacy: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Keys and shapes in the order of the file."""
    dim, mlp = config.hidden, config.mlp
    kv_width = config.kv_heads * config.head_size
    table = [("tok_embeddings.weight", (config.vocab_size, dim))]
    norm = [("norm.weight", (dim,))]
    head = [] if config.tied else [("output.weight", (config.vocab_size, dim))]

    def each_layer(name: str, *shape: int):
        return [(f"layers.{n}.{name}.weight", shape) for n in range(config.layers)]

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
    angles = (config.positions, config.head_size // 2)  # cosines and sines, computed anew here
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
