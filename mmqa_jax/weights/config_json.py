"""Model configs (nested frozen dataclasses) as JSON and back, and single values changed by name."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json
from mmqa_jax.weights.published_keys import LARGEST

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
    config, found = _replaced(config, changes)
    assert set(changes) <= found, f"no fields {sorted(set(changes) - found)}"
    return config


def _replaced(config: Any, changes: Mapping[str, Any]) -> tuple[Any, set[str]]:
    values, found = {}, set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in changes:
            values[field.name] = changes[field.name]
            found.add(field.name)
        elif dataclasses.is_dataclass(value):
            values[field.name], inner = _replaced(value, changes)
            found |= inner
    return dataclasses.replace(config, **values), found


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
