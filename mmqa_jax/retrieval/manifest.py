"""Folders of derived files (indexes, embeddings), written whole, each with a manifest."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.checkpoints.checksums import write_sums
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_json
from mmqa_jax.core.paths import as_path, in_store, remove_tree, upload

MANIFEST = "manifest.json"
# Subfolders of an index's folder: of `mmqa embed`, `mmqa index`, and that with --kind=bm25.
EMBEDDINGS, INDEX, BM25_INDEX = "embeddings", "index", "bm25"


@contextlib.contextmanager
def replace_folder(folder: str | os.PathLike, manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Yields an empty folder to fill; on success it replaces `folder`, with manifest and checksums.

    One writer at a time: the next writer removes what a killed one left behind. Of a folder in an
    object store the manifest is removed first and put last.
    """
    folder = as_path(folder)
    if in_store(folder):
        with tempfile.TemporaryDirectory(prefix="mmqa-") as filled:
            yield Path(filled)
            _seal(Path(filled), manifest)
            (folder / MANIFEST).unlink(missing_ok=True)
            remove_tree(folder)
            for file in sorted(Path(filled).iterdir(), key=lambda file: file.name == MANIFEST):
                upload(file, folder / file.name)
        return
    folder = Path(os.path.realpath(folder))  # a link stays
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _seal(temporary, manifest)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The content of a manifest's file."""
    return (json.dumps(dict(manifest), indent=2, ensure_ascii=False) + "\n").encode()


def _seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    with atomic_write(folder / MANIFEST, "wb") as file:
        file.write(manifest_bytes(manifest))
    write_sums(folder)


def read_manifest(folder: str | os.PathLike, what: str, verb: str) -> dict[str, Any]:
    """Reads the manifest of a folder that should hold `what` ("a BM25 index"), as `verb` ("mmqa
    index") makes it; UserError if there is none."""
    path = as_path(folder) / MANIFEST
    if not path.is_file():
        raise UserError(f"{path}: not found, {what} was expected there; run `{verb}` first.")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("what") != what:
        raise UserError(f"{path}: is not the manifest of {what}; run `{verb}` again.")
    return manifest


def check_manifest(
    folder: str | os.PathLike, manifest: Mapping[str, Any], expected: Mapping[str, Any], verb: str
) -> None:
    """UserError if a manifest differs from what is expected (values of None are not compared)."""
    for key, value in expected.items():
        recorded = manifest.get(key)
        if value is not None and recorded != value:
            raise UserError(
                f"{folder}/{MANIFEST}: {key} is {recorded!r} but {value!r} was expected "
                f"(it was made with another model, corpus or setting); run `{verb}` again."
            )
