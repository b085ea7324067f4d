"""Families most of whose layers are recurrent: Qwen3.5, 3.6 and Qwen3-Next, and LFM2."""

import dataclasses
from collections.abc import Mapping

from mmqa_jax.models.llama.family import BALANCING, FULL, SLIDING, WINDOW, Family
from mmqa_jax.weights.config_json import kinds

DELTA_KEYS = {  # of DeltaConfig
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
# Qwen3.5's: layers of the gated delta rule, and of attention with a gate.
_HYBRID = kinds(
    flag="attention_bias",
    list_or_null="layer_types",
    size="full_attention_interval " + " ".join(DELTA_KEYS.values()),
)
_HYBRID_DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
_HYBRID_MIXTURE = {
    **_HYBRID,
    **kinds(
        size="moe_intermediate_size shared_expert_intermediate_size num_experts num_experts_per_tok"
    ),
}
_HYBRID_MIXTURE_DEFAULTS = {
    **_HYBRID_DEFAULTS,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_HYBRID_COMPUTES = {"qk_norm": "head", "unit_norms": True, "gated": True}
# Of layers that propose tokens, which are no part of the model.
_HYBRID_HARMLESS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
_HYBRID_FIXED = {
    "attn_output_gate": (True,),
    "output_gate_type": ("sigmoid",),
    "mamba_ssm_dtype": ("float32",),
}
_LINEARS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_LFM2 = Family(
    title="LFM2, without experts",
    architecture="Lfm2ForCausalLM",
    keys=kinds(
        number="norm_eps block_ffn_dim_multiplier",
        size="conv_L_cache block_multiple_of",
        flag="block_auto_adjust_ff_dim",
        list_or_null="layer_types full_attn_idxs",
    ),
    defaults={
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    computes={"qk_norm": "head"},
    # Of its training, and what other keys say too.
    harmless=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
    ),
    fixed={"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,)},
    fused=("in",),
    names={"rms_norm_eps": "norm_eps"},
    renamed={"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"},
    tensors={
        "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
        **{"model.embedding_norm.": "model.norm.", "feed_forward.gate.": "mlp.gate."},
        **{"operator_norm.": "input_layernorm.", "ffn_norm.": "post_attention_layernorm."},
        **{"self_attn.out_proj.": "self_attn.o_proj.", "feed_forward.experts.": "mlp.experts."},
        **{f"{part}_layernorm.": f"{part}_norm." for part in "qk"},
        **{f"feed_forward.{theirs}.": f"mlp.{part}." for theirs, part in _LINEARS.items()},
        **{f".{theirs}.": f".{part}." for theirs, part in _LINEARS.items()},
    },
)
RECURRENT: Mapping[str, Family] = {
    "qwen3_5_text": Family(
        title="Qwen3.5 and 3.6, without experts",
        architecture="Qwen3_5ForCausalLM",
        keys=_HYBRID,
        defaults={
            **_HYBRID_DEFAULTS,
            "vocab_size": 248320,
            "intermediate_size": 12288,
            "num_key_value_heads": 4,
        },
        computes=_HYBRID_COMPUTES,
        harmless=_HYBRID_HARMLESS,
        fixed=_HYBRID_FIXED,
        partial=True,
        fused=("q", "in_proj_qkv", "conv1d"),
    ),
    "qwen3_5_moe_text": Family(
        title="Qwen3.5's and 3.6's mixtures of experts",
        architecture="Qwen3_5MoeForCausalLM",
        keys=_HYBRID_MIXTURE,
        defaults={
            **_HYBRID_MIXTURE_DEFAULTS,
            "vocab_size": 248320,
            "num_hidden_layers": 40,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        computes={**_HYBRID_COMPUTES, "normed_experts": True},
        harmless=(*_HYBRID_HARMLESS, "intermediate_size", *BALANCING),
        fixed={**_HYBRID_FIXED, "mlp_only_layers": ([],), "norm_topk_prob": (True,)},
        names={"intermediate_size": "moe_intermediate_size"},
        partial=True,
        fused=("q", "in_proj_qkv", "conv1d"),
    ),
    "qwen3_next": Family(
        title="Qwen3-Next",
        architecture="Qwen3NextForCausalLM",
        keys={**_HYBRID_MIXTURE, **kinds(flag="norm_topk_prob")},
        defaults={
            **_HYBRID_MIXTURE_DEFAULTS,
            "vocab_size": 151936,
            "num_hidden_layers": 48,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        computes=_HYBRID_COMPUTES,
        harmless=("intermediate_size", *BALANCING),
        fixed={**_HYBRID_FIXED, "mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
        names={"intermediate_size": "moe_intermediate_size"},
        partial=True,
        fused=("q", "in_proj_qkvz", "in_proj_ba", "conv1d"),
    ),
    "lfm2": _LFM2,
    "lfm3": Family(
        title="LFM3",
        architecture="Lfm3ForCausalLM",
        keys={
            **WINDOW,
            **kinds(
                number="norm_eps",
                size="conv_L_cache",
                flag="attention_bias",
                list_or_null="layer_types",
            ),
        },
        defaults={
            **{"vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7680},
            **{"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4},
            **{"head_dim": 128, "max_position_embeddings": 128000, "norm_eps": 1e-5},
            **{"tie_word_embeddings": True, "conv_L_cache": 7, "sliding_window": 256},
            "rope_parameters": {
                FULL: {
                    **{"rope_type": "proportional", "rope_theta": 1e6},
                    "partial_rotary_factor": 0.5,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        computes={"qk_norm": "head", "norms": "both", "gated": True, "head_gates": True},
        fixed={
            "conv_bias": (False,),
            **dict.fromkeys(("use_sandwich_norm", "use_attention_gate"), (True,)),
        },
        fused=("in",),
        names={"rms_norm_eps": "norm_eps"},
        local=True,
        tensors={
            **{"model.embedding_norm.": "model.norm.", "operator_norm.": "input_layernorm."},
            **{"post_operator_norm.": "post_attention_layernorm."},
            **{"post_ffn_norm.": "post_feedforward_layernorm."},
            **{"ffn_norm.": "pre_feedforward_layernorm."},
            "self_attn.g_proj.": "self_attn.gate_proj.",
            **{f"feed_forward.{theirs}.": f"mlp.{part}." for theirs, part in _LINEARS.items()},
        },
    ),
    "lfm2_moe": dataclasses.replace(
        _LFM2,
        title="LFM2's mixtures of experts",
        architecture="Lfm2MoeForCausalLM",
        keys=kinds(
            number="norm_eps routed_scaling_factor",
            size="conv_L_cache intermediate_size moe_intermediate_size num_experts "
            "num_experts_per_tok",
            integer="num_dense_layers",
            flag="norm_topk_prob use_expert_bias",
            list_or_null="layer_types",
        ),
        defaults={
            **_LFM2.defaults,
            **{"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792},
            **{"num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2},
            "norm_topk_prob": True,
        },
        computes={"qk_norm": "head", "router": "sigmoid"},
        harmless=BALANCING,
        names={"rms_norm_eps": "norm_eps", "intermediate_size": "moe_intermediate_size"},
        renamed={"tie_word_embeddings": "tie_embedding"},
        dense_first="num_dense_layers",
    ),
}
