"""A config from the metadata of a GGUF file, of LLaMA or a relative.

Keys: llama.cpp gguf-py/gguf/constants.py and conversion/ (convert_hf_to_gguf.py); what they do not
hold, llama.cpp's code has for each architecture (src/llama-model.cpp, load_hparams).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.rope import scaling_from_hf
from mmqa_jax.models.llama.config import LlamaConfig, RopeScaling
from mmqa_jax.models.llama.families import FAMILIES
from mmqa_jax.models.llama.layer_kinds import plain_first
from mmqa_jax.models.llama.network import inverse_frequencies
from mmqa_jax.weights.formats import gguf

ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
# Keys of an architecture that are read, that change nothing, and that have these values in a LLaMA.
_READ = (
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    "attention.value_length",
    *("attention.layer_norm_rms_epsilon", "embedding_length", "block_count"),
    *("feed_forward_length", "context_length", "rope.freq_base", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
)
_HARMLESS = ("vocab_size", "tensor_data_layout")
_WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern")
_OF_GRANITE = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
_EXPERTS = ("expert_count", "expert_used_count")
_OF_SIGMOIDS = (
    *(*_EXPERTS, "expert_feed_forward_length", "expert_shared_count", "expert_weights_scale"),
    *("expert_weights_norm", "expert_gating_func", "leading_dense_block_count"),
    "nextn_predict_layers",
)
_SIGMOID = 2  # of expert_gating_func
_TAPS = "shortconv.l_cache"
_LAYER_NORMS = ("attention.layer_norm_epsilon",)
_FURTHER = {
    **dict.fromkeys(("llama", "olmoe"), _EXPERTS),
    **dict.fromkeys(("nemotron", "starcoder2"), _LAYER_NORMS),
    "stablelm": (*_LAYER_NORMS, "use_parallel_residual"),  # its tensors say it
    "command-r": (*_LAYER_NORMS, "logit_scale"),
    "cohere2": (*_LAYER_NORMS, "logit_scale", *_WINDOW),
    "exaone4": _WINDOW,
    "phi3": (*_WINDOW, "rope.scaling.attn_factor"),
    "granite": _OF_GRANITE,
    "granitemoe": (*_OF_GRANITE, *_EXPERTS),
    "olmo2": (*_WINDOW, "rope.freq_base_swa"),
    "qwen3moe": (*_EXPERTS, "expert_feed_forward_length"),
    **dict.fromkeys(("dots1", "glm4moe"), _OF_SIGMOIDS),
    **{"lfm2": (_TAPS,), "lfm2moe": (_TAPS, *_OF_SIGMOIDS), "minimax-m2": _OF_SIGMOIDS},
    "qwen2moe": (*_EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "gemma2": (*_WINDOW, "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": (*_WINDOW, "final_logit_softcapping", "rope.freq_base_swa"),
}
_MULTIPLIERS = {  # our field -> its key
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "attention_scale": "attention.scale",
    "logit_divisor": "logit_scale",
    "attention_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}
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
# llama.cpp's names of architectures, and the families'. Its LLaMA is also Mistral's and Mixtral's.
ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "phi3", "olmo2", "granite", "smollm3")},
    **{name: name for name in ("olmoe", "granitemoe", "seed_oss", "ernie4_5", "exaone4", "glm4")},
    **{
        name: name for name in ("cohere2", "nemotron", "stablelm", "starcoder2", "apertus", "arcee")
    },
    **{"gemma2": "gemma2", "gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"},
    **{"command-r": "cohere", "dots1": "dots1", "glm4moe": "glm4_moe"},
    **{"lfm2": "lfm2", "lfm2moe": "lfm2_moe", "minimax-m2": "minimax_m2"},
    "qwen2moe": "qwen2_moe",
}
_CONSTANTS = FAMILIES["apertus"].constants
# Families whose tensors have other names in llama.cpp -> the names of others.
_OF_LFM2 = {"token_embd_norm": "output_norm", "shortconv": "conv"}
RENAMED = {
    **{name: {"post_attention_norm": "ffn_norm"} for name in ("seed_oss", "glm4_moe")},
    **{"lfm2": _OF_LFM2, "lfm2_moe": _OF_LFM2},
}
# Families whose rows of queries and keys llama.cpp turns (`keys.rotary_rows`).
TURNED = ("llama", "mixtral", "granite", "granitemoe", "smollm3", "arcee")
# Layers of Gemmas whose scores are divided by the root of hidden / heads, not of a head's size.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def gguf_config(source: gguf.GGUFSource) -> LlamaConfig:
    """Our config from a GGUF file's metadata."""
    architecture = source.metadata("general.architecture")
    if architecture not in ARCHITECTURES:
        names = ", ".join(map(repr, ARCHITECTURES))
        raise UserError(
            f"{source.name}: general.architecture is {architecture!r}, expected one of {names}; "
            "give such a file, or the safetensors files of this model."
        )
    of = f"{architecture}."
    gguf.check_metadata(source, of, (*_READ, *_HARMLESS, *_FURTHER.get(architecture, ())), _FIXED)
    specs = source.specs()
    heads = gguf.heads_of(source, of)
    hidden = source.integer(f"{of}embedding_length")
    head_size = gguf.head_size_of(source, of, hidden // heads)
    rotated = source.integer(f"{of}rope.dimension_count", head_size)
    name = ARCHITECTURES[architecture]
    if name == "olmo2" and source.metadata(f"{of}attention.sliding_window", 0):
        name = "olmo3"
    if name == "llama" and source.metadata(f"{of}expert_count", 0):
        name = "mixtral"
    family = FAMILIES[name]
    if rotated != head_size and not family.partial:
        raise UserError(
            f"{source.name}: {of}rope.dimension_count is {rotated}, a head has {head_size}; use "
            "a model that rotates whole heads."
        )
    eps = "norm_epsilon" if family.computes.get("norm_kind") else "norm_rms_epsilon"
    bias, out_bias = (f"blk.0.attn_{part}.bias" in specs for part in ("q", "output"))
    layers = gguf.layers_of(source, f"{of}block_count") - _proposing(source, of)
    kv_heads, kinds = _of_layers(source, of, heads, layers)
    config = LlamaConfig(
        family=name,
        vocab_size=gguf.vocabulary_of(source),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=None if head_size * heads == hidden else head_size,
        positions=source.integer(f"{of}context_length"),
        eps=source.number(f"{of}attention.layer_{eps}"),
        rope_theta=source.number(f"{of}rope.freq_base", 10000.0),
        rotary_fraction=rotated / head_size,
        tied="output.weight" not in specs,
        **{
            "mlp": source.integer(f"{of}feed_forward_length"),
            "attention_bias": bias,
            "out_bias": None if out_bias == bias else out_bias,
            "mlp_bias": "blk.0.ffn_up.bias" in specs,
            "activation": family.defaults.get("hidden_act", "silu"),
            "parallel": name == "stablelm" and "blk.0.ffn_norm.weight" not in specs,
            "kinds": kinds,
            "conv_taps": source.integer(f"{of}{_TAPS}") if kinds else None,
            **family.computes,
            **_experts(source, of, name, kinds or ("full",) * layers),
        },
    )
    config = _with_multipliers(_with_windows(config, source, of), source, of)
    return _with_scaling(config, source, of)


def _proposing(source: gguf.GGUFSource, of: str) -> int:
    """The last layers of a file that propose tokens, which are no part of the model."""
    key = f"{of}nextn_predict_layers"
    return source.metadata(key, 0) and source.integer(key)


def _of_layers(
    source: gguf.GGUFSource, of: str, heads: int, layers: int
) -> tuple[int, tuple[str, ...]]:
    """Heads of keys and values, and `LlamaConfig.kinds`: of LFM2 a file has the former of each
    layer, 0 where that is a convolution."""
    key = f"{of}attention.head_count_kv"
    if f"{of}{_TAPS}" not in source.metadata_keys():
        return source.integer(key, heads), ()
    of_layers = source.metadata(key)
    sizes = {*of_layers} - {0} if isinstance(of_layers, list) else {}
    if len(sizes) != 1 or len(of_layers) != layers:
        raise UserError(
            f"{source.name}: {key} is {str(of_layers)[:60]}, expected 0 or one other number for "
            f"each of {layers} layers; convert the model again."
        )
    return sizes.pop(), tuple("full" if size else "conv" for size in of_layers)


def _experts(source: gguf.GGUFSource, of: str, name: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a mixture of experts."""
    if "num_experts_per_tok" not in FAMILIES[name].keys:
        return {}
    if FAMILIES[name].computes.get("router") == "sigmoid":
        return _sigmoid_experts(source, of, name, kinds)
    of_qwen = name in ("qwen2_moe", "qwen3_moe")
    width = "expert_feed_forward_length" if of_qwen else "feed_forward_length"
    shared = f"{of}expert_shared_feed_forward_length"
    return {
        "shared_expert": source.integer(shared) if name == "qwen2_moe" else None,
        "experts": source.integer(f"{of}expert_count"),
        "active_experts": source.integer(f"{of}expert_used_count"),
        "mlp": source.integer(f"{of}{width}"),
        "normed_experts": name not in ("olmoe", "qwen2_moe"),  # llama.cpp has no key for it
    }


def _sigmoid_experts(
    source: gguf.GGUFSource, of: str, name: str, kinds: tuple[str, ...]
) -> dict[str, Any]:
    """Those of a mixture that chooses by sigmoids, and whose first layers have one MLP."""
    gate = source.metadata(f"{of}expert_gating_func", _SIGMOID)
    if gate != _SIGMOID:
        raise UserError(
            f"{source.name}: {of}expert_gating_func is {gate!r}, expected {_SIGMOID} (sigmoids); "
            "use the safetensors files of this model."
        )
    dense = source.metadata(f"{of}leading_dense_block_count", 0)
    width = source.integer(f"{of}expert_feed_forward_length")
    shared = source.metadata(f"{of}expert_shared_count", 0)
    ends = {key.partition(".")[2].partition(".")[2] for key in source.specs()}  # of layers
    kinds, computes = plain_first(kinds, dense), FAMILIES[name].computes
    usual = "head" if "attn_q_norm.weight" in ends else "none"
    # llama.cpp's code of these has no key for it.
    normed = name in ("lfm2_moe", "minimax_m2")
    return {
        "experts": source.integer(f"{of}expert_count"),
        "active_experts": source.integer(f"{of}expert_used_count"),
        "mlp": width,
        "normed_experts": bool(source.metadata(f"{of}expert_weights_norm", normed)),
        "expert_weight": source.number(f"{of}expert_weights_scale", 1.0),
        "choice_bias": "exp_probs_b.bias" in ends,
        "shared_expert": shared * width or None,
        "kinds": () if {*kinds} == {"full"} else kinds,
        "plain_mlp": source.integer(f"{of}feed_forward_length") if dense else None,
        "qk_norm": computes.get("qk_norm", usual),
    }


def curves(source: gguf.GGUFSource, config: LlamaConfig) -> dict[str, np.ndarray]:
    """The numbers of xIELU, which a file keeps as metadata, by the names of our rules."""
    arrays: dict[str, np.ndarray] = {}
    for part in ("alpha_p", "alpha_n", *(key.rpartition(".")[2] for key in _CONSTANTS)):
        values = source.metadata(f"xielu.{part}", None)
        constant = _CONSTANTS.get(f"mlp.act_fn.{part}")
        fits = isinstance(values, list) and len(values) == config.layers
        if not fits or (constant and not np.allclose(values, constant, rtol=0.01, atol=0)):
            raise UserError(
                f"{source.name}: xielu.{part} is {str(values)[:60]}, expected a number for each of "
                f"{config.layers} layers{f', {constant}' if constant else ''}; fetch it again."
            )
        if constant is None:
            keys = (f"blk.{number}.mlp.act_fn.{part}" for number in range(config.layers))
            arrays |= zip(keys, np.array(values, np.float32)[:, None], strict=True)
    return arrays


def _with_windows(config: LlamaConfig, source: gguf.GGUFSource, of: str) -> LlamaConfig:
    """Adds windows, local layers and layers without positions."""
    family, layers = FAMILIES[config.family], config.layers
    changes: dict[str, Any] = {}
    window = source.integer(f"{of}attention.sliding_window", 0)
    pattern = source.metadata(f"{of}attention.sliding_window_pattern", family.full_every)
    if not isinstance(pattern, list):  # layers up to one that sees all; 0: none does
        pattern = source.integer(f"{of}attention.sliding_window_pattern", family.full_every)
        pattern = [not pattern or (number + 1) % pattern != 0 for number in range(layers)]
    if len(pattern) != layers:
        raise UserError(
            f"{source.name}: {of}attention.sliding_window_pattern has {len(pattern)} values for "
            f"{layers} layers; fetch the file again."
        )
    slides = tuple(bool(slide and window) for slide in pattern)
    if any(slides) and window < config.positions:
        changes["windows"] = tuple(window * slide for slide in slides)
    if family.local and any(slides):
        changes["local"] = slides
        usual = config.rope_theta if config.family == "olmo3" else 10000.0
        changes["local_theta"] = source.number(f"{of}rope.freq_base_swa", usual)
    if family.near_rotates and any(slides) and not all(slides):
        changes["rotated"] = slides
    if config.family == "smollm3":  # llama.cpp has no key for it
        rotated = tuple((number + 1) % 4 != 0 for number in range(layers))
        changes["rotated"] = () if all(rotated) else rotated
    return dataclasses.replace(config, **changes)


def _with_multipliers(config: LlamaConfig, source: gguf.GGUFSource, of: str) -> LlamaConfig:
    """Adds Granite's multipliers, and Gemma's with its caps."""
    changes: dict[str, Any] = {}
    architecture = of.removesuffix(".")
    for field, key in _MULTIPLIERS.items():
        if key in _FURTHER.get(architecture, ()) and f"{of}{key}" in source.metadata_keys():
            changes[field] = source.number(f"{of}{key}")
    if FAMILIES[config.family].logit_factor and "logit_divisor" in changes:
        changes["logit_divisor"] = 1 / changes["logit_divisor"]
    if architecture in _LARGEST:
        changes["activation"] = "gelu_pytorch_tanh"
        if config.layers == _LARGEST[architecture]:
            changes["attention_scale"] = (config.hidden // config.heads) ** -0.5
    if FAMILIES[config.family].scaled:
        changes["embedding_scale"] = config.hidden**0.5
    return dataclasses.replace(config, **changes)


def _with_scaling(config: LlamaConfig, source: gguf.GGUFSource, of: str) -> LlamaConfig:
    """Adds the rope scaling, which GGUF keeps as metadata (linear) or tensors (llama3, longrope).

    of: in front of the architecture's keys.
    """
    kind = source.metadata(f"{of}rope.scaling.type", "none")
    if kind == "linear":
        factor = source.number(f"{of}rope.scaling.factor")
        return dataclasses.replace(config, rope_scaling=RopeScaling("linear", factor))
    if kind != "none":
        raise UserError(
            f"{source.name}: {of}rope.scaling.type {kind!r} is not supported; use a model "
            "without scaling, or with linear, llama3 or longrope."
        )
    if all(name in source.specs() for name in _LONGROPE.values()):
        rope = {key: source.read(name).tolist() for key, name in _LONGROPE.items()}
        if f"{of}rope.scaling.attn_factor" in source.metadata_keys():
            rope["attention_factor"] = source.number(f"{of}rope.scaling.attn_factor")
        original = source.integer(f"{of}rope.scaling.original_context_length")
        scaling = scaling_from_hf(
            {"rope_type": "longrope", **rope}, original, config.positions, source.name
        )
        return dataclasses.replace(config, rope_scaling=scaling)
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
