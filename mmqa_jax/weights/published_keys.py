"""The keys of a published config.json: each is read, harmless to inference, or refused by name.

A key that a reader does not know may change what the model computes, so that it is not passed
over. The lists of what is read, and of what is harmless in one model alone, are with its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError

# Harmless in every model: what transformers 2 to 5 keep in each config.json beside the model.
HARMLESS = frozenset(
    [
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "torchscript",
        "use_bfloat16",
        "fp16",
        "auto_map",
        "custom_pipelines",
        "transformers.js_config",
        "tokenizer_class",
        "prefix",
        "name_or_path",
        "finetuning_task",
        "task_specific_params",
        "tf_legacy_loss",
        "xla_device",
        "return_dict",
        "gradient_checkpointing",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "chunk_size_feed_forward",
        "attn_implementation",
        "use_flash_attn",
        "use_flash_attention",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "classifier_dropout",
        "classif_dropout",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "initializer_range",
        "initializer_factor",
        "init_std",
        "logit_scale_init_value",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "max_length",
        "min_length",
        "max_new_tokens",
        "pad_token",
        "bos_token",
        "eos_token",
        "unsloth_fixed",
        "unsloth_version",
        "neftune_noise_alpha",
        "written_by",
    ]
)
_HARMLESS_ENDS = ("_token_id",)  # read where a model needs one, e.g. by BART
# Refused in every model unless they have one of these values.
_SWITCHED_OFF: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": ({},),
    "compression_config": ({},),
    "pruned_heads": ({},),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "adapters": ({},),
}


# Sizes are at most as large as an index of an array may be. There are few layers and experts, since
# readers go through them one by one.
LARGEST = 2**31 - 1
MOST_LAYERS = 10_000
_NAMES_OF_FEW = ("layers", "depth", "experts", "patch_size", "merge_size", "interval")


def check_keys(
    published: Mapping[str, Any],
    where: str,
    *,
    read: Collection[str] | Mapping[str, str],
    harmless: Collection[str] = (),
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
) -> None:
    """Checks that no key of a config changes what is computed without being read.

    Args:
      published: the config; values that are null count as absent.
      where: what messages call it.
      read: keys that the reader uses; a mapping says of what kind their values are (`KINDS`; with a
        question mark behind it, null too).
      harmless: further keys that change nothing in inference.
      fixed: keys that change it and have only these values here; they take precedence over what
        holds for every model.
    """
    if isinstance(read, Mapping):
        _check_kinds(published, where, read)
    allowed = {**_SWITCHED_OFF, **(fixed or {})}
    for key, value in published.items():
        if value is None or key in read:
            continue
        if key in allowed:
            if value not in allowed[key]:
                values = " or ".join(repr(one) for one in allowed[key]) or "none"
                raise UserError(
                    f"{where}: {key} is {value!r}, which this reader does not support (only "
                    f"{values}); use a checkpoint without it."
                )
        elif not (
            key in HARMLESS
            or key in harmless
            or key.startswith("_")
            or key.endswith(_HARMLESS_ENDS)
            or value in ({}, [], "")
        ):
            raise UserError(
                f"{where}: the key {key!r} ({_shown(value)}) is not known here and may change "
                "what the model computes; take it out of the file if it does not, or use another "
                "checkpoint."
            )


def _check_kinds(published: Mapping[str, Any], where: str, kinds: Mapping[str, str]) -> None:
    for key, kind in kinds.items():
        if key not in published:
            continue
        value, (fits, meaning) = published[key], KINDS[kind.removesuffix("?")]
        if value is None and kind.endswith("?"):
            continue
        if kind.startswith("size") and fits(value):
            most = MOST_LAYERS if any(part in key for part in _NAMES_OF_FEW) else LARGEST
            fits, meaning = most.__ge__, f"a whole number of at most {most:,}"
        if not fits(value):
            raise UserError(
                f"{where}: {key} is {_shown(value)}, expected {meaning}; repair the file or fetch "
                "it again."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Kind of a value -> whether it is one, and what a message calls it.
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "size": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        "a whole number of at least 1",
    ),
    "integer": (lambda value: isinstance(value, int) and _is_number(value), "a whole number"),
    "number": (lambda value: _is_number(value) and 0 <= value < float("inf"), "a number from 0 on"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "name": (lambda value: isinstance(value, str), "a name"),
    "object": (lambda value: isinstance(value, Mapping), "an object"),
    "list": (lambda value: isinstance(value, list | tuple), "a list"),
    "any": (lambda value: True, "anything"),
}


def kinds(**keys: str) -> dict[str, str]:
    """A mapping for `check_keys`: kind -> its keys, with spaces between; `or_null` ends a kind."""
    return {
        key: kind.replace("_or_null", "?") for kind, names in keys.items() for key in names.split()
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
