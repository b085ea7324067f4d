"""Config files: `get_config(mode)` of a python file, dotted overrides, checks, fingerprints.

A config is an `ml_collections.ConfigDict` from `configs/.../x.py`; the part behind a colon
(`x.py:runlocal`) is handed to `get_config`. Overrides come from the command line as text and
are parsed to the type of the value they replace; keys that do not exist are refused.

A config file may name its modes, `MODES = ("runlocal",)`; any other mode is then refused.

`check_section` compares a section with its specification: a dict `name -> Key`, or in place of
the Key its kind alone, for a required key without a minimum.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import hashlib
import inspect
import json
import os
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin

from ml_collections import ConfigDict, FieldReference

from mmqa_jax.core.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "0"), False),
}


# jax.random.key takes the low 32 bits of a seed, so that 2**32 would be the seed 0.
_LARGEST = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Key:
    """What a specification says about one key of a config section.

    Attributes:
      kind: the value's type, as in an annotation; for a section, its own specification.
      required: whether the key must be present.
      minimum: the smallest value of a number.
    """

    kind: Any
    required: bool = True
    minimum: float | None = None


def optional(kind: Any, minimum: float | None = None) -> Key:
    """A key that may be left out."""
    return Key(kind, False, minimum)


def spec_of(
    maker: Callable[..., Any],
    *without: str,
    minimum: float | None = None,
    partial: bool = False,
) -> dict[str, Key]:
    """The specification of a section whose values are the arguments of a function or dataclass.

    Args:
      without: parameters that do not come from the section.
      minimum: of all parameters that are whole numbers.
      partial: whether any parameter may be left out, not only those with a default.
    """
    return {
        name: Key(
            parameter.annotation,
            parameter.default is parameter.empty and not partial,
            minimum if parameter.annotation is int else None,
        )
        for name, parameter in inspect.signature(maker, eval_str=True).parameters.items()
        if name not in without
    }


def check_section(section: Any, name: str, spec: Mapping[str, Any]) -> None:
    """Checks the keys of a config section and their values, nested sections included.

    Args:
      section: the section, or the whole config.
      name: of the section, such as `model.changes`; empty for the whole config.
      spec: its specification.

    Raises:
      UserError: not a section; a key that is unknown (with the nearest known one) or missing;
        a value of another type, below its minimum, or a whole number of more than 32 bits.
    """
    if not _fits(section, dict):
        raise UserError(f"config key {name}={section!r}: a section was expected.")
    keys = {key: one if isinstance(one, Key) else Key(one) for key, one in spec.items()}
    prefix = f"{name}." if name else ""
    for key, value in section.items():
        if key not in keys:
            raise UserError(f"config key {prefix}{key}: unknown; {nearest(key, keys)}")
        _check_value(value, prefix + key, keys[key])
    for key, one in keys.items():
        if one.required and key not in section:
            raise UserError(f"config key {prefix}{key} is missing; add it.")


def _check_value(value: Any, name: str, key: Key) -> None:
    if isinstance(key.kind, Mapping):
        check_section(value, name, key.kind)
    elif not _fits(value, key.kind):
        choices = map(str, get_args(key.kind)) if get_origin(key.kind) is Literal else ()
        close = difflib.get_close_matches(str(value), choices, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else "correct the value."
        raise UserError(
            f"config key {name}={value!r}: {_describe(key.kind)} was expected; {remedy}"
        )
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


def auto() -> FieldReference:
    """The value `auto` of a config file: what is best is chosen where it is used.

    Files that change the config may assign a number to it.
    """
    return FieldReference("auto", field_type=object)


def load_config(
    path_with_argument: str | os.PathLike,
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> ConfigDict:
    """Loads a config file and applies overrides.

    Args:
      path_with_argument: `configs/x.py`, or `configs/x.py:MODE` for `get_config("MODE")`;
        see `find_config`.
      overrides: `{"train.steps": "500"}`, or `["train.steps=500"]`. Text is parsed to the type
        of the value it replaces (`none` clears a value that is not text); other values must
        have that type.

    Raises:
      UserError: no such file, a file without `get_config` or with a mistake in it, an unknown
        mode or key (with the nearest known one), or a value of another type.
    """
    match = re.fullmatch(r"(.+\.py)(?::(.*))?", str(path_with_argument))
    if match is None:
        raise UserError(
            f"--config={path_with_argument}: a python file was expected, such as "
            "configs/atlas/demo.py or configs/atlas/demo.py:runlocal."
        )
    file, mode = find_config(match[1]), match[2] or ""
    config = _call_get_config(load_module(file), file, mode)
    for key, value in _pairs(overrides):
        _override(config, key, value, file)
    return config


def find_config(path: str | os.PathLike) -> Path:
    """The file at a path, or else the one of that name that comes with the installed package."""
    path = Path(path)
    # Wheels carry configs/ in the package; in a checkout it is beside it.
    for candidate in (path, _PACKAGE / path, _PACKAGE.parent / path):
        if candidate.is_file():
            return candidate
    return path


def to_plain_dict(config: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """The config as dicts, lists, text, numbers, booleans and None (JSON's types).

    Raises:
      UserError: a value of another type, with its key.
    """
    return _plain(config, "")


def config_fingerprint(config: ConfigDict | Mapping[str, Any]) -> str:
    """16 hex digits that are equal if and only if two configs hold the same values."""
    text = json.dumps(to_plain_dict(config), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flatten(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"steps": 5}}` -> `{"train.steps": 5}`; an empty section stays as `{}`."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'steps'?` for a misspelled word, or else the list of known ones."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:  # the right last part in the wrong section
        last = word.rpartition(".")[2]
        tails = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1, cutoff=0.75)]
    if close:
        return f"did you mean {close[0]!r}?"
    return f"the known ones are {', '.join(sorted(known))}." if known else "remove it."


def config_beside(file: str, name: str) -> ModuleType:
    """Loads another config file, for configs that have parts in common.

    Args:
      file: the config's own `__file__`.
      name: path of the other file, relative to the folder of `file`.
    """
    return _execute(Path(file).parent / name)


def load_module(file: Path) -> ModuleType:
    """The module of a config file; UserError where there is none."""
    if not file.is_file():
        raise UserError(f"--config={file}: no such config file; check the path.")
    return _execute(file)


def _execute(file: Path) -> ModuleType:
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    with _mistakes_named(file):
        exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), module.__dict__)
    return module


@contextlib.contextmanager
def _mistakes_named(file: Path) -> Iterator[None]:
    """Turns what a config file raises into a UserError with file and line."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(
            f"{error.filename or file}, line {error.lineno or 1}: not valid python ({error.msg}); "
            "repair the config file."
        ) from error
    except (Exception, SystemExit) as error:
        # The innermost line of this config or of one beside it that it calls.
        folder = file.resolve().parent
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename).resolve().parent == folder]
        place = f"{own[-1].filename}, line {own[-1].lineno}" if own else str(file)
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{place}: the config file fails ({said}); repair it.") from error


def _call_get_config(module: Any, file: Path, mode: str) -> ConfigDict:
    if not callable(getattr(module, "get_config", None)):
        raise UserError(
            f"{file}: a config file must define get_config(mode=''), which returns a ConfigDict."
        )
    if mode and not inspect.signature(module.get_config).parameters:
        raise UserError(
            f"--config={file}:{mode}: get_config of this file takes no mode; leave out ':{mode}'."
        )
    modes = getattr(module, "MODES", None)
    if mode and modes is not None and mode not in modes:
        raise UserError(
            f"--config={file}:{mode}: this file has no such mode; {nearest(mode, modes)}"
        )
    with _mistakes_named(file):
        config = module.get_config(mode) if mode else module.get_config()
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"{file}: get_config must return an ml_collections.ConfigDict, "
            f"it returned {type(config).__name__}."
        )
    return config


def _pairs(overrides: Mapping[str, Any] | Iterable[str]) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"override {text!r}: KEY=VALUE was expected, such as train.steps=500.")
        yield key, value


def _override(config: ConfigDict, key: str, value: Any, file: Path) -> None:
    section: Any = config
    *parents, last = key.split(".")
    for part in [*parents, last]:
        if not isinstance(section, ConfigDict) or part not in section:
            known = flatten(config.to_dict())
            raise UserError(f"--config.{key}: {file} has no such key; {nearest(key, known)}")
        parent, section = section, section[part]
    if isinstance(section, ConfigDict):
        inner = ", ".join(f"{key}.{name}" for name in section)
        raise UserError(f"--config.{key}: is a section, not a value; set one of {inner}.")
    kind = parent.get_type(last)
    try:
        parsed = _parse(value, kind, section)
    except ValueError as error:
        raise UserError(
            f"--config.{key}={value}: {file} has {_describe(kind)} there ({section!r}); "
            f"give {_describe(kind)}."
        ) from error
    with parent.unlocked(), parent.ignore_type():
        parent[last] = parsed


def _parse(value: Any, kind: type, current: Any) -> Any:
    """Converts an override to the type `kind`; raises ValueError if that is impossible.

    A whole number, or several, and `auto` may replace each other; the config's check knows where.
    """
    if current == "auto" and type(given := _literal(value)) in (int, tuple, list):
        return given
    if value == "auto" and kind in (int, tuple):
        return value
    if isinstance(value, str) and kind is not str:
        value = _literal(value)
    if value is None or kind is type(None):  # `current` is None: any type may replace it
        return value
    if kind in (tuple, list):
        return _parse_items(value, kind, current)
    if kind is bool:
        value = _BOOLEANS.get(str(value).lower(), value)
    elif kind is int and isinstance(value, float) and value.is_integer():  # 1e4
        value = int(value)
    elif kind is float and type(value) is int:
        value = float(value)
    if not _fits(value, kind):
        raise ValueError(value)
    return value


def _parse_items(value: Any, kind: type, current: Any) -> Any:
    """A tuple or list from `(1, 2)`, `1,2`, `a,b` or `1`; items of the type of the current ones."""
    if isinstance(value, str):
        if value.strip().startswith(("(", "[")):  # with a mistake in it
            raise ValueError(value)
        value = [_literal(item) for item in value.split(",") if item]
    items = value if isinstance(value, list | tuple) else [value]
    kinds = {type(item) for item in current or ()}
    if len(kinds) == 1 and (one := kinds.pop()) in (int, float, str):
        items = [str(item) if one is str else _parse(item, one, None) for item in items]
    return kind(items)


def _literal(text: Any) -> Any:
    """The python value that a text spells, or the text itself; other values as they are."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return {"none": None, "true": True, "false": False}.get(text.strip().lower(), text)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a config value is of a type, given as in an annotation."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and inner[-1] is not Ellipsis:
            return len(value) == len(inner) and all(map(_fits, value, inner))
        return all(_fits(item, inner[0]) for item in value)
    if kind is dict:
        return isinstance(value, Mapping | ConfigDict)
    if origin is dict:
        return _fits(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if kind is Any or (isinstance(value, bool) and kind is not bool):
        return kind is Any  # python counts True as 1
    return isinstance(value, int | float if kind is float else kind)


def _describe(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    names |= {dict: "a section", tuple: "a tuple", list: "a list"}
    if get_origin(kind) is Literal:
        choices = ", ".join(map(str, get_args(kind)))
        return f"one of {choices}" if len(get_args(kind)) > 1 else choices
    if get_origin(kind) in (Union, types.UnionType) and Literal["auto"] in get_args(kind):
        return " or ".join(map(_describe, get_args(kind)))
    if get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,):
        return f"a tuple whose items are each {_describe(get_args(kind)[0])}"
    if get_origin(kind) is tuple:
        return f"a tuple of {' and '.join(map(_describe, get_args(kind)))}"
    return names.get(kind) or str(kind).removeprefix("collections.abc.")


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, ConfigDict):
        value = value.to_dict()  # resolves field references
    if isinstance(value, Mapping):
        prefix = f"{key}." if key else ""
        return {str(name): _plain(inner, f"{prefix}{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return value.item()
    raise UserError(
        f"config key {key}: holds a {type(value).__name__}; only text, numbers, true/false, "
        "none, lists and sections can be kept in config.json."
    )
