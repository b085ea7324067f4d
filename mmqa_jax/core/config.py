"""Config files: `get_config(mode)` of a python file, dotted overrides, checks, fingerprints.

A config is an `ml_collections.ConfigDict` from `configs/.../x.py`; the part behind a colon
(`x.py:runlocal`) is handed to `get_config`. Overrides come from the command line as text and
are parsed to the type of the value they replace; keys that do not exist are refused.

A config file may name its modes, `MODES = ("runlocal",)`; any other mode is then refused.

"""

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ml_collections import ConfigDict, FieldReference

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import describe, fits, nearest

_PACKAGE = Path(__file__).resolve().parents[1]
_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "0"), False),
}


def auto() -> FieldReference:
    """The value `auto` of a config file: its user chooses the best value.

    Files that change the config may assign a number to it.
    """
    return FieldReference("auto", field_type=object)


def load_config(
    path_with_argument: str | os.PathLike,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    adds: bool = False,
) -> ConfigDict:
    """Loads a config file and applies overrides.

    Args:
      path_with_argument: `configs/x.py`, or `configs/x.py:MODE` for `get_config("MODE")`;
        see `find_config`.
      overrides: `{"train.steps": "500"}`, or `["train.steps=500"]`. Text is parsed to the type
        of the value it replaces (`none` clears a value that is not text); other values must
        have that type.
      adds: overrides may name keys that the file leaves out, for callers that read the whole
        config as a dataclass (core.typed), which knows these keys and refuses others.
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
        _override(config, key, value, file, adds)
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
    """The config as dicts, lists, text, numbers, booleans and None (JSON's types)."""
    return _plain(config, "")


def config_fingerprint(config: ConfigDict | Mapping[str, Any]) -> str:
    """16 hex digits that are equal if and only if two configs hold the same values."""
    return plain_fingerprint(to_plain_dict(config))


def plain_fingerprint(plain: Mapping[str, Any]) -> str:
    """The fingerprint of a config that consists of JSON's types already."""
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_record(config: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """The `config` as JSON's types and its `fingerprint`, as config.json has them."""
    plain = to_plain_dict(config)
    return {"config": plain, "fingerprint": plain_fingerprint(plain)}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys of two configs whose values differ, with both; `absent` where a key is not there."""
    if old == new:
        return {}
    old, new, absent = flatten(old), flatten(new), object()
    return {
        key: (old.get(key, "absent"), new.get(key, "absent"))
        for key in dict.fromkeys([*new, *old])
        if old.get(key, absent) != new.get(key, absent)
    }


def flatten(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"steps": 5}}` -> `{"train.steps": 5}`; an empty section stays as `{}`."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


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
    # Kept: tasks and systems that the file defines are found as subclasses, while they are there.
    sys.modules[f"config file {file.resolve()}"] = module
    module.__file__ = str(file)
    with _mistakes_named(file):
        exec(_compiled(file.read_bytes(), file), module.__dict__)
    return module


@functools.lru_cache(maxsize=64)  # all rows of a table are of a few files
def _compiled(source: bytes, file: Path) -> CodeType:
    return compile(source, file, "exec", dont_inherit=True)


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
        in_configs = [f for f in frames if Path(f.filename).resolve().parent == folder]
        place = (
            f"{in_configs[-1].filename}, line {in_configs[-1].lineno}" if in_configs else str(file)
        )
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{place}: the config file fails ({reason}); repair it.") from error


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


def _override(config: ConfigDict, key: str, value: Any, file: Path, adds: bool) -> None:
    section: Any = config
    *parents, last = key.split(".")
    for number, part in enumerate([*parents, last]):
        if adds and isinstance(section, ConfigDict) and part not in section:
            added: Any = _literal(value)
            for name in reversed([*parents, last][number + 1 :]):
                added = {name: added}
            with section.unlocked():
                section[part] = ConfigDict(added) if isinstance(added, dict) else added
            return
        if not isinstance(section, ConfigDict) or part not in section:
            known = flatten(config.to_dict())
            raise UserError(f"--config.{key}: {file} has no such key; {nearest(key, known)}")
        parent, section = section, section[part]
    if isinstance(section, ConfigDict) and _literal(value) is None:  # what may be absent
        with parent.unlocked(), parent.ignore_type():
            parent[last] = None
        return
    if isinstance(section, ConfigDict):
        inner = ", ".join(f"{key}.{name}" for name in section)
        raise UserError(f"--config.{key}: is a section, not a value; set one of {inner}.")
    kind = parent.get_type(last)
    try:
        parsed = _parse(value, kind, section)
    except ValueError as error:
        raise UserError(
            f"--config.{key}={value}: {file} has {describe(kind)} there ({section!r}); "
            f"give {describe(kind)}."
        ) from error
    with parent.unlocked(), parent.ignore_type():
        parent[last] = parsed


def _parse(value: Any, kind: type, current: Any) -> Any:
    """Converts an override to the type `kind`; raises ValueError if that is impossible.

    A whole number, or several, and `auto` may replace each other; the config's check knows where.
    """
    if current == "auto" and type(literal := _literal(value)) in (int, tuple, list):
        return literal
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
    if not fits(value, kind):
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
    if len(kinds) == 1 and (item_kind := kinds.pop()) in (int, float, str):
        items = [str(item) if item_kind is str else _parse(item, item_kind, None) for item in items]
    return kind(items)


def _literal(text: Any) -> Any:
    """The python value that a text spells, or the text itself; other values as they are."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return {"none": None, "true": True, "false": False}.get(text.strip().lower(), text)


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
