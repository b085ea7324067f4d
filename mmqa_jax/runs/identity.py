"""Hashes whatever a result depends on: folders of models and indexes, files, questions.

They are of the content, not of the paths, which may differ between hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.retrieval.rankings import ranking_row
from mmqa_jax.weights.hub import find_model, is_hub_name

_SAMPLED = 1 << 30  # bytes: of larger files (weights) only the size and both ends are read
_END = 1 << 20
_PUBLISHED = ("*.safetensors", "pytorch_model*.bin")  # weights of published models


def of_folders(*folders: str | Path, text: str = "") -> str:
    """16 hex digits of the JSON files and the weights of folders, and of a text.

    Of our own weights the manifest is read, which differs for every writing, even of the same size
    to the same folder. A published model may be named ORG/NAME, as in the Hugging Face cache.
    """
    digest = hashlib.sha256(text.encode())
    for folder in filter(None, folders):
        folder = Path(folder)
        if not folder.exists() and is_hub_name(folder):
            folder = find_model(str(folder), fetch=f"add --download, or run `hf download {folder}`")
        for pattern in _PUBLISHED:
            for file in sorted(folder.glob(pattern)):
                digest.update(f"{file.name} {of_file(file)}".encode())
        for file in (*sorted(folder.glob("*.json")), *folder.glob("weights/manifest.ocdbt")):
            with _naming(file):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def of_file(path: str | Path) -> str:
    """16 hex digits of a file's content; UserError if it cannot be read."""
    with _naming(path), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= _SAMPLED:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
        digest = hashlib.sha256(str(size).encode() + file.read(_END))
        file.seek(-_END, os.SEEK_END)
        digest.update(file.read())
        return digest.hexdigest()[:16]


@contextlib.contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path.") from error


def of_path(path: str | Path) -> str:
    """16 hex digits of a file or of a folder; the path itself where it is neither."""
    if Path(path).is_dir():
        return of_folders(path)
    return of_file(path) if Path(path).is_file() else str(path)


def of_rankings(rankings: Sequence[Ranking]) -> str:
    """16 hex digits of rankings in their order."""
    rows = map(ranking_row, rankings)
    return hashlib.sha256("".join(map(json.dumps, rows)).encode()).hexdigest()[:16]


def of_questions(questions: Sequence[Question]) -> str:
    """16 hex digits of all that is known of questions, and of their order."""
    digest = hashlib.sha256()
    for question in questions:
        row = dataclasses.asdict(question)
        if not question.more_images:  # a question of one picture is what it was without this key
            del row["more_images"]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]
