"""Files written whole or not at all, and JSON read with the place of its mistakes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mmqa_jax.core.errors import UserError


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Opens a temporary file beside `path` and renames it onto `path` on success.

    A reader sees the old file or the whole new one; on an error the old one stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode, **({} if "b" in mode else {"encoding": "utf-8"})) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    with atomic_write(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def write_jsonl(path: str | os.PathLike, rows: Iterable[Any]) -> None:
    """Writes one JSON value a line, the file whole or not at all."""
    with atomic_write(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file; raises UserError naming the file and line of a mistake."""
    text = _read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON "
            f"({error.msg}); repair that line or fetch the file again."
        ) from error


def read_jsonl(path: str | os.PathLike) -> Iterator[tuple[int, Any]]:
    """Yields (line number, value) of a JSON-lines file; blank lines are passed over."""
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}: not valid JSON ({error.msg}); every line must hold "
                "one JSON object."
            ) from error


def _read_text(path: str | os.PathLike) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check the path.") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder, a file was expected.") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text (byte {error.start}); a JSON file was expected."
        ) from error
