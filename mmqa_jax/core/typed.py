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
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from mmqa_jax.core.errors import UserError

T = TypeVar("T")
Spec = Any  # of check_section: names with their keys, or the kind of a mapping
_REQUIRED = dataclasses.MISSING


def at_least(minimum: float, default: Any = _REQUIRED) -> Any:
    """A field whose number has a smallest value."""
    return dataclasses.field(default=default, metadata={"minimum": minimum})


def mapping(spec: Spec | Callable[[Mapping[str, Any]], Spec], *, required: bool = False) -> Any:
    """A field that stays a mapping, checked by a specification; empty where it is left out.

    The specification is names with their keys, a kind such as `dict[str, float]`, or a function of
    the section that has the field, on whose other values it depends.
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
    """A section of sections: `choose` makes of the section that has the field a mapping from each
    name to its dataclass and whether it is required.
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
    """Returns the check of a field."""
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
        return {
            key: read_typed(named[key][0], inner_section, f"{name}.{key}")
            for key, inner_section in value.items()
        }
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


# Checks of config sections, and the sentences that name what is wrong with them.
#
# `check_section` compares a section with its specification: a dict `name -> Key`, or in place of
# the Key its kind alone, for a required key without a minimum.

# jax.random.key takes the low 32 bits of a seed, so that 2**32 would be the seed 0.
_LARGEST = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Key:
    """The specification of one key of a config section."""

    kind: Any  # the value's type, as in an annotation; for a section, its own specification
    required: bool = True  # whether the key must be present
    minimum: float | None = None  # the smallest value of a number


class AtLeast(NamedTuple):
    """The smallest value of a number, in the annotation of a parameter."""

    minimum: float


Count = Annotated[int, AtLeast(0)]  # where 0 means none: other whole numbers are mostly at least 1


def optional(kind: Any, minimum: float | None = None) -> Key:
    """A key that may be left out."""
    return Key(kind, False, minimum)


def spec_of(
    maker: Callable[..., Any], *without: str, minimum: float | None = None, partial: bool = False
) -> dict[str, Key]:
    """The specification of a section whose values are the arguments of a function or dataclass.

    Args:
      without: parameters that do not come from the section.
      minimum: of the parameters that are whole numbers, unless their annotation says `AtLeast`.
      partial: whether any parameter may be left out, not only those with a default.
    """
    return {
        name: _key_of(parameter, minimum, partial)
        for name, parameter in parameters_of(maker).items()
        if name not in without
    }


@functools.cache
def parameters_of(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function or dataclass, annotations evaluated; it is cached."""
    return inspect.signature(maker, eval_str=True).parameters


def _key_of(parameter: inspect.Parameter, minimum: float | None, partial: bool) -> Key:
    kind, required = parameter.annotation, parameter.default is parameter.empty and not partial
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        return Key(kind, required, next(n.minimum for n in notes if isinstance(n, AtLeast)))
    return Key(kind, required, minimum if kind is int else None)


def check_section(section: Any, name: str, spec: Mapping[str, Any]) -> None:
    """Checks the keys of a config section and their values, nested sections included.

    Args:
      section: the section, or the whole config.
      name: of the section, such as `model.changes`; empty for the whole config.
      spec: its specification.
    """
    if not fits(section, dict):
        raise UserError(f"config key {name}={section!r}: a section was expected; correct it.")
    keys = {key: known if isinstance(known, Key) else Key(known) for key, known in spec.items()}
    prefix = f"{name}." if name else ""
    for key, value in section.items():
        if key not in keys:
            raise UserError(f"config key {prefix}{key}: unknown; {nearest(key, keys)}")
        _check_value(value, prefix + key, keys[key])
    for key, known in keys.items():
        if known.required and key not in section:
            raise UserError(f"config key {prefix}{key} is missing; add it.")


def _check_value(value: Any, name: str, key: Key) -> None:
    if isinstance(key.kind, Mapping):
        check_section(value, name, key.kind)
    elif not fits(value, key.kind):
        choices = map(str, get_args(key.kind)) if get_origin(key.kind) is Literal else ()
        close = difflib.get_close_matches(str(value), choices, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else "correct the value."
        raise UserError(f"config key {name}={value!r}: {describe(key.kind)} was expected; {remedy}")
    elif any(abs(number) > _LARGEST for number in _whole_numbers(value)):
        raise UserError(
            f"config key {name}={value!r:.60}: at most {_LARGEST:,} was expected, since arrays and "
            "random keys hold 32 bits; give a smaller number."
        )
    elif key.minimum is not None and isinstance(value, int | float) and value < key.minimum:
        raise UserError(
            f"config key {name}={value}: at least {key.minimum} was expected; give a larger number."
        )


def _whole_numbers(value: Any) -> list[int]:
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if type(item) is int]


def nearest(word: str, known: Iterable[str], listed: str = "") -> str:
    """`did you mean 'steps'?` for a misspelled word, or else the list of known ones, or what
    lists them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:  # the right last part in the wrong section
        last = word.rpartition(".")[2]
        tails = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1, cutoff=0.75)]
    if close:
        return f"did you mean {close[0]!r}?"
    if listed:
        return listed
    return f"the known ones are {', '.join(sorted(known))}." if known else "remove it."


def fits(value: Any, kind: Any) -> bool:
    """Whether a config value is of a type, given as in an annotation."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, alternative) for alternative in inner)
    if origin is Literal:
        return value in inner
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and inner[-1] is not Ellipsis:
            return len(value) == len(inner) and all(map(fits, value, inner))
        return all(fits(item, inner[0]) for item in value)
    if kind is dict:
        return is_section(value)
    if origin is dict:
        return fits(value, dict) and all(fits(item, inner[1]) for item in value.values())
    if kind is Any or (isinstance(value, bool) and kind is not bool):
        return kind is Any  # python counts True as 1
    return isinstance(value, int | float if kind is float else kind)


def describe(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    names |= {dict: "a section", tuple: "a tuple", list: "a list"}
    if get_origin(kind) is Literal:
        choices = ", ".join(str(choice) or "''" for choice in get_args(kind))
        return f"one of {choices}" if len(get_args(kind)) > 1 else choices
    if get_origin(kind) in (Union, types.UnionType) and Literal["auto"] in get_args(kind):
        return " or ".join(map(describe, get_args(kind)))
    if get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,):
        return f"a tuple whose items are each {describe(get_args(kind)[0])}"
    if get_origin(kind) is tuple:
        return f"a tuple of {' and '.join(map(describe, get_args(kind)))}"
    return names.get(kind) or str(kind).removeprefix("collections.abc.")


def is_section(value: Any) -> bool:
    """Whether a value is a mapping or a ConfigDict, which is none by its class."""
    return isinstance(value, Mapping) or (hasattr(value, "items") and hasattr(value, "to_dict"))
