"""Fields of LlamaConfig from a transformers' config.json, and back, of all `families.FAMILIES`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.activations import ACTIVATIONS, LEARNED
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.common.rope import scaling_from_hf, scaling_to_hf
from mmqa_jax.models.llama.families import FAMILIES
from mmqa_jax.models.llama.family import CONV, FULL, LINEAR, SLIDING, TEMPER, Family
from mmqa_jax.models.llama.layer_kinds import DeltaConfig, FullLayers, LatentConfig, plain_first
from mmqa_jax.models.llama.mixture_families import LATENT_KEYS
from mmqa_jax.models.llama.recurrent_families import DELTA_KEYS
from mmqa_jax.weights.config_json import ForeignModel, check_keys, kinds

# Our fields that are plain values in transformers' config.json, with LLaMA's defaults there; a
# family has those of `_COMMON` and its own `keys`.
_PLAIN = {
    "vocab_size": ("vocab_size", 32000),
    "hidden": ("hidden_size", 4096),
    "layers": ("num_hidden_layers", 32),
    "heads": ("num_attention_heads", 32),
    "mlp": ("intermediate_size", 11008),
    "positions": ("max_position_embeddings", 2048),
    "eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
    "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "activation": ("hidden_act", "silu"),
    "attention_dropout": ("attention_dropout", 0.0),
    "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0),
    "attention_scale": ("attention_multiplier", 1.0),
    "logit_divisor": ("logits_scaling", 1.0),
    "attention_cap": ("attn_logit_softcapping", None),
    "logit_cap": ("final_logit_softcapping", None),
    "bidirectional": ("use_bidirectional_attention", False),
    "parallel": ("use_parallel_residual", False),
    "out_bias": ("attention_out_bias", None),
    "experts": ("num_experts", None),
    "active_experts": ("num_experts_per_tok", None),
    "normed_experts": ("norm_topk_prob", False),
    "gate_limit": ("swiglu_limit", None),
    "side": ("hidden_size_per_layer_input", None),
    "chunk": ("attention_chunk_size", None),
    "shared_expert": ("shared_expert_intermediate_size", None),
    "expert_weight": ("routed_scaling_factor", 1.0),
    "choice_bias": ("use_expert_bias", True),
    "conv_taps": ("conv_L_cache", 3),
    "expert_groups": ("n_group", None),
    "active_groups": ("topk_group", None),
}
_COMMON = kinds(
    size="vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings",
    size_or_null="num_key_value_heads head_dim original_max_position_embeddings",
    number="rms_norm_eps",
    number_or_null="attention_dropout rope_theta partial_rotary_factor",
    flag="tie_word_embeddings",
    name="hidden_act",
    object_or_null="rope_scaling rope_parameters",
)
_FIXED: Mapping[str, tuple[Any, ...]] = {"is_causal": (True,), "is_decoder": (True, False)}
# Fields that are ours, or have another form in a config.json.
_OWN = ("dtype", "attention", "remat", "unroll", "init_stddev", "head_dim", "out_bias")
_OWN += ("picture_sight",)  # the family of a model that sees fixes it


def fields_from_hf(published: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of LlamaConfig from transformers' `config.json`; see `LlamaConfig.from_hf`."""
    model_type = published.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ForeignModel(where, model_type, f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    read = _read(family)
    published = {**published}
    if "attn_temperature_tuning" in read and "attn_temperature_tuning" in published:
        tuning = published["attn_temperature_tuning"]  # a number in the first files
        published["attn_temperature_tuning"] = bool(tuning) if isinstance(tuning, int) else tuning
    for key, newer in family.renamed.items():
        if newer in published:
            published.setdefault(key, published.pop(newer))
    if published.get("output_router_logits") and "num_experts_per_tok" in read:
        raise UserError(
            f"{where}: output_router_logits is true, with which training adds a loss that balances "
            "experts (router_aux_loss_coef), and this one does not; set output_router_logits to "
            "false there to train and answer without."
        )
    check_keys(
        published, where, read=read, harmless=family.harmless, fixed={**_FIXED, **family.fixed}
    )

    if "conv_L_cache" in read and "sliding_window" in read and not published.get("layer_types"):
        turns = (CONV, CONV, FULL, CONV, SLIDING, CONV, FULL, CONV)  # LFM3's own choice
        layers = published.get("num_hidden_layers", family.defaults["num_hidden_layers"])
        published["layer_types"] = [
            turns[number % 4 if number < 4 else 4 + number % 4] for number in range(layers)
        ]
    if published.get("rope_parameters") is None and "rope_parameters" in family.defaults:
        published["rope_parameters"] = family.defaults["rope_parameters"]

    def value(key: str, default: Any = None) -> Any:
        return published.get(key, family.defaults.get(key, default))

    plain = _plain(family)
    fields = {field: value(key, default) for field, (key, default) in plain.items()}
    if "activation" in plain:
        known = (*ACTIVATIONS, *([] if family.computes.get("gated_mlp", True) else LEARNED))
        check_known(f"{where}: {plain['activation'][0]}", fields["activation"], known)
    rope = published.get("rope_scaling") or published.get("rope_parameters")
    rope = rope or family.defaults.get("rope_scaling", {})
    near: Mapping[str, Any] = {}
    beta = None
    if family.tempered:
        rope, beta = _without_temper(rope, where)
    if family.local:
        rope, near = _both_ropes(published, rope)
    partial = rope.get("partial_rotary_factor", value("partial_rotary_factor"))
    if partial is None and value("rotary_dim"):
        partial = value("rotary_dim") / value("head_dim")
    if rope.get("rope_type") == "proportional":
        partial = None  # it is the scaling's
    if partial not in (None, 1.0) and not family.partial:
        raise UserError(
            f"{where}: partial_rotary_factor {partial} is not supported; use a checkpoint "
            "whose heads are rotated whole."
        )
    heads, head_dim = fields["heads"], value("head_dim")
    fields |= {
        "family": model_type,
        "attention_dropout": fields["attention_dropout"] or 0.0,
        "kv_heads": value("num_key_value_heads") or heads,
        "head_dim": None if head_dim == fields["hidden"] / heads else head_dim,
        "rope_theta": _first(rope.get("rope_theta"), value("rope_theta"), 10000.0),
        "rope_scaling": scaling_from_hf(
            rope, value("original_max_position_embeddings"), fields["positions"], where
        ),
        "rotary_fraction": 1.0 if partial is None else float(partial),
        **family.computes,
    }
    if beta is not None:
        scaling = fields["rope_scaling"]
        fields["rope_scaling"] = dataclasses.replace(scaling, query_beta=beta)
        fields["positions"] = min(fields["positions"], scaling.original_positions)
    if DELTA_KEYS["key_heads"] in read:
        sizes = DeltaConfig()
        sizes = {ours: value(key, getattr(sizes, ours)) for ours, key in DELTA_KEYS.items()}
        fields |= {"delta": DeltaConfig(**sizes), "kinds": _layer_kinds(value, fields, where)}
    if LATENT_KEYS["rank"] in read:
        fields |= _of_latents(value, fields, rope)
    if value("topk_method") == "greedy" or fields.get("expert_groups") == 1:
        fields["expert_groups"] = None
    if not fields.get("expert_groups"):
        fields |= dict.fromkeys(("expert_groups", "active_groups"))
    if "conv_L_cache" in read:
        fields["kinds"] = _layer_kinds(value, fields, where, CONV)
    if "block_multiple_of" in read and value("block_auto_adjust_ff_dim", True):
        width = int(value("block_ffn_dim_multiplier", 1.0) * int(2 * fields["mlp"] / 3))
        multiple = value("block_multiple_of", 256)
        fields["mlp"] = -(-width // multiple) * multiple
    if family.logit_factor:
        factor = value(family.logit_factor, 1.0)
        if not factor:
            raise UserError(
                f"{where}: {family.logit_factor} is {factor}, expected more; repair the file."
            )
        fields["logit_divisor"] = 1 / factor
    if family.scaled or value("mup_enabled"):
        fields["embedding_scale"] = fields["hidden"] ** 0.5
    if "query_pre_attn_scalar" in read:
        fields["attention_scale"] = _scale(value("query_pre_attn_scalar"), head_dim)
    fields["rotated"] = _rotated(value, fields["layers"], where) if "no_rope_layers" in read else ()
    if value("layer_rope_theta"):
        fields |= _thetas(value("layer_rope_theta"), fields["layers"], where)
    if "attention_chunk_size" in read:
        fields |= _of_llama4(value, fields, where)
    elif "use_qk_norm" in read:
        fields["qk_norm"] = "head" if value("use_qk_norm", False) else "none"
    shared = family.names.get("n_shared_experts", "n_shared_experts")
    if shared in read:
        fields["shared_expert"] = value(shared, 1) * fields["mlp"]
    if "shared_expert" in fields:
        fields["shared_expert"] = fields["shared_expert"] or None
    if family.dense_first:
        fields |= _dense_first(value, family, fields, where)
    if "sliding_window" in read:
        slides = _slides(family, value, read, fields, where)
        window = value("sliding_window")
        if window and fields.get("bidirectional"):
            window = window // 2 + 1  # on each side, the token itself included
        fields["windows"] = _windows(slides, window, fields["positions"])
        if family.local:
            fields["local"] = slides if any(slides) else ()
        if family.near_rotates and window and not all(slides):
            fields["rotated"] = slides
    elif "layer_types" in read and not fields.get("kinds") and not fields.get("chunk"):
        _slides(family, value, read, fields, where)  # which refuses windows
    if family.local:
        if scaling_from_hf(near, None, fields["positions"], where) is not None:
            raise UserError(
                f"{where}: rope_parameters.{SLIDING} is scaled, which is not supported; use a "
                "checkpoint whose layers with a window are not."
            )
        theta = _first(near.get("rope_theta"), value("rope_local_base_freq"), fields["rope_theta"])
        fields["local_theta"] = theta
    if "enable_moe_block" in read:
        fields["experts_beside"] = value("moe_intermediate_size")
        of_experts = ("experts", "active_experts", "experts_beside", "normed_experts")
        if not value("enable_moe_block", False):
            fields = {field: x for field, x in fields.items() if field not in of_experts}
        elif None in [fields[name] for name in of_experts]:
            raise UserError(
                f"{where}: enable_moe_block is true, and num_experts, top_k_experts or "
                "moe_intermediate_size is missing; add it."
            )
    if "global_head_dim" in read:
        fields["full_layers"] = _full_layers(value, slides, fields, where)
        fields["borrowers"] = borrowers = value("num_kv_shared_layers", 0) or None
        if borrowers and value("use_double_wide_mlp", False):
            fields["borrower_mlp"] = 2 * fields["mlp"]
        if fields["full_layers"] or borrowers:
            fields["kinds"] = tuple("near" if slide else "full" for slide in slides)
    fields["side"] = fields.get("side") or None
    if fields["side"]:
        fields["side_table"] = True
        if value("vocab_size_per_layer_input", fields["vocab_size"]) != fields["vocab_size"]:
            raise UserError(
                f"{where}: vocab_size_per_layer_input is {value('vocab_size_per_layer_input')}, "
                f"expected vocab_size = {fields['vocab_size']}; use a checkpoint of these."
            )
    return fields


def _full_layers(
    value: Any, slides: tuple[bool, ...], fields: Mapping[str, Any], where: str
) -> FullLayers | None:
    """`LlamaConfig.full_layers`; None where all layers have the same heads."""
    if slides[-1]:
        raise UserError(
            f"{where}: layer_types ends with {SLIDING}, and the last layer of this family sees "
            f"all; end it with {FULL}."
        )
    usual = {"head_dim": value("head_dim"), "num_key_value_heads": fields["kv_heads"]}
    shared, per_layer = value("attention_k_eq_v", False), value("per_layer_config")
    sizes = {**usual, "head_dim": value("global_head_dim")}
    if shared and value("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = value("num_global_key_value_heads")
    if per_layer is not None:  # of layers by number, each of which may have a zero in front
        of_layers = {
            key.lstrip("0") or "0": sizes_of_layer for key, sizes_of_layer in per_layer.items()
        }
        sizes = {**usual, **_object(of_layers.get(str(len(slides) - 1)))}
        full = {str(number) for number, slide in enumerate(slides) if not slide}
        same = all({**usual, **_object(of_layers.get(number))} == sizes for number in full)
        if not same or sizes.keys() != usual.keys() or not of_layers.keys() <= full:
            raise UserError(
                f"{where}: per_layer_config is {per_layer!r}, expected head_dim and "
                f"num_key_value_heads, the same of all layers that are {FULL} and of no other; "
                "use a checkpoint of these."
            )
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        raise UserError(
            f"{where}: its layers that are {FULL} have {sizes!r}, expected whole numbers from 1; "
            "repair the file or fetch it again."
        )
    if sizes == usual and not shared:
        return None
    return FullLayers(sizes["head_dim"], sizes["num_key_value_heads"], shared)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(family: Family) -> dict[str, str]:
    """Kinds of the keys that are read of a family's config.json."""
    others = {*family.names, *family.fixed}
    return {key: kind for key, kind in _COMMON.items() if key not in others} | {**family.keys}


def _plain(family: Family) -> dict[str, tuple[str, Any]]:
    """Finds what a family has of `_PLAIN`, with its own names."""
    named = {field: (family.names.get(key, key), x) for field, (key, x) in _PLAIN.items()}
    return {field: pair for field, pair in named.items() if pair[0] in _read(family)}


def _without_temper(rope: Mapping[str, Any], where: str) -> tuple[dict[str, Any], float]:
    """Rope parameters as other families have them, and `llama_4_scaling_beta`."""
    beta = rope.get(TEMPER)
    is_number = isinstance(beta, int | float) and not isinstance(beta, bool)
    if not is_number or not 0 < beta < 100 or not rope.get("original_max_position_embeddings"):
        raise UserError(
            f"{where}: rope_parameters have {TEMPER} {beta!r} and "
            f"original_max_position_embeddings {rope.get('original_max_position_embeddings')!r}, "
            "expected numbers above 0; use a checkpoint of Ministral 3."
        )
    left_out = (TEMPER, "max_position_embeddings")
    return {key: value for key, value in rope.items() if key not in left_out}, float(beta)


def _both_ropes(
    published: Mapping[str, Any], rope: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rope parameters of the layers that see all and of the others (transformers 5 keeps both)."""
    parameters = published.get("rope_parameters") or {}
    if parameters.keys().isdisjoint((SLIDING, FULL)):
        return rope, {}
    far = {**(parameters.get(FULL) or {}), **(published.get("rope_scaling") or {})}
    return far, parameters.get(SLIDING) or {}


def _scale(size: float, head_dim: int) -> float | None:
    """`LlamaConfig.attention_scale` of Gemma's `query_pre_attn_scalar`."""
    return None if size == head_dim else size**-0.5


def _first(*values: float | None) -> float:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _rotated(value: Any, layers: int, where: str) -> tuple[bool, ...]:
    """`LlamaConfig.rotated`: every fourth layer is not, if `no_rope_layers` does not say it."""
    rotated, every = value("no_rope_layers"), value("no_rope_layer_interval", 4)
    if not rotated:
        rotated = [(number + 1) % every != 0 for number in range(layers)]
    if len(rotated) < layers or any(flag not in (0, 1) for flag in rotated):
        raise UserError(
            f"{where}: no_rope_layers is {rotated!r}, expected 0 or 1 for each of {layers} layers; "
            "repair the file or fetch it again."
        )
    rotated = tuple(bool(flag) for flag in rotated[:layers])
    return () if all(rotated) else rotated


def _thetas(thetas: list[Any], layers: int, where: str) -> dict[str, Any]:
    """Fields of Granite's `layer_rope_theta`: one base for all layers that rotate, 0 for others."""
    are_numbers = all(isinstance(theta, int | float) for theta in thetas)
    bases = {theta for theta in thetas if theta} if are_numbers else set()
    if len(thetas) != layers or len(bases) != 1:
        raise UserError(
            f"{where}: layer_rope_theta is {thetas!r}, expected 0 or one other number for each of "
            f"{layers} layers; use a checkpoint of these."
        )
    rotated = tuple(bool(theta) for theta in thetas)
    return {"rope_theta": bases.pop(), "rotated": () if all(rotated) else rotated}


def _layer_kinds(
    value: Any, fields: Mapping[str, Any], where: str, recurrent: str = LINEAR
) -> tuple[str, ...]:
    """`LlamaConfig.kinds` of a decoder with recurrent layers, which `layer_types` calls so."""
    layers, every = fields["layers"], value("full_attention_interval", 4)
    attends = value("full_attn_idxs")
    if attends is None:
        attends = range(every - 1, layers, every)
    types = value("layer_types") or [
        FULL if number in attends else recurrent for number in range(layers)
    ]
    names = {LINEAR: "linear", CONV: "conv", FULL: "full", SLIDING: "full"}
    known = (recurrent, FULL, *([SLIDING] if value("sliding_window") else []))
    if len(types) != layers or any(kind not in known for kind in types):
        raise UserError(
            f"{where}: layer_types is {types!r}, expected {' or '.join(known)} for each of "
            f"{layers} layers; use a checkpoint of these."
        )
    return tuple(names[kind] for kind in types)


def _of_latents(value: Any, fields: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of attention over latents."""
    usual = LatentConfig()
    latent = {ours: value(key, getattr(usual, ours)) for ours, key in LATENT_KEYS.items()}
    latent, scaling = LatentConfig(**latent), fields["rope_scaling"]
    scale = (latent.resting + latent.turning) ** -0.5
    if scaling is not None:
        all_scale = rope.get("mscale_all_dim") or 0.0
        scaling = dataclasses.replace(scaling, score_scale=float(all_scale))
        scale *= scaling.score_factor
    return {
        **{"latent": latent, "attention_scale": scale, "rope_scaling": scaling},
        **{"kv_heads": 1, "head_dim": latent.rank + latent.turning},
    }


def _dense_first(
    value: Any, family: Family, fields: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The fields of a mixture whose first layers have one MLP in the place of experts."""
    layers, types = fields["layers"], value("mlp_layer_types")
    key = family.dense_first if types is None else "mlp_layer_types"
    count = value(family.dense_first, 0) if types is None else types.count("dense")
    if types is not None and types != ["dense"] * count + ["sparse"] * (layers - count):
        raise UserError(
            f"{where}: {key} is {types!r}, expected dense for the first of {layers} layers and "
            "sparse for the others; use a checkpoint of these."
        )
    if not 0 <= (count or 0) < layers:
        raise UserError(
            f"{where}: {key} is {count}, expected less than the {layers} layers; use a checkpoint "
            "of these."
        )
    if not count:
        return {}
    kinds = plain_first(fields.get("kinds") or ("full",) * layers, count)
    return {"kinds": kinds, "plain_mlp": value("intermediate_size")}


def _of_llama4(value: Any, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of Llama 4's own keys. Layers that rotate see chunks, the others all."""
    layers, rotated = fields["layers"], fields["rotated"]
    chunks = ["chunked_attention" if rotates else FULL for rotates in rotated or (True,) * layers]
    every = value("interleave_moe_layer_step", 1)
    mixtures = value("moe_layers")
    is_dense = mixtures == []  # Llama Guard 4
    if mixtures is None:
        mixtures = [*range(every - 1, layers, every)] if every else []
    known = all(isinstance(number, int) and 0 <= number < layers for number in mixtures)
    known = known and (mixtures or is_dense)
    for key, right, wanted in (
        ("layer_types", value("layer_types") in (None, chunks), f"{chunks}"),
        ("moe_layers", known, f"numbers of layers below {layers}, one at least"),
    ):
        if not right:
            raise UserError(
                f"{where}: {key} is {value(key)!r}, expected {wanted}; use a checkpoint of these."
            )
    kinds = tuple("full" if number in mixtures else "plain" for number in range(layers))
    plain = "plain" in kinds
    grows = value("attn_temperature_tuning", True) and rotated
    dense = dict.fromkeys(("experts", "active_experts", "shared_expert"))
    dense |= {"mlp": value("intermediate_size_mlp"), "weighted_input": False}
    dense |= {"kinds": (), "plain_mlp": None}
    return {
        "qk_norm": "rotated" if value("use_qk_norm", True) else "none",
        "growth": (float(value("attn_scale")), value("floor_scale")) if grows else (),
        "shared_expert": fields["mlp"],
        "kinds": kinds if plain else (),
        "plain_mlp": value("intermediate_size_mlp") if plain else None,
        **(dense if is_dense else {}),
    }


def _slides(
    family: Family, value: Any, read: Mapping[str, str], fields: Mapping[str, Any], where: str
) -> tuple[bool, ...]:
    """Which layers have a window, if it is smaller than the text."""
    layers, window = fields["layers"], value("sliding_window")
    if "use_sliding_window" in read and not value("use_sliding_window", False):
        window = None
    kinds = value("layer_types") if "layer_types" in read else None
    if kinds is None and window is None and not family.full_every:
        return (False,) * layers
    if kinds is None:  # transformers' own choice
        slides = [True] * layers
        if family.full_every:
            pattern = family.names.get("sliding_window_pattern", "sliding_window_pattern")
            every, offset = value(pattern, family.full_every), int(not family.full_first)
            slides = [(number + offset) % every != 0 for number in range(layers)]
            slides[-1] &= "global_head_dim" not in read
        elif "max_window_layers" in read:
            slides = [number >= value("max_window_layers") for number in range(layers)]
        elif "no_rope_layers" in read:
            slides = [not rotated for rotated in fields["rotated"] or (True,) * layers]
    else:
        known = (SLIDING, FULL, *([CONV] if "conv_L_cache" in read else []))
        if len(kinds) != layers or any(kind not in known for kind in kinds):
            raise UserError(
                f"{where}: layer_types is {kinds!r}, expected {SLIDING} or {FULL} for each of "
                f"{layers} layers; use a checkpoint of these."
            )
        slides = [kind == SLIDING for kind in kinds]
    if window is None and any(slides):
        raise UserError(
            f"{where}: layer_types has {SLIDING}, but no sliding_window is in use; give "
            f"sliding_window, or make all layers {FULL}."
        )
    return tuple(slides)


def _windows(slides: tuple[bool, ...], window: int | None, positions: int) -> tuple[int, ...]:
    """`LlamaConfig.windows`; () where no layer's window is smaller than the positions."""
    if window is None or window >= positions or not any(slides):
        return ()
    return tuple(window * slide for slide in slides)


def fields_to_hf(config: Any) -> dict[str, Any]:
    """transformers' `config.json` of a config; see `LlamaConfig.to_hf`."""
    family = FAMILIES[config.family]
    read = _read(family)
    published: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type or config.family,
        **{key: getattr(config, field) for field, (key, _) in _plain(family).items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_to_hf(config.rope_scaling),
        "initializer_range": config.init_stddev,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":  # where Phi-3 looks for it
        published["original_max_position_embeddings"] = scaling.original_positions
    if "hidden_size_per_layer_input" in read:
        published["hidden_size_per_layer_input"] = config.side or 0
    if "query_pre_attn_scalar" in read:
        scale = config.attention_scale
        published["query_pre_attn_scalar"] = round(scale**-2) if scale else config.head_size
    if family.local:
        published |= _local_to_hf(config, published["rope_scaling"])
        if "rope_local_base_freq" in read:
            published["rope_local_base_freq"] = config.local_theta
        if "rope_parameters" in family.defaults:  # younger classes read nothing else
            del published["rope_theta"], published["rope_scaling"]
    if "rope_scaling" in family.defaults and scaling is None:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        published["rope_scaling"] = published["rope_parameters"] = rope
    if family.logit_factor:
        published[family.logit_factor] = 1 / config.logit_divisor
    if "mup_enabled" in read:
        published["mup_enabled"] = config.embedding_scale != 1
    if "layer_rope_theta" in read:
        rotated = config.rotated or (True,) * config.layers
        published["layer_rope_theta"] = [config.rope_theta * rotates for rotates in rotated]
    if family.partial:
        published["partial_rotary_factor"] = config.rotary_fraction
    if "rotary_dim" in read:
        published["rotary_dim"] = config.rotary_size
    if "no_rope_layers" in read:
        rotated = config.rotated or (True,) * config.layers
        published["no_rope_layers"] = [int(flag) for flag in rotated]
    if config.delta:
        published |= {key: getattr(config.delta, ours) for ours, key in DELTA_KEYS.items()}
    if config.latent:
        published |= {key: getattr(config.latent, ours) for ours, key in LATENT_KEYS.items()}
        published |= {"num_key_value_heads": config.heads, "head_dim": config.latent.turning}
    if "n_group" in read:
        published |= {"n_group": config.expert_groups or 1}
        published["topk_group"] = config.active_groups or 1
    if "topk_method" in read:
        in_groups = bool(config.expert_groups)
        published["topk_method"] = "group_limited_greedy" if in_groups else "greedy"
    shared = family.names.get("n_shared_experts", "n_shared_experts")
    if shared in read:
        published[shared] = (config.shared_expert or 0) // config.mlp
    elif "shared_intermediate_size" in read:
        published["shared_intermediate_size"] = config.shared_expert or 0
    if family.dense_first:
        count = sum(kind.startswith("plain") for kind in config.kinds)
        published[family.dense_first] = count
        if "mlp_layer_types" in read:
            types = ["dense"] * count + ["sparse"] * (config.layers - count)
            published["mlp_layer_types"] = types
        published["intermediate_size"] = config.plain_mlp or config.mlp
    if "use_qk_norm" in read:
        published["use_qk_norm"] = config.qk_norm != "none"
    if config.recurrent:
        published["layer_types"] = _published_kinds(config)
    if "block_multiple_of" in read:
        published["block_auto_adjust_ff_dim"] = False
    if "attention_chunk_size" in read:
        by, tokens = config.growth or (
            family.defaults["attn_scale"],
            family.defaults["floor_scale"],
        )
        published |= {"attn_scale": by, "floor_scale": tokens}
        published["attn_temperature_tuning"] = bool(config.growth)
        kinds = config.kinds or ("full",) * config.layers
        published["moe_layers"] = [number for number, kind in enumerate(kinds) if kind == "full"]
        if config.plain_mlp:
            published["intermediate_size_mlp"] = config.plain_mlp
        if not config.experts:
            published |= {"moe_layers": [], "intermediate_size_mlp": config.mlp}
            published |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    if "sliding_window" in read:
        published |= _windows_to_hf(config, read)
    if "enable_moe_block" in read:
        published |= {"enable_moe_block": bool(config.experts)}
        published["moe_intermediate_size"] = config.experts_beside
    if "vocab_size_per_layer_input" in read:
        published["vocab_size_per_layer_input"] = config.vocab_size
    if "global_head_dim" in read:
        full = config.full_layers or FullLayers(config.head_size, config.kv_heads, False)
        published["global_head_dim"] = full.head_dim
        published["num_global_key_value_heads"] = full.kv_heads
        published["attention_k_eq_v"] = full.keys_are_values
        published["num_kv_shared_layers"] = config.borrowers or 0
        published["use_double_wide_mlp"] = config.borrower_mlp is not None
    as_own = published | {"model_type": config.family}
    again = type(config)(**fields_from_hf(as_own, "the exported config.json"))
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OWN]
    for name in (*names, "head_size", "biases"):
        if getattr(again, name) != getattr(config, name):
            raise UserError(
                f"model.{name} is {getattr(config, name)!r}, for which {family.architecture} has "
                "no key in its config.json; it cannot be exported."
            )
    return published


def _published_kinds(config: Any) -> list[str]:
    """`layer_types` without those that have a window."""
    types = {"linear": LINEAR, "conv": CONV, "plain_conv": CONV}
    return [types.get(kind, FULL) for kind in config.kinds or ("full",) * config.layers]


def _local_to_hf(config: Any, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Writes the entry that `_both_ropes` reads."""
    far = {"rope_type": "default", "rope_theta": config.rope_theta, **(scaling or {})}
    near = {"rope_type": "default", "rope_theta": config.local_theta}
    return {"rope_parameters": {FULL: far, SLIDING: near}}


def _windows_to_hf(config: Any, read: Mapping[str, str]) -> dict[str, Any]:
    sizes = {window for window in config.windows if window}
    window = max(sizes, default=None)
    if window and config.bidirectional:
        window = 2 * (window - 1)
    published: dict[str, Any] = {"sliding_window": window}
    if "use_sliding_window" in read:
        published["use_sliding_window"] = bool(sizes)
    if "layer_types" in read:
        near = config.local or config.windows
        if FAMILIES[config.family].near_rotates:
            near = config.rotated
        near = near or (0,) * config.layers
        others = _published_kinds(config)
        published["layer_types"] = [
            SLIDING if slides else kind for slides, kind in zip(near, others, strict=True)
        ]
        if any(near) and not sizes:  # it is no smaller than the positions
            published["sliding_window"] = (1 + config.bidirectional) * config.positions
    if "max_window_layers" in read:
        published["max_window_layers"] = config.layers  # layer_types say it
    return published
