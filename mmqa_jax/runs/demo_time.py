"""The time that is left of a whole demo, from recorded demos and what has been seen of this one.

A stage takes `fixed` seconds (programs that compile, files that open: one core's work, whatever the
sizes in the config) and seconds in proportion to its work (all cores' products). The recorded demos
say how long that is on the reference machine; this run says how many times slower this machine is
at either. Before a stage has run, the speed of its products says it; then the stages that ran do,
each training with its own split into compiling and steps, so that also kept programs, which need
not compile, are seen for what they are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.files import read_json
from mmqa_jax.training.attempts import goodput, read_attempts

MACHINE = "machine.json"  # in a demo's workdir: what its machine was measured to do
TRAININGS = ("contrastive", "rerank", "answer")
STAGES = (
    *("prepare", "contrastive", "embed", "search", "rerank"),
    *("tune", "refuse", "select", "answer", "read", "score"),
)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Seconds of the stages of a whole demo (workdir-demo/stages/*.json).

    Attributes:
      precision: of its products.
      slowness: of its machine: seconds there for one second of the reference machine.
    """

    precision: str
    slowness: float
    seconds: Mapping[str, float]


def _recorded(precision: str, slowness: float, *seconds: float) -> Recorded:
    return Recorded(precision, slowness, dict(zip(STAGES, seconds, strict=True)))


REFERENCE_RATE = 164.0  # GFLOP/s of float32 products of the reference machine, two cores
# The second and the fourth are of one machine of 206 GFLOP/s, on which other work ran beside them;
# the third is of one of 141 GFLOP/s, without AVX-512.
RECORDED = (
    _recorded("float32", 1.0, 21, 95, 95, 21, 116, 12, 3, 69, 560, 100, 0.3),
    _recorded("float32", 0.87, 19, 83, 80, 35, 117, 13, 3, 72, 464, 51, 0.3),
    _recorded("float32", 1.55, 39, 130, 166, 65, 176, 21, 5, 111, 729, 90, 0.8),
    _recorded("bfloat16", 0.87, 20, 104, 98, 31, 105, 11, 3, 46, 398, 40, 0.3),
)
# Of these, on the reference machine, what does not depend on the sizes in the config.
FIXED = {
    "prepare": 4.0,
    "contrastive": 20.0,
    "embed": 9.0,
    "search": 7.0,
    "rerank": 38.0,
    "tune": 5.0,
    "refuse": 0.5,
    "select": 4.0,
    "answer": 44.0,
    "read": 18.0,
    "score": 0.1,
}
_WHOLE = {  # units of work (see `stage_units`) of the recorded demos
    "prepare": 11_399,
    "contrastive": 24 * 48,
    "embed": 11_399,
    "search": 300,
    "rerank": 130 * 64,
    "tune": 60,
    "refuse": 300,
    "select": 300,
    "answer": 450 * 32,
    "read": 300,
    "score": 300,
}
_ALL_QUESTIONS, _ALL_SOURCES, _ALL_COUNTRIES = 1540, 11_399, 260  # of Atlas, where 0 means all
_ONE_BAR = ("contrastive", "embed", "rerank", "answer")  # whose progress bar is the whole stage
_WORTH = 20.0  # a first guess counts as so many seconds of stages that ran


def usual_seconds(precision: str, recorded: Sequence[Recorded] = RECORDED) -> dict[str, float]:
    """Stage -> seconds on the reference machine, the mean of the demos of that precision."""
    alike = [one for one in recorded if one.precision == precision] or list(recorded)
    return {
        stage: sum(one.seconds[stage] / one.slowness for one in alike) / len(alike)
        for stage in STAGES
    }


class TimeLeft:
    """Predicts the rest of a demo.

    Args:
      config: of the demo.
      records: stage -> its record (see Workdir.stages), of those that are complete.
      rate: GFLOP/s of this machine's float32 products.
      precision: of the products of this run.
      fixed: training -> seconds of it that were no steps (see `fixed_seconds`).
      recorded, clock: for tests.
    """

    def __init__(
        self,
        config: ConfigDict,
        records: Mapping[str, Mapping[str, Any]],
        rate: float,
        precision: str = "float32",
        fixed: Mapping[str, float] | None = None,
        *,
        recorded: Sequence[Recorded] = RECORDED,
        clock: Callable[[], float] = time.monotonic,
    ):
        units = stage_units(config)
        usual = usual_seconds(precision, recorded)
        self._work = {
            name: max(usual[name] - FIXED[name], 0.0) * units[name] / _WHOLE[name]
            for name in STAGES
        }
        self._taken = {name: record["seconds"] for name, record in records.items()}
        self._fixed = dict(fixed or {})
        self._rate, self._clock = rate, clock
        self._stage, self._began = "", clock()

    def start(self, stage: str, elapsed: float = 0.0) -> float:
        """Begins a stage; returns the seconds that are left with it and all later ones.

        Args:
          elapsed: seconds that the stage has had already.
        """
        self._stage, self._began = stage, self._clock() - elapsed
        return self.seconds()

    def finish(self, fixed: float | None = None) -> None:
        """Ends the stage that runs; its time corrects the prediction of the others.

        Args:
          fixed: of a training the seconds that were no steps.
        """
        self._taken[self._stage] = self._clock() - self._began
        if fixed is not None:
            self._fixed[self._stage] = fixed

    def seconds(self, of_bar: float | None = None) -> float:
        """Seconds left of the whole demo.

        Args:
          of_bar: what the progress bar that is shown says of its own work.
        """
        fixed, work = self._slower()
        predicted = {name: fixed * FIXED[name] + work * self._work[name] for name in STAGES}
        later = sum(
            seconds
            for name, seconds in predicted.items()
            if name not in self._taken and name != self._stage
        )
        left = predicted[self._stage] - (self._clock() - self._began)
        if of_bar is not None and self._stage in _ONE_BAR:
            left = of_bar
        return max(left, of_bar or 0.0, 0.0) + later

    def _slower(self) -> tuple[float, float]:
        """How many times slower this machine is at what is fixed, and at the work."""
        by_products = REFERENCE_RATE / self._rate
        of_prepare = FIXED["prepare"] + self._work["prepare"]
        prepared = self._taken.get("prepare")
        by_one_core = by_products if prepared is None else prepared / of_prepare
        # [seconds that were seen, seconds of the reference machine] of both, from the first guess.
        fixed, work = [_WORTH * by_one_core, _WORTH], [_WORTH * by_products, _WORTH]
        for name, taken in self._taken.items():
            # `prepare` decodes and draws pictures: it says nothing of products.
            if name not in FIXED or name == "prepare":
                continue
            share = by_one_core * FIXED[name]
            share /= share + by_products * self._work[name]
            of_fixed = min(self._fixed.get(name, share * taken), taken)
            fixed[0] += of_fixed
            fixed[1] += FIXED[name]
            work[0] += taken - of_fixed
            work[1] += self._work[name]
        return fixed[0] / fixed[1], work[0] / work[1]


def fixed_seconds(folder: Path, stage: str) -> float | None:
    """What a stage of the demo in `folder` spent on its start and on compiling; None: not known."""
    measured = goodput(read_attempts(folder / stage)) if stage in TRAININGS else None
    if measured is None:
        return None
    return measured.seconds["start"] + measured.seconds["compile"]


def stage_units(config: ConfigDict) -> dict[str, float]:
    """The work of every stage: sources, questions, or the examples of a training."""
    share = (config.countries or _ALL_COUNTRIES) / _ALL_COUNTRIES
    questions = config.evaluate.questions or _ALL_QUESTIONS * share
    sources = _ALL_SOURCES * share
    trained = {
        task: config[task].train.steps * config[task].batches.batch_size for task in TRAININGS
    }
    return {
        "prepare": sources,
        "embed": sources,
        "tune": config.select.dev_questions,
        **dict.fromkeys(("search", "refuse", "select", "read", "score"), questions),
        **trained,
    }


def about(seconds: float) -> str:
    """`about 12 min`, `about 40 s`."""
    if seconds >= 90:
        return f"about {round(seconds / 60)} min"
    return f"about {max(10, round(seconds, -1)):.0f} s"


def open_time_left(
    config: ConfigDict, folder: Path, records: Mapping[str, Mapping[str, Any]]
) -> TimeLeft:
    """What predicts the rest of the demo in `folder`, whose machine has been measured.

    Args:
      records: of its complete stages (Workdir.stages).
    """
    machine = read_json(folder / MACHINE)
    fixed = {name: fixed_seconds(folder, name) for name in TRAININGS if name in records}
    known = {name: seconds for name, seconds in fixed.items() if seconds is not None}
    return TimeLeft(config, records, machine["gflops"], machine["precision"], known)
