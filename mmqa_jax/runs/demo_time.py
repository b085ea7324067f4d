"""The time that is left of the whole demo, predicted from its stages' usual costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

# Seconds of each stage per unit of its work (see `stage_units`), from workdir-demo/stages/*.json
# of a run at _REFERENCE_RATE. Only their ratios count, once a stage has run on this machine.
_SECONDS_PER_UNIT = {
    "prepare": 21 / 11_399,
    "contrastive": 95 / (24 * 48),
    "embed": 95 / 11_399,
    "search": 21 / 300,
    "rerank": 116 / (130 * 64),
    "tune": 12 / 60,
    "select": 69 / 300,
    "answer": 560 / (450 * 32),
    "read": 100 / 300,
    "score": 0.3 / 300,
}
_REFERENCE_RATE = 164.0  # GFLOP/s of float32 products
_ONE_BAR = ("contrastive", "embed", "rerank", "answer")  # whose progress bar is the whole stage
_ALL_QUESTIONS, _ALL_SOURCES, _ALL_COUNTRIES = 1540, 11_399, 260  # of Atlas, where 0 means all


class TimeLeft:
    """Predicts the rest of a demo: usual costs, times how much slower this machine is.

    That factor comes from the stages that have run here and, before one has, from the rate of
    matrix products.

    Args:
      config: of the demo.
      records: stage -> its record (see Workdir.stages), of those that are complete.
      rate: GFLOP/s of this machine's products.
      clock: for tests.
    """

    def __init__(
        self,
        config: ConfigDict,
        records: Mapping[str, Mapping[str, Any]],
        rate: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        units = stage_units(config)
        self._usual = {name: cost * units[name] for name, cost in _SECONDS_PER_UNIT.items()}
        self._taken = {name: record["seconds"] for name, record in records.items()}
        self._rate, self._clock = rate, clock
        self._stage, self._began = "", clock()

    def start(self, stage: str) -> float:
        """Begins a stage; returns the seconds that are left with it and all later ones."""
        self._stage, self._began = stage, self._clock()
        return self.seconds()

    def finish(self) -> None:
        """Ends the stage that runs; its time corrects the prediction of the others."""
        self._taken[self._stage] = self._clock() - self._began

    def seconds(self, of_bar: float | None = None) -> float:
        """Seconds left of the whole demo.

        Args:
          of_bar: what the progress bar that is shown says of its own work.
        """
        slower = self._slower()
        later = sum(
            usual
            for name, usual in self._usual.items()
            if name not in self._taken and name != self._stage
        )
        own = self._usual[self._stage] * slower - (self._clock() - self._began)
        if of_bar is not None and self._stage in _ONE_BAR:
            own = of_bar
        return max(own, of_bar or 0.0, 0.0) + later * slower

    def _slower(self) -> float:
        """How many times the usual costs a stage takes on this machine."""
        # `prepare` decodes and draws pictures: it says little of the other stages.
        known = [name for name in self._taken if name in self._usual and name != "prepare"]
        usual = sum(self._usual[name] for name in known)
        if usual < 0.02 * sum(self._usual.values()):
            return _REFERENCE_RATE / self._rate
        return sum(self._taken[name] for name in known) / usual


def stage_units(config: ConfigDict) -> dict[str, float]:
    """The work of every stage: sources, questions, or the examples of a training."""
    share = (config.countries or _ALL_COUNTRIES) / _ALL_COUNTRIES
    questions = config.evaluate.questions or _ALL_QUESTIONS * share
    sources = _ALL_SOURCES * share
    trained = {
        task: config[task].train.steps * config[task].batches.batch_size
        for task in ("contrastive", "rerank", "answer")
    }
    return {
        "prepare": sources,
        "embed": sources,
        "tune": config.select.dev_questions,
        **dict.fromkeys(("search", "select", "read", "score"), questions),
        **trained,
    }


def about(seconds: float) -> str:
    """`about 12 min`, `about 40 s`."""
    if seconds >= 90:
        return f"about {round(seconds / 60)} min"
    return f"about {max(10, round(seconds, -1)):.0f} s"
