"""The collectives of a compiled program: which devices take part, along which mesh axis."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mmqa_jax.core.chips import Chip, seconds_to_send, sent_bytes

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Collective(NamedTuple):
    """One kind of collective along one mesh axis, over a whole program.

    Attributes:
      axis: mesh axes along which the members of a group differ, joined by "+"; "?" unknown.
      members: devices of a group.
      count: how often it runs in one call of the program, loops multiplied out.
      bytes: of the whole array of a device's group, summed up: what is gathered, reduced or
        permuted.
      hosts: whether groups reach over several hosts.
      links: of a TPU slice that a member has to others of its group, see core.chips.fewest_links; None:
        all that the device has.
      hidden_cycles: that a TPU works, by its compiler's estimate, while they run; None: they stop
        all else. Infinite where nobody estimates.
    """

    kind: str
    axis: str
    members: int
    count: float
    bytes: float
    hosts: bool = False
    links: int | None = None
    hidden_cycles: float | None = None

    def seconds(self, chip: Chip) -> float:
        """The least time that the exchange takes."""
        return seconds_to_send(self.sent_bytes, chip, hosts=self.hosts, links=self.links)

    def exposed_seconds(self, chip: Chip) -> float:
        """What of it cannot run beside other work."""
        seconds = self.seconds(chip)
        if self.hidden_cycles is None:
            return seconds
        return max(0.0, seconds - self.hidden_cycles / (chip.clock or 1))

    @property
    def sent_bytes(self) -> float:
        """See core.chips.sent_bytes."""
        return sent_bytes(self.kind, self.members, self.bytes)


def groups(attributes: str, devices: int) -> list[tuple[int, ...]]:
    """The groups of a collective as positions in the mesh's flat order; a permute's pairs.

    An empty list of groups means all devices.
    """
    iota = _IOTA.search(attributes)
    if iota is not None:
        shape, sizes, order = (
            tuple(map(int, text.split(","))) if text else None for text in iota.groups()
        )
        assert shape is not None
        assert sizes is not None
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        numbers = numbers.transpose(order) if order else numbers
        return [tuple(map(int, row)) for row in numbers.reshape(shape[0], -1)]
    found = _LISTED.search(attributes) or _PAIRS.search(attributes)
    listed = re.findall(r"\{([\d,]+)\}", found[1]) if found else []
    if not listed:
        return [tuple(range(devices))]
    return [tuple(map(int, text.split(","))) for text in listed]


def axis_of(members: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> str:
    """The mesh axes along which the devices of a group differ, such as `data` or `data+fsdp`.

    Args:
      members: of every group, positions in the mesh's flat order.
      mesh: axis -> size, in the mesh's order.

    Returns:
      "" if no group has two members; "?" if a position is not on the mesh.
    """
    names, sizes = list(mesh), tuple(mesh.values())
    total = math.prod(sizes)
    varying: set[int] = set()
    for group in members:
        if any(position >= total for position in group):
            return "?"
        places = np.array(np.unravel_index(group, sizes))  # [axes, members]
        varying |= {n for n, row in enumerate(places) if (row != row[0]).any()}
    return "+".join(names[n] for n in sorted(varying))
