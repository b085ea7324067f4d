"""What each kind of index holds and reads for so many sources, before there are any."""

from __future__ import annotations

import dataclasses

from mmqa_jax.retrieval.indexes.index import ScannParameters
from mmqa_jax.retrieval.indexes.milvus import FLAT_ROWS, GRAPH

_FLOAT = 4  # bytes
SHARD_ROWS = 1_000_000  # of `mmqa index --kind=scann --shard_rows`, as planned here


@dataclasses.dataclass(frozen=True)
class IndexSize:
    """Bytes of an index outside of accelerators.

    Attributes:
      place: what holds them: `disk`, `host memory` or `Milvus`.
      held: while it is searched; building needs more.
      read: per batch of queries if `shared`, else per query; None: not known beforehand.
      shared: one pass over the sources serves a whole batch.
    """

    kind: str
    place: str
    held: float
    read: float | None
    shared: bool = False


def index_sizes(rows: int, dim: int) -> tuple[IndexSize, ...]:
    """Exact search from disk, ScaNN on one host and in shards, and Milvus, for float32 vectors
    [rows, dim]."""
    vectors = float(rows * dim * _FLOAT)
    return (
        IndexSize("exact", "disk", vectors, vectors, shared=True),
        _scann(rows, dim),
        *([_scann_shards(rows, dim)] if rows > SHARD_ROWS else []),
        _milvus(rows, dim),
    )


def _scann(rows: int, dim: int) -> IndexSize:
    """Vectors for reordering; codes of two dimensions each, in one or two partitions of a row.

    A code is a byte in the files, of which searching reads 4 bits.
    """
    parameters, vectors = ScannParameters.for_rows(rows), rows * dim * _FLOAT
    if not parameters.leaves:
        return IndexSize("scann", "host memory", vectors, vectors)
    codes, centers = _codes(rows, dim, parameters), parameters.leaves * dim * _FLOAT
    members = _partitions(parameters) * rows * 4  # the numbers of the partitions
    share = parameters.leaves_to_search / parameters.leaves
    read = centers + share * codes / 2 + parameters.reorder * dim * _FLOAT
    return IndexSize("scann", "host memory", vectors + codes + members + centers, read)


def _scann_shards(rows: int, dim: int) -> IndexSize:
    """What of SHARD_ROWS is in memory but the vectors; a batch of queries reads all shards' codes.

    Building one takes its vectors twice, as ScaNN copies them.
    """
    whole = _scann(SHARD_ROWS, dim).held - SHARD_ROWS * dim * _FLOAT
    return IndexSize("scann_shards", "host memory", whole, whole * rows / SHARD_ROWS, shared=True)


def _codes(rows: int, dim: int, parameters: ScannParameters) -> float:
    return _partitions(parameters) * rows * dim / 2


def _partitions(parameters: ScannParameters) -> int:
    """Returns in how many partitions a row lies."""
    return 2 if parameters.soar else 1


def _milvus(rows: int, dim: int) -> IndexSize:
    """HNSW: vectors, and 2 M neighbors of each on the lowest level, where nearly all of them are.

    How many of them a search visits depends on the vectors.
    """
    vectors = rows * dim * _FLOAT
    if rows <= FLAT_ROWS:
        return IndexSize("milvus", "Milvus", vectors, vectors)
    links = rows * 2 * GRAPH["M"] * 4
    return IndexSize("milvus", "Milvus", vectors + links, None)
