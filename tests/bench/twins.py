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
        (one.name, kinds.kind(own, one))
        for own in module.computations.values()
        for one in own.instructions.values()
        if one.opcode not in _UNKEPT
    ]
    of_kind = {kind: known[name] for name, kind in named if name in known}
    return {name: of_kind[kind] for name, kind in named if kind in of_kind} | dict(known)


class _Kinds:
    """What alike instructions have in common, as values that are equal."""

    def __init__(self, module: Module):
        self._module = module
        self._bodies: dict[str, int] = {}  # computation -> number of its kind
        self._numbers: dict[Any, int] = {}

    def kind(self, own: Computation, one: Instruction) -> Any:
        """Results, operands, attributes, and what a fusion computes."""
        sources = [own.instructions.get(name) for name in one.operands]
        operands = tuple(source.arrays for source in sources if source is not None)
        return (operands, self._of(one), one.attribute(_WINDOW))

    def _of(self, one: Instruction) -> Any:
        attributes = _CALLS.sub("", _APART.split(one.attributes)[0])
        inner = tuple(self._body(name) for name in one.called.values())
        return (one.opcode, one.arrays, attributes, inner)

    def _body(self, name: str) -> int:
        """The number of all computations that compute the same."""
        if name not in self._bodies:
            own = self._module.computations[name]
            places = {name: place for place, name in enumerate(own.instructions)}
            lines = tuple(
                (
                    self._of(one),
                    tuple(places.get(operand) for operand in one.operands),
                    one.literal
                    if not one.operands or one.opcode in ("constant", "parameter")
                    else "",
                )
                for one in own.instructions.values()
            )
            self._bodies[name] = self._numbers.setdefault(lines, len(self._numbers))
        return self._bodies[name]
