"""Model configs (nested frozen dataclasses) as JSON and back, and single values changed by name."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json

C = TypeVar("C")


def config_to_json(config: Any) -> dict[str, Any]:
    """A config as JSON values: nested configs become objects, tuples become lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_from_json(kind: type[C], value: Any, where: str) -> C:
    """The config that `config_to_json` wrote; fields that are absent keep their defaults.

    Args:
      kind: the config's dataclass.
      value: the JSON object.
      where: what messages call it, e.g. `config.json, key config`.
    """
    return _read(kind, value, where)


def with_changes(config: C, changes: Iterable[str]) -> C:
    """The config with some values replaced.

    Args:
      config: a config.
      changes: `FIELD=VALUE` each; a dot leads into a nested config (`text.heads=4`), the value
        is JSON or a plain string.
    """
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise UserError(f"--set {change}: write it as FIELD=VALUE, e.g. --set heads=12.")
        try:
            value = parse_json(text, name)
        except UserError:
            value = text
        config = _changed(config, name.split("."), value, f"--set {name}")
    return config


def replace_fields(config: C, **changes: Any) -> C:
    """The config with fields replaced wherever it, or a config in it, has a field of that name."""
    config, replaced = _replaced(config, changes)
    assert set(changes) <= replaced, f"no fields {sorted(set(changes) - replaced)}"
    return config


def _replaced(config: Any, changes: Mapping[str, Any]) -> tuple[Any, set[str]]:
    values, replaced = {}, set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in changes:
            values[field.name] = changes[field.name]
            replaced.add(field.name)
        elif dataclasses.is_dataclass(value):
            values[field.name], inner = _replaced(value, changes)
            replaced |= inner
    return dataclasses.replace(config, **values), replaced


def _changed(config: Any, path: list[str], value: Any, where: str) -> Any:
    name, *rest = path
    hints = typing.get_type_hints(type(config))
    if name not in hints:
        raise UserError(f"{where}: unknown field {name!r}; use one of {', '.join(hints)}.")
    if not rest:
        return dataclasses.replace(config, **{name: _read(hints[name], value, where)})
    inner = getattr(config, name)
    if not dataclasses.is_dataclass(inner):
        raise UserError(f"{where}: {name!r} has no fields of its own; leave out what follows it.")
    return dataclasses.replace(config, **{name: _changed(inner, rest, value, where)})


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as the type hint `kind` says."""
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _dataclass(kind, value, where)
    if isinstance(kind, types.UnionType):
        options = [option for option in typing.get_args(kind) if _fits(option, value)]
        if options:  # of several configs, the one that has all the fields
            return _read(min(options, key=lambda option: _unknown(option, value)), value, where)
    elif typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
        kinds = typing.get_args(kind)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(kinds) == len(value):
            return tuple(_read(*pair, where) for pair in zip(kinds, value, strict=True))
    elif _fits(kind, value):
        return float(value) if kind is float else value
    name = getattr(kind, "__name__", None) or kind
    raise UserError(f"{where} is {value!r}: expected {name}; correct it.")


def _fits(kind: Any, value: Any) -> bool:
    if dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
    return isinstance(value, kind)


def _unknown(kind: Any, value: Any) -> int:
    """How many of the value's fields the dataclass `kind` does not have."""
    return len(set(value) - set(typing.get_type_hints(kind))) if isinstance(value, Mapping) else 0


def _dataclass(kind: type, value: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise UserError(
            f"{where}: unknown field {unknown[0]!r}; use one of {', '.join(hints)}, or the version "
            "of mmqa_jax that wrote it."
        )
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}; add it.")
    read = {name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    return kind(**read)


# The keys of a published config.json: each is read, harmless to inference, or refused by name.
#
# A key that a reader does not know may change what the model computes, so that it is not passed
# over. The lists of what is read, and of what is harmless in one model alone, are with its
# reader.


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


class ForeignModel(UserError):
    """A config is of a model type that was not expected; `what` says so without a remedy."""

    def __init__(self, where: str, model_type: Any, expected: str):
        self.model_type = model_type
        self.what = f"{where}: model_type is {model_type!r}, expected {expected}"
        super().__init__(f"{self.what}; give a checkpoint of that model.")


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
                values = " or ".join(repr(choice) for choice in allowed[key]) or "none"
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
            near = difflib.get_close_matches(key, [*read, *allowed], n=1, cutoff=0.85)
            asked = f", unlike {near[0]!r}," if near else ""
            raise UserError(
                f"{where}: the key {key!r} ({_shown(value)}) is not known here{asked} and may "
                "change what the model computes; take it out of the file if it does not, or use "
                "another checkpoint."
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
