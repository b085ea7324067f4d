"""Qwen3-Omni's thinker, which reads texts and pictures: a Qwen3-VL mixture under other names.

Its talker, the decoder of sound and the tower of sound are left out. Names: transformers
models/qwen3_omni_moe and conversion_mapping.py.
"""

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.layouts import check_model_type

MODEL_TYPES = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
_AS = "qwen3_vl_moe"
_TOKENS = tuple(f"{name}_token_id" for name in ("image", "video", "vision_start", "vision_end"))
# Of sound, and of conversations.
_HARMLESS = (
    *("talker_config", "code2wav_config", "enable_audio_output", "audio_config"),
    *("position_id_per_seconds", "seconds_per_chunk"),
    *(f"audio_{part}token_id" for part in ("", "start_", "end_")),
    *(f"{part}_token_id" for part in ("im_start", "im_end", "system", "user", "assistant")),
    *(f"tts_{part}_token_id" for part in ("bos", "eos", "pad")),
)
# Of its parts: keys of their own -> their only values.
_TEXT = {
    **{"norm_topk_prob": (True,), "use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
    "sliding_window": (None,),
}
_TOWER = {"apply_vit_abs_pos_embed": (True,), "image_size": None}
_LEFT_OUT = re.compile(r"(talker|code2wav|audio_tower)\.")
_NAMES = (
    (re.compile(r"\.merger_list\."), ".deepstack_merger_list."),
    (re.compile(r"(merger(?:_list\.\d{1,4})?)\.ln_q\."), r"\1.norm."),
    (re.compile(r"(merger(?:_list\.\d{1,4})?)\.mlp\.0\."), r"\1.linear_fc1."),
    (re.compile(r"(merger(?:_list\.\d{1,4})?)\.mlp\.2\."), r"\1.linear_fc2."),
)


def thinker(published: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config.json of the Qwen3-VL mixture that a Qwen3-Omni's thinker is."""
    if "thinker_config" in published:
        check_keys(published, where, read=kinds(object="thinker_config"), harmless=_HARMLESS)
        published, where = published["thinker_config"], f"{where}, thinker_config"
    check_keys(
        published,
        where,
        read=kinds(object="text_config vision_config", integer=" ".join(_TOKENS)),
        harmless=(*_HARMLESS, "tie_word_embeddings"),
    )
    parts = {}
    for name, kind, known in (
        ("text_config", "text", _TEXT),
        ("vision_config", "vision_encoder", _TOWER),
    ):
        part = published[name]
        check_model_type(
            {"model_type": f"{MODEL_TYPES[0]}_{kind}", **part},
            f"{where}, {name}",
            f"{MODEL_TYPES[0]}_{kind}",
        )
        fixed = {key: values for key, values in known.items() if values is not None}
        check_keys({key: part[key] for key in fixed if key in part}, where, read=(), fixed=fixed)
        parts[name] = {key: value for key, value in part.items() if key not in known}
        parts[name]["model_type"] = f"{_AS}_{kind.partition('_')[0]}"
    for key in ("rope_scaling", "rope_parameters"):
        if rope := parts["text_config"].get(key):
            parts["text_config"][key] = {k: v for k, v in rope.items() if k != "interleaved"}
    tokens = {key: published[key] for key in _TOKENS if key in published}
    return {"model_type": _AS, "tie_word_embeddings": False, **tokens, **parts}


def thinker_tensors(source: TensorSource) -> TensorSource:
    """The tensors of the thinker under a Qwen3-VL's names; a warning says what is left out."""
    tensors: dict[str, Any] = {}
    left_out = set()
    for key, spec in source.specs().items():
        name = key.removeprefix("thinker.")
        if match := _LEFT_OUT.match(name):
            left_out.add(match[1])
            continue
        for theirs, ours in _NAMES:
            name = theirs.sub(ours, name)
        tensors[name] = spec, functools.partial(source.read, key)
    if left_out:
        logging.getLogger(__name__).warning(
            "%s: of this Qwen3-Omni the thinker is read without sound; its %s are left out",
            source.name,
            " and ".join(sorted(left_out)),
        )
    return DerivedSource(source.name, tensors)
