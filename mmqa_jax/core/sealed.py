"""Files that notice their own damage: JSON, lines and arrays with a SHA-256 of what they hold.

A file without one is older than they are and is read unchecked. (Whole folders: core.checksums.)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json

_KEY = "sha256"
_OF_LINE = re.compile(rb'(.*), "sha256": "([0-9a-f]{16})"\}', re.DOTALL)
_LAST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})"\}\n')
SEAL_LENGTH = len(json.dumps({_KEY: "0" * 64})) + 1  # bytes of `seal_bytes`


class Damaged(ValueError):
    """The content is not what was written."""


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object with a checksum of its other keys, whole or not at all."""
    write_json(path, {**value, _KEY: _of_value(value)})


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object, without the checksum.

    Raises:
      UserError: it is damaged, or not an object; `remedy` ends the sentence.
    """
    try:
        value = read_json(path)
    except UserError as error:
        if not path.is_file():
            raise
        raise UserError(f"{path}: is damaged; {remedy}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is damaged; {remedy}.")
    expected = value.pop(_KEY, None)
    if expected is not None and expected != _of_value(value):
        raise UserError(f"{path}: is damaged (its SHA-256 is another); {remedy}.")
    return value


def seal_line(value: Mapping[str, Any]) -> str:
    """A JSON object as one line that ends in its checksum."""
    line = json.dumps(value, ensure_ascii=False)
    digest = hashlib.sha256(line[:-1].encode()).hexdigest()
    return f'{line[:-1]}, "{_KEY}": "{digest[:16]}"}}'


def open_line(line: bytes, keys: set[str]) -> dict[str, Any]:
    """The object of `seal_line`, or of an older line without a checksum.

    Args:
      keys: that it has.

    Raises:
      ValueError: it is damaged.
    """
    value = _parse(line)
    if not isinstance(value, dict):
        raise Damaged("a line holds no object")
    if match := _OF_LINE.fullmatch(line):
        del value[_KEY]
        if hashlib.sha256(match[1]).hexdigest()[:16] != match[2].decode():
            raise Damaged("the SHA-256 of a line is another")
    if value.keys() != keys:
        raise Damaged(f"a line holds {', '.join(map(str, value))}")
    return value


def seal_bytes(data: bytes, name: str = "") -> bytes:
    """What is put behind the content of a file: a line of JSON with its SHA-256.

    Args:
      name: of the file, where the content does not say it: in another's place it is damaged.
    """
    return json.dumps({_KEY: _of_bytes(data, name)}).encode() + b"\n"


def open_bytes(data: bytes, name: str = "", *, sealed: bool = False) -> bytes:
    """The content of a file without the line of `seal_bytes`, which an older file lacks.

    Args:
      name: as of `seal_bytes`.
      sealed: whether the file says itself that it has one.

    Raises:
      Damaged: the content is another.
    """
    match = _LAST_LINE.fullmatch(data[-SEAL_LENGTH:])
    content = data[:-SEAL_LENGTH] if match else data
    if match is None and not sealed:
        return content
    if match is None or _of_bytes(content, name) != match[1].decode():
        raise Damaged("its SHA-256 is another")
    return content


def _of_bytes(data: bytes, name: str) -> str:
    digest = hashlib.sha256(data)
    digest.update(name.encode())
    return digest.hexdigest()


def _of_value(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError as error:
        raise Damaged("a line is nested too deep") from error
