"""Which test executes which lines of the package, for tests.mutation.

    python -m pytest -p tests.executed --executed=FOLDER tests/unit

Every process of pytest writes a file of JSON lines to FOLDER, one a test that passed: its id, its
seconds and the lines by file, fixtures included. Lines of processes that tests start are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

_PACKAGE = str(Path(__file__).parents[1] / "mmqa_jax") + os.sep


class Tracer:
    """Collects the lines of the package that run while it is on, of all threads."""

    def __init__(self) -> None:
        self.lines: dict[str, set[int]] = defaultdict(set)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            return None
        lines = self.lines[file.removeprefix(_PACKAGE)]

        def at_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return at_line

        return at_line

    def __enter__(self) -> Tracer:
        self.lines.clear()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


class Recorder:
    """The plugin of one process."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}.jsonl"
        self._passed = False

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._passed, began = False, time.monotonic()
        with Tracer() as tracer:
            yield
        if self._passed:
            lines = {file: sorted(found) for file, found in tracer.lines.items() if found}
            row = {"test": item.nodeid, "seconds": time.monotonic() - began, "lines": lines}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._passed = report.passed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executed", metavar="FOLDER", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--executed")
    # With xdist the tests run in its workers.
    is_controller = getattr(config.option, "numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if folder and not is_controller:
        config.pluginmanager.register(Recorder(folder))


class Executing(NamedTuple):
    """A test that executes a line, and how long it takes."""

    seconds: float
    test: str


def read(folder: Path) -> dict[tuple[str, int], list[Executing]]:
    """The tests of each (file of the package, line), the quickest first."""
    found: dict[tuple[str, int], list[Executing]] = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            one = Executing(row["seconds"], row["test"])
            for file, lines in row["lines"].items():
                for line in lines:
                    found[file, line].append(one)
    for tests in found.values():
        tests.sort()
    return dict(found)
