"""What each kind of index holds and reads for so many sources, before there are any."""

from __future__ import annotations

import dataclasses

from mmqa_jax.retrieval.index import ScannParameters
from mmqa_jax.retrieval.milvus import FLAT_ROWS, GRAPH

_FLOAT = 4  # bytes


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
    """Exact search from disk, ScaNN on one host, and Milvus, for float32 vectors [rows, dim]."""
    vectors = float(rows * dim * _FLOAT)
    return (
        IndexSize("exact", "disk", vectors, vectors, shared=True),
        _scann(rows, dim),
        _milvus(rows, dim),
    )


def _scann(rows: int, dim: int) -> IndexSize:
    """Vectors for reordering; codes of two dimensions each, in one or two partitions of a row.

    A code is a byte in the files, of which searching reads 4 bits.
    """
    parameters, vectors = ScannParameters.for_rows(rows), rows * dim * _FLOAT
    if not parameters.leaves:
        return IndexSize("scann", "host memory", vectors, vectors)
    partitions = 2 if parameters.soar else 1
    codes = partitions * rows * dim / 2
    members = partitions * rows * 4  # the numbers of the partitions
    centers = parameters.leaves * dim * _FLOAT
    share = parameters.leaves_to_search / parameters.leaves
    read = centers + share * codes / 2 + parameters.reorder * dim * _FLOAT
    return IndexSize("scann", "host memory", vectors + codes + members + centers, read)


def _milvus(rows: int, dim: int) -> IndexSize:
    """HNSW: vectors, and 2 M neighbors of each on the lowest level, where nearly all of them are.

    How many of them a search visits depends on the vectors.
    """
    vectors = rows * dim * _FLOAT
    if rows <= FLAT_ROWS:
        return IndexSize("milvus", "Milvus", vectors, vectors)
    links = rows * 2 * GRAPH["M"] * 4
    return IndexSize("milvus", "Milvus", vectors + links, None)
