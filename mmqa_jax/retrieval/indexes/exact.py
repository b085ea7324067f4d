"""Exact dense search: dot products with every row, on any device; as an index of faiss, too."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.core.files import atomic_write, check_out
from mmqa_jax.core.serving import free_bytes
from mmqa_jax.retrieval.embeddings import BROKEN, Embeddings, check_finite
from mmqa_jax.retrieval.manifest import replace_folder
from mmqa_jax.retrieval.rankings import candidate_rows, check_top_k

INDEX_WHAT = "a dense index"  # in the manifest of every kind of index
SHARE = 0.25  # of a device's free memory, for blocks: readers and encoders may come after them


class DenseIndex:
    """What all indexes over embeddings have alike: they check, rank candidates, and are saved."""

    kind: str  # of the index, as `mmqa index --kind` names it
    is_exact: bool  # its search finds what ExactIndex's does
    embeddings: Embeddings  # what is searched; row i is source i

    def __len__(self) -> int:
        return len(self.embeddings.vectors)

    def search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None = None
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """Finds the `top_k` rows with the highest dot products, or most of them.

        Args:
          queries: float32[n, D].
          top_k: at most the number of (allowed) rows.
          allowed: bool[rows], the rows that may be returned (known modality); None means all.

        Returns:
          (rows int32[n, top_k], scores float32[n, top_k]), best first; equal scores in row order.
        """
        check_top_k(top_k, len(self), allowed, "index")
        return self._search(check_queries(queries, self.embeddings), top_k, allowed)

    def _search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Searches as `search`, with checked arguments."""
        raise NotImplementedError

    def search_within(
        self, queries: np.ndarray, rows: Sequence[Sequence[int]], top_k: int
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """Ranks each query's own candidate rows, exactly (the restricted setting).

        Returns:
          (rows, scores) as `search`; queries with fewer than top_k candidates are padded with
          row -1 and score -inf. Equal scores stay in the candidates' order.
        """
        return search_within(self.embeddings, queries, rows, top_k)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes what `load_index` opens, whole or not at all; without the embeddings."""
        manifest = index_manifest(self.embeddings, self.kind, self._parameters())
        with replace_folder(folder, manifest) as filled:
            self._write(filled)

    def _parameters(self) -> dict[str, Any]:
        """Returns what the manifest says of how it was made."""
        return {}

    def _write(self, folder: Path) -> None:
        """Writes its files beside the manifest; most kinds need nothing but the embeddings."""


class ExactIndex(DenseIndex):
    """Dot products with every row, in blocks: the reference, and fast enough for small corpora.

    Blocks of at most `block_rows` stay on the device while they fit into a quarter of the memory
    that is free at the first search; the others are streamed from the host. A CPU scores the
    host's array itself, also one that is mapped from disk, and copies it once where it is not
    aligned to 64 bytes. `query_batch` queries are scored at once (one query alone is not padded).
    """

    kind = "exact"
    is_exact = True

    def __init__(self, embeddings: Embeddings, *, block_rows: int = 65_536, query_batch: int = 256):
        check_embeddings(embeddings)
        self.embeddings = embeddings
        self._query_batch = query_batch
        # Blocks of one length, so that one program scores all: the last begins inside the one
        # before it, and its mask leaves out the rows that both have.
        blocks = -(-len(self) // block_rows)
        self._block_rows = -(-len(self) // blocks)
        self._on_device: dict[int, jax.Array] = {}  # row of a block's first vector -> block

    def _search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        size = 1 if len(queries) == 1 else self._query_batch
        # From NumPy: of jax.numpy, each would be a program of its own for every `top_k`.
        nothing = (
            np.full((size, top_k), -np.inf, np.float32),
            np.full((size, top_k), -1, np.int32),
        )
        best = [jax.device_put(nothing) for _ in range(0, len(queries), size)]
        padded = np.zeros((len(best), size, queries.shape[1]), np.float32)
        padded.reshape(-1, queries.shape[1])[: len(queries)] = queries
        batches = [jax.device_put(batch) for batch in padded]
        for scored in range(0, len(self), self._block_rows):
            start = min(scored, len(self) - self._block_rows)
            block, mask = self._block(start), self._mask(start, scored, allowed)
            # Read a block while the previous one is scored, but no further ahead, or a million
            # rows would be in memory with all their scores.
            jax.block_until_ready(best)
            best = [
                _best_with_block(batch, block, mask, np.int32(start), *state)
                for batch, state in zip(batches, best, strict=True)
            ]
        scores = [jax.device_get(state[0]) for state in best] or [np.zeros((0, top_k), np.float32)]
        rows = [jax.device_get(state[1]) for state in best] or [np.zeros((0, top_k), np.int32)]
        return np.concatenate(rows)[: len(queries)], np.concatenate(scores)[: len(queries)]

    def _block(self, start: int) -> jax.Array:  # [block_rows, D]
        if (held := self._on_device.get(start)) is not None:
            return held
        rows = self.embeddings.vectors[start : start + self._block_rows]
        block = jax.device_put(np.asarray(rows, np.float32))
        if (len(self._on_device) + 1) * block.nbytes <= self._room:
            self._on_device[start] = block
        return block

    @functools.cached_property
    def _room(self) -> float:
        """Bytes of the device for blocks; no limit on a CPU."""
        return SHARE * free_bytes(jax.local_devices()[0])

    def _mask(self, start: int, scored: int, allowed: np.ndarray | None) -> jax.Array:
        """Which rows of the block from `start` may be returned: those before `scored` were."""
        mask = np.ones(self._block_rows, bool)
        if allowed is not None:
            mask[:] = allowed[start : start + self._block_rows]
        mask[: scored - start] = False
        return jax.device_put(mask)


@jax.jit
def _best_with_block(
    queries: jax.Array,  # [Q, D]
    block: jax.Array,  # [R, D]
    mask: jax.Array,  # bool[R]
    start: jax.Array,  # row of the block's first vector
    best_scores: jax.Array,  # [Q, K]
    best_rows: jax.Array,  # [Q, K]
) -> tuple[jax.Array, jax.Array]:
    """Merges a block into the running top K; lax.top_k puts the earlier of equal scores first."""
    top_k = best_scores.shape[1]
    scores = jnp.matmul(queries, block.T, precision="highest")  # [Q, R]
    scores = jnp.where(mask, scores, -jnp.inf)
    scores, indices = jax.lax.top_k(scores, min(top_k, block.shape[0]))
    scores = jnp.concatenate([best_scores, scores], axis=1)
    rows = jnp.concatenate([best_rows, indices + start], axis=1)
    scores, indices = jax.lax.top_k(scores, top_k)
    return scores, jnp.take_along_axis(rows, indices, axis=1)


def search_within(
    embeddings: Embeddings, queries: np.ndarray, rows: Sequence[Sequence[int]], top_k: int
) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
    """Ranks each query's own candidate rows; see DenseIndex.search_within."""
    queries = check_queries(queries, embeddings)
    if top_k < 1 or len(rows) != len(queries):
        raise UserError(
            f"index: top_k={top_k} must be at least 1, with one list of candidate rows for each of "
            f"{len(queries)} queries (got {len(rows)})."
        )
    rows_of_candidates = np.full((len(queries), top_k), -1, np.int32)
    scores = np.full((len(queries), top_k), -np.inf, np.float32)
    for number, (query, candidates) in enumerate(zip(queries, rows, strict=True)):
        candidates = candidate_rows(candidates, len(embeddings.vectors), "index")
        if not len(candidates):
            continue
        vectors = embeddings.vectors[candidates]
        similarity = vectors @ query  # [candidates]
        if not np.isfinite(similarity).all():
            check_finite(vectors, "index: the embeddings of the candidates", BROKEN)
        order = np.argsort(-similarity, kind="stable")[:top_k]
        rows_of_candidates[number, : len(order)] = candidates[order]
        scores[number, : len(order)] = similarity[order]
    return rows_of_candidates, scores


def index_manifest(
    embeddings: Embeddings, kind: str, parameters: dict | None = None
) -> dict[str, Any]:
    """The manifest of an index."""
    rows, dim = embeddings.vectors.shape
    return {
        "what": INDEX_WHAT,
        "kind": kind,
        "rows": rows,
        "dim": dim,
        "model_fingerprint": embeddings.model_fingerprint,
        "corpus_fingerprint": embeddings.corpus_fingerprint,
        "parameters": parameters or {},
    }


def check_embeddings(embeddings: Embeddings) -> None:
    """UserError unless there are vectors, all of them finite: a NaN would be every query's best.

    TypeError as `check_wrapped`.
    """
    check_wrapped(embeddings)
    if embeddings.vectors.ndim != 2 or not len(embeddings.vectors):
        raise UserError("index: the corpus is empty, at least one embedded source was expected.")
    remedy = "run `mmqa embed` again, with another checkpoint if it says so"
    check_finite(embeddings.vectors, "index: the embeddings", remedy)


def check_wrapped(embeddings: Any) -> None:
    """TypeError for an array alone: nobody would know of which encoder and corpus it is."""
    if not isinstance(embeddings, Embeddings):
        raise TypeError(
            f"index: {type(embeddings).__name__} was given, Embeddings were expected; wrap vectors "
            "as mmqa_jax.retrieval.embeddings.Embeddings(vectors, model_fingerprint, "
            "corpus_fingerprint)."
        )


def check_queries(queries: np.ndarray, embeddings: Embeddings) -> Float32[np.ndarray, "n D"]:
    dim = embeddings.vectors.shape[1]
    queries = np.asarray(queries, np.float32)
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise UserError(
            f"index: queries of shape {queries.shape} do not fit the index's dimension {dim}; "
            "embed them with the encoder that made the index."
        )
    check_finite(queries, "index: the queries", BROKEN)
    return np.ascontiguousarray(queries)


# Embeddings as an index of FAISS, for other tools: every source by exact inner product.


INDEX, IDS = "index", "docid"  # files of the folder
_BLOCK = 65_536  # rows that are read from disk together


def check_export(folder: Path, ids: Sequence[str]) -> None:
    """UserError if an export cannot be written there: before the vectors are read."""
    import_optional("faiss", "--export=faiss:", "faiss", "faiss-cpu")
    check_out(folder, folder=True)
    for name in (IDS, INDEX):
        check_out(folder / name)
    for name in ids:
        if name != name.strip() or len(name.splitlines()) != 1:
            raise UserError(
                f"{folder / IDS}: the id {name!r:.80} is empty, or has a line break or spaces at "
                "its ends, which a line of ids loses; prepare the corpus with other ids."
            )


def export_faiss(folder: str | os.PathLike, embeddings: Embeddings, ids: Sequence[str]) -> None:
    """Writes the two files; the index, without which the ids are of no use, last.

    FAISS holds all vectors in memory: 4 bytes a value.

    `ids`: of the sources, by row.
    """
    folder = Path(folder)
    check_embeddings(embeddings)
    rows, dim = embeddings.vectors.shape
    if len(ids) != rows:
        raise UserError(
            f"{folder}: {len(ids):,} sources but {rows:,} vectors; give the corpus that was "
            "embedded."
        )
    check_export(folder, ids)
    faiss = import_optional("faiss", "--export=faiss:", "faiss", "faiss-cpu")
    index = faiss.IndexFlatIP(dim)
    for start in range(0, rows, _BLOCK):
        index.add(embeddings.vectors[start : start + _BLOCK])
    with atomic_write(folder / IDS) as file:
        file.writelines(f"{name}\n" for name in ids)
    with atomic_write(folder / INDEX, "wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
