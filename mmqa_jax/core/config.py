"""Config files: `get_config(mode)` of a python file, dotted overrides, fingerprints.

A config is an `ml_collections.ConfigDict` from `configs/.../x.py`; the part behind a colon
(`x.py:runlocal`) is handed to `get_config`. Overrides come from the command line as text and
are parsed to the type of the value they replace; keys that do not exist are refused.

A config file may name its modes, `MODES = ("runlocal",)`: others are refused then.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin

from ml_collections import ConfigDict, FieldReference

from mmqa_jax.core.errors import UserError

_TRUE = {"true", "t", "yes", "y", "1"}
_FALSE = {"false", "f", "no", "n", "0"}


def load_config(
    path_with_argument: str | os.PathLike,
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> ConfigDict:
    """Loads a config file and applies overrides.

    Args:
      path_with_argument: `configs/x.py`, or `configs/x.py:MODE` for `get_config("MODE")`.
      overrides: `{"train.steps": "500"}`, or `["train.steps=500"]`. Text is parsed to the type
        of the value it replaces (`none` clears a value that is not text); other values must
        have that type.

    Raises:
      UserError: no such file, a file without `get_config` or with a mistake in it, an unknown
        mode or key (with the nearest known one), or a value of another type.
    """
    path, _, argument = str(path_with_argument).partition(".py:")
    file = Path(path if path.endswith(".py") else path + ".py")
    if not str(path_with_argument).endswith(".py") and ".py:" not in str(path_with_argument):
        raise UserError(
            f"--config={path_with_argument}: a python file was expected, such as "
            "configs/atlas/demo.py or configs/atlas/demo.py:runlocal."
        )
    config = _call_get_config(_load_module(file), file, argument)
    for key, value in _pairs(overrides):
        _override(config, key, value, file)
    return config


def to_plain_dict(config: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """The config as dicts, lists, text, numbers, booleans and None (JSON's types).

    Raises:
      UserError: a value of another type, with its key.
    """
    if isinstance(config, ConfigDict):
        config = config.to_dict()  # resolves field references
    return {str(key): _plain(value, str(key)) for key, value in config.items()}


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
    """`, did you mean 'steps'?` for a misspelt word, or a list of what is known."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:  # a right last part in a wrong section
        last = word.rpartition(".")[2]
        tails = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1, cutoff=0.75)]
    if close:
        return f"did you mean {close[0]!r}?"
    return f"the known ones are {', '.join(sorted(known))}."


def check_section(
    section: Any, name: str, known: Mapping[str, Any], needed: Iterable[str] = ()
) -> None:
    """Checks the keys of a config section, and the types of their values.

    Args:
      section: the section, or the whole config.
      name: of the section, such as `model.changes`; empty for the whole config.
      known: key -> type, as in an annotation; a `dict` is a section.
      needed: keys that must be there.

    Raises:
      UserError: not a section; a key that is unknown (with the nearest known one) or missing;
        a value of another type.
    """
    if not _fits(section, dict):
        raise UserError(f"config key {name}={section!r}: {_describe(dict)} was expected.")
    prefix = f"{name}." if name else ""
    for key, value in section.items():
        if key not in known:
            raise UserError(f"config key {prefix}{key}: unknown; {nearest(key, known)}")
        if not _fits(value, known[key]):
            raise UserError(
                f"config key {prefix}{key}={value!r}: {_describe(known[key])} was expected; "
                "correct the value."
            )
    for key in needed:
        if key not in section:
            raise UserError(f"config key {prefix}{key} is missing; add it.")


def parameters_of(maker: Callable[..., Any], *without: str) -> tuple[dict[str, Any], list[str]]:
    """Parameters of the function or dataclass that a section goes to, for `check_section`.

    Args:
      without: parameters that do not come from the section.

    Returns:
      name -> type, and the names without a default.
    """
    found = inspect.signature(maker, eval_str=True).parameters
    kept = [parameter for name, parameter in found.items() if name not in without]
    needed = [parameter.name for parameter in kept if parameter.default is parameter.empty]
    return {parameter.name: parameter.annotation for parameter in kept}, needed


def config_beside(file: str, name: str) -> ModuleType:
    """Another python file, for experiments that share a part.

    Args:
      file: the config's own `__file__`.
      name: path of the other one from the config's folder.
    """
    return _execute(Path(file).parent / name)


def _load_module(file: Path) -> ModuleType:
    if not file.is_file():
        raise UserError(f"--config={file}: no such config file; check the path.")
    module = _execute(file)
    if not callable(getattr(module, "get_config", None)):
        raise UserError(
            f"{file}: a config file must define get_config(mode=''), which returns a ConfigDict."
        )
    return module


def _execute(file: Path) -> ModuleType:
    name = "mmqa_config_" + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    keep = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # no __pycache__ beside the user's configs
    try:
        with _mistakes_named(file):
            spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = keep
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
            f"{error.filename}, line {error.lineno}: not valid python ({error.msg}); "
            "repair the config file."
        ) from error
    except Exception as error:
        # The innermost line of this config or of one beside it that it calls.
        folder = file.resolve().parent
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename).resolve().parent == folder]
        place = f"{own[-1].filename}, line {own[-1].lineno}" if own else str(file)
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{place}: the config file fails ({said}); repair it.") from error


def _call_get_config(module: Any, file: Path, argument: str) -> ConfigDict:
    if argument and not inspect.signature(module.get_config).parameters:
        raise UserError(
            f"--config={file}:{argument}: get_config of this file takes no mode; "
            f"leave out ':{argument}'."
        )
    modes = getattr(module, "MODES", None)
    if argument and modes is not None and argument not in modes:
        raise UserError(
            f"--config={file}:{argument}: this file has no such mode; {nearest(argument, modes)}"
        )
    with _mistakes_named(file):
        config = module.get_config(argument) if argument else module.get_config()
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
    except (ValueError, SyntaxError) as error:
        raise UserError(
            f"--config.{key}={value}: {file} has {_describe(kind)} there ({section!r}); "
            f"give {_describe(kind)}."
        ) from error
    with parent.unlocked(), parent.ignore_type():
        parent[last] = parsed


def _parse(value: Any, kind: type, current: Any) -> Any:
    """Turns an override into the type `kind`; raises ValueError when it does not fit."""
    if kind is type(None):  # nothing says which type it will be: read it as a literal
        return _literal(value) if isinstance(value, str) else value
    if value is None or (isinstance(value, str) and kind is not str and value.lower() == "none"):
        return None
    if kind is bool:
        return _boolean(value)
    if kind is int:
        if isinstance(value, str):
            return int(value) if value.strip().lstrip("+-").isdigit() else _whole(float(value))
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(value)
        return value
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(value)
        return float(value)
    if kind in (tuple, list):
        return _sequence(value, kind, current)
    if kind is str and isinstance(value, str):
        return value
    if isinstance(value, str):
        value = ast.literal_eval(value)
    if not isinstance(value, kind):
        raise ValueError(value)
    return value


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError(value)


def _whole(value: float) -> int:
    if not value.is_integer():  # nor are inf and nan
        raise ValueError(value)
    return int(value)


def _sequence(value: Any, kind: type, current: Any) -> Any:
    if isinstance(value, str):
        text = value.strip()
        bracketed = text[:1] in "([" and text[:1] != ""
        items = ast.literal_eval(text) if bracketed else [_literal(x) for x in text.split(",") if x]
    else:
        items = value
    if not isinstance(items, list | tuple):
        raise ValueError(value)
    kinds = {type(item) for item in current or ()}
    if len(kinds) == 1 and (one := kinds.pop()) in (int, float, str):
        items = [str(item) if one is str else _parse(item, one, None) for item in items]
    return kind(items)


def _literal(text: str) -> Any:
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
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return names.get(kind) or str(kind).removeprefix("collections.abc.")


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, FieldReference):
        value = value.get()
    if isinstance(value, ConfigDict):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}") for name, inner in value.items()}
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
