"""Some consecutive shards of BM25's index on disk, searched as one.

What a query costs in a shard is mostly the same few steps on short arrays, so that several shards
together take little more time than one. A group's rows are numbered from 0 through its shards; what
a word adds at most is bounded by the statistics of all shards (bm25/on_disk.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmqa_jax.retrieval.bm25.shard import Norms, Shard


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The tiers of a word in all shards of a group, those first that can add most.

    So the first few are some of the first tiers of each shard, and the next one bounds the rest.

    Attributes:
      bounds: what the postings of each add at most, before the idf, falling.
      sizes: postings of each.
      owners: the shard of each, by its place in the group.
      drops: how much the bound falls behind each, at last to 0.
      worth: the drop for a posting read, never rising: a tier shares the drop of the next ones
        where that is larger for their size, since it is read for theirs.
    """

    bounds: np.ndarray
    sizes: np.ndarray
    owners: np.ndarray
    drops: np.ndarray
    worth: np.ndarray

    def behind(self, taken: int) -> float:
        """What a word adds at most to a source that is in none of its first `taken` tiers."""
        return self.bounds[taken] if taken < len(self.bounds) else np.float32(0)


class ShardGroup:
    """Shards one behind another.

    A word is given by its numbers, one a shard, -1 where the shard has none.

    Attributes:
      rows: how many sources they have.
      norms: of all sources, float32.
    """

    def __init__(self, shards: Sequence[Shard], norms: Norms):
        self._shards = shards
        self._starts = np.cumsum([0, *(shard.rows for shard in shards)]).tolist()
        self._norms = norms
        self._shard_norms = [
            dataclasses.replace(norms, mean_length=shard.mean_length) for shard in shards
        ]
        self.rows: int = self._starts[-1]
        self._lengths = np.concatenate([shard.lengths for shard in shards])
        self.norms: np.ndarray = norms.of(self._lengths).astype(np.float32)

    def release(self) -> None:
        """Lets go of the pages that were read, as `Shard.release`."""
        for shard in self._shards:
            shard.release()

    def norms_of(self, rows: np.ndarray) -> np.ndarray:
        """The norms of some sources, float64."""
        return self._norms.of(self._lengths[rows])

    def tiers(self, numbers: Sequence[Sequence[int]]) -> list[Tiers]:
        """The tiers of several words, each of which at least one of the shards has."""
        of_shards = np.array(numbers)
        found = []
        for owner, (shard, norms) in enumerate(zip(self._shards, self._shard_norms, strict=True)):
            present = np.flatnonzero(of_shards[:, owner] >= 0)
            words, impacts, sizes = shard.tiers(of_shards[present, owner])
            bounds = self._norms.bounds(impacts, norms)
            found.append((present[words], bounds, sizes, np.full(len(sizes), owner)))
        words, bounds, sizes, owners = map(np.concatenate, zip(*found, strict=True))
        order = np.lexsort((-bounds, words))  # stable: tiers of a shard stay in order
        bounds, sizes, owners = bounds[order], sizes[order], owners[order]
        edges = np.cumsum(np.bincount(words, minlength=len(of_shards)))
        behind = np.append(bounds[1:], np.float32(0))
        behind[edges - 1] = 0
        drops = bounds - behind
        columns = (bounds, sizes, owners, drops)
        spans = map(slice, [0, *edges[:-1].tolist()], edges.tolist())
        return [
            Tiers(*(column[span] for column in columns), _worth(drops[span], sizes[span]))
            for span in spans
        ]

    def postings(
        self, numbers: Sequence[int], tiers: Tiers, taken: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows and counts of a word's first `taken` tiers."""
        sizes = np.bincount(tiers.owners[:taken], tiers.sizes[:taken]).astype(np.int64).tolist()
        rows, counts = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint8)]
        for owner, size in enumerate(sizes):
            if size:
                shard, number = self._shards[owner], numbers[owner]
                everything = size == shard.frequency(number)
                found = shard.postings(number) if everything else shard.top_postings(number, size)
                rows.append(found[0] + np.uint32(self._starts[owner]))
                counts.append(found[1])
        return np.concatenate(rows), np.concatenate(counts)

    def counts(self, numbers: Sequence[int], rows: np.ndarray) -> np.ndarray:
        """How often each of some sources has a word; uint32 rows, ascending."""
        counts = np.zeros(len(rows), np.uint32)
        edges = np.searchsorted(rows, self._starts).tolist()
        for owner, number in enumerate(numbers):
            first, last = edges[owner], edges[owner + 1]
            if number >= 0 and first < last:
                own = rows[first:last] - np.uint32(self._starts[owner])
                counts[first:last] = self._shards[owner].counts(number, own)
        return counts


def _worth(drops: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The slopes of the convex hull below the bounds, one a tier."""
    slopes: list[tuple[float, int, int]] = []  # drop, postings, tiers
    for drop, size in zip(drops.tolist(), sizes.tolist(), strict=True):
        tiers = 1
        while slopes and drop * slopes[-1][1] >= slopes[-1][0] * size:
            above = slopes.pop()
            drop, size, tiers = drop + above[0], size + above[1], tiers + above[2]
        slopes.append((drop, size, tiers))
    return np.repeat([drop / size for drop, size, _ in slopes], [tiers for *_, tiers in slopes])
