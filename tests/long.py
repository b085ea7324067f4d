"""What takes an hour: `launch/test.sh long`, or python -m tests.long [NAME ...]

Each item is a process with its log in --out. Prints the table that stands in tests/RESULTS.md; exit
code 1 if an item failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BOX = "│├└┌┃┡┏"  # how lines of a bench's table begin
# Its last line tells how many passed.
PYTEST = (*("-m", "pytest", "-o", "addopts="), *("-n", "2", "--dist", "loadfile"))


class Item(NamedTuple):
    """One process: what it shows, the arguments of Python, and whether XLA optimizes as for users."""

    what: str
    arguments: tuple[str, ...]
    is_optimized: bool = False


ITEMS = {
    "kills": Item(
        "training runs, inference jobs and stores killed, 200 times at random",
        (
            *(*PYTEST, "--kills=100", "tests/resume/test_random_kills.py"),
            *("tests/unit/test_inference_killed.py", "tests/resume/test_store_kills.py"),
        ),
    ),
    "flips": Item(
        "200 damages of files that runs and models are opened from",
        ("-m", "tests.resume.flips", "--count=200", "--seed=0"),
    ),
    "scorers": Item(
        "fuzz of scorers against the official code, in the folder of MMQA_OFFICIAL",
        ("-m", "tests.fuzz_scorers", "--count=2000", "--seed=0"),
    ),
    "equivalence": Item(
        "models beside the originals, compiled as users' runs are",
        (*PYTEST, "tests/equivalence"),
        is_optimized=True,
    ),
    "mesh": Item(
        "eight devices beside one, compiled as users' runs are",
        (*PYTEST, "tests/mesh"),
        is_optimized=True,
    ),
    "report": Item(
        "a report of 5,000 questions in a browser",
        (*PYTEST, "tests/unit/test_report_in_browser.py"),
    ),
    "store": Item("the store beside others", ("-m", "tests.bench", "store")),
    "retrieval": Item("search beside exact search", ("-m", "tests.bench", "retrieval")),
    "llm": Item("the engine beside transformers", ("-m", "tests.bench", "llm")),
}


def last_line(log: Path) -> str:
    """The last line that is neither JSON nor part of a table: how many passed, a table's title."""
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    told = [line for line in lines if line and line[0] not in "{|" + _BOX]
    return told[-1].strip("= ") if told else ""


def run(name: str, out: Path) -> tuple[int, str, float]:
    """Exit code, last line and seconds of an item."""
    log, began = out / f"{name}.log", time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        command = [sys.executable, *ITEMS[name].arguments]
        optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"} if ITEMS[name].is_optimized else {}
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | optimized, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    told = last_line(log)
    if code == 0 and "skipped" in told and "passed" not in told:
        code = 1  # what a machine lacks, here a browser, was not tried
    return code, told, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ITEMS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "long")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in ITEMS]
    if unknown:
        parser.error(f"{unknown[0]}: no such item; use one of {', '.join(ITEMS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows, failed = [], False
    for name in arguments.names or ITEMS:
        print(f"{name} ...", flush=True)
        code, told, seconds = run(name, arguments.out)
        failed |= code != 0
        result = "passed" if code == 0 else f"exit code {code}"
        rows.append(f"| `{name}`: {ITEMS[name].what} | {result}: {told} | {seconds:,.0f} |")
        print(f"{name}: {result}, {seconds:,.0f} s", flush=True)
    print(f"\n{datetime.date.today():%-d %B %Y}\n\n| what | result | seconds |\n|---|---|---:|")
    print("\n".join(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
