"""Families whose attention is over latents: DeepSeek's, Kimi K2, GLM-4.7-Flash, Youtu-LLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mmqa_jax.models.llama.family import BALANCING, Family
from mmqa_jax.models.llama.mixture_families import BIASED_SIGMOIDS, PROPOSING, SHARED
from mmqa_jax.weights.config_json import kinds

LATENT_KEYS = {  # of LatentConfig
    "rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "resting": "qk_nope_head_dim",
    "turning": "qk_rope_head_dim",
    "value": "v_head_dim",
}
_KEYS = kinds(
    size="kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim", size_or_null="q_lora_rank"
)
_ROUTED = kinds(
    size="intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok",
    integer="first_k_dense_replace n_shared_experts",
    flag="norm_topk_prob",
    number="routed_scaling_factor",
    size_or_null="n_group topk_group",
)
# What only training and other code read; head_dim and the number of key heads follow from others.
_HARMLESS = (
    *(*BALANCING, *PROPOSING, "pretraining_tp", "aux_loss_alpha", "seq_aux", "ep_size"),
    *("head_dim", "qk_head_dim", "num_key_value_heads"),
)
_FIXED = {"attention_bias": (False,), "moe_layer_freq": (1,)}
_NAMES = {"intermediate_size": "moe_intermediate_size", "num_experts": "n_routed_experts"}
_DEEPSEEK_V3 = Family(
    title="DeepSeek-V3, V3.1 and R1",
    architecture="DeepseekV3ForCausalLM",
    keys={**_KEYS, **_ROUTED},
    defaults={
        **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432},
        **{"moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128},
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
        **{"first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "max_position_embeddings": 4096,
    },
    computes=BIASED_SIGMOIDS,
    harmless=_HARMLESS,
    fixed={
        **{**_FIXED, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        "rope_interleave": (True,),
    },
    names=_NAMES,
    fused=("kv_b",),
    neighbours=True,
    tensors=SHARED,
    dense_first="first_k_dense_replace",
)
LATENT: Mapping[str, Family] = {
    "deepseek_v2": Family(
        title="DeepSeek-V2, V2-Lite and V2.5",
        architecture="DeepseekV2ForCausalLM",
        keys={**_KEYS, **_ROUTED, **kinds(name="topk_method")},
        defaults={
            **{"vocab_size": 102400, "intermediate_size": 11008, "moe_intermediate_size": 1407},
            **{"n_routed_experts": 64, "n_shared_experts": 2, "topk_method": "greedy"},
        },
        computes={"shared_gate": False},
        harmless=_HARMLESS,
        fixed={
            **{**_FIXED, "scoring_func": ("softmax",), "mlp_bias": (False,)},
            "norm_topk_prob": (False,),
        },
        names=_NAMES,
        fused=("kv_b",),
        neighbours=True,
        tensors=SHARED,
        dense_first="first_k_dense_replace",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": dataclasses.replace(
        _DEEPSEEK_V3, title="Kimi K2, K2-Thinking", model_type="deepseek_v3"
    ),
    "glm4_moe_lite": dataclasses.replace(
        _DEEPSEEK_V3,
        title="GLM-4.7-Flash",
        architecture="Glm4MoeLiteForCausalLM",
        keys={**_DEEPSEEK_V3.keys, **kinds(list_or_null="mlp_layer_types")},
        defaults={
            **{"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240},
            **{"moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20},
            **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
            **{"n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8},
            **{"max_position_embeddings": 202752, "rms_norm_eps": 1e-5},
        },
    ),
    "youtu": Family(
        title="Youtu-LLM",
        architecture="YoutuForCausalLM",
        keys=_KEYS,
        defaults={
            **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144},
            **{"num_attention_heads": 16, "max_position_embeddings": 131072},
            "tie_word_embeddings": True,
        },
        harmless=(*_HARMLESS, "embedding_initializer_range"),
        fixed={**_FIXED, "rope_interleave": (True,), "mlp_bias": (False,)},
        fused=("kv_b",),
        neighbours=True,
    ),
}
