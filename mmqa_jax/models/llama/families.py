"""LLaMA and the families that are LLaMAs with other switches: what a config.json of each says.

Each family is one entry; `family.py` says what an entry holds. A key that a family's class in
transformers does not read is refused (`published_config.py`), whatever other families do with it.
To add a family: one entry here, or in `mixture_families.py` or `recurrent_families.py`, its
tensors' names in `models/llama/keys.py` where they differ, and one case of
`tests/equivalence/test_decoder_families.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmqa_jax.models.llama import family
from mmqa_jax.models.llama.family import FULL, SLIDING, Family
from mmqa_jax.models.llama.mixture_families import LATENT, MIXTURES
from mmqa_jax.models.llama.recurrent_families import RECURRENT
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


_SWITCHED_WINDOW = kinds(
    flag="use_sliding_window", size_or_null="sliding_window", list_or_null="layer_types"
)
_COHERE_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
_COHERE_COMPUTES = {"norm_kind": "layer", "parallel": True}
# Notes of Cohere's own code, which transformers' does not read.
_COHERE_HARMLESS = (
    *("cache_implementation", "use_embedding_sharing", "use_parallel_embedding", "layer_switch"),
    *("order_of_interleaved_layers", "model_max_length", "pretraining_tp"),
)
_COHERE_FIXED: Mapping[str, tuple[Any, ...]] = {
    "use_qk_norm": (False,),
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "rotary_pct": (1.0,),
    "position_embedding_type": ("rope_gptj",),
}
_GLM4 = family.Family(
    title="GLM-4 of April 2025 (0414), GLM-Z1",
    architecture="Glm4ForCausalLM",
    keys=kinds(flag="attention_bias"),
    defaults={
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    computes={"norms": "both", "out_bias": False},
    partial=True,
    fused=("gate_up",),
    neighbours=True,
    tensors={
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
)
_ERNIE = family.Family(
    title="ERNIE 4.5, without experts",
    architecture="Ernie4_5ForCausalLM",
    keys=kinds(flag="use_bias"),
    defaults={
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    neighbours=True,
)
FAMILIES: Mapping[str, family.Family] = {
    "llama": family.Family(
        title="LLaMA 1, 2, 3, Vicuna, SmolLM2",
        architecture="LlamaForCausalLM",
        keys=family.BIASES,
        # pretraining_tp splits products (the same but for rounding).
        harmless=("pretraining_tp", "max_sequence_length", "is_llama_config"),
        fixed={"rope_interleaved": (False,)},  # SmolLM's
    ),
    "mistral": family.Family(
        title="Mistral",
        architecture="MistralForCausalLM",
        keys=family.WINDOW,
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
    ),
    "ministral": family.Family(
        title="Ministral",
        architecture="MinistralForCausalLM",
        keys={**family.WINDOW, **kinds(list_or_null="layer_types")},
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
    ),
    "ministral3": family.Family(
        title="Ministral 3",
        architecture="Ministral3ForCausalLM",
        keys=family.WINDOW,
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, family.TEMPER: 0.1},
                **{"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
        tempered=True,
    ),
    "qwen2": family.Family(
        title="Qwen2, Qwen2.5",
        architecture="Qwen2ForCausalLM",
        keys={**_SWITCHED_WINDOW, **kinds(integer="max_window_layers")},
        defaults={
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        computes={"attention_bias": True, "out_bias": False},
    ),
    "qwen3": family.Family(
        title="Qwen3, without experts",
        architecture="Qwen3ForCausalLM",
        keys={**_SWITCHED_WINDOW, **kinds(flag="attention_bias", integer="max_window_layers")},
        defaults={
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        computes={"qk_norm": "head"},
    ),
    "gpt_oss": family.Family(
        title="gpt-oss",
        architecture="GptOssForCausalLM",
        keys={
            **family.WINDOW,
            **kinds(
                list_or_null="layer_types",
                flag="attention_bias",
                number="swiglu_limit",
                size="num_local_experts num_experts_per_tok",
            ),
        },
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        # x * sigmoid(swiglu_alpha * x)
        computes={
            **{"sinks": True, "mlp_bias": True, "normed_experts": True},
            "activation": "quick_gelu",
        },
        harmless=(*family.BALANCING, "initial_context_length", "experts_per_token"),
        fixed={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
        names={"num_experts": "num_local_experts"},
        full_every=2,
        tensors={"mlp.router.": "mlp.gate."},
        experts_across="in turn",
    ),
    "seed_oss": family.Family(
        title="Seed-OSS",
        architecture="SeedOssForCausalLM",
        keys={**family.BIASES, **kinds(flag="attention_out_bias")},
        defaults={
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
        },
        harmless=("pretraining_tp", "residual_dropout"),
    ),
    "ernie4_5": _ERNIE,
    "paddleocr_vl_text": dataclasses.replace(
        _ERNIE,
        title="PaddleOCR-VL's language model",
        architecture="PaddleOCRVLForConditionalGeneration",
        neighbours=False,
    ),
    "exaone4": family.Family(
        title="EXAONE 4",
        architecture="Exaone4ForCausalLM",
        keys={**family.WINDOW, **kinds(list_or_null="layer_types")},
        defaults={
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        computes={"qk_norm": "head", "norms": "after"},
        fixed={"sliding_window_pattern": (4, 0, "LLLG")},  # layer_types say it
        full_every=4,
        near_rotates=True,
    ),
    "glm4": _GLM4,
    "glm": dataclasses.replace(
        _GLM4,
        title="GLM-4 of 2024, GLM-Edge",
        architecture="GlmForCausalLM",
        computes={"out_bias": False},
        tensors={},
    ),
    "hyperclovax": family.Family(
        title="HyperCLOVA X SEED Think",
        architecture="HyperCLOVAXForCausalLM",
        keys={
            **family.BIASES,
            **family.MULTIPLIERS,
            **kinds(number_or_null="attention_multiplier"),
        },
        defaults={"attention_multiplier": None},
        computes={"norms": "both"},
        fixed={"use_post_norm": (True,)},
        logit_factor="logits_scaling",
        scales_all=True,
        tensors={
            "post_attention_layernorm": "pre_feedforward_layernorm",
            **{
                "post_norm1": "post_attention_layernorm",
                "post_norm2": "post_feedforward_layernorm",
            },
        },
    ),
    "iquestcoder": family.Family(
        title="IQuest-Coder",
        architecture="IQuestCoderForCausalLM",
        keys=family.BIASES,
        defaults={
            **{"vocab_size": 76800, "hidden_size": 5120, "intermediate_size": 27648},
            **{"num_hidden_layers": 80, "num_attention_heads": 40, "num_key_value_heads": 8},
            **{"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        },
        fixed={"clip_qkv": (), "use_sliding_window": (False,)},
    ),
    "internlm3": family.Family(
        title="InternLM 3",
        architecture="InternLM3ForCausalLM",
        defaults={
            **{"vocab_size": 128512, "intermediate_size": 10240, "num_hidden_layers": 48},
            **{"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768},
            "rms_norm_eps": 1e-5,
        },
        # Of two kinds of biases the hub's code and transformers' have different ideas.
        fixed=dict.fromkeys(("qkv_bias", "bias", "attention_bias", "mlp_bias"), (False,)),
    ),
    "cwm": family.Family(
        title="Code World Model",
        architecture="CwmForCausalLM",
        keys={**family.WINDOW, **kinds(list_or_null="layer_types")},
        defaults={
            **{"vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504},
            **{"num_hidden_layers": 64, "num_attention_heads": 48, "num_key_value_heads": 8},
            **{"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            **{"rope_theta": 1e6, "sliding_window": 8192},
            "rope_scaling": {
                **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
        },
        harmless=("pretraining_tp",),
        fixed={"mlp_bias": (False,)},
        full_every=4,
        full_first=True,
    ),
    "granite_swa": family.Family(
        title="Granite with windows",
        architecture="GraniteSWAForCausalLM",
        keys={**family.BIASES, **family.MULTIPLIERS, **family.WINDOW, **family.WINDOWED_GRANITE},
        defaults={
            **{"vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192},
            **{"num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 4},
            **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
            **{"tie_word_embeddings": True, "sliding_window": 128},
        },
        computes={"sinks": True},
        scales_all=True,
        full_every=4,
        full_first=True,
    ),
    "helium": family.Family(
        title="Helium",
        architecture="HeliumForCausalLM",
        keys=family.BIASES,
        defaults={
            **{"vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040},
            **{"num_hidden_layers": 24, "num_attention_heads": 20, "head_dim": 128},
            **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "rope_theta": 100000.0},
        },
        computes={"out_bias": False},
        neighbours=True,
    ),
    "arcee": family.Family(
        title="Arcee's AFM",
        architecture="ArceeForCausalLM",
        keys=family.BIASES,
        defaults={
            **{"hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2"},
            **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        },
        computes={"gated_mlp": False},
    ),
    "smollm3": family.Family(
        title="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        keys={
            **family.BIASES,
            **_SWITCHED_WINDOW,
            **kinds(list_or_null="no_rope_layers", size="no_rope_layer_interval"),
        },
        defaults={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        harmless=("pretraining_tp",),
        fixed={"rope_interleaved": (False,)},
    ),
    "llama4_text": family.Family(
        title="Llama 4, its language model",
        architecture="Llama4ForCausalLM",
        keys=kinds(
            size="attention_chunk_size floor_scale intermediate_size_mlp no_rope_layer_interval",
            integer_or_null="interleave_moe_layer_step num_local_experts num_experts_per_tok",
            number="attn_scale",
            flag="attention_bias attn_temperature_tuning use_qk_norm",
            list_or_null="layer_types moe_layers no_rope_layers",
        ),
        defaults={
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        computes={"weighted_input": True, "shared_gate": False},
        harmless=(
            *family.BALANCING,
            "router_jitter_noise",
            "for_llm_compressor",
        ),
        names={"num_experts": "num_local_experts"},
        neighbours=True,
        experts_across="halves",
        tensors={
            **{f"feed_forward.{part}.": f"mlp.{part}." for part in ("experts", "shared_expert")},
            **{
                f"feed_forward.{part}_proj.": f"mlp.{part}_proj." for part in ("gate", "up", "down")
            },
            "feed_forward.router.": "mlp.gate.",
        },
    ),
    "olmo2": family.Family(
        title="OLMo 2",
        architecture="Olmo2ForCausalLM",
        keys=kinds(flag="attention_bias"),
        defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
        computes={"qk_norm": "whole", "norms": "after"},
    ),
    "olmo3": family.Family(
        title="OLMo 3",
        architecture="Olmo3ForCausalLM",
        keys={**family.WINDOW, **kinds(flag="attention_bias", list_or_null="layer_types")},
        defaults={
            "vocab_size": 50304,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
        },
        computes={"qk_norm": "whole", "norms": "after"},
        full_every=4,
        local=True,
    ),
    "phi3": family.Family(
        title="Phi-3, Phi-4",
        architecture="Phi3ForCausalLM",
        keys=family.WINDOW,
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        fixed={
            **{"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)},
            **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False,)),
            **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),  # Phi-4-mini's
        },
        partial=True,
        fused=("qkv", "gate_up"),
    ),
    "granite": family.Family(
        title="Granite 3",
        architecture="GraniteForCausalLM",
        keys={**family.BIASES, **family.MULTIPLIERS},
        scales_all=True,
    ),
    "cohere": family.Family(
        title="Command R",
        architecture="CohereForCausalLM",
        keys=kinds(flag="attention_bias", number="layer_norm_eps logit_scale"),
        defaults={**_COHERE_DEFAULTS, "rope_theta": 500000.0},
        computes=_COHERE_COMPUTES,
        harmless=_COHERE_HARMLESS,
        fixed=_COHERE_FIXED,
        names={"rms_norm_eps": "layer_norm_eps"},
        neighbours=True,
        logit_factor="logit_scale",
    ),
    "cohere2": family.Family(
        title="Command R7B and A, Tiny Aya",
        architecture="Cohere2ForCausalLM",
        keys=kinds(
            flag="attention_bias",
            number="layer_norm_eps logit_scale",
            size="sliding_window_pattern",
            size_or_null="sliding_window",
            list_or_null="layer_types",
        ),
        defaults={**_COHERE_DEFAULTS, "sliding_window": 4096},
        computes=_COHERE_COMPUTES,
        harmless=_COHERE_HARMLESS,
        fixed=_COHERE_FIXED,
        names={"rms_norm_eps": "layer_norm_eps"},
        logit_factor="logit_scale",
        neighbours=True,
        full_every=4,
        near_rotates=True,
    ),
    "nemotron": family.Family(
        title="Nemotron 3 and 4, Minitron",
        architecture="NemotronForCausalLM",
        keys={**family.BIASES, **kinds(number="norm_eps")},
        defaults={
            "vocab_size": 256000,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 48,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        computes={"norm_kind": "biased_layer", "unit_norms": True, "gated_mlp": False},
        harmless=("pretraining_tp", "kv_channels"),
        names={"rms_norm_eps": "norm_eps"},
        partial=True,
    ),
    "stablelm": family.Family(
        title="StableLM",
        architecture="StableLmForCausalLM",
        keys=kinds(flag="use_qkv_bias use_parallel_residual", number="layer_norm_eps"),
        defaults={
            "vocab_size": 50304,
            "intermediate_size": 6912,
            "hidden_size": 2560,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        computes={"norm_kind": "biased_layer", "out_bias": False},
        harmless=("hidden_dropout",),
        fixed={"qk_layernorm": (False,)},
        names={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
        partial=True,
    ),
    "starcoder2": family.Family(
        title="StarCoder 2",
        architecture="Starcoder2ForCausalLM",
        keys={**family.WINDOW, **kinds(flag="use_bias", number="norm_epsilon")},
        defaults={
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        computes={"norm_kind": "biased_layer", "gated_mlp": False},
        harmless=("residual_dropout", "embedding_dropout"),
        names={
            "rms_norm_eps": "norm_epsilon",
            "attention_bias": "use_bias",
            "mlp_bias": "use_bias",
        },
        tensors={"mlp.c_fc.": "mlp.up_proj.", "mlp.c_proj.": "mlp.down_proj."},
    ),
    "apertus": family.Family(
        title="Apertus",
        architecture="ApertusForCausalLM",
        keys=kinds(flag="attention_bias"),
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "hidden_act": "xielu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        computes={"qk_norm": "head", "gated_mlp": False},
        harmless=("hidden_dropout",),
        fixed={"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
        tensors={
            "attention_layernorm": "input_layernorm",
            "feedforward_layernorm": "post_attention_layernorm",
        },
        constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
    ),
    **MIXTURES,
    **LATENT,
    **RECURRENT,
    **GEMMA,
}
