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
from mmqa_jax.models.llama.config import LlamaConfig, RopeScaling
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.formats.torch import TorchFile

_READ = kinds(
    size="dim n_layers n_heads multiple_of",
    size_or_null="n_kv_heads",
    number="norm_eps",
    number_or_null="ffn_dim_multiplier rope_theta",
    flag="use_scaled_rope",
)
_HARMLESS = ("vocab_size", "max_seq_len", "max_batch_size")
# (dim, n_layers) of the models with scaled positions -> by how much: 3.1 and 3.3 as in Meta's
# model.py, 3.2's 1B and 3B as transformers' conversion has it. params.json does not say.
_SCALED_BY = {
    (4096, 32): 8.0,
    (8192, 80): 8.0,
    (16384, 126): 8.0,
    (2048, 16): 32.0,
    (3072, 28): 32.0,
}


def unknown_scaling(config: LlamaConfig) -> dict[str, float]:
    """`Checkpoint.unknown` of a Meta folder."""
    known = config.rope_scaling is None or (config.hidden, config.layers) in _SCALED_BY
    return {} if known else {"rope_scaling.factor": config.rope_scaling.factor}


def read_meta(folder: Path) -> tuple[LlamaConfig, TensorSource]:
    """Opens a folder; reads headers only.

    params.json does not name the context: it is taken from the generation that its other values
    imply (LLaMA-1 2,048; LLaMA-2 4,096; Code Llama 16,384; LLaMA-3 8,192; 3.1 131,072). Nothing
    that is computed depends on it but the longest prompt.
    """
    file = folder / "params.json"
    params = read_json(file)
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps") if key not in params]
    if missing:
        raise UserError(f"{file}: lacks {', '.join(missing)}; give Meta's params.json.")
    check_keys(params, str(file), read=_READ, harmless=_HARMLESS)
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
        sizes = params["dim"], params["n_layers"]
        scaling = RopeScaling("llama3", _SCALED_BY.get(sizes, 8.0))  # model.py apply_scaling
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
