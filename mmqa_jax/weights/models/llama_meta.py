"""Meta's LLaMA folders: params.json and model-parallel files consolidated.00.pth, .01.pth, ..."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.llama_config import LlamaConfig, RopeScaling
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.formats.torch import TorchFile


def read_meta(folder: Path) -> tuple[LlamaConfig, TensorSource]:
    """Opens a folder; reads headers only.

    params.json does not name the context: it is taken from the generation that its other values
    imply (LLaMA-1 2,048; LLaMA-2 4,096; Code Llama 16,384; LLaMA-3 8,192; 3.1 131,072). Nor does
    it distinguish 3.1's rope scaling (by 8, as in Meta's model.py) from 3.2's (by 32): set
    LLaMA-3.2's `rope_scaling` yourself.

    Raises:
      UserError: a missing or broken file, or another number of files than their shapes require.
    """
    file = folder / "params.json"
    params = read_json(file)
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps") if key not in params]
    if missing:
        raise UserError(f"{file}: lacks {', '.join(missing)}; give Meta's params.json.")
    files = sorted(folder.glob("consolidated.*.pth"))
    if not files:
        raise UserError(f"{folder}: holds no consolidated.00.pth; fetch the weights.")
    source = meta_source(files, params["dim"], str(folder))
    table = source.specs().get("tok_embeddings.weight")
    return meta_config(params, table.shape[0] if table else 32000), source


def meta_config(params: Mapping[str, Any], vocab_size: int) -> LlamaConfig:
    """Our config from Meta's params.json (llama/model.py ModelArgs, FeedForward)."""
    mlp = int(2 * 4 * params["dim"] / 3)
    if params.get("ffn_dim_multiplier") is not None:
        mlp = int(params["ffn_dim_multiplier"] * mlp)
    multiple = params.get("multiple_of", 256)
    scaling = None
    if params.get("use_scaled_rope"):
        scaling = RopeScaling("llama3", 8.0)  # model.py apply_scaling
    theta = float(params.get("rope_theta") or 10000.0)
    positions = {500000.0: 8192, 1000000.0: 16384}.get(theta, 4096)
    if theta == 10000.0 and params["norm_eps"] == 1e-6:
        positions = 2048
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden=params["dim"],
        layers=params["n_layers"],
        heads=params["n_heads"],
        kv_heads=params.get("n_kv_heads") or params["n_heads"],
        mlp=multiple * -(-mlp // multiple),
        positions=131072 if scaling else positions,
        eps=params["norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
    )


def meta_source(files: list[Path], hidden: int, name: str) -> TensorSource:
    """Meta's model-parallel files put together, one tensor at a time.

    Column-parallel linears (wq, wk, wv, w1, w3, output) are split by rows of their weight,
    row-parallel ones (wo, w2) by columns; norms are whole in every file. The embedding table is
    split by columns in LLaMA-1 and 2, by rows in LLaMA-3.

    Args:
      files: the shards in order.
      hidden: the model's width; says how many shards there must be and how the table is split.
      name: what messages call them.
    """
    shards = [TorchFile(file) for file in files]
    parts = [shard.specs() for shard in shards]
    for file, part in zip(files, parts, strict=True):
        odd = sorted(part.keys() ^ parts[0].keys())
        if odd:
            raise UserError(
                f"{file}: its tensors are not those of {files[0].name} ({odd[0]!r} is in only one "
                "of them); fetch both again."
            )
    first = parts[0].get("layers.0.attention.wo.weight")
    if first is not None and first.shape[1] * len(files) != hidden:
        raise UserError(
            f"{name}: holds {len(files)} consolidated.*.pth, their shapes require "
            f"{hidden // first.shape[1]}; fetch the missing files."
        )

    def split_axis(key: str) -> int | None:
        shape = parts[0][key].shape
        if len(parts) == 1 or len(shape) < 2:
            return None
        if key == "tok_embeddings.weight":
            return 0 if shape[1] == hidden else 1
        return 1 if key.endswith((".wo.weight", ".w2.weight")) else 0

    def read(key: str, axis: int | None) -> np.ndarray:
        if axis is None:
            return shards[0].read(key)
        return np.concatenate([shard.read(key) for shard in shards], axis=axis)

    tensors = {}
    for key, spec in parts[0].items():
        shape, axis = list(spec.shape), split_axis(key)
        if axis is not None:
            shape[axis] = sum(part[key].shape[axis] for part in parts)
        whole = jax.ShapeDtypeStruct(tuple(shape), spec.dtype)
        tensors[key] = whole, functools.partial(read, key, axis)
    return DerivedSource(name, tensors)
