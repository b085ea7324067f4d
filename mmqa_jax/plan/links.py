"""What the devices of a mesh have to exchange, and over which links of a slice they do.

A slice is a grid of chips with links between neighbors, and from end to end along those dimensions
that wrap around. What a group of chips exchanges goes at most at the rate of the chip with the
fewest links inside the group: half of a ring's where the dimension does not wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mmqa_jax.core.chips import Chip

Place = tuple[int, ...]  # of a chip in its slice


class Placement(NamedTuple):
    """Where the devices of a mesh are, in its flat order.

    Attributes:
      hosts: of every device; one number for all where they are linked as one (a slice).
      links: of a group of positions, `fewest_links`; None: each device reaches all others of its
        host at its whole rate.
    """

    hosts: tuple[int, ...]
    links: Callable[[Sequence[int]], int] | None = None

    def reach(self, groups: Sequence[Sequence[int]]) -> tuple[bool, int | None]:
        """Whether a group reaches over several hosts, and the links of the worst placed one."""
        far = any(len({self.hosts[member] for member in group}) > 1 for group in groups)
        return far, None if self.links is None else min(map(self.links, groups))


def sent_bytes(kind: str, members: int, size: float) -> float:
    """Bytes that a device has to send at least (ring algorithms reach it).

    Args:
      kind: of the collective, as XLA names it.
      members: devices of a group.
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
    """Which dimensions of a slice of so many chips are linked from end to end."""
    if len(shape) == 3:  # cut into cubes: all or none
        return (all(size % chip.wraps_from == 0 for size in shape),) * 3
    return tuple(size >= chip.wraps_from for size in shape)


def fewest_links(group: Collection[Place], shape: Sequence[int], chip: Chip) -> int:
    """How many links the worst placed chip of a group has to others of it.

    Args:
      group: places of the group's chips; the two cores of a v4 chip have one.
      shape: of the slice.

    Returns:
      At least 1: chips that are no neighbors are reached over others.
    """
    members, ends = set(group), wraps(shape, chip)

    def links(place: Place) -> int:
        found = 0
        for axis, size in enumerate(shape):
            for step in (-1, 1):
                at = place[axis] + step
                if not 0 <= at < size and not ends[axis]:
                    continue
                neighbor = (*place[:axis], at % size, *place[axis + 1 :])
                found += neighbor in members and neighbor != place
        return found

    return max(1, min(map(links, members)))
