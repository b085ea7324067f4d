"""Do the tests bite? Changes the code in one place at a time, and runs the tests that use it.

    python -m pytest -n 2 --cov=mmqa_jax --cov-context=test --cov-report= tests/unit tests/equivalence
    python -m tests.mutation --count=300 --seed=0 --out=mutants.jsonl

A mutant that no test notices survives: the line is not tested, or the change makes no difference.
Mutants are drawn evenly over the lines of code of the folders that `--rooms` names. The tests of a
mutant are those that execute its line, the quickest first, until one fails. Every mutant is one
line of the file, so that an interrupted run goes on; the last line on stdout counts them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import coverage
import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("papers", "tasks", "evaluation", "retrieval", "weights", "core/store.py")
_COPIED = (
    "mmqa_jax",
    "tests",
    "configs",
    "launch",
    "pyproject.toml",
    "README.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
_FIRST = 10  # tests that judge a mutant before all others do
_PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
# What most tests import, before the children are forked. Nothing of ours: a child imports a mutant.
_LIBRARIES = (
    "numpy",
    "jax",
    "flax.nnx",
    "optax",
    "orbax.checkpoint",
    "grain",
    "PIL.Image",
    "torch",
)

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
_CALLS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "argmax": "argmin", "argmin": "argmax",
    "sorted": "list", "reversed": "list", "zeros": "ones", "ones": "zeros", "lower": "upper",
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of one file.

    Attributes:
      file: relative to the repository.
      line: of the change, from 1.
      start, end: characters of the file that are replaced.
      new: by what.
    """

    file: str
    line: int
    start: int
    end: int
    new: str


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All mutants of a file, in order."""
    text = file.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    name = file.relative_to(ROOT).as_posix()
    encoded = [line.encode() for line in text.splitlines(keepends=True)]

    def at(line: int, column: int) -> int:
        """Characters before a place that ast gives in bytes."""
        return starts[line - 1] + len(encoded[line - 1][:column].decode())

    def replaced(start: ast.AST, end: ast.AST, new: str) -> Mutant:
        first = at(start.lineno, start.col_offset)
        return Mutant(name, start.lineno, first, at(end.end_lineno, end.end_col_offset), new)

    def between(left: ast.expr, right: ast.expr, new: str) -> Mutant:
        """The operator between two operands; brackets around them stay."""
        first, last = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        old = text[first:last]
        lead = len(old) - len(old.lstrip(") \n"))
        tail = len(old) - len(old.rstrip("( \n"))
        return Mutant(name, left.end_lineno, first + lead, last - tail, new)

    for node in _code(ast.parse(text)):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                yield between(left, right, _COMPARISONS[type(op)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                if not _is_text(left) and not _is_text(right):
                    yield between(left, right, _ARITHMETIC[type(op)])
            case ast.BoolOp(op=op, values=[left, right, *_]):
                yield between(left, right, "or" if isinstance(op, ast.And) else "and")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield replaced(node, operand, f"({ast.unparse(operand)})")
            case ast.Constant(value=bool(value)):
                yield replaced(node, node, str(not value))
            case ast.Constant(value=int(value) | float(value)):
                yield replaced(node, node, repr(value + 1))
            case ast.Call(func=ast.Name(id=called) as function) if called in _CALLS:
                yield replaced(function, function, _CALLS[called])
            case ast.Call(func=ast.Attribute(value=owner, attr=called) as function) if (
                called in _CALLS
            ):
                yield replaced(function, function, f"{ast.unparse(owner)}.{_CALLS[called]}")
            case ast.IfExp(test=test):
                yield replaced(test, test, f"(not ({ast.unparse(test)}))")
            case ast.If(test=test) | ast.While(test=test):
                yield replaced(test, test, f"(not ({ast.unparse(test)}))")
            case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper) as part) if lower or upper:
                yield replaced(part, part, ":")
            case ast.Return(value=value) if value is not None and not _is_constant(value):
                yield replaced(value, value, "None")
            case ast.Expr(value=ast.Call()):
                yield replaced(node, node, "pass")


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose change could be noticed: no annotations, decorators, messages of errors."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from _code(child)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def draw(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Mutants, evenly over the lines that have any."""
    files = []
    for room in rooms:
        path = ROOT / "mmqa_jax" / room
        files += [path] if path.suffix else sorted(path.rglob("*.py"))
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for file in files:
        for mutant in mutants_of(file):
            by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    generator = random.Random(seed)
    lines = generator.sample(sorted(by_line), min(count, len(by_line)))
    return [generator.choice(by_line[line]) for line in lines]


class Tests:
    """The tests that can notice a change of a line, by the contexts that coverage.py recorded.

    A line that runs when its module is imported, such as a constant's, is in no test's context: for
    it, the tests that execute any line of the file.

    Args:
      recorded: the file that `pytest --cov-context=test` wrote.
    """

    def __init__(self, recorded: Path):
        data = coverage.CoverageData(str(recorded))
        data.read()
        self._of_line: dict[tuple[str, int], set[str]] = {}
        self._lines: Counter[str] = Counter()  # that a test executes: the fewer, the quicker it is
        for file in data.measured_files():
            name = f"mmqa_jax/{file.rpartition('/mmqa_jax/')[2]}"
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = {context.rpartition("|")[0] for context in contexts} - {""}
                self._of_line[name, line] = tests
                self._lines.update(tests)

    def of(self, mutant: Mutant) -> list[str]:
        """Their ids, the quickest first."""
        first, last = statement_at(ROOT / mutant.file, mutant.line)
        of_lines = [self._of_line.get((mutant.file, n), set()) for n in range(first, last + 1)]
        of_file = (tests for (file, _), tests in self._of_line.items() if file == mutant.file)
        tests = set().union(*of_lines) or set().union(*of_file)
        return sorted(tests, key=lambda test: (self._lines[test], test))


def statement_at(file: Path, line: int) -> tuple[int, int]:
    """First and last line of the innermost statement at a line, without the block that it heads."""
    found = (line, line)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno
            if line <= max(last, node.lineno):
                found = (node.lineno, max(last, node.lineno))
    return found


def judge(mutant: Mutant, tests: Tests, copy: Path, seconds: float) -> dict[str, object]:
    """Runs a mutant's tests in a copy of the repository; what became of it.

    Returns:
      The mutant's row; `result` is `killed`, `timeout` (it hangs, or is slow), `survived`,
      `untested` (no test executes it) or `invalid` (no Python).
    """
    original = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = original[: mutant.start] + mutant.new + original[mutant.end :]
    place = copy / mutant.file
    row: dict[str, object] = {**mutant._asdict(), "was": original[mutant.start : mutant.end]}
    try:
        ast.parse(changed)
    except SyntaxError:
        return {**row, "result": "invalid"}
    noticing = tests.of(mutant)
    if not noticing:
        return {**row, "result": "untested"}
    place.write_text(changed, encoding="utf-8")
    try:
        ends = time.monotonic() + seconds
        # Most mutants are killed by a few quick tests.
        for chosen in (noticing[:_FIRST], noticing[_FIRST:]):
            result = _result(copy, chosen, ends) if chosen else "survived"
            if result != "survived":
                break
        return {**row, "tests": len(noticing), "result": result}
    finally:
        place.write_text(original, encoding="utf-8")


def _result(copy: Path, tests: list[str], ends: float) -> str:
    """What tests make of the copy, in a child of this process, which has imported the libraries."""
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        sys.dont_write_bytecode = True
        code = 1
        try:
            code = int(pytest.main([*_PYTEST, *tests]))
        finally:
            os._exit(code)
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="of pytest --cov")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for one mutant")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th mutant from the I-th on")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    index, parts = map(int, arguments.part.split("/"))
    drawn = draw(arguments.rooms.split(","), arguments.count, arguments.seed)[index::parts]
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    rows = [json.loads(line) for line in lines]
    tests = Tests(arguments.coverage)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    for library in _LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder, arguments.out.open("a") as out:
        copy = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                skipped = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, copy / name, ignore=skipped)
            else:
                shutil.copy(source, copy / name)
        for mutant in drawn[len(rows) :]:
            rows.append(judge(mutant, tests, copy, arguments.seconds))
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
            print(f"{len(rows)}/{len(drawn)} {rows[-1]['result']} {mutant.file}:{mutant.line}")
    print(json.dumps(Counter(str(row["result"]) for row in rows)))


if __name__ == "__main__":
    main()
