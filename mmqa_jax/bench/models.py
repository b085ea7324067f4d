"""`mmqa bench models`: our models against transformers on PyTorch.

Same weights, inputs, threads and type on both sides, in one process, in turn; each row first
checks that both compute the same. A row's floor is what its matrix products take at the highest
rate that either library reaches here with square matrices, or reading its weights once, if that
takes longer. On a GPU PyTorch runs under torch.compile with its fused attention.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mmqa_jax.bench import Options
from mmqa_jax.bench.timing import (
    device_name,
    interleave,
    read_bandwidth,
    speed_ratio,
    stolen_share,
)
from mmqa_jax.core.errors import RunError
from mmqa_jax.core.progress import Progress

if TYPE_CHECKING:
    from mmqa_jax.bench.contests import Contest, Suite

_ROUNDS = 5
_LOW = "bfloat16"  # faster on processors that have instructions for it; shown beside float32


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those asked for; `small` sizes on a CPU, `full` elsewhere."""
    # Two libraries share the accelerator's memory; jax alone would take three quarters of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from mmqa_jax.bench import contests
    from mmqa_jax.core.startup import start

    start()
    on_cpu = jax.default_backend() == "cpu"
    size = options.size or ("small" if on_cpu else "full")
    suite = contests.small() if size == "small" else contests.full()
    return measure(suite, options)


def measure(suite: Suite, options: Options) -> dict[str, Any]:
    """Measures the rows of a suite; returns what `--json` prints."""
    import jax
    import torch
    import transformers

    from mmqa_jax.bench.contests import ROWS, contests
    from mmqa_jax.bench.peers import prepare_torch

    wanted = options.chosen(ROWS)
    rounds = options.rounds or _ROUNDS
    prepare_torch()
    stolen = stolen_share()
    with Progress("Measuring models", (len(wanted) + 1) * rounds, "rounds") as progress:
        matmul = _matmul(suite)
        readings = [_timed(matmul, {}, rounds, progress)]
        for contest in contests(suite, wanted):
            # With each row again: the machine may have been busy before.
            squares = {f"square_{side}": matmul.sides[side] for side in ("ours", "peer")}
            readings.append(_timed(_check(contest), squares, rounds, progress))
        bandwidth = read_bandwidth()
    squares = ("square_ours", "square_peer")
    fastest = min(*readings[0].seconds["ours"], *readings[0].seconds["peer"])
    for reading in readings[1:]:
        fastest = min(fastest, *(second for side in squares for second in reading.seconds[side]))
    peak = matmul.flops / fastest
    return {
        "bench": "models",
        "device": device_name(),
        "rows": [_row(reading, peak, bandwidth) for reading in readings],
        "dtype": suite.dtype,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "matmul_gflops": round(peak / 1e9, 1),
        "bandwidth_gb": round(bandwidth / 1e9, 1),
        "stolen_share": round(stolen(), 3),
        "versions": {module.__name__: module.__version__ for module in (jax, torch, transformers)},
    }


class _Work(NamedTuple):
    """One row before it is timed."""

    name: str
    text: str
    sides: dict[str, Callable[[], Any]]
    flops: float
    weight_bytes: int
    deviation: float | None


class _Reading(NamedTuple):
    """One row's times, seconds per call of each side."""

    work: _Work
    seconds: dict[str, list[float]]


def _matmul(suite: Suite) -> _Work:
    """The product of two square matrices, in both libraries."""
    import jax
    import jax.numpy as jnp

    from mmqa_jax.bench.peers import matmul_work

    side = suite.matmul
    x = jax.random.normal(jax.random.key(0), (side, side)).astype(suite.dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    sides = {
        "ours": lambda: product(x).block_until_ready(),
        "peer": matmul_work(side, suite.dtype),
    }
    if suite.dtype != _LOW:
        low = x.astype(_LOW)
        sides["ours_low"] = lambda: product(low).block_until_ready()
        sides["peer_low"] = matmul_work(side, _LOW)
    for work in sides.values():
        work()
    return _Work("matmul", f"{side} x {side}", sides, 2 * side**3, 0, None)


def _check(contest: Contest) -> _Work:
    """Runs both sides, so that all is compiled, and sees that they compute the same."""
    from mmqa_jax.bench.peers import count_flops

    # Twice: a training step's second loss tells whether the first update was the same.
    deviation = max(_deviation(contest) for _ in range(2))
    if not deviation <= contest.agreement:
        raise RunError(
            f"bench models, {contest.name}: results deviate by {deviation:.2g} of the largest "
            f"value, at most {contest.agreement:.2g} was expected, so the sides do not compute "
            "the same; run tests/equivalence to find out which is wrong."
        )
    sides = {"ours": contest.ours, "peer": contest.peer}
    for name in ("ours_low", "peer_low"):
        work = getattr(contest, name)
        if work is not None:
            work()
            sides[name] = work
    flops = count_flops(contest.count)
    return _Work(contest.name, contest.work, sides, flops, contest.weight_bytes, deviation)


def _timed(
    work: _Work, more: dict[str, Callable[[], Any]], rounds: int, progress: Progress
) -> _Reading:
    seconds = interleave(work.sides | more, rounds, on_round=progress.advance)
    return _Reading(work._replace(sides={}), seconds)  # the models may go


def _deviation(contest: Contest) -> float:
    """Largest difference of the two results, as a share of the peer's largest value."""
    import numpy as np

    ours = np.asarray(contest.ours(), np.float32).ravel()
    peer = contest.peer().float().cpu().numpy().ravel()
    return float(np.abs(ours - peer).max() / np.abs(peer).max())


def _row(reading: _Reading, peak: float, bandwidth: float) -> dict[str, Any]:
    """What is printed; peak in FLOP/s, bandwidth in bytes/s."""
    work, seconds = reading
    median = {side: statistics.median(readings) for side, readings in seconds.items()}
    ratio = speed_ratio(seconds["ours"], seconds["peer"])
    rate = work.flops / median["ours"]
    milliseconds = {side: round(value * 1e3, 2) for side, value in median.items()}
    return {
        "name": work.name,
        "ours": milliseconds["ours"],
        "peer": milliseconds["peer"],
        "ratio": round(ratio.median, 2),
        "unit": "ms",
        "floor": round(max(work.flops / peak, work.weight_bytes / bandwidth) * 1e3, 2),
        "work": work.text,
        "ratio_range": [round(ratio.low, 2), round(ratio.high, 2)],
        "gflops": round(rate / 1e9, 1),
        "of_peak": round(rate / peak, 2),
        "peer_of_peak": round(work.flops / median["peer"] / peak, 2),
        f"ours_{_LOW}": milliseconds.get("ours_low"),
        f"peer_{_LOW}": milliseconds.get("peer_low"),
        "deviation": None if work.deviation is None else float(f"{work.deviation:.2g}"),
    }
