"""Bounds the exchange between the devices of a mesh, from a program's jaxpr and its shardings.

Three things follow from how the weights are split:
- what `data`, `fsdp` or `sequence` splits is gathered where a product uses it;
- a product that contracts a dimension which `tensor` splits gives partial sums, added up over it
  (sums of partial sums at once);
- gradients are added up over the devices that share the batch.

What the model itself exchanges over `sequence` stands in the jaxpr (`models/attention/`):
keys and values are gathered in every layer, their gradients added up and scattered.

Compilers exchange more, and run some of it beside other work: of a compiled program
`python -m tests.bench plan` counts it.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.chips import Chip, seconds_to_send, sent_bytes
from mmqa_jax.core.flops import inner_jaxprs, times_run
from mmqa_jax.core.mesh import SEQUENCE

Split = tuple[tuple[str, ...], ...]  # mesh axes that split each dimension of an array
Sent = Counter[tuple[str, str]]  # (kind, axes joined by "+") -> bytes of whole arrays
_ROWS = ("data", "fsdp", SEQUENCE)  # axes that share the batch
# Collectives over `sequence`, of experts over `tensor`, as the model writes them, which have the
# whole array of a group where they send it: XLA's name, and whether it is what they give.
_WRITTEN = {
    "all_gather": ("all-gather", True),
    "reduce_scatter": ("reduce-scatter", False),
    "ppermute": ("collective-permute", False),
}
# What hands partial sums on as they are, if all its operands are partial sums.
_LINEAR = {"add", "add_any", "sub", "neg", "convert_element_type", "reshape", "transpose"}


class Weight(NamedTuple):
    """A weight, or a part of one, inside a program."""

    split: Split  # its dimensions
    number: int  # of the argument that it comes from


class Exchange(NamedTuple):
    """One kind of collective along one or several mesh axes, over a call of a program."""

    kind: str  # as XLA names it
    axis: str  # mesh axes, joined by "+"
    members: int  # devices of a group
    bytes: float  # of the whole arrays that a group gathers or reduces, summed up
    slices: int = 1  # that a group reaches over, or hosts of GPUs
    links: int | None = None  # see seconds_to_send

    def seconds(self, chip: Chip) -> float:
        """The least time that it takes within slices.

        Members exchange the whole arrays within a slice, and each of them its part of these with
        the other slices, as XLA compiles it.
        """
        sent = sent_bytes(self.kind, self.members / self.slices, self.bytes)
        return seconds_to_send(sent, chip, hosts=False, links=self.links)

    @property
    def network_bytes(self) -> float:
        """The fewest bytes that a device sends to other slices over the data-center network."""
        return sent_bytes(self.kind, self.slices, self.bytes * self.slices / self.members)


class Placement(NamedTuple):
    """The places of a mesh's devices, in its flat order."""

    hosts: tuple[int, ...]  # as of plan.topology.Topology, of every device
    # Of a group of positions, `fewest_links`; None: each device reaches all others of its host at
    # its whole rate.
    links: Callable[[Sequence[int]], int] | None = None

    def reach(self, groups: Sequence[Sequence[int]]) -> tuple[int, int | None]:
        """How many slices or hosts a group reaches over, and the links of the worst placed one."""
        far = max(len({self.hosts[member] for member in group}) for group in groups)
        return far, None if self.links is None else min(map(self.links, groups))


def least_exchanges(
    jaxpr: Any,
    arguments: Sequence[Any],
    weights: Sequence[Any],
    trained: Sequence[Any],
    mesh: Mapping[str, int],
    placement: Placement,
) -> tuple[Exchange, ...]:
    """The exchanges of one call, the most bytes first.

    Args:
      jaxpr: of the program.
      arguments: its inputs, flat: jax.ShapeDtypeStructs with shardings.
      weights: those of `arguments` (the same objects) that are weights.
      trained: those of `weights` that get a gradient.
      mesh: axis -> size, in the mesh's order.
      placement: of its devices.
    """
    known, numbers = set(map(id, weights)), {id(leaf): n for n, leaf in enumerate(arguments)}
    reader = _Reader(mesh)
    inputs = [Weight(_split(x), n) if id(x) in known else None for n, x in enumerate(arguments)]
    sent = reader.read(jaxpr, inputs)[1]
    for leaf in trained:
        number = numbers[id(leaf)]
        sent.update(_gradient(leaf, reader.itemsize.get(number, leaf.dtype.itemsize), mesh))
    exchanges = []
    for (kind, axis), size in sent.items():
        axes = axis.split("+")
        members = math.prod(mesh[name] for name in axes)
        if members > 1 and size:
            reach = placement.reach(groups_along(mesh, axes))
            exchanges.append(Exchange(kind, axis, members, size, *reach))
    return tuple(sorted(exchanges, key=lambda exchange: -exchange.bytes))


def groups_along(mesh: Mapping[str, int], axes: Sequence[str]) -> list[tuple[int, ...]]:
    """The devices that differ along some axes alone, as positions in the mesh's flat order."""
    numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    chosen = [list(mesh).index(axis) for axis in axes]
    last = np.moveaxis(numbers, chosen, range(-len(chosen), 0))
    members = math.prod(mesh[axis] for axis in axes)
    return [tuple(map(int, row)) for row in last.reshape(-1, members)]


def _split(leaf: Any) -> Split:
    """The axes of each dimension of a leaf."""
    listed = tuple(leaf.sharding.spec) + (None,) * (len(leaf.shape) - len(leaf.sharding.spec))
    return tuple((axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in listed)


def _gradient(leaf: Any, itemsize: int, mesh: Mapping[str, int]) -> Sent:
    """The exchange that sums up a weight's gradient: each device keeps its share of the weight."""
    split = {axis for axes in _split(leaf) for axis in axes}
    others = math.prod(mesh.get(axis, 1) for axis in split - set(_ROWS))
    size = leaf.size * itemsize / others
    scattered = [axis for axis in _ROWS if axis in split and mesh.get(axis, 1) > 1]
    whole = [axis for axis in _ROWS if axis not in split and mesh.get(axis, 1) > 1]
    sent: Sent = Counter()
    if scattered:
        sent["reduce-scatter", "+".join(scattered)] += size
    if whole:
        share = size / math.prod(mesh[axis] for axis in scattered)
        sent["all-reduce", "+".join(whole)] += share
    return sent


@dataclasses.dataclass
class _Reader:
    """Follows weights through a jaxpr, and what their products add up to.

    `itemsize` is a weight's bytes an element in the type in which it, and its gradient, is used.
    """

    mesh: Mapping[str, int]
    itemsize: dict[int, int] = dataclasses.field(default_factory=dict)

    def read(self, jaxpr: Any, inputs: Sequence[Weight | None]) -> tuple[list[Weight | None], Sent]:
        """Returns the exchange of one run of a jaxpr, and the outputs that are weights still."""
        weights = {id(v): weight for v, weight in zip(jaxpr.invars, inputs, strict=True) if weight}
        partial: set[int] = set()  # variables that are partial sums
        sent: Sent = Counter()
        for equation in jaxpr.eqns:
            name, operands = equation.primitive.name, equation.invars
            summed = {id(v): v for v in operands if id(v) in partial}
            if summed and name in _LINEAR and len(summed) == len({id(v) for v in operands}):
                partial.add(id(equation.outvars[0]))
                continue
            for variable in summed.values():
                sent.update(self._sum(variable))
                partial.discard(id(variable))
            known = [weights.get(id(v)) for v in operands]
            if name == "shard_map" or not any(known):
                sent.update(_along_sequence(equation))
            if not any(known):
                continue
            if name == "dot_general":
                gathered, sums = self._product(equation, known)
                sent.update(gathered)
                if sums:
                    partial.add(id(equation.outvars[0]))
            elif any(True for _ in inner_jaxprs(equation.params)):
                outputs, inner = self._call(equation, known)
                sent.update(inner)
                pairs = zip(equation.outvars, outputs, strict=False)
                weights |= {id(v): weight for v, weight in pairs if weight}
            else:
                number = next(n for n, weight in enumerate(known) if weight)
                split = _handed_on(equation, number, known[number].split)
                if split is not None:
                    self._note(known[number], equation.outvars[0])
                    weights[id(equation.outvars[0])] = known[number]._replace(split=split)
        for variable in {id(v): v for v in jaxpr.outvars if id(v) in partial}.values():
            sent.update(self._sum(variable))
        return [weights.get(id(v)) for v in jaxpr.outvars], sent

    def _note(self, weight: Weight, variable: Any) -> None:
        """Notes the type in which a weight is used."""
        itemsize = variable.aval.dtype.itemsize
        self.itemsize[weight.number] = min(itemsize, self.itemsize.get(weight.number, itemsize))

    def _sum(self, variable: Any) -> Sent:
        """Partial sums of rows that the devices share."""
        rows = math.prod(self.mesh.get(axis, 1) for axis in _ROWS)
        size = variable.aval.size * variable.aval.dtype.itemsize / rows
        return Counter({("all-reduce", "tensor"): size})

    def _product(self, equation: Any, known: Sequence[Weight | None]) -> tuple[Sent, bool]:
        """Returns the weights that a product gathers, and whether it gives partial sums."""
        contracted = equation.params["dimension_numbers"][0]
        sent, sums = Counter(), False
        for variable, weight, dimensions in zip(equation.invars, known, contracted, strict=True):
            if weight is None:
                continue
            itemsize = variable.aval.dtype.itemsize
            split = [axis for axes in weight.split for axis in axes if self.mesh.get(axis, 1) > 1]
            over = [axis for axis in split if axis in _ROWS]
            if over:
                others = math.prod(self.mesh[axis] for axis in split if axis not in _ROWS)
                sent["all-gather", "+".join(over)] += variable.aval.size * itemsize / others
            sums |= any("tensor" in weight.split[n] for n in dimensions) and "tensor" in split
        return sent, sums

    def _split_call(self, equation: Any, known: Sequence[Weight | None]) -> Sent:
        """Returns the exchange of a shard_map on weights: of what it does not take split, and its
        own sums. Its sums over the batch are gradients, see `_gradient`.
        """
        sent: Sent = Counter()
        specs = equation.params["in_specs"]
        for variable, weight, spec in zip(equation.invars, known, specs, strict=True):
            if weight is None:
                continue
            self._note(weight, variable)
            listed = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
            manual_axes = {axis for axes in listed for axis in axes}
            split = [axis for axes in weight.split for axis in axes if self.mesh.get(axis, 1) > 1]
            over = [axis for axis in split if axis not in manual_axes]
            if over:
                others = math.prod(self.mesh[axis] for axis in split if axis in manual_axes)
                size = variable.aval.size * variable.aval.dtype.itemsize / others
                sent["all-gather", "+".join(over)] += size
        for inner in equation.params["jaxpr"].eqns:
            sent.update(_written(inner, "tensor"))
            if inner.primitive.name.startswith("psum"):
                axes = [axis for axis in inner.params["axes"] if axis not in _ROWS]
                size = sum(v.aval.size * v.aval.dtype.itemsize for v in inner.invars)
                if axes:
                    sent["all-reduce", "+".join(axes)] += size
        return sent

    def _call(
        self, equation: Any, known: Sequence[Weight | None]
    ) -> tuple[list[Weight | None], Sent]:
        """Returns the exchange of an equation's jaxprs; of several branches the dearest."""
        name, params = equation.primitive.name, equation.params
        if name == "shard_map":
            return [], self._split_call(equation, known)
        if name == "scan":
            carried = params["num_consts"] + params["num_carry"]
            inputs = [
                *known[: params["num_consts"]],
                *(None,) * params["num_carry"],
                *(w and w._replace(split=w.split[1:]) for w in known[carried:]),
            ]
            outputs, sent = self.read(params["jaxpr"].jaxpr, inputs)
            stacked = [
                w and w._replace(split=((), *w.split)) for w in outputs[params["num_carry"] :]
            ]
            outputs = [*(None,) * params["num_carry"], *stacked]
        elif name == "while":
            first = params["cond_nconsts"]
            body = params["body_jaxpr"].jaxpr
            inputs = known[first : first + params["body_nconsts"]]
            inputs = [*inputs, *(None,) * (len(body.invars) - len(inputs))]
            outputs, sent = [], self.read(body, inputs)[1]
        elif name == "cond":
            branches = [self.read(branch.jaxpr, known[1:]) for branch in params["branches"]]
            outputs, sent = max(branches, key=lambda branch: branch[1].total())
        else:
            called = [inner for inner in inner_jaxprs(params) if len(inner.invars) == len(known)]
            if not called:
                return [], Counter()
            outputs, sent = self.read(called[0], known)
        times = times_run(equation)
        return outputs, Counter({what: size * times for what, size in sent.items()})


def _written(equation: Any, axis: str) -> Sent:
    """The exchange of an equation that is a collective over a mesh axis, see `_WRITTEN`."""
    kind, gives_whole = _WRITTEN.get(equation.primitive.name, (None, False))
    if kind is None or axis not in equation.params["axis_name"]:
        return Counter()
    arrays = equation.outvars if gives_whole else equation.invars
    return Counter({(kind, axis): sum(v.aval.size * v.aval.dtype.itemsize for v in arrays)})


def _along_sequence(equation: Any) -> Sent:
    """Sums up the exchanges over `sequence` that an equation and its callees write; of several
    branches the dearest."""
    sent = _written(equation, SEQUENCE)
    # Every device runs a shard_map once.
    times = 1 if equation.primitive.name == "shard_map" else times_run(equation)
    callees = [
        sum((_along_sequence(inner) for inner in jaxpr.eqns), Counter())
        for jaxpr in inner_jaxprs(equation.params)
    ]
    if equation.primitive.name == "cond":
        callees = [max(callees, key=Counter.total)]
    for callee in callees:
        sent.update({what: size * times for what, size in callee.items()})
    return sent


def _handed_on(equation: Any, operand: int, split: Split) -> Split | None:
    """How the result of an operation on a weight is split; None: it is a weight no more."""
    name, params = equation.primitive.name, equation.params
    before, result = equation.invars[operand].aval.shape, equation.outvars[0].aval
    if name == "transpose":
        return tuple(split[n] for n in params["permutation"])
    if name == "squeeze":
        return tuple(axes for n, axes in enumerate(split) if n not in params["dimensions"])
    if name == "broadcast_in_dim":
        places, new = params["broadcast_dimensions"], range(len(result.shape))
        return tuple(split[places.index(n)] if n in places else () for n in new)
    if name == "reshape":
        return _reshaped(before, result.shape, split)
    if name == "gather" and equation.invars[1].aval.ndim <= 1:  # one layer of a stack
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        dimensions = [n for n in range(len(before)) if n not in numbers.collapsed_slice_dims]
        return tuple(split[n] if sizes[n] == before[n] else () for n in dimensions)
    if name in ("slice", "dynamic_slice"):
        pairs = zip(split, before, result.shape, strict=True)
        return tuple(axes if old == new else () for axes, old, new in pairs)
    same = name in ("convert_element_type", "copy", "mul", "div", "sharding_constraint")
    # A base under LoRA; what comes from the host.
    same = same or name in ("stop_gradient", "device_put")
    return split if same and result.shape == before else None


def _reshaped(before: Sequence[int], after: Sequence[int], split: Split) -> Split:
    """Merged dimensions hand their axes to the result, a divided one to its first part."""
    result: list[tuple[str, ...]] = [()] * len(after)
    old = new = 0
    while old < len(before) and new < len(after):
        axes, first = split[old], new
        left, right = before[old], after[new]
        while left != right:
            if left < right:
                old += 1
                left, axes = left * before[old], axes + split[old]
            else:
                new += 1
                right *= after[new]
        place = next((n for n in range(first, new + 1) if after[n] > 1), first)
        result[place] = axes
        old, new = old + 1, new + 1
    return tuple(result)
