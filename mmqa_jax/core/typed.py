"""Config sections as typed dataclasses: what a section may hold is written once, as fields.

A field's annotation is the kind of its value, its default the value where the config leaves it
out, and `__post_init__` holds the rules between fields. A field whose annotation is such a
dataclass is a section of its own.

    @dataclasses.dataclass(frozen=True)
    class Pictures:
        size: int = at_least(1)
        resize: Literal["squash", "crop"] = "crop"

    read_typed(Pictures, config.pictures, "pictures")
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union

from mmqa_jax.core.sections import Key, check_section, spec_of

T = TypeVar("T")
Spec = Any  # of core.sections.check_section: names with their keys, or the kind of a mapping
_REQUIRED = dataclasses.MISSING


def at_least(minimum: float, default: Any = _REQUIRED) -> Any:
    """A field whose number has a smallest value."""
    return dataclasses.field(default=default, metadata={"minimum": minimum})


def mapping(spec: Spec | Callable[[Mapping[str, Any]], Spec], *, required: bool = False) -> Any:
    """A field that stays a mapping, checked by a specification; empty where it is left out.

    Args:
      spec: names with their keys, a kind such as `dict[str, float]`, or a function of the section
        that has the field, on whose other values the specification depends.
    """
    metadata = {"spec": spec}
    if required:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default_factory=dict, metadata=metadata)


def changes_of(kind: type, *without: str) -> Any:
    """A field that maps names of another dataclass's fields to the values that differ."""
    return mapping(spec_of(kind, *without, minimum=1, partial=True))


def chosen_by(choose: Callable[[Mapping[str, Any]], type]) -> Any:
    """A section whose dataclass depends on its values: `choose(section)`."""
    return dataclasses.field(metadata={"choose": choose})


def sections_by_name(choose: Callable[[Mapping[str, Any]], Mapping[str, tuple[type, bool]]]) -> Any:
    """A section of sections.

    Args:
      choose: of the section that has the field: name -> its dataclass, and whether it is required.
    """
    return dataclasses.field(metadata={"named": choose})


def as_given() -> Any:
    """A field that is no key: the section that was read, as plain values.

    It is empty of a dataclass that was made in code, `dataclasses.replace` included.
    """
    metadata = {"given": True}
    return dataclasses.field(
        init=False, default_factory=dict, compare=False, repr=False, metadata=metadata
    )


def read_typed(kind: type[T], section: Any, name: str = "") -> T:
    """A config section as its dataclass, the sections in it included.

    Args:
      section: a ConfigDict or mapping.
      name: of the section, such as `inference`; empty for the whole config.

    Raises:
      UserError: not a section; a key that is unknown (with the nearest known one) or missing; a
        value of another type or below its minimum; or what the dataclass refuses.
    """
    hints, every = _hints(kind), dataclasses.fields(kind)
    fields = [field for field in every if "given" not in field.metadata]
    check_section(section, name, {field.name: _key(field, hints, section) for field in fields})
    prefix = f"{name}." if name else ""
    values = {
        field.name: _value(field, hints[field.name], section, prefix + field.name)
        for field in fields
        if field.name in section
    }
    made = kind(**values)
    for field in every:
        if "given" in field.metadata:
            object.__setattr__(made, field.name, plain(section))
    return made


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _key(field: dataclasses.Field, hints: Mapping[str, Any], section: Mapping[str, Any]) -> Key:
    """What check_section checks of a field."""
    required = field.default is _REQUIRED and field.default_factory is _REQUIRED
    kind: Any = hints[field.name]
    if "spec" in field.metadata:
        kind = field.metadata["spec"]
        kind = kind(section) if isinstance(kind, types.FunctionType) else kind
    elif "named" in field.metadata:
        named = field.metadata["named"](section)
        kind = {name: Key(dict, needed) for name, (_, needed) in named.items()}
    elif "choose" in field.metadata or dataclasses.is_dataclass(kind):
        kind = dict
    elif _section_of(kind) is not None:
        kind = dict | None
    return Key(kind, required, field.metadata.get("minimum"))


def _value(field: dataclasses.Field, hint: Any, section: Mapping[str, Any], name: str) -> Any:
    """The field's value as the dataclass has it."""
    value = section[field.name]
    if "named" in field.metadata:
        named = field.metadata["named"](section)
        return {key: read_typed(named[key][0], one, f"{name}.{key}") for key, one in value.items()}
    if "choose" in field.metadata:
        return read_typed(field.metadata["choose"](value), value, name)
    if "spec" in field.metadata:
        return plain(value)
    inner = _section_of(hint)
    if inner is not None:
        return None if value is None else read_typed(inner, value, name)
    return as_tuples(plain(value))


def _section_of(hint: Any) -> type | None:
    """The dataclass of an annotation `Section` or `Section | None`."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return _section_of(kinds[0]) if len(kinds) == 1 else None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def plain(value: Any) -> Any:
    """A ConfigDict as a dict; other values as they are."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def as_tuples(value: Any) -> Any:
    """Lists as tuples, which is what JSON makes of tuples."""
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value
