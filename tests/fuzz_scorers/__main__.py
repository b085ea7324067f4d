"""Scorers beside the official code: python -m tests.fuzz_scorers [NAME ...] --official=FOLDER

FOLDER holds clones of public repositories as OWNER/NAME, of which the files that the table names are
read. Each scorer gets random answers and references full of traps, and each file of many questions
random files; both scores must be equal. Prints a table, and of each difference the smallest input
found; exit code 1 if there was one, or if a file is not there.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tests.fuzz_scorers.case import Case, Raised
from tests.fuzz_scorers.cases import CASES
from tests.fuzz_scorers.compare import Outcome, compare

_COLUMNS = "| case | official file | compared | official errors | known | differences |"


def _row(case: Case, outcome: Outcome | None) -> str:
    numbers = ["not there", "", "", ""]
    if outcome is not None:
        counts = (outcome.compared, outcome.errors, outcome.known.total(), outcome.differing)
        numbers = [f"{count:,}" for count in counts]
    return f"| `{case.name}` | {case.repository}, {case.file} | {' | '.join(numbers)} |"


def _show(case: Case, outcome: Outcome) -> None:
    """Prints the differences of a case, those that are known as one line each."""
    for why, count in outcome.known.items():
        print(f"{case.name}: {count:,} known: {why}", flush=True)
    for given, official, ours in outcome.shown:
        print(
            f"{case.name}: {given!r}\n    official {_told(official)}\n    ours     {_told(ours)}",
            flush=True,
        )


def _told(score: Any) -> str:
    return str(score) if isinstance(score, Raised) else repr(score)


def run(cases: list[Case], folder: Path, count: int, seed: int) -> int:
    """Compares the cases and prints the table; the exit code."""
    rows, outcomes, missing = [], [], 0
    for case in cases:
        file = folder / case.repository / case.file
        outcome = compare(case, file, count, seed) if file.is_file() else None
        rows.append(_row(case, outcome))
        if outcome is None:
            missing += 1
            print(f"{case.name}: {file} is not there; clone {case.repository}.", flush=True)
            continue
        outcomes.append(outcome)
        _show(case, outcome)
    print(f"\n{_COLUMNS}\n|---|---|---:|---:|---:|---:|\n" + "\n".join(rows) + "\n")
    differing = sum(outcome.differing for outcome in outcomes)
    compared = sum(outcome.compared for outcome in outcomes)
    errors = sum(outcome.errors for outcome in outcomes)
    known = sum(outcome.known.total() for outcome in outcomes)
    print(
        f"{len(outcomes)} of {len(cases)} cases compared: {compared:,} inputs; errors of the official "
        f"code: {errors:,}; known differences: {known:,}; others: {differing:,}"
    )
    return int(differing > 0 or missing > 0)


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_scorers", description=__doc__)
    known = {case.name: case for case in CASES}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument(
        "--official",
        type=Path,
        default=os.environ.get("MMQA_OFFICIAL"),
        help="folder of the clones; by default that of the variable MMQA_OFFICIAL",
    )
    parser.add_argument("--count", type=int, default=2000, help="inputs of a case")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"{unknown[0]}: no such case; use one of {', '.join(known)}")
    if arguments.official is None or not arguments.official.is_dir():
        parser.error(
            f"--official={arguments.official}: is no folder; name one of clones, OWNER/NAME each"
        )
    chosen = [known[name] for name in arguments.names or known]
    return run(chosen, arguments.official, arguments.count, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
