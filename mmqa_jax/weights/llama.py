"""LLaMA checkpoints: transformers' and Meta's layouts, and export to transformers.

`load_llama` knows a layout by what lies at the path. Every layout is opened as config, key map
and source; the tensors then stream one by one onto their shardings.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.models.llama import Llama
from mmqa_jax.models.llama_config import LlamaConfig, RopeScaling
from mmqa_jax.weights.hf_config import config_file, hf_config
from mmqa_jax.weights.keymap import (
    IDENTITY,
    TRANSPOSE,
    KeyMap,
    Rule,
    StateSource,
    Transform,
    make_loaded,
    untied_source,
)
from mmqa_jax.weights.safetensors_io import TensorSource
from mmqa_jax.weights.sources import open_source, read_magic
from mmqa_jax.weights.torch_io import TorchFile

_BUFFERS = r"rotary_emb\.inv_freq$"


class LlamaCheckpoint(NamedTuple):
    """What is needed to fill a Llama: its config, the key map of the layout, and the tensors."""

    config: LlamaConfig
    key_map: KeyMap
    source: TensorSource
    layout: str  # what was recognised


def interleaved_rows(heads: int) -> Transform:
    """Rows of a query or key projection as Meta and llama.cpp keep them, to our kernel.

    Within each head their rows 2n and 2n + 1 are a rotary pair; in ours (transformers') n and
    n + head_dim / 2 are. Takes a weight (heads * head_dim, in) or a bias (heads * head_dim).
    """

    def forward(x):
        halves = x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2)
        return halves.reshape(x.shape).T

    def inverse(x):
        x = x.T
        return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    return Transform(forward, inverse)


def llama_rules(config: LlamaConfig, prefix: str = "", path: str = "") -> list[Rule]:
    """Rules of transformers' LlamaForCausalLM; `prefix` ends in a dot, `path` in a slash."""
    names = {
        "embed_tokens": "model.embed_tokens",
        "layer": "model.layers.{layer}",
        "norm": "model.norm",
        "head": "lm_head",
        "input_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    return layout_rules(config, names, prefix, path)


def layout_rules(
    config: LlamaConfig,
    names: Mapping[str, str],
    prefix: str = "",
    path: str = "",
    *,
    interleaved: bool = False,
) -> list[Rule]:
    """Rules of one published layout.

    Args:
      config: decides on biases and the head.
      names: the published name of each part (see `llama_rules` for all of them).
      prefix, path: put before keys and paths.
      interleaved: query and key rows are in Meta's order.
    """
    rules = [
        Rule(f"{prefix}{names['embed_tokens']}.weight", f"{path}tokens/table"),
        Rule(f"{prefix}{names['norm']}.weight", f"{path}norm/scale"),
    ]
    if not config.tied:
        rules.append(Rule(f"{prefix}{names['head']}.weight", f"{path}head/kernel", TRANSPOSE))
    layer = f"{prefix}{names['layer']}."
    for norm in ("input_norm", "mlp_norm"):
        rules.append(Rule(f"{layer}{names[norm]}.weight", f"{path}layers/{norm}/scale"))
    heads = {"q": config.heads, "k": config.kv_heads} if interleaved else {}
    for linear in ("q", "k", "v", "out", "gate", "up", "down"):
        turned = interleaved_rows(heads[linear]) if linear in heads else None
        key, ours = f"{layer}{names[linear]}", f"{path}layers/{linear}"
        rules.append(Rule(f"{key}.weight", f"{ours}/kernel", turned or TRANSPOSE))
        if config.mlp_bias if linear in ("gate", "up", "down") else config.attention_bias:
            rules.append(Rule(f"{key}.bias", f"{ours}/bias", turned or IDENTITY))
    return rules


def llama_key_map(config: LlamaConfig) -> KeyMap:
    """Key map of transformers' LlamaForCausalLM."""
    tied = (("lm_head.weight", "model.embed_tokens.weight"),) if config.tied else ()
    return KeyMap(llama_rules(config), ignore=(_BUFFERS,), tied=tied)


def meta_key_map(config: LlamaConfig) -> KeyMap:
    """Key map of Meta's Transformer (meta-llama/llama llama/model.py) and of llama2.c's."""
    names = {
        "embed_tokens": "tok_embeddings",
        "layer": "layers.{layer}",
        "norm": "norm",
        "head": "output",
        "input_norm": "attention_norm",
        "mlp_norm": "ffn_norm",
        "q": "attention.wq",
        "k": "attention.wk",
        "v": "attention.wv",
        "out": "attention.wo",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
    }
    return KeyMap(layout_rules(config, names, interleaved=True), ignore=(r"^rope\.freqs$",))


def open_llama(path: str | os.PathLike) -> LlamaCheckpoint:
    """Opens a LLaMA checkpoint of any layout, known by its content; reads headers only.

    Args:
      path: a GGUF file or a folder with one, a llama2.c `.bin` file, a folder with Meta's
        `params.json` and `consolidated.*.pth`, or transformers' folder, or file beside its
        `config.json`, of safetensors or torch tensors.

    Raises:
      UserError: a missing or broken file, another model's config, several GGUF files.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"{path}: no such file, neither a folder nor a checkpoint's file; check the path."
        )
    if path.is_dir():
        if (path / "params.json").exists() or any(path.glob("consolidated.*.pth")):
            return open_meta(path)
        found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(found) > 1:
            raise UserError(
                f"{path}: holds {len(found)} .gguf files; give one of them, e.g. {found[0]}."
            )
        path = found[0] if found else path
    kind = "folder" if path.is_dir() else read_magic(path)
    if kind == "gguf" or path.suffix == ".gguf":  # a broken one is its reader's to name
        from mmqa_jax.weights.gguf_io import open_gguf

        return open_gguf(path)
    if kind == "other" and path.suffix == ".bin":
        from mmqa_jax.weights.llama2c import open_llama2c

        return open_llama2c(path)
    if kind == "other":
        raise UserError(
            f"{path}: not a checkpoint that is known (GGUF, llama2.c's .bin, safetensors, torch); "
            "give the file or folder as it was published."
        )
    return open_hf(path)


def load_llama(
    path: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    param_dtype: str = "float32",
    **changes: Any,
) -> Llama:
    """Reads a LLaMA checkpoint of any layout (see `open_llama`).

    Args:
      path: file or folder.
      mesh: where the parameters go, each tensor straight onto its shards; None is the default
        device.
      rules: logical axis -> mesh axis.
      param_dtype: of the parameters; bfloat16 halves memory where nothing is trained.
      changes: fields of LlamaConfig that the checkpoint does not decide (dtype, attention,
        remat, unroll, positions).

    Raises:
      UserError: as `open_llama`, or tensors that do not fit.
    """
    config, key_map, source, _ = open_llama(path)
    config = dataclasses.replace(config, **changes)
    where = {"mesh": mesh, "rules": rules, "param_dtype": param_dtype}
    return make_loaded(lambda: Llama(config, rngs=nnx.Rngs(0)), key_map, source, **where)


def stacked_source(state: nnx.State, key_map: KeyMap) -> StateSource:
    """`untied_source` of a model with a LLaMA; raises TypeError where its layers are unstacked."""
    source = untied_source(state, key_map)
    if not any(".layers." in key and "vision" not in key for key in source.specs()):
        raise TypeError("unstacked layers are for generation: export the stacked model")
    return source


def open_hf(path: Path) -> LlamaCheckpoint:
    """Opens transformers' layout: config.json with safetensors or, as Vicuna-1.5, torch files.

    Raises:
      UserError: no config.json, another model's, a missing or broken file.
    """
    config = LlamaConfig.from_hf(hf_config(path, "llama"), str(config_file(path)))
    return LlamaCheckpoint(config, llama_key_map(config), open_source(path), "transformers")


def open_meta(folder: str | os.PathLike) -> LlamaCheckpoint:
    """Opens Meta's layout: params.json and consolidated.00.pth, .01.pth, ...

    params.json does not name the context: it is taken from the generation that its other values
    tell (LLaMA-1 2,048; LLaMA-2 4,096; Code Llama 16,384; LLaMA-3 8,192; 3.1 131,072). Nor does
    it tell 3.1's rope scaling (by 8, as in Meta's model.py) from 3.2's (by 32): give LLaMA-3.2's
    to `load_llama` as `rope_scaling`.

    Raises:
      UserError: a missing or broken file, shards of another number than their shapes ask for.
    """
    folder = Path(folder)
    file = folder / "params.json"
    params = read_json(file)
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps") if key not in params]
    if missing:
        raise UserError(f"{file}: lacks {', '.join(missing)}; give Meta's params.json.")
    files = sorted(folder.glob("consolidated.*.pth"))
    if not files:
        raise UserError(f"{folder}: holds no consolidated.00.pth; fetch the weights.")
    source = MetaSource(files, params["dim"], str(folder))
    specs = source.specs()
    table = specs.get("tok_embeddings.weight")
    config = meta_config(params, table.shape[0] if table else 32000)
    return LlamaCheckpoint(config, meta_key_map(config), source, "meta")


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


class MetaSource:
    """Meta's model-parallel files put together, one tensor at a time.

    Column-parallel linears (wq, wk, wv, w1, w3, output) are split by rows of their weight,
    row-parallel ones (wo, w2) by columns; norms are whole in every file. The token table is
    split by columns in LLaMA-1 and 2, by rows in LLaMA-3.

    Args:
      files: the shards in order.
      hidden: the model's width; tells how many shards there must be and how the table is split.
      name: what messages call them.
    """

    def __init__(self, files: list[Path], hidden: int, name: str):
        self.name = name
        self._hidden = hidden
        self._files = [TorchFile(file) for file in files]
        self._parts = [file.specs() for file in self._files]
        for file, part in zip(files, self._parts, strict=True):
            odd = sorted(part.keys() ^ self._parts[0].keys())
            if odd:
                raise UserError(
                    f"{file}: its tensors are not those of {files[0].name} ({odd[0]!r} is in one "
                    "of them alone); fetch both again."
                )
        first = self._parts[0].get("layers.0.attention.wo.weight")
        if first is not None and first.shape[1] * len(files) != hidden:
            raise UserError(
                f"{name}: holds {len(files)} consolidated.*.pth, their shapes ask for "
                f"{hidden // first.shape[1]}; fetch the missing files."
            )

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every whole tensor, by key."""
        found = {}
        for key, spec in self._parts[0].items():
            shape, axis = list(spec.shape), self._axis(key)
            if axis is not None:
                shape[axis] = sum(part[key].shape[axis] for part in self._parts)
            found[key] = jax.ShapeDtypeStruct(tuple(shape), spec.dtype)
        return found

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from all files."""
        axis = self._axis(key)
        if axis is None:
            return self._files[0].read(key)
        return np.concatenate([file.read(key) for file in self._files], axis=axis)

    def _axis(self, key: str) -> int | None:
        shape = self._parts[0][key].shape
        if len(self._parts) == 1 or len(shape) < 2:
            return None
        if key == "tok_embeddings.weight":
            return 0 if shape[1] == self._hidden else 1
        return 1 if key.endswith((".wo.weight", ".w2.weight")) else 0
