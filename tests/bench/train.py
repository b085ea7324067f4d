"""`python -m tests.bench train`: what the loop, checkpoints and many processes cost a training run.

`loop`: the same step on the same batches in memory, in the loop and on its own; `overhead` is the
share that the loop adds. `save_N`: how long a save keeps the loop waiting, against writing it
while the loop waits; `one_b_*` is what follows for the 12 GB of a model of a billion float32
parameters with Adam's moments, saved by one host every ten minutes. `devices`, `processes`: the
largest relative difference of the losses of 1, 2, 4 and 8 fake devices, and of 1, 2 and 4
processes, from those of one. `embed`, `rerank`, `prompt`: two shards pinned to a core each,
against one of them alone on its core.

All runs in processes of its own, and none in this one: a TPU belongs to one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmqa_jax.core.errors import RunError
from tests.bench import Options, training_shards
from tests.bench.runner import Case, measure, open_journal
from tests.bench.timing import child_environment
from tests.bench.training_runs import Sizes, median_share
from tests.fake_devices import fake_devices

_ROUNDS = 5
_ONE_B_BYTES = 12e9  # parameters and two moments of Adam, float32
_SAVE_EVERY = 600.0  # seconds
_CHILD = f"import sys; from {__package__}.training_runs import main; main(*sys.argv[1:])"


@dataclasses.dataclass(frozen=True)
class Load:
    """What is measured.

    Attributes:
      step: of the row `loop`, which takes `steps` steps a round.
      saves: name of a row -> size of the state in MiB.
      curve: of the rows `devices` and `processes`, each of `curve_steps` steps.
      jobs: of the rows `embed`, `rerank` and `prompt`.
    """

    step: Sizes
    steps: int
    saves: Mapping[str, int]
    curve: Sizes
    curve_steps: int
    devices: tuple[int, ...]
    processes: tuple[int, ...]
    jobs: training_shards.Jobs

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows."""
        return ("loop", *self.saves, "devices", "processes", *training_shards.ROWS)


_SMALL_TRUNK = {"hidden": 256, "heads": 4, "mlp": 1024, "layers": 4, "vocab_size": 8192}


def load_of(size: str) -> Load:
    """`small`: a step of a tenth of a second on two CPU cores; `full`: VLP-base on accelerators."""
    small = Sizes(_SMALL_TRUNK, rows=16, columns=64)
    tiny = {"hidden": 64, "heads": 4, "mlp": 128, "layers": 2, "vocab_size": 512}
    return Load(
        step=small if size == "small" else Sizes({"dtype": "bfloat16"}, rows=64, columns=200),
        steps=40,
        saves={"save_256mib": 256, "save_1gib": 1024},
        curve=Sizes(tiny, rows=8, columns=24),
        curve_steps=50,
        devices=(1, 2, 4, 8),
        processes=(1, 2, 4),
        jobs=training_shards.Jobs(),
    )


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected; `small` on a CPU, `full` elsewhere."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = _child("device")
    size = options.size or ("small" if device["platform"] == "cpu" else "full")
    return run_load(load_of(size), options, device["name"])


def run_load(load: Load, options: Options, device: str) -> dict[str, Any]:
    """Measures the rows of a load; returns what `--json` prints."""
    wanted, rounds = options.chosen(load.rows), options.rounds or _ROUNDS
    with open_journal("train", load, rounds, device=device) as journal:
        missing = tuple(name for name in wanted if name not in journal)
        return measure(
            "train", _cases(load, missing, rounds), wanted, rounds, device=device, journal=journal
        )


def _cases(load: Load, wanted: Sequence[str], rounds: int) -> Iterator[Case]:
    for name in wanted:
        if name == "loop":
            yield _loop(load, rounds)
        elif name in load.saves:
            yield _save(name, load.saves[name], rounds)
        elif name == "devices":
            yield _same_curves(name, load, load.devices)
        elif name == "processes":
            yield _same_curves(name, load, load.processes)
    jobs = [name for name in wanted if name in training_shards.ROWS]
    if jobs:
        yield from training_shards.cases(jobs, load.jobs, rounds)


def _loop(load: Load, rounds: int) -> Case:
    sizes = dataclasses.asdict(load.step)
    figures = _child("overhead", sizes=sizes, steps=load.steps, rounds=rounds)
    ours, peer = (statistics.median(figures[side]) * 1e3 for side in ("ours", "peer"))
    notes = {
        "work": f"{load.step.rows} x {load.step.columns} tokens, AdamW",
        "overhead": median_share(figures["ours"], figures["peer"]),
    }
    return Case("loop", "ms", ours, peer, notes=notes)


def _save(name: str, mib: int, rounds: int) -> Case:
    figures = _child("save", mib=mib, rounds=rounds)
    stall, whole = (statistics.median(figures[side]) for side in ("ours", "peer"))
    one_b = stall * _ONE_B_BYTES / (mib << 20)
    notes = {
        "work": f"{mib} MiB",
        "stall_gb_per_s": (mib << 20) / stall / 1e9,
        "written_gb_per_s": (mib << 20) / whole / 1e9,
        "one_b_stall_s": one_b,
        "one_b_share": one_b / (one_b + _SAVE_EVERY),
    }
    return Case(name, "s", stall, whole, floor=figures["copy_floor"], notes=notes)


def _same_curves(name: str, load: Load, counts: Sequence[int]) -> Case:
    """The largest relative difference of any loss from that of the first count."""
    curves = {count: _curve(load, count, by_process=name == "processes") for count in counts}
    first = curves[counts[0]]
    largest = max(
        abs(loss - other) / abs(other)
        for count in counts[1:]
        for loss, other in zip(curves[count], first, strict=True)
    )
    work = f"{', '.join(map(str, counts))} {name}, {len(first)} steps"
    return Case(name, "relative", largest, notes={"work": work})


def _curve(load: Load, count: int, *, by_process: bool) -> list[float]:
    devices = 1 if by_process else count
    common = fake_devices(devices)
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:
        arguments = {
            "sizes": dataclasses.asdict(load.curve),
            "steps": load.curve_steps,
            "folder": folder,
        }
        if not by_process or count == 1:
            return _child("curve", env=common, **arguments)
        joined = common | {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}",
            "JAX_NUM_PROCESSES": str(count),
        }
        started = [
            _start("curve", joined | {"JAX_PROCESS_ID": str(process)}, arguments)
            for process in range(count)
        ]
        return _results(started)[0]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _child(name: str, env: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """What a function of training_runs returns, in a process of its own."""
    return _results([_start(name, env or {}, arguments)])[0]


def _start(name: str, env: Mapping[str, str], arguments: Mapping[str, Any]) -> subprocess.Popen:
    command = [sys.executable, "-c", _CHILD, name, json.dumps(arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(**{"MMQA_PROGRESS": "off", **env}),
    )


def _results(started: Sequence[subprocess.Popen]) -> list[Any]:
    """The last line that each process prints; none is left running."""
    try:
        printed = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
    for process in started:
        if process.returncode:
            raise RunError(
                f"a process of the bench ended with {process.returncode}; see its message above."
            )
    return [json.loads(text.splitlines()[-1]) for text in printed]
