"""Which pages of the cache hold which sequence, and which prefixes of prompts they share.

A sequence gets a slot and all pages that it can come to need at once, so that none that has begun
waits for another's. Pages that hold a whole beginning of a prompt are shared with every sequence
that begins alike, and stay when the last of these has ended, until their place is needed: the least
recently used go first. Prefixes are known by a chain of hashes (vLLM's automatic prefix caching):
what is found costs no more for many slots than for few.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


@dataclasses.dataclass(eq=False)
class Prefix:
    """Pages that several sequences may read."""

    key: bytes  # of all tokens up to the end of these pages, see `chunks.prefix_keys`
    pages: list[int]  # numbers within the shard
    end: int  # the column after the last one of these pages
    users: int = 1  # sequences in slots that read them
    encoded: bool = False  # whether the program that writes them has been started


class Placement(NamedTuple):
    """Says where a sequence goes, and which of its columns need not be computed."""

    slot: int
    pages: list[int]  # in the order of its columns
    reused: int  # columns that are there, or will be once `awaited` is encoded
    awaited: Prefix | None  # the last prefix that another sequence has still to encode


@dataclasses.dataclass
class _Held:
    """Lists the pages and prefixes that a sequence in a slot holds."""

    prefixes: list[Prefix]  # in the order of columns
    pages: list[int]  # that it does not share


@dataclasses.dataclass
class _Shard:
    """Slots and pages of one device, or group of them, that nobody uses."""

    slots: list[int]
    pages: list[int]
    prefixes: dict[bytes, Prefix] = dataclasses.field(default_factory=dict)
    # Of no sequence in a slot, the least recently used first; a prefix behind those that go on
    # from it, since it was released after them.
    idle: collections.OrderedDict[bytes, Prefix] = dataclasses.field(
        default_factory=collections.OrderedDict
    )

    def held(self, keys: Sequence[bytes]) -> list[Prefix]:
        """The prefixes, from the first on, that are there."""
        there = []
        for key in keys:
            if key not in self.prefixes:
                break
            there.append(self.prefixes[key])
        return there

    def spare(self, size: int, reused: Sequence[Prefix]) -> int:
        """How many pages can be taken while prefixes, of `size` pages each, are reused."""
        idle = len(self.idle) - sum(not prefix.users for prefix in reused)
        return len(self.pages) + size * idle

    def take(self, count: int) -> list[int]:
        """`count` pages, of prefixes that are not in use where no others are left."""
        while len(self.pages) < count:
            key, prefix = self.idle.popitem(last=False)
            del self.prefixes[key]
            self.pages += prefix.pages
        cut = len(self.pages) - count
        self.pages, taken = self.pages[:cut], self.pages[cut:]
        return taken


_SPARE = 4  # a shard may have a quarter of its slots fewer free than another for a common prefix


class PagePool:
    """Gives sequences slots and pages.

    Args:
      slots: their number.
      pages: of each shard, from 1 on: page 0 is nobody's.
      width: columns of a page.
      chunk: columns of the largest chunk; it and `width` divide one another.
      shards: devices, or groups of them, that hold equally many consecutive slots, and pages, each.
        A prefix is shared within a shard alone: each encodes it once, at the same time.
    """

    def __init__(self, slots: int, pages: int, width: int, chunk: int, shards: int = 1):
        self._slots_of_shard, self._pages_of_shard = slots // shards, pages
        self._width, self.unit = width, max(width, chunk)
        self._size = self.unit // width  # pages of a prefix
        self._shards = [self._empty(shard) for shard in range(shards)]
        self._held: dict[int, _Held] = {}  # by slot

    def _empty(self, shard: int) -> _Shard:
        first = shard * self._slots_of_shard
        slots = range(first, first + self._slots_of_shard)
        return _Shard(list(reversed(slots)), list(range(self._pages_of_shard, 0, -1)))

    def shard(self, slot: int) -> int:
        """The shard that a slot belongs to."""
        return slot // self._slots_of_shard

    def reusable(self, keys: Sequence[bytes], most: int) -> int:
        """How many of a prompt's first columns, up to `most`, some shard holds."""
        keys = keys[: most // self.unit]
        return max(len(shard.held(keys)) for shard in self._shards) * self.unit

    def place(self, keys: Sequence[bytes], columns: int, most: int) -> Placement | None:
        """A slot and pages for a sequence; None where too few are free before others end.

        Shards are filled evenly.

        Args:
          keys: of its prompt, see `chunks.prefix_keys`, with `unit` as their size.
          columns: that it may come to need.
          most: columns of its prompt that may be reused.
        """
        count, most = -(-columns // self._width), most // self.unit
        fitting = []
        for number, shard in enumerate(self._shards):
            reused = shard.held(keys[:most])
            needed = count - len(reused) * self._size
            if shard.slots and needed <= shard.spare(self._size, reused):
                fitting.append((number, shard, reused))
        if not fitting:
            return None
        least = max(len(shard.slots) for _, shard, _ in fitting) - self._slots_of_shard // _SPARE
        _, shard, reused = max(
            (candidate for candidate in fitting if len(candidate[1].slots) >= least),
            key=lambda candidate: (len(candidate[2]), len(candidate[1].slots), -candidate[0]),
        )
        for prefix in reused:
            prefix.users += 1
            shard.idle.pop(prefix.key, None)
        slot, fresh = shard.slots.pop(), shard.take(count - len(reused) * self._size)
        held = _Held(list(reused), [])
        pages = [page for prefix in reused for page in prefix.pages] + fresh
        for n in range(len(reused), len(keys)):
            of_prefix = pages[n * self._size : (n + 1) * self._size]
            if keys[n] in shard.prefixes:  # encoded anew, as the prompt's last chunk is
                held.pages += of_prefix
                continue
            prefix = shard.prefixes[keys[n]] = Prefix(keys[n], of_prefix, (n + 1) * self.unit)
            held.prefixes.append(prefix)
        held.pages += pages[len(keys) * self._size :]
        self._held[slot] = held
        awaited = reused[-1] if reused and not reused[-1].encoded else None
        return Placement(slot, pages, len(reused) * self.unit, awaited)

    def encoded(self, slot: int, end: int) -> None:
        """Programs that write the slot's columns before `end` have been started."""
        for prefix in self._held[slot].prefixes:
            prefix.encoded = prefix.encoded or prefix.end <= end

    def release(self, slot: int) -> None:
        """A slot's sequence has ended: what it holds is free, its encoded prefixes stay."""
        held, shard = self._held.pop(slot), self._shards[self.shard(slot)]
        shard.slots.append(slot)
        shard.pages += held.pages
        for prefix in reversed(held.prefixes):
            prefix.users -= 1
            if prefix.users:
                continue
            if prefix.encoded and shard.prefixes.get(prefix.key) is prefix:
                shard.idle[prefix.key] = prefix
            else:
                if shard.prefixes.get(prefix.key) is prefix:
                    del shard.prefixes[prefix.key]
                shard.pages += prefix.pages

    def release_all(self) -> None:
        """All sequences have ended."""
        for slot in list(self._held):
            self.release(slot)

    def clear(self) -> None:
        """Forgets all prefixes: sequences from now on share none that is there."""
        for shard in self._shards:
            shard.pages += [page for prefix in shard.idle.values() for page in prefix.pages]
            shard.idle.clear()
            shard.prefixes.clear()
