"""Counts what a device sends in a collective, and over which links of a slice it goes.

A slice is a grid of chips with links between neighbors, and from end to end along those dimensions
that wrap around. What a group of chips exchanges goes at most at the rate of the chip with the
fewest links inside the group: half of a ring's where the dimension does not wrap around.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from mmqa_jax.core.chips import Chip

Place = tuple[int, ...]  # of a chip in its slice


def sent_bytes(kind: str, members: float, size: float) -> float:
    """Bytes that a device has to send at least (ring algorithms reach it).

    Args:
      kind: of the collective, as XLA names it.
      members: devices of a group, or slices of which each sends as one.
      size: bytes of the whole array of a group: what is gathered, reduced or permuted.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    return size * (members - 1) / members * (2 if kind == "all-reduce" else 1)


def seconds_to_send(size: float, chip: Chip, *, hosts: bool, links: int | None) -> float:
    """The least time in which a device sends so many bytes.

    Args:
      hosts: whether they go to other hosts.
      links: of a TPU's chip to others of its group; None: all that the device has.
    """
    if hosts:
        return size / chip.network_rate
    return size / (chip.link_rate * (1.0 if links is None else links / chip.links))


def wraps(shape: Sequence[int], chip: Chip) -> tuple[bool, ...]:
    """Marks the dimensions of a slice of so many chips that are linked from end to end."""
    if len(shape) == 3:  # cut into cubes: all or none
        return (all(size % chip.wraps_from == 0 for size in shape),) * 3
    return tuple(size >= chip.wraps_from for size in shape)


def fewest_links(group: Collection[Place], shape: Sequence[int], chip: Chip) -> int:
    """Counts the links that the worst placed chip of a group has to the others.

    Args:
      group: places of the group's chips; the two cores of a v4 or v7x chip have one.
      shape: of the slice.

    Returns:
      At least 1: chips that are no neighbors are reached over others. All of a chip's for its own
      cores: between those of a TPU7x is six times the bandwidth of a link (its page).
    """
    members, ends = set(group), wraps(shape, chip)
    if len(members) == 1:
        return chip.links

    def links(place: Place) -> int:
        count = 0
        for axis, size in enumerate(shape):
            for step in (-1, 1):
                at = place[axis] + step
                if not 0 <= at < size and not ends[axis]:
                    continue
                neighbor = (*place[:axis], at % size, *place[axis + 1 :])
                count += neighbor in members and neighbor != place
        return count

    return max(1, min(map(links, members)))


def most_even(chips: int, dimensions: int) -> tuple[int, ...]:
    """The sides of Google's slice of so many chips: as even as possible, ascending, sides of 1
    last; () for no chip."""
    if dimensions == 1:
        return (chips,) if chips else ()
    splits = [
        tuple(sorted((side, *most_even(chips // side, dimensions - 1))))
        for side in range(1, math.isqrt(chips) + 1)
        if chips % side == 0
    ]
    sides = min(splits, key=lambda sides: (sides[-1], -sides[0]), default=())
    return (*(side for side in sides if side > 1), *(side for side in sides if side == 1))


def near_seconds(kind: str, members: int, size: float, chip: Chip) -> float:
    """The time of a collective within a slice or host, by bytes and by hops.

    Args:
      kind, members, size: as of sent_bytes; the members are a block of the slice, as even as
        possible.
    """
    if members == 1:
        return 0.0
    links, hops = None, 2 * (members - 1)  # of GPUs a ring
    if chip.links:
        sides = most_even(-(-members // chip.of_chip), chip.dimensions)
        places = list(itertools.product(*map(range, sides)))
        links, hops = fewest_links(places, sides, chip), 2 * sum(side - 1 for side in sides)
    latency = chip.call_seconds + max(1, hops) * chip.hop_seconds
    return latency + seconds_to_send(
        sent_bytes(kind, members, size), chip, hosts=False, links=links
    )
