"""Embeddings kept on disk, found again by the content that was embedded."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int

from mmqa_jax.core.progress import Progress
from mmqa_jax.core.store import Store
from mmqa_jax.retrieval.embeddings import BROKEN, check_finite, not_finite

_MANY = 2_000  # contents, from which on their progress is shown


def cached_vectors(
    folder: Path,
    fingerprint: str,
    contents: Sequence[str | bytes],
    embed: Callable[[Int[np.ndarray, " rows"]], Float32[np.ndarray, "rows D"]],
    *,
    unit: str = "texts",
    block: int = 1_024,
    groups: Sequence[str] | None = None,
) -> Float32[np.ndarray, "n D"]:
    """The vectors of `contents`, computed unless an earlier run kept them.

    They are computed and kept in blocks, so that an interrupted run continues with the next one.
    A block is found by all of its contents: a vector may depend, in its last bits, on those that
    it was computed with.

    Args:
      folder: of the cache; it has a folder for each encoder.
      fingerprint: of the encoder and of how it is used.
      contents: what is embedded, or its digests, in order.
      embed: computes the vectors of the contents with these indices.
      unit: what is embedded, for the progress.
      block: contents of a block, and of a call of `embed` at least; fewer than an embedder shows
        the progress of.
      groups: of each content, such as its file: contents of one group are a block, so that only
        the groups that change are computed again. None: blocks are of similar length.
    """
    blocks = _of_similar_length(contents, block) if groups is None else _of_groups(groups)
    keys = [_digest(contents[row] for row in rows) for rows in blocks]
    encoder = hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
    with Store(folder / encoder, {"encoder": fingerprint}, damage="drop") as store:
        kept = [_kept(store, key, len(rows)) for key, rows in zip(keys, blocks, strict=True)]
        with _progress(unit, blocks, kept) as advance:
            for numbers in _together(blocks, kept, block):
                rows = np.concatenate([blocks[number] for number in numbers])
                vectors = np.asarray(embed(rows))
                check_finite(vectors, f"embed: the vectors of {unit}", BROKEN)
                ends = np.cumsum([len(blocks[number]) for number in numbers])
                parts = dict(zip(numbers, np.split(vectors, ends[:-1]), strict=True))
                store.add({keys[number]: part for number, part in parts.items()})
                for number, part in parts.items():
                    kept[number] = part
                advance(len(rows))
    return np.concatenate(kept)[np.argsort(np.concatenate(blocks))]


def _of_similar_length(contents: Sequence[str | bytes], block: int) -> list[np.ndarray]:
    """The rows of every block: texts of similar length together, as the embedder batches them."""
    order = np.arange(len(contents))
    if len(contents) > block:
        order = np.argsort([len(content) for content in contents], kind="stable")
    return [order[start : start + block] for start in range(0, max(len(order), 1), block)]


def _of_groups(groups: Sequence[str]) -> list[np.ndarray]:
    """The rows of every block: those of a group."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return [np.array(members) for members in rows.values()]


def _together(
    blocks: Sequence[np.ndarray], kept: Sequence[np.ndarray | None], least: int
) -> Iterator[list[int]]:
    """Numbers of the blocks that nothing is kept of, in groups of at least so many contents."""
    waiting: list[int] = []
    for number, vectors in enumerate(kept):
        if vectors is None:
            waiting.append(number)
        if waiting and sum(len(blocks[n]) for n in waiting) >= least:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _digest(contents: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        data = content.encode() if isinstance(content, str) else content
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()[:32]


def _kept(store: Store, key: str, rows: int) -> np.ndarray | None:
    """The vectors of a block; None where there are not so many, or they are of no use."""
    vectors = store.get(key)
    is_whole = isinstance(vectors, np.ndarray) and vectors.ndim == 2 and len(vectors) == rows
    return vectors if is_whole and not len(not_finite(vectors)) else None


@contextlib.contextmanager
def _progress(
    unit: str, blocks: Sequence[np.ndarray], kept: Sequence[np.ndarray | None]
) -> Iterator[Callable[[int], None]]:
    """Shows how many are embedded, if there are many; yields what counts more of them."""
    total = sum(map(len, blocks))
    start = sum(len(vectors) for vectors in kept if vectors is not None)
    quiet = None if total >= _MANY else True
    with Progress(f"Embedding {unit}", total, unit, start=start, quiet=quiet) as progress:
        yield progress.advance
