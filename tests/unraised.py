"""Which errors does no test raise? Every `raise` of a new error that no test executes.

    python -m pytest -n 2 --cov=mmqa_jax --cov-context=test --cov-report= tests/unit tests/equivalence
    python -m tests.unraised

A line for each: file, line and what is raised; the last line counts them. What only a fork or
another process raises is listed too: coverage sees the tests' own processes.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]


def raises(source: str) -> Iterator[tuple[range, str]]:
    """Lines and text of every statement that raises a new error."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield range(node.lineno, node.end_lineno + 1), ast.unparse(node.exc)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.unraised", description=__doc__)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="of pytest --cov")
    parser.add_argument("rooms", nargs="*", default=["mmqa_jax"], help="folders or files")
    arguments = parser.parse_args()
    data = coverage.CoverageData(str(arguments.coverage))
    data.read()
    executed = {
        f"mmqa_jax/{file.rpartition('/mmqa_jax/')[2]}": data.lines(file)
        for file in data.measured_files()
    }
    count = unraised = 0
    for room in map(Path, arguments.rooms):
        for file in [room] if room.suffix else sorted(room.rglob("*.py")):
            lines_run = set(executed.get(file.as_posix(), ()))
            for lines, error in raises(file.read_text(encoding="utf-8")):
                count += 1
                if lines_run.isdisjoint(lines):
                    unraised += 1
                    print(f"{file}:{lines.start} {error[:120]}")
    print(f"{unraised} of {count} are raised by no test")


if __name__ == "__main__":
    main()
