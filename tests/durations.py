"""Where the suite's time goes, by file and by kind: `launch/test.sh --durations`.

Kinds of a test file's seconds, fixtures included:

  compile    JAX traces, lowers and compiles in the tests' own process
  processes  waiting for processes that tests start (verbs, launches, servers)
  compute    the rest
  import     loading the file for collection, once in every worker; not part of the other three

Beside them `cpu`: seconds of processors, of the tests' process and of those that it waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OPTION = "--seconds"
_KINDS = ("compile", "processes")
_SHOWN = 30  # files


class Clock:
    """Seconds of the running test by kind; a kind within another counts for the outer one alone."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    @contextlib.contextmanager
    def measuring(self, kind: str) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside = False
            self.seconds[kind] += time.perf_counter() - began

    def taken(self) -> dict[str, float]:
        """What was measured since the last call."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


class Durations:
    """The plugin: measures in each worker, adds up and reports where the run was started."""

    def __init__(self, config: pytest.Config):
        self._config, self._clock, self._cpu = config, Clock(), _cpu_seconds()
        self.is_worker = hasattr(config, "workerinput")
        self.files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.imports: dict[str, float] = defaultdict(float)
        self._measure_processes()
        self._measure_compilations()

    def _measure_processes(self) -> None:
        for name in ("wait", "communicate"):
            waits = getattr(subprocess.Popen, name)

            def measured(popen: Any, *arguments: Any, _waits: Any = waits, **options: Any) -> Any:
                with self._clock.measuring("processes"):
                    return _waits(popen, *arguments, **options)

            setattr(subprocess.Popen, name, measured)

    def _measure_compilations(self) -> None:
        import jax

        def add(event: str, seconds: float, **_: Any) -> None:
            if event.startswith("/jax/core/compile/"):
                self._clock.seconds["compile"] += seconds

        jax.monitoring.register_event_duration_secs_listener(add)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        began = time.perf_counter()
        report = yield
        if isinstance(collector, pytest.Module):
            self.imports[_name(collector.path, self._config)] += time.perf_counter() - began
        return report

    def pytest_collection_finish(self) -> None:
        self._cpu = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report = yield
        measured = {"total": call.duration, **self._clock.taken()}
        if call.when == "teardown":  # the system adds up the process's threads, which takes a while
            before, self._cpu = self._cpu, _cpu_seconds()
            measured["cpu"] = self._cpu - before
        report.user_properties = [("seconds", measured), ("file", _name(item.path, self._config))]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if not self.is_worker and "seconds" in properties:
            for kind, seconds in properties["seconds"].items():
                self.files[properties["file"]][kind] += seconds

    def pytest_sessionfinish(self) -> None:
        if self.is_worker:
            self._config.workeroutput["imports"] = dict(self.imports)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        for file, seconds in getattr(node, "workeroutput", {}).get("imports", {}).items():
            self.imports[file] += seconds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.is_worker:
            return
        rows = []
        for file in sorted({*self.files, *self.imports}):
            seconds = self.files.get(file, {})
            total = seconds.get("total", 0.0)
            kinds = {kind: seconds.get(kind, 0.0) for kind in _KINDS}
            compute = max(total - sum(kinds.values()), 0.0)
            rows.append(
                {
                    "file": file, **kinds, "compute": compute,
                    "import": self.imports.get(file, 0.0), "cpu": seconds.get("cpu", 0.0),
                }
            )  # fmt: skip
        Path(self._config.getoption(OPTION)).write_text(json.dumps(rows, indent=1) + "\n")
        for line in table(rows):
            terminalreporter.write_line(line)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The seconds of each folder and of the longest files, as lines of a Markdown table."""
    kinds = (*_KINDS, "compute", "import")

    def line(name: str, chosen: list[dict[str, Any]]) -> str:
        sums = [sum(row[kind] for row in chosen) for kind in kinds]
        columns = [sum(sums), *sums, sum(row["cpu"] for row in chosen)]
        return f"| {name} | " + " | ".join(f"{one:.0f}" for one in columns) + " |"

    folders = sorted({row["file"].rpartition("/")[0] for row in rows})
    longest = sorted(rows, key=lambda row: -sum(row[kind] for kind in kinds))[:_SHOWN]
    return [
        "| where | seconds | " + " | ".join((*kinds, "cpu")) + " |",
        "|---|" + "---:|" * (len(kinds) + 2),
        *(line(f"{one}/", [r for r in rows if r["file"].startswith(f"{one}/")]) for one in folders),
        line("all", rows),
        *(line(row["file"], [row]) for row in longest),
    ]


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def _name(path: Path, config: pytest.Config) -> str:
    return path.relative_to(config.rootpath).as_posix()
