"""The one harness of the benches: cases are timed in turn and become rows.

A bench yields cases; each has a side of ours and, mostly, a peer that does the same work. Ratios
are medians over the rounds. Where the operations of a case are known, its row gives the share of
the device's matmul peak that it reaches: the highest rate of square matrices seen in this run. On a
machine whose speed changes the peak is that of its best moment; `of_xla_matmul` is the share of the
rate at which XLA multiplied square matrices in the same rounds, the part that code can influence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import mmqa_jax
from mmqa_jax.core.errors import RunError
from mmqa_jax.core.host import cache_dir, device_name, read_bandwidth
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.store import Store
from tests.bench import Options
from tests.bench.timing import interleave, speed_ratio, stolen_share

Work = Callable[[], Any]  # does the work once and returns when it is done
MATMUL = "matmul"  # name of the row that measures the peak itself
_SQUARE = "square_"  # before the name of a side: its product of squares, timed along with a case
_PROBE = 512  # side of the matrices that show how fast a type is multiplied
_WORTH = 0.5  # of float32's rate, below which bfloat16 is no choice for anybody
_LOWER_IS_BETTER = ("ms", "s", "MiB", "GiB", "perplexity")


@dataclasses.dataclass
class Case:
    """One row of a bench.

    Attributes:
      name: of the row.
      unit: `ms`, or `tokens/s` and the like; figures that are not timed may have any.
      ours, peer: the work, or its figure in `unit` where the bench measures it itself.
      count: how many of the unit's pieces (tokens, queries) one call works on.
      others: further sides to time in the same rounds; name of their column -> work.
      floor: the best possible figure; None: what `flops` and `read_bytes` allow, if given.
      flops: floating-point operations of one call, see `program_flops`.
      read_bytes: what one call must read from memory.
      agreement: the largest difference of the results of ours and peer, as a share of the peer's
        largest value; None does not compare them.
      notes: further values of the row.
      late_notes: the same, computed when the case has been timed.
      repeat: whether quick work is repeated and every side first runs once untimed.
      clock: what measures the time.
    """

    name: str
    unit: str
    ours: Work | float
    peer: Work | float | None = None
    count: float = 1
    others: Mapping[str, Work] = dataclasses.field(default_factory=dict)
    floor: Work | float | None = None
    flops: float = 0
    read_bytes: float = 0
    agreement: float | None = None
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    late_notes: Callable[[], Mapping[str, Any]] = dict
    repeat: bool = True
    clock: Callable[[], float] = time.perf_counter

    def figure(self, seconds: float) -> float:
        """Seconds of a call, in `unit`."""
        return seconds * 1e3 if self.unit == "ms" else self.count / seconds

    def seconds(self, figure: float) -> float:
        """The reverse of `figure`."""
        return figure / 1e3 if self.unit == "ms" else self.count / figure

    def ratio(self, ours: float, peer: float) -> float:
        """How many times better ours is."""
        return peer / ours if self.unit in _LOWER_IS_BETTER else ours / peer


class Peak:
    """The highest rate at which square matrices are multiplied, `best`, in FLOP/s.

    Args:
      side: of the matrices.
      dtype: of both factors.
      with_torch: PyTorch multiplies them too.

    Attributes:
      left_out: sides in bfloat16 (`peer_bfloat16`) that are not worth measuring, since the
        processor has no such product and the library does without at a fraction of float32's rate
        (PyTorch at 1 GFLOP/s) -> a sentence that says so.
    """

    def __init__(self, side: int, dtype: str, *, with_torch: bool = False):
        self.side, self.flops, self.best = side, 2 * side**3, 0.0
        self.dtype, self.with_torch = dtype, with_torch
        self.sides = self._products(dtype, side)
        self.left_out = {} if dtype == "bfloat16" else self._slow_bfloat16()

    def _slow_bfloat16(self) -> dict[str, str]:
        rates = {
            dtype: {
                side: 2 * _PROBE**3 / min(readings)
                for side, readings in interleave(self._products(dtype, _PROBE), 3).items()
            }
            for dtype in (self.dtype, "bfloat16")
        }
        return {
            f"{side}_bfloat16": f"{side}_bfloat16 is left out: here its matrix product runs at "
            f"{slow / 1e9:.3g} GFLOP/s, that of {self.dtype} at {fast / 1e9:.3g}"
            for side, fast in rates[self.dtype].items()
            if (slow := rates["bfloat16"][side]) < _WORTH * fast
        }

    def _products(self, dtype: str, side: int) -> dict[str, Work]:
        """One product in each library, compiled."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        random = np.random.default_rng(0).standard_normal((side, side), np.float32)
        x = jax.device_put(random.astype(jnp.dtype(dtype)))
        product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
        product(x).block_until_ready()
        sides = {"ours": lambda: product(x).block_until_ready()}
        if self.with_torch:
            from tests.bench.torch_reference import matmul_work

            sides["peer"] = matmul_work(side, dtype)
        return sides

    def observe(self, seconds: Iterable[Iterable[float]]) -> None:
        """Takes further readings of the product, seconds per call."""
        self.best = max(self.best, *(self.flops / second for side in seconds for second in side))

    def measure(self, rounds: int) -> None:
        """Times the product on its own."""
        self.observe(interleave(self.sides, rounds).values())

    def case(self) -> Case:
        """The row of the product itself, in bfloat16 too."""
        low = {} if self.dtype == "bfloat16" else self._products("bfloat16", self.side)
        others = {f"{side}_bfloat16": work for side, work in low.items()}
        others = {name: work for name, work in others.items() if name not in self.left_out}
        notes = {"work": f"{self.side} x {self.side}"}
        return Case(MATMUL, "ms", **self.sides, flops=self.flops, others=others, notes=notes)


def start_device(options: Options) -> str:
    """Prepares jax; returns the size to run: unless one is given, small on a CPU."""
    # Two libraries share the accelerator's memory; jax alone would take three quarters of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from mmqa_jax.core.hosts.distributed import start
    from mmqa_jax.core.mesh import platform

    start()
    return options.size or ("small" if platform() == "cpu" else "full")


def program_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """Floating-point operations of a jitted function, as XLA counts them.

    A loop's body counts once: give a function whose layers are unrolled. The program is counted as
    it is lowered: that needs no compiling, and matmul and attention kernels that the compiler
    would substitute, and then count as nothing, are still plain products. XLA for GPUs counts
    nothing before it compiles; there the products of the jaxpr are counted.
    """
    import jax

    from mmqa_jax.core.flops import jaxpr_flops

    traced = jax.jit(function).trace(*arguments)
    counted = traced.lower().cost_analysis()
    return counted["flops"] if counted else jaxpr_flops(traced.jaxpr)


def measure(
    bench: str,
    cases: Iterable[Case | dict[str, Any]],
    wanted: tuple[str, ...],
    rounds: int,
    *,
    peak: Peak | None = None,
    device: str | None = None,
    budget: float | None = None,
    journal: Store | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Measures the cases of a bench; returns what `--json` prints.

    Args:
      bench: its name.
      cases: each is built when its turn comes; a dict is a row that a child process has measured.
      wanted: names of the rows to give, in order.
      rounds: how often each side is timed.
      peak: for the shares of the peak; timed along with every case.
      device: None is what jax computes on.
      budget: seconds that a row's rounds may take, see `interleave`.
      journal: of `open_journal`, with the rows that an interrupted run has measured, which `cases`
        leaves out; it is removed when all rows are there.
      **facts: further entries of the result.
    """
    stolen = stolen_share()
    timed: list[tuple[Case | dict[str, Any], dict[str, list[float]]]] = []
    for name in wanted if journal is not None else ():
        if name in journal:
            timed.append(_from_journal(journal[name], peak))
    if timed:
        facts["rows_of_an_interrupted_run"] = len(timed)
    with Progress(f"Measuring {bench}", len(wanted) - len(timed), "rows") as progress:
        for case in cases:
            if isinstance(case, dict):
                timed.append((case, {}))
            else:
                timed.append(time_case(case, rounds, peak, budget))
                if journal is not None:
                    with contextlib.suppress(OSError):  # a read-only home: nothing is kept
                        journal.add({case.name: _for_journal(*timed[-1], peak)})
            del case  # its models, before the next ones are built
            progress.advance()
    bandwidth = None
    if any(isinstance(case, Case) and case.read_bytes for case, _ in timed):
        bandwidth = read_bandwidth()
        facts["bandwidth_gb"] = round(bandwidth / 1e9, 1)
    if peak is not None:
        facts["matmul_gflops"] = _digits(peak.best / 1e9)
    rows = [
        case if isinstance(case, dict) else row_of(case, seconds, peak, bandwidth)
        for case, seconds in timed
    ]
    rows = [row for row in rows if row["name"] in wanted]
    if journal is not None:
        journal.remove()
    return {
        "bench": bench,
        "device": device or device_name(),
        **facts,
        "rows": sorted(rows, key=lambda row: wanted.index(row["name"])),
        "rounds": rounds,
        "stolen_share": round(stolen(), 3),
        "versions": {
            name: sys.modules[name].__version__
            for name in ("jax", "torch", "transformers")
            if name in sys.modules
        },
    }


def open_journal(bench: str, *facts: Any, device: str | None = None) -> Store:
    """What an interrupted run of a bench has measured: the same code, facts, device and day.

    Args:
      facts: what else the rows depend on, with a `repr` that tells it.
      device: None is what jax computes on.
    """
    import jax

    code = hashlib.sha256()
    for folder in (Path(mmqa_jax.__file__).parent, Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            code.update(file.read_bytes())
    what = {
        "code": code.hexdigest(),
        "device": device or device_name(),
        "jax": jax.__version__,
        "day": time.strftime("%F"),
        "facts": repr(facts),
    }
    return Store(cache_dir() / "bench" / bench, what)


# Of a timed case, what its row needs.
_KEPT = ("name", "unit", "ours", "peer", "floor", "count", "flops", "read_bytes", "notes")


def _for_journal(
    case: Case, seconds: Mapping[str, list[float]], peak: Peak | None
) -> dict[str, Any]:
    values = {key: getattr(case, key) for key in _KEPT}
    return {"case": values, "seconds": seconds, "peak": 0.0 if peak is None else peak.best}


def _from_journal(
    values: Mapping[str, Any], peak: Peak | None
) -> tuple[Case, dict[str, list[float]]]:
    if peak is not None:
        peak.best = max(peak.best, values["peak"])
    return Case(**values["case"]), values["seconds"]


def time_case(
    case: Case, rounds: int, peak: Peak | None = None, budget: float | None = None
) -> tuple[Case, dict[str, list[float]]]:
    """Times the sides of a case that are work; returns the case without them, and their seconds."""
    notes = dict(case.notes)
    if case.agreement is not None:
        # Twice: a training step's second loss shows whether the first update was the same.
        deviation = max(_deviation(case.ours(), case.peer()) for _ in range(2))
        if not deviation <= case.agreement:
            raise RunError(
                f"{case.name}: results differ by {deviation:.2g} of the largest value, at most "
                f"{case.agreement:.2g} was expected, so the two sides do not compute the same; run "
                "tests/equivalence to find out which is wrong."
            )
        notes["deviation"] = float(f"{deviation:.2g}")
    figures = {"ours": case.ours, "peer": case.peer, "floor": case.floor, **case.others}
    sides = {name: work for name, work in figures.items() if callable(work)}
    if not sides:
        return dataclasses.replace(case, notes=notes), {}
    if case.repeat:
        compared = ("ours", "peer") if case.agreement is not None else ()  # have run
        for name, work in sides.items():
            if name not in compared:
                work()  # compiles
    squares = {}
    if peak is not None and case.name != MATMUL:
        # With each case again: the machine may have been busy before.
        squares = {f"{_SQUARE}{name}": work for name, work in peak.sides.items()}
    seconds = interleave(
        sides | squares, rounds, repeat=case.repeat, clock=case.clock, budget=budget
    )
    if peak is not None:
        # The row `matmul` is a reading itself, without its bfloat16 sides.
        readings = [seconds[name] for name in squares]
        peak.observe(readings or [seconds[name] for name in peak.sides])
    notes |= case.late_notes()
    # Nothing of what is returned keeps the models of the sides in memory.
    left = {side: None if side in sides else figures[side] for side in ("ours", "peer", "floor")}
    freed = {"others": {}, "late_notes": dict, "clock": time.perf_counter}
    return dataclasses.replace(case, notes=notes, **freed, **left), seconds


def row_of(
    case: Case,
    seconds: Mapping[str, list[float]],
    peak: Peak | None = None,
    bandwidth: float | None = None,
) -> dict[str, Any]:
    """What is printed of a timed case; bandwidth in bytes/s."""
    squares = {name: readings for name, readings in seconds.items() if name.startswith(_SQUARE)}
    seconds = {name: readings for name, readings in seconds.items() if name not in squares}
    median = {side: statistics.median(readings) for side, readings in seconds.items()}
    figures = {side: case.figure(value) for side, value in median.items()}
    ours, peer = figures.pop("ours", case.ours), figures.pop("peer", case.peer)
    floor = figures.pop("floor", case.floor)
    if case.flops or case.read_bytes:
        bounds = (
            case.flops / peak.best if case.flops else 0.0,
            case.read_bytes / bandwidth if case.read_bytes else 0.0,
        )
        floor = case.figure(max(bounds))
    row = {"name": case.name, "ours": ours, "peer": peer, "ratio": None}
    row |= {"unit": case.unit, "floor": floor}
    if "work" in case.notes:
        row["work"] = case.notes["work"]
    if "ours" in seconds and "peer" in seconds:
        ratio = speed_ratio(seconds["ours"], seconds["peer"])
        row["ratio"] = ratio.median
        row["ratio_range"] = [_digits(ratio.low), _digits(ratio.high)]
    elif peer is not None:
        row["ratio"] = case.ratio(ours, peer)
    if case.flops:
        rate = case.flops / case.seconds(ours)
        row |= {"gflops": rate / 1e9, "of_peak": rate / peak.best}
        if f"{_SQUARE}ours" in squares:
            pairs = zip(seconds["ours"], squares[f"{_SQUARE}ours"], strict=True)
            shares = [case.flops / mine / (peak.flops / square) for mine, square in pairs]
            row["of_xla_matmul"] = statistics.median(shares)
        if "peer" in seconds:
            row["peer_of_peak"] = case.flops / median["peer"] / peak.best
    elif case.read_bytes:
        row["of_floor"] = case.ratio(ours, floor)
    row |= figures
    if {"ours_bfloat16", "peer_bfloat16"} <= figures.keys():
        row["ratio_bfloat16"] = case.ratio(figures["ours_bfloat16"], figures["peer_bfloat16"])
    row |= case.notes
    return {
        key: _digits(value) if isinstance(value, float) else value for key, value in row.items()
    }


def _deviation(ours: Any, peer: Any) -> float:
    """Largest difference of two results, as a share of the peer's largest value."""
    import numpy as np

    mine = np.asarray(ours, np.float32).ravel()
    theirs = peer.float().cpu().numpy().ravel()
    return float(np.abs(mine - theirs).max() / np.abs(theirs).max())


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
