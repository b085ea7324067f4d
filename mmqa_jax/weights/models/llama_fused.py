"""Phi-3's tensors: q, k and v as rows of one, gate and up of another; apart, as ours, and back."""

from __future__ import annotations

import functools

import jax
import numpy as np

from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource

_FUSED = {  # its name -> those of its parts
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_FUSED_GGUF = {  # in llama.cpp
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_up": ("ffn_gate", "ffn_up"),
}


def _rows(config: LlamaConfig, name: str) -> tuple[int, ...]:
    """Of the parts of a fused tensor."""
    if name in ("mlp.gate_up_proj", "ffn_up"):
        return (config.mlp, config.mlp)
    of_keys = config.kv_heads * config.head_size
    return (config.heads * config.head_size, of_keys, of_keys)


def apart(source: TensorSource, config: LlamaConfig) -> TensorSource:
    """The tensors of a checkpoint with the fused ones split; wrong sizes are left as they are."""
    tensors, fused = {}, _FUSED | _FUSED_GGUF
    for key, spec in source.specs().items():
        name = next((name for name in fused if key.endswith(f".{name}.weight")), None)
        sizes = () if name is None else _rows(config, name)
        if name is None or spec.shape[0] != sum(sizes):
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        first = 0
        for part, size in zip(fused[name], sizes, strict=True):
            rows = slice(first, first + size)
            of_part = jax.ShapeDtypeStruct((size, *spec.shape[1:]), spec.dtype)
            read = functools.partial(lambda key, rows: source.read(key)[rows], key, rows)
            tensors[key.replace(name, part)] = of_part, read
            first += size
    return DerivedSource(source.name, tensors)


def together(source: TensorSource) -> TensorSource:
    """The reverse of `apart`."""
    tensors = {}
    whole = {part: name for name, parts in _FUSED.items() for part in parts}
    for key, spec in source.specs().items():
        part = next((part for part in whole if key.endswith(f".{part}.weight")), None)
        if part is None:
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        name = whole[part]
        keys = [key.replace(part, one) for one in _FUSED[name]]
        rows = sum(source.specs()[one].shape[0] for one in keys)
        of_all = jax.ShapeDtypeStruct((rows, *spec.shape[1:]), spec.dtype)
        read = functools.partial(lambda keys: np.concatenate([*map(source.read, keys)]), keys)
        tensors[key.replace(part, name)] = of_all, read
    return DerivedSource(source.name, tensors)
