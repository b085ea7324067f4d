"""LLaMA's checkpoints and its relatives': layouts of transformers, Meta, llama.cpp and llama2.c.

Names and row order: llama.cpp gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py
(LlamaModel.permute), meta-llama/llama llama/model.py.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.common import comparison
from mmqa_jax.models.common.activations import LEARNED
from mmqa_jax.models.llama import expert_tensors
from mmqa_jax.models.llama.config import LlamaConfig, RopeScaling
from mmqa_jax.models.llama.families import FAMILIES
from mmqa_jax.models.llama.gguf import RENAMED, ROPE_FACTORS, TURNED, curves, gguf_config
from mmqa_jax.models.llama.layer_kinds import CONV_LINEARS
from mmqa_jax.models.llama.network import Llama, inverse_frequencies, unstacked_llama
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.gguf import GGUFSource
from mmqa_jax.weights.formats.llama2c import Header, Llama2cSource
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.formats.torch import TorchFile
from mmqa_jax.weights.keymap import IDENTITY, TRANSPOSE, KeyMap, Rule, Transform, untied_source

# Part of the model: its name in transformers, Meta's (and llama2.c's), and llama.cpp's layout.
_LAYOUTS = ("transformers", "meta", "gguf")
_NAMES = {
    "tokens": ("model.embed_tokens", "tok_embeddings", "token_embd"),
    "layer": ("model.layers.{layer}", "layers.{layer}", "blk.{layer}"),
    "norm": ("model.norm", "norm", "output_norm"),
    "head": ("lm_head", "output", "output"),
    "input_norm": ("input_layernorm", "attention_norm", "attn_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm", "ffn_norm"),
    "q_norm": ("self_attn.q_norm", "", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "", "attn_k_norm"),
    "sinks": ("self_attn.sinks", "", "attn_sinks.weight"),
    "q": ("self_attn.q_proj", "attention.wq", "attn_q"),
    "k": ("self_attn.k_proj", "attention.wk", "attn_k"),
    "v": ("self_attn.v_proj", "attention.wv", "attn_v"),
    "out": ("self_attn.o_proj", "attention.wo", "attn_output"),
    "out_gate": ("self_attn.gate_proj", "", ""),  # of queries' rows, see fused_rows
    "side_gate": ("per_layer_input_gate", "", ""),  # of `LlamaConfig.side`
    "side_out": ("per_layer_projection", "", ""),
    "side_norm": ("post_per_layer_input_norm", "", ""),
    "gate": ("mlp.gate_proj", "feed_forward.w1", "ffn_gate"),
    "up": ("mlp.up_proj", "feed_forward.w3", "ffn_up"),
    "down": ("mlp.down_proj", "feed_forward.w2", "ffn_down"),
}
_NORMS_AFTER = {  # OLMo 2's and Gemma's, in transformers and llama.cpp
    "out_norm": ("post_attention_layernorm", "", "post_attention_norm"),
    "down_norm": ("post_feedforward_layernorm", "", "post_ffw_norm"),
}
_EXPERTS = {  # of a mixture, all of a layer in one tensor (see expert_tensors)
    "router": ("mlp.gate", "", "ffn_gate_inp"),
    "gate": ("mlp.experts.gate_proj", "", "ffn_gate_exps"),
    "up": ("mlp.experts.up_proj", "", "ffn_up_exps"),
    "down": ("mlp.experts.down_proj", "", "ffn_down_exps"),
}
_DELTA = {  # of the gated delta rule, in transformers; what is fused there is apart (fused_rows)
    **{part: f"linear_attn.{part}_proj" for part in ("q", "k", "v")},
    **{"gate": "linear_attn.in_proj_z", "correction": "linear_attn.in_proj_b"},
    **{"decay": "linear_attn.in_proj_a", "out": "linear_attn.out_proj"},
}
_BESIDE = {  # of experts beside an MLP (Gemma 4)
    "experts/router_scale": "router.scale",
    "experts/expert_scale": "router.per_expert_scale",
    "experts/input_scale": "pre_feedforward_layernorm_2.weight",
    "dense_norm/scale": "post_feedforward_layernorm_1.weight",
    "experts_norm/scale": "post_feedforward_layernorm_2.weight",
}
_SIDE = {  # of `LlamaConfig.side`, what is no layer's
    "side_tokens/table": "model.embed_tokens_per_layer.weight",
    "side_projection/kernel": "model.per_layer_model_projection.weight",
    "side_norm/scale": "model.per_layer_projection_norm.weight",
}
_NORMS_BOTH = {**_NORMS_AFTER, "mlp_norm": ("pre_feedforward_layernorm", "", "ffn_norm")}
_COMPUTED = {  # tensors that the model computes
    "transformers": r"rotary_emb\.inv_freq$",
    "meta": r"^rope\.freqs$",
    "gguf": rf"^({ROPE_FACTORS}|rope_factors_(short|long)\.weight)$",
}


def proposing(config: LlamaConfig) -> tuple[str, ...]:
    """The keys of layers that propose tokens, which are no part of the model."""
    if "num_nextn_predict_layers" in FAMILIES[config.family].harmless:
        return (rf"^model\.layers\.{config.layers}\.", r"^mtp\.")
    return (r"^mtp\.",) if config.delta else ()


LESS_ONE = Transform(lambda x: x - 1, lambda x: x + 1)
_TAPS = Transform(lambda x: x[:, 0].T, lambda x: x.T[:, None])  # Conv1d (channels, 1, taps)
# (1, inputs), or (inputs) in GGUF files, <-> [inputs, 1].
_COLUMN = Transform(lambda x: x.reshape(-1, 1), lambda x: x.T)
SWAPPED = Transform(lambda x: x.swapaxes(-1, -2), lambda x: x.swapaxes(-1, -2))


def rows_of_heads(heads: int, size: int, order: np.ndarray) -> Transform:
    """Rows of a projection, `size` of each head, in the order that is given, to our kernel."""

    def taken(x, order):
        return x.reshape(heads, size, *x.shape[1:])[:, order].reshape(x.shape)

    return Transform(lambda x: taken(x, order).T, lambda x: taken(x.T, np.argsort(order)))


def rotary_rows(heads: int, size: int, rotated: int, *, neighbours: bool) -> Transform:
    """Rows of a query or key projection of which the first `rotated` of each head's `size` are
    rotated, to our kernel, in which rotary pairs are the halves of the whole head.

    neighbours: pairs are the rows 2n and 2n + 1 (Meta, llama.cpp), not n and n + rotated / 2.
    Takes a weight (heads * size, in) or a bias (heads * size).
    """
    turning, rest = np.arange(rotated), np.arange(rotated, size)
    first, second = (turning[0::2], turning[1::2]) if neighbours else np.split(turning, 2)
    middle = len(rest) // 2
    ours = np.concatenate([first, rest[:middle], second, rest[middle:]])
    return rows_of_heads(heads, size, ours)


def llama_rules(
    config: LlamaConfig, layout: str = "transformers", prefix: str = "", path: str = ""
) -> list[Rule]:
    """Rules of one published layout.

    Args:
      config: decides on biases and the head.
      layout: transformers (LlamaForCausalLM), meta (llama2.c too) or gguf.
      prefix: in front of the keys; ends in a dot.
      path: in front of the parameters' paths; ends in a slash.
    """
    column = _LAYOUTS.index(layout)
    further = {"before": {}, "after": _NORMS_AFTER, "both": _NORMS_BOTH}[config.norms]
    rows = _NAMES | further
    names = {part: row[column] for part, row in rows.items()}
    # llama.cpp keeps what is multiplied by.
    of_norms = LESS_ONE if layout == "gguf" and config.unit_norms else IDENTITY
    rules = [
        Rule(f"{prefix}{names['tokens']}.weight", f"{path}tokens/table"),
        *_norm_rules(config, f"{prefix}{names['norm']}", f"{path}norm", of_norms),
    ]
    if not config.tied:
        rules.append(Rule(f"{prefix}{names['head']}.weight", f"{path}head/kernel", TRANSPOSE))
    layer, places = f"{prefix}{names['layer']}.", config.period if config.kinds else 1
    for place in range(places):
        parts = f"{path}layers/places/{place}/" if config.kinds else f"{path}layers/"
        of_layer = _layer_rules(config.of_layer(place), names, layout, layer, parts)
        rules += [dataclasses.replace(rule, first=place, step=places) for rule in of_layer]
    for ours, key in _SIDE.items() if config.side else ():
        if config.side_table or ours != "side_tokens/table":
            turned = TRANSPOSE if ours.endswith("/kernel") else IDENTITY
            rules.append(Rule(f"{prefix}{key}", f"{path}{ours}", turned))
    return rules


def _layer_rules(
    config: LlamaConfig, names: Mapping[str, str], layout: str, layer: str, path: str
) -> list[Rule]:
    """Rules of layers of one kind; `layer` and `path` are in front of keys and paths."""
    rules = []
    if config.recurrent and config.delta:
        rules = _delta_rules(layer, f"{path}delta/")
    elif config.recurrent:
        rules = [
            Rule(f"{layer}conv.{part}_proj.weight", f"{path}conv/{part}/kernel", TRANSPOSE)
            for part in CONV_LINEARS
        ]
        taps = TRANSPOSE if layout == "gguf" else _TAPS
        rules.append(Rule(f"{layer}conv.conv.weight", f"{path}conv/taps", taps))
    elif config.latent:
        rules = _latent_rules(config, f"{layer}self_attn.", f"{path}latent/")
    # llama.cpp keeps what is multiplied by.
    of_norms = LESS_ONE if layout == "gguf" and config.unit_norms else IDENTITY
    neighbours = FAMILIES[config.family].neighbours or layout == "meta"
    neighbours |= layout == "gguf" and config.family in TURNED
    sizes, turns = (config.head_size, config.rotary_size), {}
    if neighbours or len({*sizes}) > 1:
        turned = functools.partial(rotary_rows, neighbours=neighbours)
        turns = {"q": turned(config.heads, *sizes), "k": turned(config.kv_heads, *sizes)}
        if config.qk_norm == "head":
            turns |= {"q_norm": turned(1, *sizes), "k_norm": turned(1, *sizes)}
        if config.qk_norm == "whole":
            turns |= {"q_norm": turns["q"], "k_norm": turns["k"]}
    norms = () if config.norms == "after" else ("input_norm", "mlp_norm")[: 2 - config.parallel]
    norms += () if config.norms == "before" else ("out_norm", "down_norm")
    norms += (
        ("q_norm", "k_norm") if config.qk_norm in ("head", "whole") and not config.recurrent else ()
    )
    norms = tuple(norm for norm in norms if norm != "k_norm" or not config.borrows)
    norms += ("side_norm",) if config.side else ()
    for norm in norms:
        turned = turns.get(norm, of_norms)
        rules += _norm_rules(config, f"{layer}{names[norm]}", f"{path}{norm}", turned)
    for linear in config.linears:
        turned = turns.get(linear)
        key, ours = f"{layer}{names[linear]}", f"{path}{linear}"
        rules.append(Rule(f"{key}.weight", f"{ours}/kernel", turned or TRANSPOSE))
        if linear in config.biases:
            rules.append(Rule(f"{key}.bias", f"{ours}/bias", turned or IDENTITY))
    for part, keys in _EXPERTS.items() if config.experts else ():
        ours = (
            ("router", "router_bias") if part == "router" else (f"{part}/kernels", f"{part}/bias")
        )
        key, experts = f"{layer}{keys[_LAYOUTS.index(layout)]}", f"{path}experts/"
        rules.append(Rule(f"{key}.weight", f"{experts}{ours[0]}", SWAPPED))
        if part == "router" and config.choice_bias:
            choice = (
                f"{layer}exp_probs_b.bias" if layout == "gguf" else f"{key}.e_score_correction_bias"
            )
            rules.append(Rule(choice, f"{experts}choice_bias"))
        if config.mlp_bias:
            rules.append(Rule(f"{key}.bias", f"{experts}{ours[1]}"))
    if config.activation in LEARNED:
        curve = {"mlp.act_fn.alpha_p": "rising", "mlp.act_fn.alpha_n": "falling"}
        rules += [Rule(f"{layer}{key}", f"{path}{ours}") for key, ours in curve.items()]
    if config.sinks:
        rules.append(Rule(f"{layer}{names['sinks']}", f"{path}sinks"))
    for ours, key in _BESIDE.items() if config.experts_beside else ():
        rules.append(Rule(f"{layer}{key}", f"{path}{ours}"))
    if config.layer_scales:
        rules.append(Rule(f"{layer}layer_scalar", f"{path}scale"))
    if config.shared_expert:
        shared = {f".{part}_proj": f"{part}/kernel" for part in ("gate", "up", "down")}
        for key, ours in (shared | ({"_gate": "choice"} if config.shared_gate else {})).items():
            key = f"{layer}mlp.shared_expert{key}.weight"
            if layout == "gguf":
                part = "gate_inp" if ours == "choice" else ours.split("/")[0]
                key = f"{layer}ffn_{part}_shexp.weight"
            turned = _COLUMN if ours == "choice" else TRANSPOSE
            rules.append(Rule(key, f"{path}shared/{ours}", turned))
    return rules


def _norm_rules(config: LlamaConfig, key: str, path: str, transform: Transform) -> list[Rule]:
    biased = config.norm_kind == "biased_layer" and not path.endswith(("q_norm", "k_norm"))
    rules = [Rule(f"{key}.weight", f"{path}/scale", transform)]
    return [*rules, Rule(f"{key}.bias", f"{path}/bias")] if biased else rules


def _delta_rules(layer: str, path: str) -> list[Rule]:
    rules = [
        Rule(f"{layer}{key}.weight", f"{path}{part}/kernel", TRANSPOSE)
        for part, key in _DELTA.items()
    ]
    rules += [
        Rule(f"{layer}linear_attn.{part}_conv.weight", f"{path}{part}_taps", _TAPS)
        for part in "qkv"
    ]
    others = {"A_log": "decay_rate", "dt_bias": "decay_bias", "norm.weight": "norm"}
    return rules + [
        Rule(f"{layer}linear_attn.{key}", f"{path}{ours}") for key, ours in others.items()
    ]


def _latent_rules(config: LlamaConfig, attention: str, path: str) -> list[Rule]:
    """Rules of attention over latents; the rows of keys and values are apart (`fused_rows`). Rotary
    pairs are neighbours there."""
    sizes, heads = config.latent, config.heads

    def rows(heads: int, resting: int) -> Transform:
        turning = np.arange(sizes.turning).reshape(-1, 2).T.reshape(-1) + resting
        return rows_of_heads(
            heads, resting + sizes.turning, np.concatenate([np.arange(resting), turning])
        )

    of_keys = Transform(
        lambda x: x.reshape(heads, -1, sizes.rank), lambda x: x.reshape(-1, sizes.rank)
    )
    of_values = Transform(
        lambda x: x.reshape(heads, -1, sizes.rank).swapaxes(1, 2),
        lambda x: x.swapaxes(1, 2).reshape(-1, sizes.rank),
    )
    q = rows(heads, sizes.resting)
    rules = [
        Rule(f"{attention}kv_a_proj_with_mqa.weight", f"{path}down/kernel", rows(1, sizes.rank)),
        Rule(f"{attention}kv_a_layernorm.weight", f"{path}norm/scale"),
        Rule(f"{attention}k_b_proj.weight", f"{path}key_up", of_keys),
        Rule(f"{attention}v_b_proj.weight", f"{path}value_up", of_values),
    ]
    if not sizes.query_rank:
        return [*rules, Rule(f"{attention}q_proj.weight", f"{path}q/kernel", q)]
    return [
        *rules,
        Rule(f"{attention}q_a_proj.weight", f"{path}q_down/kernel", TRANSPOSE),
        Rule(f"{attention}q_a_layernorm.weight", f"{path}q_norm/scale"),
        Rule(f"{attention}q_b_proj.weight", f"{path}q/kernel", q),
    ]


def unread(config: LlamaConfig) -> list[str]:
    """Patterns of published tensors of layers that borrow keys and values, which nothing reads."""
    borrowers = range(config.layers - (config.borrowers or 0), config.layers)
    numbers = "|".join(map(str, borrowers))
    layers = rf"^(?:language_model\.)?model\.layers\.(?:{numbers})\."
    return [rf"{layers}self_attn\.[kv]_(proj|norm)\."] if numbers else []


def llama_key_map(config: LlamaConfig, layout: str = "transformers") -> KeyMap:
    """Key map of one published layout, see `llama_rules`."""
    tied = (("lm_head.weight", "model.embed_tokens.weight"),) if config.tied else ()
    if layout != "transformers":
        tied = ()
    ignore = (_COMPUTED[layout], *proposing(config), *unread(config))
    return KeyMap(llama_rules(config, layout), ignore=ignore, tied=tied)


_META = functools.partial(llama_key_map, layout="meta")
_GGUF = functools.partial(llama_key_map, layout="gguf")


def layers_apart(checkpoint: layouts.Checkpoint) -> tuple[Callable[..., Llama], layouts.Checkpoint]:
    """The model whose layers `unstack_layers` has taken apart, and the checkpoint for it.

    Each layer has arrays of its own, its kernels are [out, in], as most files keep them.
    """

    def moved(rule: Rule) -> Rule:
        if not rule.stacked:
            return rule
        turn = rule.path.endswith("/kernel")
        return dataclasses.replace(
            rule,
            path=re.sub(r"layers/(places/\d+/)?", "layers/{layer}/", rule.path, count=1),
            transform=_transposed(rule.transform) if turn else rule.transform,
        )

    def key_map(config: LlamaConfig) -> KeyMap:
        stacked = checkpoint.key_map(config)
        return dataclasses.replace(stacked, rules=[moved(rule) for rule in stacked.rules])

    return unstacked_llama, checkpoint._replace(key_map=key_map)


def _transposed(transform: Transform) -> Transform:
    inverse = transform.inverse
    return Transform(
        lambda x: transform.forward(x).T,
        inverse and (lambda x: inverse(x.T)),
    )


def open_llama(path: Path) -> layouts.Checkpoint:
    """Opens a LLaMA checkpoint of any layout, known by its content; reads headers only.

    `path`: a GGUF file or a folder with one, a llama2.c `.bin` file, a folder with Meta's
    `params.json` and `consolidated.*.pth`, or transformers' folder, or file beside its
    `config.json`, of safetensors or torch tensors.
    """
    if not path.exists():
        raise UserError(
            f"{path}: no such file, neither a folder nor a checkpoint's file; check the path."
        )
    if (path / "params.json").exists() or any(path.glob("consolidated.*.pth")):
        config, source = read_meta(path)
        return layouts.Checkpoint(config, _META, source, "meta", unknown=unknown_scaling(config))
    gguf = layouts.gguf_file(path)
    if gguf is not None:
        source = gguf_source = GGUFSource(gguf)
        config = gguf_config(gguf_source)
        source = renamed(source, RENAMED.get(config.family, {}))
        if FAMILIES[config.family].fused:
            source = apart(source, fused_gguf_rows(config))
        if config.activation in LEARNED:
            source = layouts.with_arrays(source, curves(gguf_source, config))
        return layouts.Checkpoint(config, _GGUF, source, "gguf")
    kind = "folder" if path.is_dir() else layouts.read_magic(path)
    if kind == "other" and path.suffix == ".bin":
        source = Llama2cSource(path)
        config = _llama2c_config(source.header)
        return layouts.Checkpoint(config, _META, source, "llama2.c", _check_angles)
    if kind == "other":
        raise UserError(
            f"{path}: not a checkpoint that is known (GGUF, llama2.c's .bin, safetensors, torch); "
            "give the file or folder as it was published."
        )
    where = str(layouts.config_file(path))
    published, source = layouts.open_hf(path, *FAMILIES, *WITH_TOWER)
    if published["model_type"] in WITH_TOWER:
        published, source = language_model(published, source, where)
    config = LlamaConfig.from_hf(published, where)
    return layouts.Checkpoint(
        config, llama_key_map, to_rule_tensors(source, config), "transformers"
    )


def to_rule_tensors(source: TensorSource, config: LlamaConfig) -> TensorSource:
    """The tensors of a transformers checkpoint as `llama_rules` names them.

    Fused tensors (Phi-3's) are apart, and those of all experts of a layer are one.
    """
    family = FAMILIES[config.family]
    source = without_constants(renamed(source, family.tensors), family.constants)
    if family.fused:
        source = apart(source, fused_rows(config))
    if family.experts_across:
        return expert_tensors.experts_by_linear(source, in_turn=family.experts_across == "in turn")
    return expert_tensors.experts_together(source, config.experts) if config.experts else source


def to_published_tensors(
    source: TensorSource, config: LlamaConfig, prefix: str = ""
) -> TensorSource:
    """The reverse of `to_rule_tensors`; `prefix` is in front of the decoder's keys."""
    family = FAMILIES[config.family]
    if family.fused:
        source = together(source, fused_rows(config), prefix)
    if family.experts_across:
        source = expert_tensors.experts_across(source, in_turn=family.experts_across == "in turn")
    elif family.experts_paired:
        source = expert_tensors.experts_paired(source)
    elif config.experts:
        source = expert_tensors.experts_apart(source)
    if family.constants:
        source = with_constants(source, config, prefix)
    return renamed(source, published_names(config.family))


def published_names(family: str) -> dict[str, str]:
    """Parts of our rules' keys -> what a family's checkpoints have in their place."""
    published: dict[str, str] = {}
    for theirs, ours in FAMILIES[family].tensors.items():
        published.setdefault(ours, theirs)  # the first of two is the one that is published
    return published


def without_constants(source: TensorSource, constants: Mapping[str, float]) -> TensorSource:
    """The tensors without those that have one value alone, which is checked."""
    tensors = {}
    for key, spec in source.specs().items():
        value = next((value for end, value in constants.items() if key.endswith(end)), None)
        if value is None:
            tensors[key] = spec, functools.partial(source.read, key)
        elif not np.allclose(source.read(key).astype(np.float32), value, rtol=0.01, atol=0):
            raise UserError(
                f"{source.name}: {key} is not {value}, the only value that is computed here; use "
                "another checkpoint."
            )
    return DerivedSource(source.name, tensors) if constants else source


def with_constants(source: TensorSource, config: LlamaConfig, prefix: str) -> TensorSource:
    """The reverse: each layer has them."""
    dtype = next(iter(source.specs().values())).dtype
    layers = [f"{prefix}model.layers.{number}." for number in range(config.layers)]
    constants = FAMILIES[config.family].constants
    arrays = {
        f"{layer}{key}": np.array(x, dtype) for layer in layers for key, x in constants.items()
    }
    return layouts.with_arrays(source, arrays)


def renamed(source: TensorSource, names: Mapping[str, str]) -> TensorSource:
    """The tensors under other names: each part of `names` that a name holds is replaced, once.

    A tower's tensors, which a decoder's names do not concern, stay as they are.
    """
    if not names:
        return source
    tensors = {
        key if _TOWER.match(key) else with_names(key, names): (
            spec,
            functools.partial(source.read, key),
        )
        for key, spec in source.specs().items()
    }
    return DerivedSource(source.name, tensors)


def with_names(key: str, names: Mapping[str, str]) -> str:
    """The key with each part of `names` replaced, once."""
    if not names:
        return key
    return re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], key)


def publish_llama(config: LlamaConfig, state: nnx.State) -> layouts.Published:
    """LlamaForCausalLM, or the class of the config's family."""
    source = untied_source(state, llama_key_map(config))
    return layouts.Published(to_published_tensors(source, config), config.to_hf())


def _check_angles(source: TensorSource, config: LlamaConfig) -> None:
    """Refuses a llama2.c file whose rotary angles, kept in version 0, are not the config's."""
    stored = source.cosines()
    if stored is None or not (stored[0] == 1).all():  # left empty: there is nothing to compare
        return
    theirs = stored[1:2]  # [1, head_dim / 2], of the second position
    ours = np.cos(np.asarray(inverse_frequencies(config)))[None]
    if np.abs(theirs - ours).max(initial=0.0) > 1e-4:
        raise UserError(
            f"{source.name}: its rotary angles are not those of rope_theta {config.rope_theta:g}; "
            "add `--set rope_theta=VALUE` with the model's own."
        )


def _llama2c_config(header: Header) -> LlamaConfig:
    """eps (1e-5) and theta (10,000) are run.c's."""
    return LlamaConfig(
        vocab_size=header.vocab_size,
        hidden=header.dim,
        layers=header.layers,
        heads=header.heads,
        kv_heads=header.kv_heads,
        mlp=header.hidden_dim,
        positions=header.context,
        tied=header.tied,
    )


# The language model in a Gemma checkpoint that has towers; these are left out.


# What people call it, and whether its class takes the head's cap.
WITH_TOWER = {
    **{"gemma3": ("Gemma 3", False), "gemma4": ("Gemma 4", True)},
    "gemma4_unified": ("Gemma 4", True),
    "llama4": ("Llama 4", False),
}
_READ = kinds(
    object="text_config", object_or_null="vision_config audio_config", flag="tie_word_embeddings"
)
_OF_PICTURES = (
    *("mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    "eoa_token_index",
)
# As published, and as transformers 4.52 and later write it.
_LANGUAGE_MODEL = re.compile(
    r"^(?:language_model\.(model\.|lm_head\.)|model\.language_model\.|(lm_head\.))"
)
_TOWER = re.compile(
    r"^(?:model\.)?(vision_tower|vision_model|audio_tower|multi_modal_projector|vision_embedder|embed_vision|"
    r"embed_audio)\."
)


def language_model(
    published: Mapping[str, Any], source: TensorSource, where: str
) -> tuple[dict[str, Any], TensorSource]:
    """The config.json and the tensors of the language model alone, as its own class has them.

    A warning names the parts that are left out.

    Args:
      published: the config.json of a model type of `WITH_TOWER`.
      source: its tensors.
      where: what messages call the file.
    """
    check_keys(published, where, read=_READ, harmless=_OF_PICTURES)
    inherited = {key: published[key] for key in ("tie_word_embeddings",) if key in published}
    title, capped = WITH_TOWER[published["model_type"]]
    text = {
        **inherited,
        "model_type": f"{published['model_type']}_text",
        **published["text_config"],
    }
    if not capped:
        text["final_logit_softcapping"] = None
    tensors, left_out = {}, set()
    for key, spec in source.specs().items():
        if tower := _TOWER.match(key):
            left_out.add(tower[1])
            continue
        ours = _LANGUAGE_MODEL.sub(lambda match: match[1] or match[2] or "model.", key)
        tensors[ours] = spec, functools.partial(source.read, key)
    logging.getLogger(__name__).warning(
        "%s: of this %s the language model is read (--model=llava reads it whole); %s left out, "
        "it sees no pictures",
        where,
        title,
        f"its {' and '.join(sorted(left_out))} are" if left_out else "a vision tower is",
    )
    return text, DerivedSource(source.name, tensors)


# Beside transformers.


def _run(model: Llama, inputs: Mapping[str, jax.Array]) -> comparison.Outputs:
    embedded = model.embed(inputs["ids"])
    layers = model.layer_outputs(embedded)
    logits = model.logits(model.norm(layers[-1]))
    return comparison.Outputs({"": comparison.states_of(embedded, layers)}, {"logits": logits})


CHECK = comparison.Check("AutoModelForCausalLM", _run, {"logits": "logits"})


# Linears that a checkpoint keeps as rows of one tensor (q, k and v; gate and up): apart, and
# back. A family says which.


class Parts(NamedTuple):
    """The rows of one tensor."""

    rows: Mapping[str, int]  # of each part, by its name
    groups: int = 1  # how often these follow one another, as for every head


Fused = Mapping[str, Parts]  # by the name of the whole
_KINDS = ("weight", "bias")


def fused_rows(config: LlamaConfig) -> Fused:
    """Of a family, as transformers calls them."""
    of_keys, size = config.kv_heads * config.head_size, config.head_size
    wholes = {
        "self_attn.qkv_proj": Parts(
            {
                "self_attn.q_proj": config.heads * size,
                "self_attn.k_proj": of_keys,
                "self_attn.v_proj": of_keys,
            }
        ),
        "mlp.gate_up_proj": Parts({"mlp.gate_proj": config.mlp, "mlp.up_proj": config.mlp}),
        "mlp.shared_expert.gate_up_proj": Parts(
            dict.fromkeys(
                (f"mlp.shared_expert.{part}_proj" for part in ("gate", "up")),
                config.shared_expert or 0,
            )
        ),
        "self_attn.q_proj": Parts(
            {"self_attn.q_proj": size, "self_attn.gate_proj": size}, config.heads
        ),
    }
    if latent := config.latent:
        parts = {"self_attn.k_b_proj": latent.resting, "self_attn.v_b_proj": latent.value}
        wholes["self_attn.kv_b_proj"] = Parts(parts, config.heads)
    if config.conv_taps:
        rows = dict.fromkeys((f"conv.{part}_proj" for part in CONV_LINEARS[:3]), config.hidden)
        wholes["conv.in_proj"] = Parts(rows)
    if delta := config.delta:
        per = delta.value_heads // delta.key_heads
        keys, values = delta.key_size, per * delta.value_size
        once = {"q": keys * delta.key_heads, "k": keys * delta.key_heads}
        once["v"] = values * delta.key_heads
        wholes |= {
            "linear_attn.in_proj_qkv": Parts(
                {f"linear_attn.{part}_proj": rows for part, rows in once.items()}
            ),
            "linear_attn.conv1d": Parts(
                {f"linear_attn.{part}_conv": rows for part, rows in once.items()}
            ),
            "linear_attn.in_proj_qkvz": Parts(  # Qwen3-Next's, of each key head
                {
                    **{f"linear_attn.{part}_proj": keys for part in "qk"},
                    **{"linear_attn.v_proj": values, "linear_attn.in_proj_z": values},
                },
                delta.key_heads,
            ),
            "linear_attn.in_proj_ba": Parts(
                {"linear_attn.in_proj_b": per, "linear_attn.in_proj_a": per}, delta.key_heads
            ),
        }
    return {
        name: parts
        for name, parts in wholes.items()
        if name.split(".")[1].removesuffix("_proj") in FAMILIES[config.family].fused
    }


def fused_gguf_rows(config: LlamaConfig) -> Fused:
    """`fused_rows` in llama.cpp's names."""
    names = {
        "self_attn.qkv_proj": ("attn_qkv", "attn_q", "attn_k", "attn_v"),
        "mlp.gate_up_proj": ("ffn_up", "ffn_gate", "ffn_up"),
        "conv.in_proj": ("conv.in_proj", *(f"conv.{part}_proj" for part in CONV_LINEARS[:3])),
    }
    fused: dict[str, Parts] = {}
    for theirs, parts in fused_rows(config).items():
        whole, *ours = names[theirs]
        fused[whole] = Parts(dict(zip(ours, parts.rows.values(), strict=True)))
    return fused


def apart(source: TensorSource, fused: Fused) -> TensorSource:
    """The tensors of a checkpoint with the fused ones split; wrong sizes are left as they are."""
    tensors = {}
    for key, spec in source.specs().items():
        name = _of(key, fused)
        parts, groups = fused.get(name, Parts({}))
        if name is None or spec.shape[0] != groups * sum(parts.values()):
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        first = 0
        for part, size in parts.items():
            rows = slice(first, first + size)
            of_part = jax.ShapeDtypeStruct((groups * size, *spec.shape[1:]), spec.dtype)
            read = functools.partial(_rows_of_groups, source, key, groups, rows, of_part.shape)
            tensors[key.replace(name, part)] = of_part, read
            first += size
    return DerivedSource(source.name, tensors)


def _rows_of_groups(
    source: TensorSource, key: str, groups: int, rows: slice, shape: tuple[int, ...]
) -> np.ndarray:
    return source.read(key).reshape(groups, -1, *shape[1:])[:, rows].reshape(shape)


def together(source: TensorSource, fused: Fused, prefix: str = "") -> TensorSource:
    """The reverse of `apart`, of the keys that begin with `prefix`."""
    tensors = {}
    whole = {part: name for name, parts in fused.items() for part in parts.rows}

    def read(keys: list[str], shape: tuple[int, ...], groups: int) -> np.ndarray:
        parts = [source.read(key).reshape(groups, -1, *shape[1:]) for key in keys]
        return np.concatenate(parts, 1).reshape(shape)

    for key, spec in source.specs().items():
        part = _of(key, whole) if key.startswith(prefix) else None
        if part is None:
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        name = whole[part]
        keys = [key.replace(part, row_key) for row_key in fused[name].rows]
        shape = (sum(source.specs()[row_key].shape[0] for row_key in keys), *spec.shape[1:])
        of_all = jax.ShapeDtypeStruct(shape, spec.dtype)
        tensors[key.replace(part, name)] = (
            of_all,
            functools.partial(read, keys, shape, fused[name].groups),
        )
    return DerivedSource(source.name, tensors)


def _of(key: str, names: Mapping[str, object]) -> str | None:
    """The name of the linear whose weight or bias a key is."""
    ends = (f".{kind}" for kind in _KINDS)
    stem = next((key.removesuffix(end) for end in ends if key.endswith(end)), key)
    return next((name for name in names if stem.endswith(f".{name}")), None)


# Meta's LLaMA folders: params.json and model-parallel files consolidated.00.pth, .01.pth, ...


_META_READ = kinds(
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
    check_keys(params, str(file), read=_META_READ, harmless=_HARMLESS)
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
