"""Prompts in pieces, and which slot holds the beginning of which prompt.

A prompt is encoded in pieces whose boundaries depend on nothing but its length. Prompts that begin
alike therefore begin with the same pieces, computed by the same program on the same input: to
copy them from another slot changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Buckets = tuple[int, ...]  # sizes of pieces, ascending, each a multiple of the one before


class Piece(NamedTuple):
    """Consecutive tokens that are encoded at once."""

    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)


def split(tokens: Sequence[int], buckets: Buckets, start: int = 0) -> list[Piece]:
    """Pieces of the tokens from `start` on, a multiple of the smallest bucket.

    A piece of bucket b begins at a multiple of b, so that with its padding it fits into columns
    that are a multiple of the largest.
    """
    pieces = []
    while start < len(tokens):
        bucket = bucket_of(len(tokens) - start, buckets)
        while start % bucket:
            bucket = max(b for b in buckets if b < bucket)
        end = min(start + bucket, len(tokens))
        pieces.append(Piece(start, tuple(tokens[start:end])))
        start = end
    return pieces


def bucket_of(count: int, buckets: Buckets) -> int:
    """The smallest bucket that holds `count` tokens, or the largest of all."""
    return next((bucket for bucket in buckets if bucket >= count), buckets[-1])


def shared(one: Sequence[Piece], other: Sequence[Piece]) -> int:
    """How many pieces two prompts have in common at their beginning."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


class Place(NamedTuple):
    """Where a prompt goes, and what it need not compute."""

    slot: int
    source: int  # the slot that holds its first pieces; `slot` itself if there is nothing to copy
    reused: int  # how many pieces these are


class SlotBook:
    """What prompt every slot holds, also after its request is finished."""

    def __init__(self, slots: int):
        self._held: list[list[Piece]] = [[] for _ in range(slots)]
        self._used = [0] * slots  # when the slot was last needed
        self._now = 0

    def place(self, pieces: list[Piece], free: Iterable[int], most: int) -> Place:
        """Takes a free slot for a prompt, of which up to `most` pieces may be another's.

        A free slot that holds the longest common beginning is taken itself. Otherwise the
        beginning is copied into the one not needed for longest; its source is not free, so that
        nobody overwrites it before.
        """
        free = set(free)
        common = [min(shared(held, pieces), most) for held in self._held]
        source = max(range(len(common)), key=lambda slot: (common[slot], slot in free))
        reused = common[source]
        if reused and source in free:
            slot = source
        else:
            slot = min(free, key=lambda slot: (self._used[slot], slot))
        self._now += 1
        self._held[slot] = pieces
        self._used[slot] = self._used[source] = self._now
        return Place(slot, source if reused else slot, reused)

    def forget(self) -> None:
        """Makes all slots empty."""
        self._held = [[] for _ in self._held]
