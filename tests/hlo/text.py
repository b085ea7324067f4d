"""Reads the text of a compiled program: optimised HLO of XLA's TPU, GPU and CPU compilers.

Only the parts that counts.py needs: computations, their instructions, the arrays of each with the
memory that they lie in, and the attributes by which instructions call computations.
(`jax.experimental.roofline` was looked at first: it reads jaxprs, before the compiler has
partitioned and fused anything, and has no rule for loops.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4},
    **{"f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0},
    **{"s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25, "f4e2m1fn": 0.5},
}
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)\s*(?:\(.*)?\{$")
_RESULT = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_SPACE = re.compile(r"S\((\d+)\)")
_END = re.compile(r"\}(?:, execution_thread=.*)?$")
_NAME = re.compile(r"%?([\w.\-]+)$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
      kind: element type, such as bf16.
      shape: its dimensions.
      space: memory space of its layout; 0 is the device's main memory (HBM), others are on chip.
    """

    kind: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Without the padding of tiled layouts."""
        each = _BYTES.get(self.kind)
        if each is None:  # float8 and its relatives
            each = 1 if self.kind.startswith("f8") else 4
        return math.ceil(self.size * each)

    @property
    def hbm_bytes(self) -> int:
        """Bytes, if it lies in main memory."""
        return 0 if self.space else self.bytes


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      arrays: of the result; several of a tuple, nested ones flattened.
      operands: names of the instructions that it reads.
      literal: what stands between the parentheses, such as the value of a constant.
      attributes: the text after them.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """`calls`, `to_apply`, `body` or `condition` -> name of the computation."""
        return dict(_CALLED.findall(self.attributes))

    @functools.cached_property
    def branches(self) -> tuple[str, ...]:
        """Computations of which a conditional runs one."""
        listed = _BRANCHES.search(self.attributes)
        if listed is not None:
            return tuple(name.strip().lstrip("%") for name in listed[1].split(","))
        return tuple(_TWO_BRANCHES.findall(self.attributes))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return found and found[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions, in the order in which they run."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        own = list(self.instructions.values())
        return next((one for one in own if one.is_root), own[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Number -> parameter."""
        own = self.instructions.values()
        return {int(one.literal): one for one in own if one.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instruction -> those that read it."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for one in self.instructions.values():
            for operand in dict.fromkeys(one.operands):
                if operand in found:
                    found[operand].append(one)
        return found

    def operand(self, one: Instruction, number: int) -> Instruction | None:
        """The instruction that an operand names; None where the text does not have it."""
        if number >= len(one.operands):
            return None
        return self.instructions.get(one.operands[number])


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str

    @functools.cached_property
    def main(self) -> Computation:
        """Where it starts."""
        return self.computations[self.entry]


def parse(text: str) -> Module:
    """The program whose `compiled.as_text()` is `text`.

    Raises:
      ValueError: the text holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, own = "", "", {}
    for line in _lines(text):
        if not line.startswith((" ", "}")) and line.endswith("{"):
            header = _HEADER.match(line)
            if header is None:
                continue
            name, own = header[2], {}
            if header[1]:
                entry = name
        elif _END.match(line) and name:
            computations[name] = Computation(name, own)
            name = ""
        elif name and (one := _instruction(line)) is not None:
            own[one.name] = one
    if not entry:
        raise ValueError("no entry computation: this is not the text of a compiled program")
    return Module(computations, entry)


def _lines(text: str) -> Iterator[str]:
    """The lines, with those joined over which the attributes of one instruction go (Mosaic)."""
    whole = ""
    for line in text.splitlines():
        if whole.startswith("  ") and line and not line.startswith("  ") and not _END.match(line):
            whole += line
            continue
        yield whole
        whole = line
    yield whole


def _instruction(line: str) -> Instruction | None:
    result = _RESULT.match(line)
    if result is None:
        return None
    at = result.end()
    end = _balanced(line, at) if line[at] == "(" else line.find(" ", at)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _balanced(line, opcode.end() - 1)
    literal = line[opcode.end() : close - 1]
    return Instruction(
        name=result[2],
        opcode=opcode[1],
        arrays=arrays(line[at:end]),
        operands=_operands(literal),
        literal=literal,
        attributes=line[close:],
        is_root=bool(result[1]),
    )


def arrays(text: str) -> tuple[Array, ...]:
    """All arrays of a shape's text, `f32[2,3]{1,0:T(8,128)S(1)}` or a tuple of such."""
    found = []
    for kind, sizes, layout in _ARRAY.findall(text):
        space = _SPACE.search(layout)
        shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        found.append(Array(kind, shape, int(space[1]) if space else 0))
    return tuple(found)


def _balanced(line: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(line)):
        if line[at] == "(":
            depth += 1
        elif line[at] == ")":
            depth -= 1
            if depth == 0:
                return at + 1
    return len(line)


def _operands(literal: str) -> tuple[str, ...]:
    """Names in `%a, f32[2]{0} %b, /*index=5*/%c`; commas within shapes do not separate."""
    literal = re.sub(r"/\*.*?\*/", "", literal)
    if "%" in literal:
        return tuple(re.findall(r"%([\w.\-]+)", literal))
    found = (_NAME.search(part.strip()) for part in literal.split(","))
    return tuple(match[1] for match in found if match)
