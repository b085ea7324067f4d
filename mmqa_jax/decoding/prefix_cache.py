"""Prompts in chunks, and which slot holds which prompt (prefix caching).

A prompt is encoded in chunks whose boundaries depend only on its length. Prompts with a common
prefix therefore begin with the same chunks, computed by the same program on the same input:
copying them from another slot changes no bit.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Buckets = tuple[int, ...]  # chunk sizes, ascending, each a multiple of the one before


class Chunk(NamedTuple):
    """Tokens in consecutive columns of the cache that are encoded together.

    Attributes:
      start: column of the first token.
      tokens: ids; negative ones are patches of pictures.
      trunk: where the prompt ends whose continuations follow as branches; 0: one sequence.
      branches: of every token the column where its branch begins (0 in the trunk); () without.
      adapter: its number, on which keys and values depend as they do on the tokens.
    """

    start: int
    tokens: tuple[int, ...]
    trunk: int = 0
    branches: tuple[int, ...] = ()
    adapter: int = 0

    @property
    def end(self) -> int:
        """The column after the last token."""
        return self.start + len(self.tokens)


def split(
    tokens: Sequence[int], buckets: Buckets, start: int = 0, *, adapter: int = 0
) -> list[Chunk]:
    """Chunks of the tokens from `start` on, a multiple of the smallest bucket.

    A chunk of bucket b begins at a multiple of b, so that with its padding it fits into columns
    that are a multiple of the largest bucket.
    """
    chunks = []
    while start < len(tokens):
        bucket = bucket_of(len(tokens) - start, buckets)
        while start % bucket:
            bucket = max(b for b in buckets if b < bucket)
        end = min(start + bucket, len(tokens))
        chunks.append(Chunk(start, tuple(tokens[start:end]), adapter=adapter))
        start = end
    return chunks


def bucket_of(count: int, buckets: Buckets) -> int:
    """The smallest bucket that holds `count` tokens, or else the largest."""
    return next((bucket for bucket in buckets if bucket >= count), buckets[-1])


def common_prefix(first: Sequence[Chunk], other: Sequence[Chunk]) -> int:
    """The number of chunks that two prompts share at their beginning."""
    pairs = zip(first, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class Placement(NamedTuple):
    """Where a prompt goes, and what need not be computed for it."""

    slot: int
    source: int  # the slot that holds its first chunks; `slot` itself if there is nothing to copy
    reused: int  # the number of these chunks


_SPARE = 4  # a shard may have a quarter of its slots fewer free than another for a common prefix


class PrefixCache:
    """Which prompt every slot holds, also after its request is finished.

    Args:
      slots: their number.
      shards: devices, or groups of them, that hold equally many consecutive slots each. A prefix is
        copied within a shard alone: each encodes it once, at the same time.
    """

    def __init__(self, slots: int, shards: int = 1):
        self._of_shard = slots // shards
        self._held: list[list[Chunk]] = [[] for _ in range(slots)]
        self._used = [0] * slots  # when the slot was last used
        self._now = 0

    def shard(self, slot: int) -> int:
        """The shard that a slot belongs to."""
        return slot // self._of_shard

    def reusable(self, chunks: Sequence[Chunk], most: int) -> int:
        """How many of a prompt's first chunks, up to `most`, some slot holds."""
        return max(min(common_prefix(held, chunks), most) for held in self._held)

    def place(self, chunks: list[Chunk], free: Iterable[int], most: int) -> Placement:
        """Takes a free slot for a prompt, of which up to `most` chunks may be reused.

        A free slot that holds the longest common prefix is taken itself. Otherwise the prefix is
        copied into the least recently used one; its source is not free, so that it is not
        overwritten before the copy. Shards are filled evenly.
        """
        free = set(free)
        spare = collections.Counter(map(self.shard, free))
        least = max(spare.values()) - self._of_shard // _SPARE
        near = [n for n in range(len(self._held)) if spare[self.shard(n)] >= max(least, 1)]
        common = {n: min(common_prefix(self._held[n], chunks), most) for n in near}
        source = max(near, key=lambda n: (common[n], n in free, spare[self.shard(n)]))
        reused = common[source]
        if reused and source in free:
            slot = source
        else:
            own = self.shard(source) if reused else max(spare, key=lambda n: (spare[n], -n))
            within = (n for n in free if self.shard(n) == own)
            slot = min(within, key=lambda n: (self._used[n], n))
        self._now += 1
        self._held[slot] = chunks
        self._used[slot] = self._used[source] = self._now
        return Placement(slot, source if reused else slot, reused)

    def keep(self, slot: int, chunks: int) -> None:
        """Forgets what a slot holds behind its first chunks."""
        self._held[slot] = self._held[slot][:chunks]

    def clear(self) -> None:
        """Forgets what the slots hold."""
        self._held = [[] for _ in self._held]
