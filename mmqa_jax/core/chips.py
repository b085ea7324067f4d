"""The figures of the makers' data sheets for accelerators, and what a slice's links carry."""

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mmqa_jax.core.errors import UserError

GIB = 2**30
# What JAX takes of a GPU's memory unless the environment says otherwise.
_GPU_SHARE = 0.75
_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device: what it computes, holds and moves at best."""

    name: str
    # FLOP/s by type of the factors; `f32` is what a float32 product runs at by default (one
    # bfloat16 pass on TPU, TF32 on GPU), `f32:highest` with precision "highest".
    rates: Mapping[str, float]
    hbm_bytes: float  # memory that a program can use
    hbm_rate: float  # bytes/s between memory and chip
    # Bytes/s that one device sends to others of its slice (ICI) or host (NVLink), all links
    # together.
    link_rate: float
    # Bytes/s that one device sends to devices of other slices, or hosts of GPUs: its share of what
    # its host's network cards send.
    network_rate: float
    source: str  # where the numbers are from
    of_chip: int = 1  # how many such devices are one chip
    # Of a TPU's chip to its neighbors, two for each dimension of the torus; 0: each device reaches
    # all others of its host at `link_rate`.
    links: int = 0
    wraps_from: int = 0  # chips along a dimension from which on its ends are linked, too
    clock: float = 0  # Hz of a TPU's core, in whose cycles its compiler counts; 0: of a GPU
    hop_seconds: float = 0  # that a collective takes for each device on its way, beside its bytes
    call_seconds: float = 0  # that it takes once
    kinds: tuple[str, ...] = ()  # parts of the name by which jax knows the device, in lower case
    # Of a TPU, with which the names of its slices begin, ours first: `v5e` of `v5e:2x4` and
    # `v5e-8`.
    spellings: tuple[str, ...] = ()
    target: str = ""  # of a TPU, its compiler's own spelling
    # Of a TPU, a whole host's slice: Google's machine types that end in 8t, and in 4t.
    host: str = ""

    @property
    def dimensions(self) -> int:
        """Returns how many dimensions the torus of a TPU's slice has: each has two links."""
        return self.links // 2

    @property
    def peak(self) -> float:
        """FLOP/s of bfloat16 products, against which MFU is stated."""
        return self.rates["bf16"]

    def seconds(self, flops: Mapping[str, float]) -> float:
        """Time of so many FLOPs by type of the factors."""
        return sum(count / self.rates.get(kind, self.rates["f32"]) for kind, count in flops.items())


def _tpu(
    name: str,
    teraflops: float,
    int8: float,
    gib: float,
    hbm: float,
    ici: float,
    *,
    dcn: float,
    ghz: float,
    **rest: Any,
) -> Chip:
    """hbm and ici in GB/s (ici as it is sent, half of the data sheet's), dcn in Gbit/s."""
    bf16 = teraflops * 1e12
    rates = {"bf16": bf16, "f16": bf16, "f32": bf16, "s8": int8 * 1e12, "u8": int8 * 1e12}
    rates["f32:highest"] = bf16 / 6  # six passes of bfloat16
    source = "cloud.google.com/tpu/docs, system architecture of each version"
    moved = (gib * GIB, hbm * 1e9, ici * 1e9, dcn * 1e9 / 8)
    # A hop: jax-ml.github.io/scaling-book, "about 1 us".
    return Chip(f"TPU {name}", rates, *moved, source, clock=ghz * 1e9, hop_seconds=1e-6, **rest)


def _memory_share() -> float:
    text = os.environ.get(_SHARE)
    try:
        share = float(text) if text else _GPU_SHARE
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(
            f"environment: {_SHARE}={text}: a number above 0 and up to 1 was expected, the share "
            "of a GPU's memory; correct or unset it."
        )
    return share


def _gpu(name: str, bf16: float, tf32: float, fp32: float, int8: float, **rest: float) -> Chip:
    rates = {"bf16": bf16, "f16": bf16, "f32": tf32, "f32:highest": fp32, "s8": int8, "u8": int8}
    share = _memory_share()
    return Chip(
        f"NVIDIA {name}",
        {kind: rate * 1e12 for kind, rate in rates.items()},
        rest["memory"] * share,
        rest["hbm"] * 1e9,
        rest["nvlink"] * 1e9,
        rest["network"] * 1e9,
        "NVIDIA's data sheet, SXM, dense; NVLink and network each way of a DGX",
        # A small all-reduce by NCCL's own model (its file tuning.cc: a ring over NVLink, LL).
        hop_seconds=0.6e-6,
        call_seconds=6.6e-6,
        kinds=(name.lower(),),
    )


# HBM in GiB as libtpu 0.0.42 lets programs use it: it refuses what exceeds that. It compiles v4 and
# TPU7x for one of a chip's two TensorCores, with half of the chip's data sheet.
# Links: a v5e or v6e pod is a torus of 16 x 16, and a slice of it has links from end to end along a
# dimension of 16 alone; the others are cut into cubes of 4 x 4 x 4, whose ends are linked, and a
# slice below one cube has none ("All 4x4x4 and larger slices have full 3D torus connectivity", the
# same documentation, v5p). Clocks: jax-ml.github.io/scaling-book, tables of TPUs; TPU7x's stands in
# none, and is that at which four units of 256 x 256, as v6e has, reach its peak of bfloat16. Its
# page states no rate of int8 either: bfloat16's is taken.
# Data-center network, same documentation: v5e "2 x 100 Gbps NIC" for a host of 8 chips, v6e "4 x
# 200 Gbps NIC", v5p "per chip (Gbps) 50", TPU7x 100. v4's page gives none: v5e's is taken.
_2D: dict[str, Any] = {"links": 4, "wraps_from": 16, "host": "2x4"}
_3D: dict[str, Any] = {"links": 6, "wraps_from": 4, "host": "2x2x1"}
_V4 = {**_3D, "kinds": ("v4",), "spellings": ("v4",), "target": "v4", "of_chip": 2}
_V5E = {**_2D, "kinds": ("v5 lite", "v5e"), "spellings": ("v5e", "v5litepod"), "target": "v5e"}
_V5P = {**_3D, "kinds": ("v5",), "spellings": ("v5p",), "target": "v5p"}
_V6E = {**_2D, "kinds": ("v6 lite", "v6e"), "spellings": ("v6e",), "target": "v6e"}
_V7X = {**_3D, "kinds": ("tpu7x",), "spellings": ("v7x", "tpu7x"), "target": "tpu7x", "of_chip": 2}
TPUS = {
    "v4": _tpu("v4 core", 137.5, 137.5, 15.25, 614, 150, dcn=12.5, ghz=1.05, **_V4),
    "v5e": _tpu("v5e", 197, 393, 15.75, 819, 200, dcn=25, ghz=1.5, **_V5E),
    "v5p": _tpu("v5p", 459, 918, 95.74, 2765, 600, dcn=50, ghz=1.75, **_V5P),
    "v6e": _tpu("v6e", 918, 1836, 31.25, 1640, 400, dcn=100, ghz=1.75, **_V6E),
    "v7x": _tpu("v7x core", 1153.5, 1153.5, 94.75, 3690, 300, dcn=50, ghz=2.2, **_V7X),
}
_HOPPER = (989.4, 494.7, 67, 1979)
GPUS = {
    "a100": _gpu("A100", 312, 156, 19.5, 624, memory=85094825984, hbm=2039, nvlink=300, network=25),
    "h100": _gpu("H100", *_HOPPER, memory=84978434048, hbm=3352, nvlink=450, network=50),
    "h200": _gpu("H200", *_HOPPER, memory=150754820096, hbm=4800, nvlink=450, network=50),
    "b200": _gpu(
        "B200", 2250, 1100, 80, 4500, memory=191514411008, hbm=7672, nvlink=900, network=50
    ),
}
CHIPS: Mapping[str, Chip] = {**TPUS, **GPUS}


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that jax names so; None: no data sheet is here."""
    wanted = device_kind.lower()
    parts = {part: chip for chip in CHIPS.values() for part in chip.kinds if part in wanted}
    return parts[max(parts, key=len)] if parts else None  # "v5" stands in "v5 lite", too


# Counts what a device sends in a collective, and over which links of a slice it goes.


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

    `kind`, `members`, `size`: as of sent_bytes; the members are a block of the slice, as even as
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
