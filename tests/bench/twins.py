"""Instructions for which the TPU's compiler makes one kernel between them.

Where two of a program are alike (the products of gate and up), libtpu compiles one of them and
writes its bundles under that one's name alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from tests.hlo.text import Computation, Instruction, Module, parse

_CALLS = re.compile(r"\b(?:calls|to_apply)=%?[\w.\-]+")
_APART = re.compile(r", (?:metadata|backend_config|frontend_attributes)=")
_UNKEPT = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while")  # no kernels
_WINDOW = r'"window_config":\{([^{}]*)\}'  # how the compiler splits it
T = TypeVar("T")


def of_twins(known: Mapping[str, T], text: str) -> dict[str, T]:
    """What is known by instruction, also of those that are like one of which it is known.

    text: of the compiled program.
    """
    module = parse(text)
    kinds = _Kinds(module)
    named = [
        (instruction.name, kinds.kind(computation, instruction))
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode not in _UNKEPT
    ]
    of_kind = {kind: known[name] for name, kind in named if name in known}
    return {name: of_kind[kind] for name, kind in named if kind in of_kind} | dict(known)


class _Kinds:
    """What alike instructions have in common, as values that are equal."""

    def __init__(self, module: Module):
        self._module = module
        self._bodies: dict[str, int] = {}  # computation -> number of its kind
        self._numbers: dict[Any, int] = {}

    def kind(self, computation: Computation, instruction: Instruction) -> Any:
        """Results, operands, attributes, and what a fusion computes."""
        sources = [computation.instructions.get(name) for name in instruction.operands]
        operands = tuple(source.arrays for source in sources if source is not None)
        return (operands, self._of(instruction), instruction.attribute(_WINDOW))

    def _of(self, instruction: Instruction) -> Any:
        attributes = _CALLS.sub("", _APART.split(instruction.attributes)[0])
        inner = tuple(self._body(name) for name in instruction.called.values())
        return (instruction.opcode, instruction.arrays, attributes, inner)

    def _body(self, name: str) -> int:
        """The number of all computations that compute the same."""
        if name not in self._bodies:
            computation = self._module.computations[name]
            places = {name: place for place, name in enumerate(computation.instructions)}
            lines = tuple(
                (
                    self._of(instruction),
                    tuple(places.get(operand) for operand in instruction.operands),
                    instruction.literal
                    if not instruction.operands or instruction.opcode in ("constant", "parameter")
                    else "",
                )
                for instruction in computation.instructions.values()
            )
            self._bodies[name] = self._numbers.setdefault(lines, len(self._numbers))
        return self._bodies[name]
