"""ScaNN in shards: for more vectors than one machine holds, which are searched one shard at a time.

A shard has the codes of some consecutive rows, a sixth of their float32 vectors or so, and not the
vectors: its best candidates are scored exactly by those in the embeddings' memory-mapped file, and
so is the order of all. Whoever searches loads a shard, asks it all the queries, and lets go of it:
give many queries at once. Building takes the memory of one shard's vectors, twice; killed, it goes
on behind the last whole shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from mmqa_jax.core.checksums import check_sums, find_damage
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import remove_tree
from mmqa_jax.retrieval.bm25.in_memory import check_top_k
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import (
    INDEX_WHAT,
    ExactIndex,
    check_queries,
    index_manifest,
    search_within,
)
from mmqa_jax.retrieval.indexes.index import (
    ScannParameters,
    load_scann,
    scann_available,
    scann_builder,
    scann_or_note,
    write_scann,
)
from mmqa_jax.retrieval.manifest import check_manifest, read_manifest, replace_folder

KIND = "scann_shards"
LEAST_ROWS = 40_000  # of a shard; half of it is searched exactly in no time
_WHAT, _VERB = "a shard of a ScaNN index", "mmqa index"
_REMEDY = f"delete the folder and run `{_VERB}` again"


class ScannShards:
    """ScaNN indexes of consecutive rows.

    Made by `open_shards`.

    Args:
      embeddings: whose vectors are memory-mapped.
      folder: of the shards.
      spans: the rows of each.
    """

    kind = KIND
    is_exact = False

    def __init__(self, embeddings: Embeddings, folder: Path, spans: Sequence[range]):
        self.embeddings, self.folder, self.spans = embeddings, folder, spans
        self._exact = ExactIndex(embeddings)

    def __len__(self) -> int:
        return len(self.embeddings.vectors)

    def search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None = None
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """Searches as ExactIndex.search: the best of all shards' candidates by exact scores.

        With `allowed`, more candidates are fetched and filtered; queries left with fewer than
        `top_k` are searched exactly.
        """
        check_top_k(top_k, len(self), allowed, "index")
        queries = check_queries(queries, self.embeddings)
        rows = np.full((len(queries), top_k), -1, np.int32)
        scores = np.full((len(queries), top_k), -np.inf, np.float32)
        if not len(queries):
            return rows, scores
        for number, span in enumerate(self.spans):
            mask = None if allowed is None else allowed[span.start : span.stop]
            if mask is not None and not mask.any():
                continue
            for i, found in enumerate(self._candidates(number, span, queries, top_k, mask)):
                vectors = np.asarray(self.embeddings.vectors[found])
                own_rows = np.concatenate([rows[i], found])
                own = np.concatenate([scores[i], vectors @ queries[i]])
                order = np.lexsort((own_rows, -own))[:top_k]  # -1, of no score, stays behind
                rows[i], scores[i] = own_rows[order], own[order]
        short = np.flatnonzero((rows < 0).any(axis=1))
        if len(short):
            rows[short], scores[short] = self._exact.search(queries[short], top_k, allowed)
        return rows, scores

    def search_within(
        self, queries: np.ndarray, rows: Sequence[Sequence[int]], top_k: int
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """Searches as ExactIndex.search_within (exact)."""
        return search_within(self.embeddings, queries, rows, top_k)

    def _candidates(
        self,
        number: int,
        span: range,
        queries: np.ndarray,
        top_k: int,
        allowed: np.ndarray | None,
    ) -> list[np.ndarray]:
        """Returns each query's rows of one shard to score, ascending; loads the shard for it."""
        place = self.folder / _name(number)
        parameters, searcher = load_scann(place, read_manifest(place, _WHAT, _VERB))
        fetch = max(parameters.reorder, 4 * top_k)
        if allowed is not None:
            fetch = math.ceil(1.5 * fetch * len(span) / np.count_nonzero(allowed))
        fetch = min(fetch, len(span))
        needed = math.ceil(8 * fetch / 4 * parameters.leaves / len(span))
        leaves = min(parameters.leaves, max(parameters.leaves_to_search, needed))
        options = {"leaves_to_search": leaves} if parameters.leaves else {}
        found, codes = searcher.search_batched_parallel(
            queries, final_num_neighbors=fetch, **options
        )
        candidates = []
        for rows, scores in zip(found, codes, strict=True):
            rows = rows[np.isfinite(scores)].astype(np.int64)
            rows = np.unique(rows if allowed is None else rows[allowed[rows]])
            candidates.append(rows + span.start)
        return candidates


def build_shards(
    folder: str | os.PathLike,
    embeddings: Embeddings,
    shard_rows: int,
    parameters: ScannParameters | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Writes the shards that are missing, and at last the manifest; whether there were any.

    Args:
      shard_rows: most rows of a shard; all have the same number, but for one row.
      parameters: of every shard; None: chosen from its rows.
      on_progress: called with (rows done, rows).
    """
    if not scann_available():
        raise UserError(
            "--shard_rows: ScaNN cannot be imported (it is Linux-only); install `scann`, or give "
            "--kind=exact without this flag."
        )
    folder = Path(folder)
    manifest, spans = _manifest(embeddings, shard_rows), spans_of(embeddings, shard_rows)
    parameters = parameters or ScannParameters.for_rows(min(map(len, spans)))
    shards, built = _shards(folder, manifest), False
    for number, span in enumerate(spans):
        about = {
            "what": _WHAT,
            "rows": [span.start, span.stop],
            "parameters": dataclasses.asdict(parameters),
        }
        if not _is_whole(shards / _name(number), about):
            _build_shard(shards / _name(number), embeddings.vectors[span.start : span.stop], about)
            built = True
        if on_progress is not None:
            on_progress(span.stop, len(embeddings.vectors))
    if built or _manifest_of(folder) != manifest:
        with replace_folder(folder, manifest):
            pass
        built = True
    for old in folder.parent.glob(f"{folder.name}-shards-*"):
        if old != shards:
            with contextlib.suppress(OSError):
                remove_tree(old)
    return built


def open_shards(
    folder: str | os.PathLike, embeddings: Embeddings, model_fingerprint: str | None = None
) -> ScannShards | ExactIndex | None:
    """Opens an index in shards over the embeddings it was built from; None: it is not in shards.

    Where ScaNN cannot be imported, search is exact.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, INDEX_WHAT, _VERB)
    if manifest.get("kind") != KIND:
        return None
    check_sums(folder, remedy=_REMEDY)
    check_manifest(folder, manifest, {"model_fingerprint": model_fingerprint}, _VERB)
    expected = _manifest(embeddings, manifest["parameters"]["shard_rows"])
    check_manifest(folder, manifest, expected, _VERB)
    spans = spans_of(embeddings, manifest["parameters"]["shard_rows"])
    shards = _shards(folder, manifest)
    for number in range(len(spans)):
        read_manifest(shards / _name(number), _WHAT, _VERB)
        check_sums(shards / _name(number), remedy=_REMEDY)
    if not scann_or_note("auto"):
        return ExactIndex(embeddings)
    return ScannShards(embeddings, shards, spans)


def _build_shard(place: Path, vectors: np.ndarray, about: dict[str, Any]) -> None:
    searcher = scann_builder(vectors, ScannParameters(**about["parameters"])).build()
    with replace_folder(place, about) as filled:
        write_scann(searcher, filled)


def _is_whole(place: Path, about: dict[str, Any]) -> bool:
    try:
        same = read_manifest(place, _WHAT, _VERB) == about
    except UserError:
        return False
    return same and find_damage(place) is None


def _manifest_of(folder: Path) -> dict[str, Any] | None:
    try:
        found = read_manifest(folder, INDEX_WHAT, _VERB)
    except UserError:
        return None
    return found if find_damage(folder) is None else None


def spans_of(embeddings: Embeddings, shard_rows: int) -> list[range]:
    """The rows of every shard."""
    rows = len(embeddings.vectors)
    if shard_rows < LEAST_ROWS:
        raise UserError(
            f"--shard_rows={shard_rows}: a shard of ScaNN has at least {LEAST_ROWS:,} sources; "
            "give more, such as 1000000."
        )
    count = -(-rows // shard_rows)
    ends = [rows * number // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def _manifest(embeddings: Embeddings, shard_rows: int) -> dict[str, Any]:
    return index_manifest(embeddings, KIND, {"shard_rows": shard_rows})


def _shards(folder: Path, manifest: dict[str, Any]) -> Path:
    """Beside the index's folder, which is replaced as a whole."""
    job = json.dumps(manifest, sort_keys=True).encode()
    name = hashlib.blake2b(job, digest_size=8).hexdigest()
    return folder.with_name(f"{folder.name}-shards-{name}")


def _name(number: int) -> str:
    return f"{number:05d}"
