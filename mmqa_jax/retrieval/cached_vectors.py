"""Embeddings kept on disk, found again by the content that was embedded."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int

from mmqa_jax.core.progress import Progress
from mmqa_jax.retrieval.embeddings import BROKEN
from mmqa_jax.retrieval.vectors import check_finite, read_vectors, write_vectors

_MANY = 2_000  # contents, from which on their progress is shown


def cached_vectors(
    folder: Path,
    fingerprint: str,
    contents: Sequence[str | bytes],
    embed: Callable[[Int[np.ndarray, " rows"]], Float32[np.ndarray, "rows D"]],
    *,
    unit: str = "texts",
    block: int = 1_024,
) -> Float32[np.ndarray, "n D"]:
    """The vectors of `contents`, computed unless an earlier run kept them.

    They are computed and kept in blocks, so that an interrupted run continues with the next one;
    the last block's end joins them into one file.

    Args:
      folder: of the cache; one .npy file per list of contents.
      fingerprint: of the encoder and of how it is used.
      contents: what is embedded, or its digests, in order.
      embed: computes the vectors of the contents with these indices.
      unit: what is embedded, for the progress.
      block: contents of a block; fewer than an embedder shows the progress of.

    Raises:
      UserError: `embed` returned what is not finite; nothing of it is kept.
    """
    path = folder / f"{_digest(fingerprint, contents)}.npy"
    kept = _read(path, len(contents))
    if kept is not None:
        return kept
    order = np.arange(len(contents))
    if len(contents) > block:  # texts of similar length together, as the embedder batches them
        order = np.argsort([len(content) for content in contents], kind="stable")
    blocks = [order[start : start + block] for start in range(0, max(len(order), 1), block)]
    parts = [path.with_suffix(f".{block}-{number}.npy") for number in range(len(blocks))]
    found = [_read(part, len(rows)) for part, rows in zip(parts, blocks, strict=True)]
    with _progress(unit, blocks, found) as advance:
        for number, rows in enumerate(blocks):
            if found[number] is None:
                found[number] = embed(rows)
                check_finite(found[number], f"embed: the vectors of {unit}", BROKEN)
                if len(blocks) > 1:
                    write_vectors(parts[number], found[number])
                advance(len(rows))
    vectors = np.concatenate(found)[np.argsort(order)]
    write_vectors(path, vectors)
    for part in parts:
        part.unlink(missing_ok=True)
    return vectors


def _digest(fingerprint: str, contents: Sequence[str | bytes]) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    for content in contents:
        data = content.encode() if isinstance(content, str) else content
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()[:32]


def _read(path: Path, rows: int) -> np.ndarray | None:
    """The vectors in a file; None where there are not so many, or the file is damaged."""
    kept = read_vectors(path)
    return kept if kept is not None and len(kept) == rows else None


@contextlib.contextmanager
def _progress(
    unit: str, blocks: Sequence[np.ndarray], found: Sequence[np.ndarray | None]
) -> Iterator[Callable[[int], None]]:
    """Shows how many are embedded, if there are many; yields what counts more of them."""
    total = sum(map(len, blocks))
    start = sum(len(vectors) for vectors in found if vectors is not None)
    quiet = None if total >= _MANY else True
    with Progress(f"Embedding {unit}", total, unit, start=start, quiet=quiet) as progress:
        yield progress.advance
