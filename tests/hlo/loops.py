"""How often a `while` of a compiled program runs.

XLA's CPU and GPU compilers write `known_trip_count` where they know it. The TPU compiler does not:
there the loop's condition is read, `index < limit` with constants, also where it stands in a
conjunction with a condition on the data (then it is the most that the loop can run).
"""

from __future__ import annotations

import dataclasses
import math
import re

from tests.hlo.text import Computation, Instruction, Module

_KNOWN = re.compile(r'known_trip_count"?[:=]\s*\{"?n"?[:=]"?(\d+)')
_SAME_VALUE = {
    "bitcast",
    "copy",
    "convert",
    "reshape",
    "copy-done",
    "copy-start",
    "optimization-barrier",
}


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A computation, and what its parameters are: (scope, instruction) by number."""

    computation: Computation
    parameters: dict[int, tuple[_Scope, str]]


@dataclasses.dataclass(frozen=True)
class _Carried:
    """An element of the tuple that a loop carries."""

    index: int


def trip_count(module: Module, outer: Computation, loop: Instruction) -> int | None:
    """Turns of a `while` instruction of the computation `outer`; None: the text does not say."""
    known = _KNOWN.search(loop.attributes)
    if known is not None:
        return int(known[1])
    condition = module.computations.get(loop.called.get("condition", ""))
    body = module.computations.get(loop.called.get("body", ""))
    if condition is None or body is None:
        return None
    counts = [
        turns
        for compare, scope in _comparisons(module, _Scope(condition, {}), condition.root)
        if (turns := _turns(module, outer, loop, body, scope, compare)) is not None
    ]
    return min(counts, default=None)


def _comparisons(module: Module, scope: _Scope, one: Instruction, depth: int = 8):
    """The comparisons that all must hold for a loop to go on, with their scopes."""
    if depth == 0:
        return
    if one.opcode == "compare":
        yield one, scope
    elif one.opcode == "and" or one.opcode in _SAME_VALUE:
        for name in one.operands:
            inner = scope.computation.instructions.get(name)
            if inner is not None:
                yield from _comparisons(module, scope, inner, depth - 1)
    elif one.opcode == "parameter" and int(one.literal) in scope.parameters:
        above, name = scope.parameters[int(one.literal)]
        yield from _comparisons(module, above, above.computation.instructions[name], depth - 1)
    elif one.opcode in ("fusion", "call"):
        called = one.called.get("calls") or one.called.get("to_apply", "")
        computation = module.computations.get(called)
        if computation is not None:
            inside = _Scope(computation, {n: (scope, name) for n, name in enumerate(one.operands)})
            yield from _comparisons(module, inside, computation.root, depth - 1)


def _turns(
    module: Module,
    outer: Computation,
    loop: Instruction,
    body: Computation,
    scope: _Scope,
    compare: Instruction,
) -> int | None:
    left, right = (_value(scope, name) for name in compare.operands)
    direction = compare.attribute(r"direction=(\w+)")
    if isinstance(right, _Carried) and isinstance(left, int):
        swapped = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
        left, right, direction = right, left, swapped.get(direction or "")
    if not isinstance(left, _Carried):
        return None
    limit = _initial(outer, loop, right.index) if isinstance(right, _Carried) else right
    start = _initial(outer, loop, left.index)
    step = _step(body, left.index)
    if limit is None or start is None or not step:
        return None
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
    if (direction in ("LT", "LE")) != (step > 0) or direction not in ("LT", "LE", "GT", "GE"):
        return None
    return max(0, math.ceil((limit - start) / step))


def _value(scope: _Scope, name: str, depth: int = 16) -> int | _Carried | None:
    """A constant, or the element of the loop's tuple that an instruction is."""
    one = scope.computation.instructions.get(name)
    if one is None or depth == 0:
        return None
    if one.opcode == "constant":
        return int(one.literal) if re.fullmatch(r"-?\d+", one.literal) else None
    if one.opcode in _SAME_VALUE:
        return _value(scope, one.operands[0], depth - 1)
    if one.opcode == "parameter" and int(one.literal) in scope.parameters:
        return _value(*scope.parameters[int(one.literal)], depth - 1)
    if one.opcode == "get-tuple-element":
        source = scope.computation.operand(one, 0)
        if source is not None and source.opcode == "parameter" and not scope.parameters:
            return _Carried(int(one.attribute(r"index=(\d+)") or 0))
    return None


def _initial(outer: Computation, loop: Instruction, index: int) -> int | None:
    """The constant with which an element of the tuple enters the loop."""
    entering = outer.operand(loop, 0)
    if entering is None or entering.opcode != "tuple" or index >= len(entering.operands):
        return None
    value = _value(_Scope(outer, {}), entering.operands[index])
    return value if isinstance(value, int) else None


def _step(body: Computation, index: int) -> int | None:
    """What a turn adds to an element of the tuple; 1 where the addition is fused away."""
    root = body.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    one = body.instructions.get(root.operands[index])
    while one is not None and one.opcode in _SAME_VALUE:
        one = body.operand(one, 0)
    if one is None or one.opcode not in ("add", "subtract"):
        return 1
    scope = _Scope(body, {})
    constants = [v for name in one.operands if isinstance(v := _value(scope, name), int)]
    if len(constants) != 1:
        return 1
    return constants[0] if one.opcode == "add" else -constants[0]
