"""What a compiled program does in one call, on one device, with its loops multiplied out.

XLA's own `cost_analysis` counts a loop's body once, and gives nothing for GPUs: so the optimised
HLO is counted here. FLOPs are those of products (dots, convolutions, kernels that state theirs);
all else is small beside them. Bytes are those that instructions read from and write to the
device's main memory: fusions count as a whole, slices and updates in place by what they touch,
and arrays in on-chip memory not at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from mmqa_jax.bench.plan.collectives import KINDS, Collective, axis_of, groups
from mmqa_jax.bench.plan.hlo import Array, Computation, Instruction, Module, parse
from mmqa_jax.bench.plan.loops import trip_count

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
    ),
}
_SLICES = {"dynamic-slice", "slice", "gather"}
_HANDED_ON = {"bitcast", "get-tuple-element", "reshape"}
_MATMUL = re.compile(r"__cublas\$|__cublas\$lt\$|gemm|matmul")
_ATTENTION = "__cudnn$fmha"


@dataclasses.dataclass(frozen=True)
class _Group:
    """A collective before its mesh axis is known."""

    kind: str
    attributes: str  # replica_groups or source_target_pairs


@dataclasses.dataclass
class Counts:
    """Sums over one call of a computation.

    Attributes:
      flops: by the type of the factors, "f32:highest" where six passes are asked for.
      bytes: read and written in main memory.
      collectives: how often, and bytes (see Collective).
      loops: turns of every `while` of the program, inner ones included; None: not known, and
        counted as one turn.
      copies, copied_bytes: of copies within main memory.
      unknown: custom calls whose FLOPs are not stated.
    """

    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes: float = 0.0
    collectives: dict[_Group, tuple[float, float]] = dataclasses.field(default_factory=dict)
    loops: list[int | None] = dataclasses.field(default_factory=list)
    copies: float = 0.0
    copied_bytes: float = 0.0
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
        for group, (count, size) in other.collectives.items():
            known = self.collectives.get(group, (0.0, 0.0))
            self.collectives[group] = (known[0] + count * times, known[1] + size * times)
        self.loops += other.loops
        self.copies += other.copies * times
        self.copied_bytes += other.copied_bytes * times
        for target, count in other.unknown.items():
            self.unknown[target] += count * times

    def on_mesh(
        self, mesh: Mapping[str, int], hosts: Sequence[int] | None = None
    ) -> list[Collective]:
        """The collectives by kind and mesh axis, the most bytes first.

        Args:
          mesh: axis -> size.
          hosts: of every device in the mesh's flat order; None: all are on one.
        """
        total = math.prod(mesh.values())
        merged: dict[tuple[str, str, int, bool], tuple[float, float]] = {}
        for group, (count, size) in self.collectives.items():
            listed = groups(group.attributes, total)
            members = max(map(len, listed))
            if members < 2:
                continue
            far = hosts is not None and any(len({hosts[m] for m in g}) > 1 for g in listed)
            key = (group.kind, axis_of(listed, mesh), members, far)
            known = merged.get(key, (0.0, 0.0))
            merged[key] = (known[0] + count, known[1] + size)
        found = [Collective(*key[:3], *value, key[3]) for key, value in merged.items()]
        return sorted(found, key=lambda one: -one.bytes)


def count(text: str) -> Counts:
    """Counts the program whose `compiled.as_text()` is `text`."""
    module = parse(text)
    return _Counter(module).computation(module.main)


class _Counter:
    """Counts computations, each once."""

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[tuple[str, bool], Counts] = {}

    def computation(self, own: Computation, *, fused: bool = False) -> Counts:
        """One call of a computation; inside a fusion nothing touches main memory."""
        key = (own.name, fused)
        if key not in self._known:
            self._known[key] = Counts()  # of a recursive call, which HLO does not have
            self._known[key] = self._count(own, fused)
        return self._known[key]

    def _count(self, own: Computation, fused: bool) -> Counts:
        total = Counts()
        for one in own.instructions.values():
            if one.opcode in _FREE or one.opcode.endswith(("-done", "-update")):
                continue
            total.add(self._instruction(own, one, fused), self._turns(own, one, total))
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
            if _is_reduce_scatter(one):
                total.collectives = {
                    dataclasses.replace(g, kind="reduce-scatter"): v
                    for g, v in total.collectives.items()
                }
            if not fused:
                total.bytes += self._fusion_bytes(own, one)
            return total
        if one.opcode == "while" or one.opcode == "call":
            for inner in called:
                total.add(self.computation(inner, fused=fused))
            return total
        if one.opcode == "conditional":
            chosen = [self.computation(self._module.computations[n]) for n in one.branches]
            if chosen:  # the branch that costs most
                total.add(max(chosen, key=lambda c: (c.total_flops, c.bytes)))
            return total
        if one.opcode in ("async-start", "call-start"):  # the latter on a TPU's SparseCores
            for inner in called:
                total.add(self.computation(inner, fused=fused))
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
            total.collectives[listed] = (1.0, sum(sources) * members)
        elif one.opcode in ("dot", "convolution", "custom-call"):
            self._add_flops(own, one, total)
        if not fused:
            total.bytes += self._bytes(own, one)
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
            stated = one.attribute(r'"cost_estimate":\{"flops":"?(\d+)')
            if stated is not None:
                # The first operand may be a row's length or a layer's number.
                total.flops[_rate(one, one.arrays[0])] += int(stated)
            elif factor is not None and _MATMUL.search(target):
                total.flops[_rate(one, factor)] += _gemm_flops(one, factor)
            elif target.startswith(_ATTENTION) and factor is not None and right is not None:
                total.flops[_rate(one, factor)] += _attention_flops(
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
            stated = one.attribute(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')
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
        total = 0.0
        for user in inner.users[one.name]:
            if user.opcode in _HANDED_ON:
                total += self._read_of(inner, user)
            elif user.opcode in _SLICES and user.operands[0] == one.name:
                total += user.arrays[0].bytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == one.name:
                continue  # written in place
            elif user.opcode == "scatter" and user.operands[0] == one.name:
                continue
            elif user.opcode == "fusion":  # nested
                nested = self._module.computations[user.called["calls"]]
                for number, name in enumerate(user.operands):
                    if name == one.name and number in nested.parameters:
                        total += self._read_of(nested, nested.parameters[number])
            elif user.opcode == "tuple":
                continue
            else:
                return one.arrays[0].bytes
        return total

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


def dot_flops(one: Instruction, left: Array) -> float:
    """2 x elements of the result x length of the contraction."""
    listed = one.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    contracted = math.prod(left.shape[int(n)] for n in listed.split(",") if n)
    return 2.0 * one.arrays[0].size * contracted


def convolution_flops(one: Instruction, left: Array, right: Array) -> float:
    """Products of real inputs only, as XLA counts: the TPU compiler writes batched dots as dilated
    convolutions, most of whose window lies on padding."""
    labels = one.attribute(r"dim_labels=(\S+?)(?:,|\s|$)") or ""
    inputs, rest = labels.split("_")
    kernel, outputs = rest.split("->")
    result = one.arrays[0].shape
    window = dict(re.findall(r"(\w+)=([\w\-]+)", one.attribute(r"window=\{([^}]*)\}") or ""))
    total = 2.0 * right.shape[kernel.index("i")] * result[outputs.index("f")]
    total *= result[outputs.index("b")]
    for place, digit in enumerate(sorted(c for c in inputs if c.isdigit())):
        total *= _valid_positions(
            size=int(_of_dimension(window, "size", place, "1")),
            stride=int(_of_dimension(window, "stride", place, "1")),
            pad=int(_of_dimension(window, "pad", place, "0_0").split("_")[0]),
            input_dilation=int(_of_dimension(window, "lhs_dilate", place, "1")),
            kernel_dilation=int(_of_dimension(window, "rhs_dilate", place, "1")),
            inputs=left.shape[inputs.index(digit)],
            outputs=result[outputs.index(digit)],
        )
    return total


def _of_dimension(window: Mapping[str, str], key: str, place: int, default: str) -> str:
    if key not in window:
        return default
    return window[key].split("x")[place]


def _valid_positions(
    *,
    size: int,
    stride: int,
    pad: int,
    input_dilation: int,
    kernel_dilation: int,
    inputs: int,
    outputs: int,
) -> int:
    """Pairs (output, place in the window) that meet a real input along one dimension."""
    starts = np.arange(outputs) * stride - pad
    count = 0
    for place in range(size):
        at = starts + place * kernel_dilation
        real = (at >= 0) & (at <= (inputs - 1) * input_dilation) & (at % input_dilation == 0)
        count += int(real.sum())
    return count


def _gemm_flops(one: Instruction, left: Array) -> float:
    """A cuBLAS or oneDNN product: dimension numbers stand in the backend's config."""
    found = re.search(r"\{.*\}", one.attributes[one.attributes.find("backend_config=") :])
    numbers: list[int] = []
    if found is not None:
        listed = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', found[0])
        numbers = [int(n) for n in json.loads(listed[1])] if listed else []
    contracted = math.prod(left.shape[n] for n in numbers) if numbers else left.shape[-1]
    return 2.0 * one.arrays[0].size * contracted


def _attention_flops(queries: Array, keys: Array, *, backward: bool) -> float:
    """cuDNN's attention of [B, Lq, heads, D] to [B, Lk, kv_heads, D], as if no score were masked:
    scores and values; backward the scores again, and the gradients of all four factors."""
    products = 5 if backward else 2
    return 2.0 * products * queries.size * keys.shape[1]


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
