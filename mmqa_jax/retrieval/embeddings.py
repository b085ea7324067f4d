"""Embeddings of a whole corpus on disk: written shard by shard, resumable, memory-mapped.

While the job runs, `folder` holds `manifest.json` and `shards/00000.npy`, ..., each written
whole or not at all; a job killed at any point goes on with the shards that are missing. At
the end the shards become one `embeddings.npy` (ScaNN wants one array) and are removed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import atomic_write, write_json
from mmqa_jax.retrieval.manifest import MANIFEST, check_manifest, read_manifest

_WHAT = "embeddings of a corpus"
_VERB = "mmqa embed"


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Unit vectors of every source of a corpus, by row.

    Attributes:
      vectors: float32[n, D], usually memory-mapped.
      model_fingerprint: of the encoder that made them; queries must come from the same.
      corpus_fingerprint: of the corpus, so that a row means the same source.
    """

    vectors: Float32[np.ndarray, "n D"]
    model_fingerprint: str
    corpus_fingerprint: str


def open_embeddings(
    folder: str | os.PathLike,
    model_fingerprint: str | None = None,
    corpus_fingerprint: str | None = None,
) -> Embeddings:
    """Opens finished embeddings, memory-mapped.

    Raises:
      UserError: none there, not finished, damaged, or of another model or corpus.
    """
    manifest = read_manifest(folder, _WHAT, _VERB)
    fingerprints = {
        "model_fingerprint": model_fingerprint,
        "corpus_fingerprint": corpus_fingerprint,
    }
    check_manifest(folder, manifest, fingerprints, _VERB)
    if not manifest.get("complete"):
        raise UserError(f"{folder}: the embedding job did not finish; run `{_VERB}` again.")
    vectors = _load(Path(folder) / "embeddings.npy", (manifest["rows"], manifest["dim"]))
    if vectors is None:
        raise UserError(
            f"{Path(folder) / 'embeddings.npy'}: missing or damaged, float32 "
            f"[{manifest['rows']}, {manifest['dim']}] was expected; delete the folder and run "
            f"`{_VERB}` again."
        )
    return Embeddings(vectors, manifest["model_fingerprint"], manifest["corpus_fingerprint"])


def write_embeddings(
    folder: str | os.PathLike,
    embed_rows: Callable[[range], np.ndarray],
    *,
    rows: int,
    dim: int,
    model_fingerprint: str,
    corpus_fingerprint: str,
    shard_rows: int = 4096,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Embeddings:
    """Runs an embedding job, or what is left of it.

    Args:
      embed_rows: embeds a range of rows, float32[len(range), dim]; called once per shard.
      rows, dim: size of the whole result.
      shard_rows: rows per shard: what a kill loses at most.
      overwrite: start afresh where `folder` holds another model's or corpus's embeddings.
      on_progress: called with (rows done, rows) after every shard.

    Raises:
      UserError: no rows; embeddings of another model or corpus are there and not `overwrite`.
      RunError: `embed_rows` gave values that are not finite.
    """
    if rows < 1:
        raise UserError("embed: the corpus is empty, at least one source was expected.")
    folder = Path(folder)
    job = {
        "what": _WHAT,
        "rows": rows,
        "dim": dim,
        "shard_rows": shard_rows,
        "model_fingerprint": model_fingerprint,
        "corpus_fingerprint": corpus_fingerprint,
    }
    found = _readable_manifest(folder)
    if found is not None and not overwrite:
        # A job cut into other shards is no other result; it only starts afresh.
        _refuse_other_job(folder, found, {k: v for k, v in job.items() if k != "shard_rows"})
    whole = folder / "embeddings.npy"
    if found == {**job, "complete": True} and _load(whole, (rows, dim)) is not None:
        shutil.rmtree(folder / "shards", ignore_errors=True)
        return open_embeddings(folder)
    if found is None or {k: v for k, v in found.items() if k != "complete"} != job:
        # Nothing says what shards without a readable manifest are of.
        shutil.rmtree(folder / "shards", ignore_errors=True)
    write_json(folder / MANIFEST, {**job, "complete": False})

    ranges = [range(start, min(start + shard_rows, rows)) for start in range(0, rows, shard_rows)]
    for number, span in enumerate(ranges):
        path = _shard_path(folder, number)
        if _load(path, (len(span), dim)) is None:
            vectors = np.asarray(embed_rows(span), np.float32)
            _check_finite(vectors, span)
            with atomic_write(path, "wb") as file:
                np.save(file, vectors)
        if on_progress is not None:
            on_progress(span.stop, rows)

    with atomic_write(whole, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for number in range(len(ranges)):
            file.write(np.ascontiguousarray(np.load(_shard_path(folder, number))).data)
    write_json(folder / MANIFEST, {**job, "complete": True})
    shutil.rmtree(folder / "shards")
    return open_embeddings(folder)


def _shard_path(folder: Path, number: int) -> Path:
    return folder / "shards" / f"{number:05d}.npy"


def _readable_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(folder, _WHAT, _VERB)
    except UserError:
        return None


def _refuse_other_job(folder: Path, found: dict[str, Any], job: dict[str, Any]) -> None:
    for key, value in job.items():
        if found.get(key) != value:
            raise UserError(
                f"{folder / MANIFEST}: holds embeddings with {key} {found.get(key)!r}, this job's "
                f"is {value!r}; name another --out or give --overwrite."
            )


def _load(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The memory-mapped array at `path`, None where it is missing, damaged or of another shape."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return array if array.shape == shape and array.dtype == np.float32 else None


def _check_finite(vectors: np.ndarray, span: range) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise RunError(
            f"embed: the vectors of {len(bad)} sources are not finite, the first is row "
            f"{span.start + int(bad[0])}; the checkpoint is broken, train again or use another."
        )
