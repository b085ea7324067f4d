"""Collectives that the TPU's compiler takes into steps, each in a fusion with other work.

A step stands in every fusion beside which its collective runs, with one channel, also in loops
inside (of LoRA's small products). What is sent is hidden as far as those fusions of the loop's turn
that starts it take as long; all of a turn's collectives share the links.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.hlo.counts import Counts, CyclesOf, stated_cycles
from tests.hlo.loops import trip_count
from tests.hlo.text import Computation, Instruction, Module, parse


class _Turn(NamedTuple):
    """A loop's body, or the program.

    Attributes:
      times: how often it runs.
      sent: channel -> bytes of the collective's whole array.
      beside: channel -> names of the fusions that have a step of it.
      cycles: of these fusions.
    """

    times: float
    sent: dict[str, int]
    beside: dict[str, set[str]]
    cycles: dict[str, float]


def hidden_cycles(
    text: str, kind: str, cycles_per_byte: float, cycles_of: CyclesOf = stated_cycles
) -> float:
    """Cycles for which collectives of a kind, taken into steps, run beside other work.

    Args:
      text: of the compiled program.
      kind: as XLA names it.
      cycles_per_byte: that the links need for a byte of a whole array.
      cycles_of: a fusion, whose bytes and FLOPs are not counted here.
    """
    module = parse(text)
    turns = list(_turns(module, module.main, 1.0, kind, cycles_of))
    starts: dict[str, float] = {}  # a loop inside repeats the steps, and sends no more
    for turn in turns:
        for channel in turn.sent:
            starts[channel] = min(turn.times, starts.get(channel, turn.times))
    total = 0.0
    for turn in turns:
        channels = [channel for channel in turn.sent if starts[channel] == turn.times]
        names = set().union(*(turn.beside[channel] for channel in channels))
        needed = cycles_per_byte * sum(turn.sent[channel] for channel in channels)
        total += turn.times * min(needed, sum(turn.cycles[name] for name in names))
    return total


def _turns(
    module: Module,
    computation: Computation,
    times: float,
    kind: str,
    cycles_of: CyclesOf,
) -> Iterator[_Turn]:
    turn = _Turn(times, {}, {}, {})
    for instruction in computation.instructions.values():
        inner = [
            module.computations[name]
            for name in instruction.called.values()
            if name in module.computations
        ]
        if instruction.opcode == "while":
            body = module.computations[instruction.called["body"]]
            inside = times * (trip_count(module, computation, instruction) or 1)
            yield from _turns(module, body, inside, kind, cycles_of)
        elif instruction.opcode == "call":
            for called in inner:
                yield from _turns(module, called, times, kind, cycles_of)
        elif instruction.opcode == "fusion":
            for called in inner:
                for step in _steps(module, called, kind):
                    channel = step.attribute(r"channel_id=(\d+)") or step.name
                    size = max(array.bytes for array in step.arrays)
                    turn.sent[channel] = max(size, turn.sent.get(channel, 0))
                    turn.beside.setdefault(channel, set()).add(instruction.name)
                    turn.cycles[instruction.name] = cycles_of(instruction, Counts())
    yield turn


def _steps(module: Module, computation: Computation, kind: str) -> Iterator[Instruction]:
    for instruction in computation.instructions.values():
        if (
            instruction.opcode == kind
            and "async_collective_fusion_config" in instruction.attributes
        ):
            yield instruction
        if instruction.opcode == "fusion":
            yield from _steps(module, module.computations[instruction.called["calls"]], kind)
