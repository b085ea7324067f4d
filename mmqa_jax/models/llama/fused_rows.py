"""Linears that a checkpoint keeps as rows of one tensor (q, k and v; gate and up): apart, and back.

A family says which: `{name of the whole: {name of a part: its rows}}`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import numpy as np

from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource

Fused = Mapping[str, Mapping[str, int]]
_KINDS = ("weight", "bias")


def phi3_rows(config: LlamaConfig) -> Fused:
    """Phi-3's."""
    of_keys = config.kv_heads * config.head_size
    return {
        "self_attn.qkv_proj": {
            "self_attn.q_proj": config.heads * config.head_size,
            "self_attn.k_proj": of_keys,
            "self_attn.v_proj": of_keys,
        },
        "mlp.gate_up_proj": {"mlp.gate_proj": config.mlp, "mlp.up_proj": config.mlp},
    }


def phi3_gguf_rows(config: LlamaConfig) -> Fused:
    """Phi-3's in llama.cpp's names."""
    of_heads, of_gate = phi3_rows(config).values()
    parts = zip(("attn_q", "attn_k", "attn_v"), of_heads.values(), strict=True)
    gate, up = of_gate.values()
    return {"attn_qkv": dict(parts), "ffn_up": {"ffn_gate": gate, "ffn_up": up}}


def apart(source: TensorSource, fused: Fused) -> TensorSource:
    """The tensors of a checkpoint with the fused ones split; wrong sizes are left as they are."""
    tensors = {}
    for key, spec in source.specs().items():
        name = _of(key, fused)
        parts = {} if name is None else fused[name]
        if name is None or spec.shape[0] != sum(parts.values()):
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        first = 0
        for part, size in parts.items():
            rows = slice(first, first + size)
            of_part = jax.ShapeDtypeStruct((size, *spec.shape[1:]), spec.dtype)
            read = functools.partial(lambda key, rows: source.read(key)[rows], key, rows)
            tensors[key.replace(name, part)] = of_part, read
            first += size
    return DerivedSource(source.name, tensors)


def together(source: TensorSource, fused: Fused, prefix: str = "") -> TensorSource:
    """The reverse of `apart`, of the keys that begin with `prefix`."""
    tensors = {}
    whole = {part: name for name, parts in fused.items() for part in parts}
    for key, spec in source.specs().items():
        part = _of(key, whole) if key.startswith(prefix) else None
        if part is None:
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        name = whole[part]
        keys = [key.replace(part, one) for one in fused[name]]
        rows = sum(source.specs()[one].shape[0] for one in keys)
        of_all = jax.ShapeDtypeStruct((rows, *spec.shape[1:]), spec.dtype)
        read = functools.partial(lambda keys: np.concatenate([*map(source.read, keys)]), keys)
        tensors[key.replace(part, name)] = of_all, read
    return DerivedSource(source.name, tensors)


def _of(key: str, names: Mapping[str, object]) -> str | None:
    """The name of the linear whose weight or bias a key is."""
    ends = (f".{kind}" for kind in _KINDS)
    stem = next((key.removesuffix(end) for end in ends if key.endswith(end)), key)
    return next((name for name in names if stem.endswith(f".{name}")), None)
