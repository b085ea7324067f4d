"""What a compiled program does in one call, on one device, with its loops multiplied out.

XLA's own `cost_analysis` counts a loop's body once, and gives nothing for GPUs: so the optimised
HLO is counted here. FLOPs are those of products (dots, convolutions, kernels that state theirs);
all else is small beside them. Bytes are those that instructions read from and write to the
device's main memory: fusions count as a whole, slices and updates in place by what they touch,
and arrays in on-chip memory not at all.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.hlo.collectives import KINDS, Collective, axis_of, groups
from tests.hlo.flops import attention_flops, convolution_flops, dot_flops, gemm_flops
from tests.hlo.loops import trip_count
from tests.hlo.text import Array, Computation, Instruction, Module, parse

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "optimization-barrier", "add-dependency", "domain"),
}
_NO_WORK = {  # custom calls that only hand on or mark memory
    *("AllocateBuffer", "ConcatBitcast", "SliceBitcast", "AsyncCollectiveStart"),
    *("AsyncCollectiveDone", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"),
    *(
        "AssumeGatherIndicesInBound",
        "annotate_device_placement",
        "MoveToHost",
        "MoveToDevice",
        "TopK",
        "PinToDevice",
        "PrepareAsyncCallStart",
        "PrepareAsyncCallDone",
        "GatherScatterIndicesBitpacked",
    ),
}
_SLICES = {"dynamic-slice", "slice", "gather"}
_NO_ELEMENTWISE = {"dot", "convolution", "custom-call", "sort", "reverse", "pad", "concatenate"}
KERNEL = "tpu_custom_call"
_TRITON = "__gpu$xla.gpu.triton"
# What a Pallas kernel states of itself: on TPUs, and as its metadata on GPUs.
_STATED_FLOPS, _STATED_BYTES = (
    rf'(?:"cost_estimate":\{{[^}}]*"{name}":"?|\\22{name}\\22: \\22)(\d+)'
    for name in ("flops", "bytes_accessed")
)
_MATMUL = re.compile(r"__cublas\$|__cublas\$lt\$|gemm|matmul")
_ATTENTION = "__cudnn$fmha"


@dataclasses.dataclass(frozen=True)
class _Group:
    """A collective before its mesh axis is known."""

    kind: str
    attributes: str  # replica_groups or source_target_pairs
    overlaps: bool = False  # it has a start and a done, with other work between


_Sums = tuple[float, ...]  # of one kind of collective: how often, bytes, cycles beside them
_NONE = (0.0, 0.0, 0.0)


@dataclasses.dataclass
class Counts:
    """Sums over one call of a computation.

    Attributes:
      flops: by the type of the factors, "f32:highest" where six passes are asked for.
      bytes: read and written in main memory.
      collectives: how often, bytes (see Collective), and cycles of the work beside them.
      loops: turns of every `while` of the program, inner ones included; None: not known, and
        counted as one turn.
      copies, copied_bytes: of copies within main memory.
      cycles: of a TPU, without collectives; see count.
      unknown: custom calls whose FLOPs are not stated.
    """

    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes: float = 0.0
    collectives: dict[_Group, _Sums] = dataclasses.field(default_factory=dict)
    loops: list[int | None] = dataclasses.field(default_factory=list)
    copies: float = 0.0
    copied_bytes: float = 0.0
    cycles: float = 0.0
    unknown: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def total_flops(self) -> float:
        """Of all types."""
        return sum(self.flops.values())

    def add(self, other: Counts, times: float = 1) -> None:
        """Adds another computation that runs `times` times."""
        for kind, count in other.flops.items():
            self.flops[kind] += count * times
        self.bytes += other.bytes * times
        for group, sums in other.collectives.items():
            known = self.collectives.get(group, _NONE)
            self.collectives[group] = tuple(x + y * times for x, y in zip(known, sums, strict=True))
        self.loops += other.loops
        self.copies += other.copies * times
        self.copied_bytes += other.copied_bytes * times
        self.cycles += other.cycles * times
        for target, count in other.unknown.items():
            self.unknown[target] += count * times

    def on_mesh(
        self,
        mesh: Mapping[str, int],
        hosts: Sequence[int] | None = None,
        links: Callable[[Sequence[int]], int] | None = None,
    ) -> list[Collective]:
        """The collectives by kind and mesh axis, the most bytes first.

        Args:
          mesh: axis -> size.
          hosts: of every device in the mesh's flat order; None: all are on one.
          links: of a group of positions in that order, see Collective.
        """
        total = math.prod(mesh.values())
        merged: dict[tuple[Any, ...], _Sums] = {}
        for group, sums in self.collectives.items():
            if not sums[0]:
                continue
            listed = groups(group.attributes, total)
            members = max(map(len, listed))
            if members < 2:
                continue
            far = hosts is not None and any(len({hosts[m] for m in g}) > 1 for g in listed)
            fewest = None if links is None else min(map(links, listed))
            key = (group.kind, axis_of(listed, mesh), members, far, fewest, group.overlaps)
            known = merged.get(key, _NONE)
            merged[key] = tuple(x + y for x, y in zip(known, sums, strict=True))
        found = []
        for (*what, far, fewest, overlaps), (count, size, cycles) in merged.items():
            hidden = None
            if overlaps:  # with what, only the TPU's compiler tells
                hidden = cycles if self.cycles else math.inf
            found.append(Collective(*what, count, size, far, fewest, hidden))
        return sorted(found, key=lambda one: -one.bytes)


CyclesOf = Callable[[Instruction, Counts], float]  # with the instruction's FLOPs and bytes


def stated_cycles(one: Instruction, _: Counts) -> float:
    """What XLA for TPUs estimates that an instruction takes; 0 where it does not say."""
    stated = one.attribute(r'"estimated_cycles":"(\d+)"')
    return float(stated or 0)


def count(text: str, cycles_of: CyclesOf = stated_cycles) -> Counts:
    """Counts the program whose `compiled.as_text()` is `text`; `cycles_of` its instructions."""
    module = parse(text)
    return _Counter(module, cycles_of).computation(module.main)


class _Counter:
    """Counts computations, each once."""

    def __init__(self, module: Module, cycles_of: CyclesOf):
        self._module, self._cycles_of = module, cycles_of
        self._known: dict[tuple[str, bool], Counts] = {}
        self._shares: dict[tuple[str, str], float] = {}  # by computation and instruction

    def computation(self, own: Computation, *, fused: bool = False) -> Counts:
        """One call of a computation; inside a fusion nothing touches main memory."""
        key = (own.name, fused)
        if key not in self._known:
            self._known[key] = Counts()  # of a recursive call, which HLO does not have
            self._known[key] = self._count(own, fused)
        return self._known[key]

    def _count(self, own: Computation, fused: bool) -> Counts:
        total = Counts()
        running: dict[str, tuple[Counts, float, float]] = {}  # by name: what, cycles and bytes then
        for one in own.instructions.values():  # in the order in which the device runs them
            if one.opcode.endswith("-done") and one.operands[0] in running:
                _hide(total, *running.pop(one.operands[0]))
            if one.opcode in _FREE or one.opcode.endswith(("-done", "-update")):
                continue
            counted = self._instruction(own, one, fused)
            total.add(counted, self._turns(own, one, total))
            if one.opcode.endswith("-start") and counted.collectives:
                running[one.name] = (counted, total.cycles, total.bytes)
        return total

    def _turns(self, own: Computation, one: Instruction, total: Counts) -> float:
        if one.opcode != "while":
            return 1
        turns = trip_count(self._module, own, one)
        total.loops.append(turns)
        return 1 if turns is None else turns

    def _instruction(self, own: Computation, one: Instruction, fused: bool) -> Counts:
        total = Counts()
        called = [
            self._module.computations[name]
            for key, name in one.called.items()
            if name in self._module.computations
            and (key != "to_apply" or one.opcode in ("call", "call-start"))
        ]
        if one.opcode == "fusion":
            for inner in called:
                total.add(self.computation(inner, fused=True))
            if not fused:
                total.bytes += self._fusion_bytes(own, one)
                total.cycles += self._cycles_of(one, total)
            if _is_reduce_scatter(one):
                total.collectives = {
                    dataclasses.replace(g, kind="reduce-scatter", overlaps=False): v
                    for g, v in total.collectives.items()
                }
            else:  # a step of it runs beside the fusion's own work
                total.collectives = _overlapping(total.collectives, total.cycles)
            return total
        if one.opcode == "while" or one.opcode == "call":
            for inner in called:
                total.add(self.computation(inner, fused=fused))
            return total
        if one.opcode == "conditional":
            chosen = [self.computation(self._module.computations[n]) for n in one.branches]
            if chosen:  # the branch that costs least: greedy decoding sorts nothing
                total.add(min(chosen, key=lambda c: (c.total_flops, c.bytes)))
            return total
        if one.opcode in ("async-start", "call-start"):  # the latter on a TPU's SparseCores
            for inner in called:
                total.add(self.computation(inner, fused=fused))
            total.collectives = _overlapping(total.collectives)
            return total
        kind = one.opcode.removesuffix("-start")
        if kind in KINDS and _is_continued(own, one):
            return total
        if kind in KINDS:
            sources = _operand_bytes(own, one)
            listed = _group(one, kind)
            members = 1
            if kind == "all-gather":
                result = [a.bytes for a in one.arrays]
                members = max(1, round(max(result) / max(1, max(sources, default=1))))
            listed = dataclasses.replace(listed, overlaps=one.opcode.endswith("-start"))
            total.collectives[listed] = (1.0, sum(sources) * members, 0.0)
        elif one.opcode in ("dot", "convolution", "custom-call"):
            self._add_flops(own, one, total)
        if not fused:
            total.bytes += self._bytes(own, one)
            total.cycles += self._cycles_of(one, total)
            if kind == "copy" and _within_hbm(own, one):
                total.copies += 1
                total.copied_bytes += one.arrays[0].bytes
        return total

    def _add_flops(self, own: Computation, one: Instruction, total: Counts) -> None:
        left, right = own.operand(one, 0), own.operand(one, 1)
        factor = left.arrays[0] if left is not None and left.arrays else None
        if one.opcode == "dot" and factor is not None:
            total.flops[_rate(one, factor)] += dot_flops(one, factor)
        elif factor is not None and right is not None and "dim_labels=" in one.attributes:
            total.flops[_rate(one, factor)] += convolution_flops(one, factor, right.arrays[0])
        elif one.opcode == "custom-call":
            target = one.attribute(r'custom_call_target="([^"]*)"') or ""
            stated = one.attribute(_STATED_FLOPS)
            if stated is not None:
                # A TPU's first operand may be a row's length or a layer's number.
                kind = factor if target == _TRITON else one.arrays[0]
                total.flops[_rate(one, kind)] += int(stated)
            elif factor is not None and _MATMUL.search(target):
                total.flops[_rate(one, factor)] += gemm_flops(one, factor)
            elif target.startswith(_ATTENTION) and factor is not None and right is not None:
                total.flops[_rate(one, factor)] += attention_flops(
                    factor, right.arrays[0], backward=target.endswith("Backward")
                )
            elif target not in _NO_WORK:
                total.unknown[target] += 1

    def _bytes(self, own: Computation, one: Instruction) -> float:
        """Bytes of an instruction outside fusions."""
        opcode = one.opcode
        if opcode == "custom-call":
            target = one.attribute(r'custom_call_target="([^"]*)"')
            if target in _NO_WORK:
                return 0
            moved = _operand_hbm(own, one) + sum(a.hbm_bytes for a in one.arrays)
            stated = one.attribute(_STATED_BYTES)
            # A kernel may read a part of what it is given (paged attention).
            return min(moved, int(stated)) if stated and int(stated) else moved
        if opcode == "copy-start":  # (target, source, context)
            return sum(a.hbm_bytes for a in one.arrays[:2])
        if opcode.endswith("slice-start"):  # ((source), target, context)
            source, target = one.arrays[0], one.arrays[1]
            return (0 if source.space else target.bytes) + target.hbm_bytes
        if opcode == "dynamic-update-slice" or opcode == "dynamic-update-slice-start":
            update = own.operand(one, 1)
            return 2 * update.arrays[0].hbm_bytes if update and not one.arrays[0].space else 0
        if opcode == "scatter":
            update = own.operand(one, len(one.operands) - 1)
            return 3 * update.arrays[0].hbm_bytes if update is not None else 0
        if opcode in _SLICES:
            source = own.operand(one, 0)
            read = 0 if source is None or source.arrays[0].space else one.arrays[0].bytes
            return read + one.arrays[0].hbm_bytes
        if opcode.removesuffix("-start") in KINDS and opcode.endswith("-start"):
            return sum(a.hbm_bytes for a in one.arrays)
        return _operand_hbm(own, one) + sum(a.hbm_bytes for a in one.arrays)

    def _fusion_bytes(self, own: Computation, one: Instruction) -> float:
        inner = self._module.computations.get(one.called.get("calls", ""))
        if inner is None:
            return _operand_hbm(own, one) + sum(a.hbm_bytes for a in one.arrays)
        total = 0.0
        for number, name in enumerate(one.operands):
            source, parameter = own.instructions.get(name), inner.parameters.get(number)
            arrays = source.arrays if source is not None else ()
            if parameter is None or len(arrays) != 1:
                total += sum(a.hbm_bytes for a in arrays)
            elif not arrays[0].space:
                total += min(arrays[0].bytes, self._read_of(inner, parameter))
        return total + self._written_of(inner, inner.root, one.arrays)

    def _read_of(self, inner: Computation, one: Instruction) -> float:
        """Bytes that a fused computation reads of a parameter."""
        return self._share_read(inner, one) * one.arrays[0].bytes

    def _share_read(self, inner: Computation, one: Instruction) -> float:
        """The share of an array that is read inside a fusion, where nothing stands in memory."""
        key = (inner.name, one.name)  # random bits have many paths from a parameter to the root
        if key not in self._shares:
            self._shares[key] = self._find_share(inner, one)
        return self._shares[key]

    def _find_share(self, inner: Computation, one: Instruction) -> float:
        total, size = 0.0, one.arrays[0].size
        for user in inner.users[one.name]:
            result = user.arrays[0] if len(user.arrays) == 1 else None
            if user.opcode in _SLICES and user.operands[0] == one.name:
                total += user.arrays[0].size / size
            elif (
                user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == one.name
            ):
                continue  # written in place
            elif user.opcode == "tuple":
                continue
            elif user.opcode == "fusion":  # nested
                nested = self._module.computations[user.called["calls"]]
                share = sum(
                    self._share_read(nested, nested.parameters[number])
                    for number, name in enumerate(user.operands)
                    if name == one.name and number in nested.parameters
                )
                if share >= 1 and result is not None and result.size == size:
                    share = self._share_used(inner, user)
                total += share
            elif result is not None and (
                user.operands[0] == one.name
                if user.opcode == "reduce"  # what is not used of it is not summed up
                else result.size == size and user.opcode not in _NO_ELEMENTWISE
            ):
                total += self._share_used(inner, user)
            else:
                return 1.0
        return min(1.0, total)

    def _share_used(self, inner: Computation, one: Instruction) -> float:
        """The share of an elementwise result that is computed: what its users read."""
        return 1.0 if one is inner.root else self._share_read(inner, one)

    def _written_of(self, inner: Computation, root: Instruction, results: Sequence[Array]) -> float:
        """Bytes that a fused computation writes: an update in place only what it changes."""
        if root.opcode == "tuple" and len(root.operands) == len(results):
            parts = [inner.instructions.get(name) for name in root.operands]
            return sum(
                self._written_of(inner, part, [result]) if part else result.hbm_bytes
                for part, result in zip(parts, results, strict=True)
            )
        while root.opcode == "bitcast" and (under := inner.operand(root, 0)) is not None:
            root = under
        if root.opcode == "parameter":  # handed on
            return 0
        if root.opcode == "fusion" and (
            nested := self._module.computations.get(root.called.get("calls", ""))
        ):
            return self._written_of(nested, nested.root, results)
        if root.opcode in ("dynamic-update-slice", "scatter") and len(results) == 1:
            number = 1 if root.opcode == "dynamic-update-slice" else len(root.operands) - 1
            update = inner.operand(root, number)
            if update is not None:
                return 0 if results[0].space else update.arrays[0].bytes
        return sum(a.hbm_bytes for a in results)


def _overlapping(collectives: Mapping[_Group, _Sums], cycles: float = 0.0) -> dict[_Group, _Sums]:
    """Collectives that run beside other work, of so many cycles as far as is known."""
    return {
        dataclasses.replace(group, overlaps=True): (count, size, cycles)
        for group, (count, size, _) in collectives.items()
    }


def _hide(total: Counts, started: Counts, cycles: float, moved: float) -> None:
    """Notes what ran between the start and the done of collectives, with the sums at the start."""
    for group, (count, size, _) in started.collectives.items():
        sums = total.collectives[group]
        if total.bytes > moved:
            total.collectives[group] = (*sums[:2], sums[2] + total.cycles - cycles)
            continue
        total.collectives[group] = (sums[0] - count, sums[1] - size, sums[2])
        alone = dataclasses.replace(group, overlaps=False)
        known = total.collectives.get(alone, _NONE)
        total.collectives[alone] = (known[0] + count, known[1] + size, known[2])


def _rate(one: Instruction, factor: Array | None) -> str:
    """Under which of a chip's rates a product runs."""
    kind = "f32" if factor is None else factor.kind
    if kind == "f32" and "operand_precision={highest" in one.attributes:
        return "f32:highest"
    return kind


def _group(one: Instruction, kind: str) -> _Group:
    kept = re.findall(
        r"(?:replica_groups|source_target_pairs)="
        r"(?:\{(?:\{[\d,]*\},?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)",
        one.attributes,
    )
    return _Group(kind, " ".join(kept))


def _is_continued(own: Computation, one: Instruction) -> bool:
    """Whether a collective was counted where it starts: the TPU compiler runs one beside several
    fusions, and it stands in each of them."""
    if "async_collective_fusion_config" not in one.attributes:
        return False
    return not any(
        '"AsyncCollectiveStart"' in other.attributes for other in own.instructions.values()
    )


def _is_reduce_scatter(one: Instruction) -> bool:
    """The TPU compiler writes it as a fusion of an all-reduce and a slice."""
    return one.called.get("calls", "").startswith("all-reduce-scatter")


def _operand_arrays(own: Computation, one: Instruction) -> list[Array]:
    found = (own.instructions.get(name) for name in dict.fromkeys(one.operands))
    return [array for operand in found if operand is not None for array in operand.arrays]


def _operand_bytes(own: Computation, one: Instruction) -> list[int]:
    return [array.bytes for array in _operand_arrays(own, one)]


def _operand_hbm(own: Computation, one: Instruction) -> float:
    return sum(array.hbm_bytes for array in _operand_arrays(own, one))


def _within_hbm(own: Computation, one: Instruction) -> bool:
    source = own.operand(one, 0)
    target = one.arrays[0]
    return target.space == 0 and source is not None and not any(a.space for a in source.arrays)
