"""What the kernels of a TPU program cost, in bundles of their final schedules.

libtpu writes the VLIW bundles of every kernel, fusion, copy and sort that it compiles, also for
chips that are not there. A bundle is a cycle, waits for memory aside. How often each runs is decided
by the scalar unit, whose few instructions are interpreted here: loops whose turns the text decides
are multiplied out, and those whose turns the data decide (a grid that is an argument) are
counted for one turn, apart.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import operator
import os
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_FLAGS = "LIBTPU_INIT_ARGS"  # read once, when libtpu is loaded
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:L[HBE]|P[BF]|CT)?:? *:? *>* *\{", re.MULTILINE)
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_BRANCH = re.compile(r"= sbr\.rel (?:\((!?)(%p\w+)\) )?target = \$region(\d+)")
_STORE = re.compile(r"= sst \[smem:\[(#\w+)\]\] (\S+)")
_SCALAR = re.compile(
    r"(%[sp]\d+_[sp]\d+) = ([\w.]+) (?:\((!?)(%p\w+)(?:, ([^)]+))?\),? ?)?([^;}]*)"
)
_COPIED = re.compile(
    r"(%\d+) = dma\.(?:hbm_to_vmem|vmem_to_hbm) [^;]*?size_in_granules=\*/([^\s,]+)"
)
_SPILLED = re.compile(r"\[smem:\[(#\w+)\]\]")
_GRANULE = 32  # bytes
_EXACT = 64  # turns of a loop that are interpreted before the rest is taken to be alike
_MOST = 1_000_000  # interpreted bundles of one kernel
_WORD = 2**32

_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_COMPUTED: Mapping[str, Callable[..., int]] = {
    "smov": lambda x: x,
    "pmov": lambda x: x,
    "sadd.s32": operator.add,
    "ssub.s32": operator.sub,
    "smul.u32": operator.mul,
    "sand.u32": operator.and_,
    "sor.u32": operator.or_,
    "sxor.u32": operator.xor,
    "sshll.u32": lambda x, n: x << (n & 63),
    "sshrl.u32": lambda x, n: (x % _WORD) >> (n & 63),
    "sshra.s32": lambda x, n: x >> (n & 63),
    "smin.u32": lambda x, y: min(x % _WORD, y % _WORD),
    "smax.u32": lambda x, y: max(x % _WORD, y % _WORD),
    "scalar_select": lambda condition, yes, no: yes if condition else no,
    "pneg": lambda x: not x,
    "por": lambda x, y: x or y,
    "pnand": lambda x, y: not (x and y),
}


@dataclasses.dataclass(frozen=True)
class Bundles:
    """How many bundles one call of a kernel runs.

    Attributes:
      fixed: outside of loops whose turns the data decide.
      turn: of one turn of such loops; 0: there is none.
      moved: bytes that one such turn moves at most between the device's main memory and its own.
    """

    fixed: float
    turn: float = 0
    moved: float = 0

    def cycles(self, moved: float) -> float:
        """Bundles of a call that moves so many bytes in all, which say how often a loop turns."""
        return self.fixed + (self.turn * moved / self.moved if self.moved else self.turn)


@contextlib.contextmanager
def dumping() -> Iterator[Path]:
    """A folder into which libtpu writes the bundles of what this process compiles; removed after.

    Raises:
      RuntimeError: libtpu is loaded already, and writes nothing.
    """
    if "libtpu.so" in Path("/proc/self/maps").read_text():
        raise RuntimeError("libtpu is loaded already: bundles are counted in a process of its own")
    with tempfile.TemporaryDirectory(prefix="mmqa_bundles_") as folder:
        before = os.environ.get(_FLAGS, "")
        os.environ[_FLAGS] = (
            f"{before} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=final_bundles"
        )
        try:
            yield Path(folder)
        finally:
            os.environ[_FLAGS] = before


def take(folder: Path) -> dict[str, Bundles]:
    """The kernels of the program that was compiled since the last call, by instruction; the files
    are removed."""
    texts = {}
    for file in folder.iterdir():
        named = _FILE.fullmatch(file.name)
        if named is not None and not named[1].endswith(("-schedule-analysis", ">")):
            texts[named[1]] = file.read_text()
        file.unlink()
    schedules = {name: _Schedule(text) for name, text in texts.items()}
    lags = [lag for schedule in schedules.values() for lag in schedule.lags]
    delay = statistics.mode(lags) if lags else 0
    return {name: _Run(schedule, delay).bundles() for name, schedule in schedules.items()}


@dataclasses.dataclass(frozen=True)
class _Operation:
    """A scalar instruction.

    Attributes:
      into: register, or place in scalar memory.
      guard: predicate under which it runs, and whether that has to be false; else `into` is
        `otherwise`, or as before.
    """

    into: str
    code: str
    arguments: tuple[str, ...]
    guard: tuple[str, bool] | None = None
    otherwise: str | None = None


class _Schedule:
    """The bundles of a kernel, as far as they decide how often each runs.

    Attributes:
      size: how many there are.
      operations: number of a bundle -> its scalar instructions, phis first.
      branches: number of a bundle -> predicate, whether it has to be false, target.
      copies: number of a bundle -> bytes that it moves to or from main memory.
      defining: predicate -> the instruction that compares.
      heads: numbers of the bundles with which loops begin.
      busy: numbers of the bundles that are in one of these, and the end.
      lags: bundles between a branch and the end of its region, most of which are its delay.
    """

    def __init__(self, text: str):
        starts = [match.start() for match in _BUNDLE.finditer(text)]
        self.size = len(starts)
        self.operations: dict[int, tuple[_Operation, ...]] = {}
        self.branches: dict[int, tuple[str, bool, int]] = {}
        self.copies: dict[int, float] = {}
        self.lags: list[int] = []
        regions: dict[str, int] = {}
        jumps: list[tuple[int, str, bool, str]] = []
        copies: dict[str, tuple[int, str]] = {}  # a check of bounds names a copy before it starts
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True)):
            part = text[start:stop]
            for region in _REGION.findall(part):
                regions.setdefault(region, number)
            if jumps and len(self.lags) < len(jumps) and "End region" in part:
                self.lags.append(number - jumps[-1][0])
            copies |= {name: (number, size) for name, size in _COPIED.findall(part)}
            plain = _COMMENT.sub("", part)
            for negated, predicate, region in _BRANCH.findall(plain):
                jumps.append((number, predicate, negated == "!", region))
            if operations := _operations(plain):
                self.operations[number] = operations
        for number, predicate, negated, region in jumps:
            if region in regions:
                self.branches[number] = (predicate, negated, regions[region])
        listed = [one for operations in self.operations.values() for one in operations]
        self.defining = {one.into: one for one in listed if one.code.startswith("scmp.")}
        constants = {one.into: one.arguments[0] for one in listed if one.code == "smov"}
        for number, size in copies.values():
            granules = constants.get(size, size)
            if granules.isdigit():
                self.copies[number] = self.copies.get(number, 0) + int(granules) * _GRANULE
        self.heads = {target for at, (_, _, target) in self.branches.items() if target <= at}
        self.busy = sorted({*self.operations, *self.branches, *self.copies, *self.heads, self.size})


def _operations(plain: str) -> tuple[_Operation, ...]:
    """The scalar instructions of a bundle, whose comments are left out."""
    listed = []
    for into, code, negated, predicate, otherwise, rest in _SCALAR.findall(plain):
        spilled = _SPILLED.search(rest) if code == "sld" else None
        arguments = (spilled[1],) if spilled else tuple(x.strip() for x in rest.split(","))
        guard = (predicate, negated == "!") if predicate else None
        if code.startswith("int_to_ptr"):  # the same register
            continue
        listed.append(
            _Operation(into, "smov" if spilled else code, arguments, guard, otherwise or None)
        )
    listed += [_Operation(place, "smov", (source,)) for place, source in _STORE.findall(plain)]
    return tuple(sorted(listed, key=lambda one: one.code != "sphi"))


_Value = int | bool | None  # None: the text does not tell it
_Span = tuple[int, int]  # a loop's first and last bundle


@dataclasses.dataclass
class _Loop:
    """What a loop has done since it was entered.

    Attributes:
      totals: bundles up to the end of each turn.
      once: at the ends of the same turns, what `_Run` knows of loops that run once.
      states: all values at the ends of the last turns before the rest is skipped.
    """

    totals: list[float] = dataclasses.field(default_factory=list)
    once: list[Counter[_Span]] = dataclasses.field(default_factory=list)
    states: list[dict[str, _Value]] = dataclasses.field(default_factory=list)


class _Run:
    """One call of a kernel, interpreted."""

    def __init__(self, schedule: _Schedule, delay: int):
        self._schedule, self._delay = schedule, delay
        self._values: dict[str, _Value] = {}
        self._last: dict[str, str] = {}  # register of the chip -> what was written there last
        self._moved = 0.0
        self._steps = 0
        # Of loops whose turns are not known: bundles and bytes of a turn, and the bundles of all the
        # times that one is run once in its place.
        self._unknown: dict[_Span, tuple[float, float]] = {}
        self._once: Counter[_Span] = Counter()

    def bundles(self) -> Bundles:
        """Interprets the call."""
        fixed = self._span(0, self._schedule.size)
        outer = [
            (first, last)
            for first, last in self._unknown
            if not any(
                (a <= first and last < b) or (a < first and last <= b) for a, b in self._unknown
            )
        ]
        if not outer:
            return Bundles(fixed)
        most = max(outer, key=lambda loop: self._unknown[loop][1])
        return Bundles(fixed - self._once[most], *self._unknown[most])

    def _span(self, start: int, stop: int) -> float:
        """Bundles that run from `start` until `stop` is reached."""
        total, at, busy = 0.0, start, self._schedule.busy
        loops: dict[int, _Loop] = {}
        entered: dict[int, float] = {}  # head of a loop -> bundles before its last turn
        while at < stop:
            if at in self._schedule.heads:
                entered[at] = total
            following = min(busy[bisect.bisect_left(busy, at)], stop)
            if following > at:
                total, at = total + following - at, following
                continue
            self._execute(at)
            if at not in self._schedule.branches:
                total, at = total + 1, at + 1
                continue
            predicate, negated, target = self._schedule.branches[at]
            value = self._value(predicate) if predicate else not negated
            taken = value is not None and bool(value) != negated and self._steps < _MOST
            after = min(at + 1 + self._delay, stop)
            for number in range(at + 1, after):
                self._execute(number)
            total += after - at
            if target <= at:
                if taken:
                    loop = loops.setdefault(at, _Loop())
                    total += self._skipped(loop, total, predicate, negated)
                else:
                    loops.pop(at, None)
                if value is None:
                    self._once[target, at] += total - entered.get(target, start)
                    if (target, at) not in self._unknown:
                        self._unknown[target, at] = (0.0, 0.0)
                        once = self._once.copy()
                        self._unknown[target, at] = self._turn(target, after)
                        self._once = once
            at = target if taken else after
        return total

    def _turn(self, start: int, stop: int) -> tuple[float, float]:
        """Bundles and bytes of a turn of which nothing is known that the loop itself computes."""
        for number in range(start, stop):
            for one in self._schedule.operations.get(number, ()):
                self._values[one.into] = None
        before = self._moved
        return self._span(start, stop), self._moved - before

    def _skipped(self, loop: _Loop, total: float, predicate: str, negated: bool) -> float:
        """Bundles of the turns of a long loop that are taken to be as those before them."""
        loop.totals.append(total)
        loop.once.append(self._once.copy())
        if len(loop.totals) > _EXACT or len(loop.totals) < _EXACT - 2:
            return 0
        loop.states.append(dict(self._values))
        if len(loop.states) < 3:
            return 0
        first, second, third = loop.states
        steps = {
            name: value - second[name]
            for name, value in third.items()
            if type(value) is type(second.get(name)) is type(first.get(name)) is int
            and value - second[name] == second[name] - first[name] != 0
        }
        left = self._turns_left(self._schedule.defining.get(predicate), steps, negated) - 2
        if left <= 0:
            return 0
        for name, step in steps.items():
            self._values[name] = _wrapped(third[name] + left * step)
        half = _EXACT // 2
        for inner, bundles in loop.once[-1].items():
            self._once[inner] += left * (bundles - loop.once[-1 - half][inner]) / half
        return left * (loop.totals[-1] - loop.totals[-1 - half]) / half

    def _turns_left(
        self, compare: _Operation | None, steps: Mapping[str, int], negated: bool
    ) -> int:
        """How many more turns follow while values go on by their steps; 0: not known."""
        if compare is None:
            return 0
        left, right = (self._value(name) for name in compare.arguments)
        if left is None or right is None:
            return 0
        distance = right - left
        step = steps.get(compare.arguments[0], 0) - steps.get(compare.arguments[1], 0)
        if not step or distance / step <= 0:
            return 0
        return int(distance / step)

    def _execute(self, number: int) -> None:
        self._steps += 1
        self._moved += self._schedule.copies.get(number, 0)
        results: list[tuple[str, _Value]] = []
        for one in self._schedule.operations.get(number, ()):
            if one.code == "sphi":
                last = self._last.get(_register(one.into))
                source = last if last in one.arguments else one.arguments[0]
                self._write(one.into, self._value(source))
                continue
            runs = True
            if one.guard is not None:
                condition = self._value(one.guard[0])
                runs = None if condition is None else bool(condition) != one.guard[1]
            if runs:
                results.append((one.into, self._compute(one)))
            elif runs is None:
                results.append((one.into, None))
            elif one.otherwise is not None:
                results.append((one.into, self._value(one.otherwise)))
        for into, value in results:
            self._write(into, value)

    def _write(self, into: str, value: _Value) -> None:
        self._values[into] = value
        self._last[_register(into)] = into

    def _value(self, name: str) -> _Value:
        if name.isdigit():
            return _wrapped(int(name))
        return self._values.get(name)

    def _compute(self, one: _Operation) -> _Value:
        values = [self._value(name) for name in one.arguments]
        kind, *compared = one.code.split(".")
        if kind == "scmp":
            if None in values:
                return None
            if compared[1] == "u32":
                values = [value % _WORD for value in values]
            return _COMPARED[compared[0]](*values)
        if one.code in ("por", "pnand"):  # one may decide
            decides = one.code == "por"
            if decides in values if decides else False in values:
                return True
        function = _COMPUTED.get(one.code)
        if function is None or None in values:
            return None
        result = function(*values)
        return result if isinstance(result, bool) else _wrapped(result)


def _register(name: str) -> str:
    """`s4` of `%s123_s4`; a place in scalar memory is itself."""
    return name.rpartition("_")[2] if name.startswith("%") else name


def _wrapped(value: int) -> int:
    """A number as the 32 bits of a register hold it."""
    return (value + _WORD // 2) % _WORD - _WORD // 2
