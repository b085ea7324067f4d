"""Gemma's families."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mmqa_jax.models.llama.family import FULL, SLIDING, Family
from mmqa_jax.weights.config_json import kinds

_GEMMA = kinds(
    name="hidden_activation",
    size="query_pre_attn_scalar",
    number_or_null="final_logit_softcapping",
    flag="attention_bias",
    size_or_null="sliding_window",
    list_or_null="layer_types",
)
# Of layers that see all, where these have other heads than those with a window (Gemma 4);
# per_layer_config is how transformers writes the first two.
_WIDE_LAYERS = kinds(
    size_or_null="global_head_dim num_global_key_value_heads",
    flag="attention_k_eq_v",
    object_or_null="per_layer_config",
)
# Keys of inputs of layers' own and of experts, which Gemma 4's 12B has not.
_OTHERS = (
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
)
# Gemma's key in the place of a common one.
_GEMMA_NAMES = {"hidden_act": "hidden_activation"}
_GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# cache_implementation is transformers', hidden_act is not read by these classes.
_GEMMA_HARMLESS = ("cache_implementation", "hidden_act", "sliding_window_size")
_GEMMA2 = Family(
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    keys={**_GEMMA, **kinds(number_or_null="attn_logit_softcapping")},
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    computes={"norms": "both", "unit_norms": True},
    harmless=_GEMMA_HARMLESS,
    fixed={"use_bidirectional_attention": (False,)},
    names=_GEMMA_NAMES,
    scaled=True,
    full_every=2,
)
_GEMMA4 = Family(
    title="Gemma 4, its language model",
    architecture="Gemma4ForCausalLM",
    keys={
        **{key: kind for key, kind in _GEMMA.items() if key != "query_pre_attn_scalar"},
        **_WIDE_LAYERS,
        **kinds(
            flag="enable_moe_block use_double_wide_mlp",
            integer_or_null="hidden_size_per_layer_input",
            integer="num_kv_shared_layers",
            size="vocab_size_per_layer_input",
            size_or_null="num_experts top_k_experts moe_intermediate_size",
        ),
    },
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "rope_parameters": {
            SLIDING: {"rope_theta": 10000.0},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
    },
    computes={
        "norms": "both",
        "qk_norm": "head",
        "attention_scale": 1.0,
        "value_norm": True,
        "layer_scales": True,
        "normed_experts": True,
    },
    harmless=_GEMMA_HARMLESS,
    fixed={
        # "vision": of pictures' tokens, of which the language model alone has none.
        "use_bidirectional_attention": ("vision",),
        "rope_scaling": (),  # rope_parameters say it
    },
    names={
        **_GEMMA_NAMES,
        "num_experts_per_tok": "top_k_experts",
    },
    scaled=True,
    full_every=6,
    local=True,
    tensors={".router.proj.weight": ".mlp.gate.weight", ".experts.": ".mlp.experts."},
    experts_paired=True,
)
GEMMA: Mapping[str, Family] = {
    "gemma": Family(
        title="Gemma 1",
        architecture="GemmaForCausalLM",
        keys=kinds(flag="attention_bias"),
        defaults={
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        # transformers reads "gelu" as the same.
        computes={"unit_norms": True, "activation": "gelu_pytorch_tanh"},
        harmless=("cache_implementation",),
        fixed={
            **dict.fromkeys(("hidden_act", "hidden_activation"), ("gelu_pytorch_tanh", "gelu")),
            "use_bidirectional_attention": (False,),
        },
        scaled=True,
    ),
    "gemma2": _GEMMA2,
    "vaultgemma": dataclasses.replace(
        _GEMMA2,
        title="VaultGemma",
        architecture="VaultGemmaForCausalLM",
        computes={"unit_norms": True},
        fixed={},
        tensors={"pre_feedforward_layernorm": "post_attention_layernorm"},
    ),
    "gemma3_text": Family(
        title="Gemma 3, its language model",
        architecture="Gemma3ForCausalLM",
        keys={
            **_GEMMA,
            **kinds(
                size="sliding_window_pattern",
                number_or_null="rope_local_base_freq",
                flag="use_bidirectional_attention",
            ),
        },
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        computes={"norms": "both", "unit_norms": True, "qk_norm": "head"},
        harmless=_GEMMA_HARMLESS,
        # transformers' class has a cap of scores, and does not use it.
        fixed={"attn_logit_softcapping": ()},
        names=_GEMMA_NAMES,
        scaled=True,
        full_every=6,
        local=True,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": dataclasses.replace(
        _GEMMA4,
        title="Gemma 4's 12B, its language model",
        architecture="Gemma4UnifiedForCausalLM",
        keys={key: kind for key, kind in _GEMMA4.keys.items() if key not in _OTHERS},
        defaults={key: x for key, x in _GEMMA4.defaults.items() if key not in _OTHERS}
        | {"max_position_embeddings": 262144, "sliding_window": 1024},
        computes={key: x for key, x in _GEMMA4.computes.items() if key != "normed_experts"},
        harmless=(*_GEMMA4.harmless, "vocab_size_per_layer_input"),
        # As it was published, with what it has not.
        fixed={
            **_GEMMA4.fixed,
            "hidden_size_per_layer_input": (0,),
            "enable_moe_block": (False,),
            **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), (None,)),
        },
    ),
}
