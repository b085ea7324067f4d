"""Prompts in chunks, and which slot holds which prompt (prefix caching).

A prompt is encoded in chunks whose boundaries depend only on its length. Prompts with a common
prefix therefore begin with the same chunks, computed by the same program on the same input:
copying them from another slot changes no bit.
"""

from __future__ import annotations

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
    """

    start: int
    tokens: tuple[int, ...]
    trunk: int = 0
    branches: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The column after the last token."""
        return self.start + len(self.tokens)


def split(tokens: Sequence[int], buckets: Buckets, start: int = 0) -> list[Chunk]:
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
        chunks.append(Chunk(start, tuple(tokens[start:end])))
        start = end
    return chunks


def bucket_of(count: int, buckets: Buckets) -> int:
    """The smallest bucket that holds `count` tokens, or else the largest."""
    return next((bucket for bucket in buckets if bucket >= count), buckets[-1])


def common_prefix(one: Sequence[Chunk], other: Sequence[Chunk]) -> int:
    """The number of chunks that two prompts share at their beginning."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class Placement(NamedTuple):
    """Where a prompt goes, and what need not be computed for it."""

    slot: int
    source: int  # the slot that holds its first chunks; `slot` itself if there is nothing to copy
    reused: int  # the number of these chunks


class PrefixCache:
    """Which prompt every slot holds, also after its request is finished."""

    def __init__(self, slots: int):
        self._held: list[list[Chunk]] = [[] for _ in range(slots)]
        self._used = [0] * slots  # when the slot was last used
        self._now = 0

    def reusable(self, chunks: Sequence[Chunk], most: int) -> int:
        """How many of a prompt's first chunks, up to `most`, some slot holds."""
        return max(min(common_prefix(held, chunks), most) for held in self._held)

    def place(self, chunks: list[Chunk], free: Iterable[int], most: int) -> Placement:
        """Takes a free slot for a prompt, of which up to `most` chunks may be reused.

        A free slot that holds the longest common prefix is taken itself. Otherwise the prefix is
        copied into the least recently used one; its source is not free, so that it is not
        overwritten before the copy.
        """
        free = set(free)
        common = [min(common_prefix(held, chunks), most) for held in self._held]
        source = max(range(len(common)), key=lambda slot: (common[slot], slot in free))
        reused = common[source]
        if reused and source in free:
            slot = source
        else:
            slot = min(free, key=lambda slot: (self._used[slot], slot))
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
