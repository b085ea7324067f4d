"""A config from the metadata of a GGUF file, of LLaMA or a relative (convert_hf_to_gguf.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.decoder_families import FAMILIES
from mmqa_jax.models.llama import inverse_frequencies
from mmqa_jax.models.llama_config import LlamaConfig, RopeScaling
from mmqa_jax.models.published_keys import check_keys
from mmqa_jax.weights.formats.gguf import GGUFSource

ROPE_FACTORS = "rope_freqs.weight"
# llama.cpp gguf-py/gguf/constants.py: keys of an architecture that are read, that change nothing,
# and that have these values in a LLaMA.
_READ = (
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    "attention.value_length",
    *("attention.layer_norm_rms_epsilon", "embedding_length", "block_count"),
    *("feed_forward_length", "context_length", "rope.freq_base", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
)
_HARMLESS = ("vocab_size", "tensor_data_layout")
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": (),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.finetuned": (True, False),  # a note
    "logit_scale": (1.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "attention.scale": (),
    "attention.sliding_window": (0,),
}
# llama.cpp's names of architectures, which are families' too. Its LLaMA is also Mistral's.
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def gguf_config(source: GGUFSource) -> LlamaConfig:
    """Our config from a GGUF file's metadata.

    Raises:
      UserError: another architecture, a missing value, or an option that our LLaMA does not have.
    """
    architecture = source.metadata("general.architecture")
    if architecture not in ARCHITECTURES:
        names = ", ".join(map(repr, ARCHITECTURES))
        raise UserError(
            f"{source.name}: general.architecture is {architecture!r}, expected one of {names}; "
            "give such a file, or the safetensors files of this model."
        )
    of = f"{architecture}."
    fixed = {f"{of}{key}": values for key, values in _FIXED.items()}
    for key in source.metadata_keys():
        if key.startswith(of) and key.removeprefix(of) not in (*_READ, *_HARMLESS):
            check_keys({key: source.metadata(key)}, source.name, read=(), fixed=fixed)
    specs = source.specs()
    if "token_embd.weight" not in specs:
        raise UserError(f"{source.name}: holds no token_embd.weight; fetch the file again.")
    heads = source.integer(f"{of}attention.head_count")
    hidden = source.integer(f"{of}embedding_length")
    head_size = source.integer(f"{of}attention.key_length", hidden // heads)
    values = source.integer(f"{of}attention.value_length", head_size)
    if values != head_size:
        raise UserError(
            f"{source.name}: {of}attention.value_length is {values}, a head has {head_size}; use "
            "a model whose keys and values are of one size."
        )
    rotated = source.integer(f"{of}rope.dimension_count", head_size)
    if rotated != head_size:
        raise UserError(
            f"{source.name}: {of}rope.dimension_count is {rotated}, a head has {head_size}; use "
            "a model that rotates whole heads."
        )
    config = LlamaConfig(
        family=architecture,
        vocab_size=specs["token_embd.weight"].shape[0],
        hidden=hidden,
        layers=source.integer(f"{of}block_count"),
        heads=heads,
        kv_heads=source.integer(f"{of}attention.head_count_kv", heads),
        mlp=source.integer(f"{of}feed_forward_length"),
        head_dim=None if head_size * heads == hidden else head_size,
        positions=source.integer(f"{of}context_length"),
        eps=source.number(f"{of}attention.layer_norm_rms_epsilon"),
        rope_theta=source.number(f"{of}rope.freq_base", 10000.0),
        tied="output.weight" not in specs,
        **{
            "attention_bias": "blk.0.attn_q.bias" in specs,
            "mlp_bias": "blk.0.ffn_gate.bias" in specs,
            **FAMILIES[architecture].computes,
        },
    )
    return _with_scaling(config, source, of)


def _with_scaling(config: LlamaConfig, source: GGUFSource, of: str) -> LlamaConfig:
    """Adds the rope scaling, which GGUF keeps as metadata (linear) or as a tensor (llama3).

    of: in front of the architecture's keys.
    """
    kind = source.metadata(f"{of}rope.scaling.type", "none")
    if kind == "linear":
        factor = source.number(f"{of}rope.scaling.factor")
        return dataclasses.replace(config, rope_scaling=RopeScaling("linear", factor))
    if kind != "none":
        raise UserError(
            f"{source.name}: {of}rope.scaling.type {kind!r} is not supported; use a model "
            "without scaling, or with linear or llama3."
        )
    if ROPE_FACTORS not in source.specs():
        return config
    # The tensor holds each frequency's divisor; the slowest one's is llama3's factor.
    divisors = source.read(ROPE_FACTORS)
    scaling = RopeScaling("llama3", float(divisors.max()))
    scaled = dataclasses.replace(config, rope_scaling=scaling)
    expected = inverse_frequencies(config) / inverse_frequencies(scaled)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise UserError(
            f"{source.name}: {ROPE_FACTORS} is not llama3's scaling of 8192 positions; use the "
            "safetensors files of this model."
        )
    return scaled
