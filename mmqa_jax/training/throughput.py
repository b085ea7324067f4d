"""How fast a training run computes: examples, tokens and FLOPs of its steps, memory in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mmqa_jax.core.chips import GIB, chip_of_kind
from mmqa_jax.core.mesh import batch_blocks, local_blocks
from mmqa_jax.core.speed import matmul_peak
from mmqa_jax.training.state import Step, TrainState

# Entries of batches that are True at every token (a VLP's picture regions are tokens too), and
# those that number the packed example of a token, 0 where there is none.
_MASKS = frozenset(
    ("mask", "query_mask", "source_mask", "candidate_mask", "context_mask", "answer_mask")
)
_SEGMENTS = "segments"
# Columns of metrics.jsonl that a clock gives, and that differ between equal runs.
CLOCK_COLUMNS = (
    *("input_seconds", "compile_seconds", "compute_seconds"),
    *("checkpoint_seconds", "evaluate_seconds", "steps_per_second", "examples_per_second"),
    *("tokens_per_second", "tflops_per_second", "mfu", "mfu_measured", "hbm_gib"),
)
_MEASURE_AFTER = 60.0  # seconds of computing, of which measuring the peak is a small part


@dataclasses.dataclass
class Work:
    """What steps have worked on.

    Attributes:
      examples: the rows of a batch, or of its entry with the fewest.
      tokens: without padding; 0 where a batch does not say.
      flops: of the model's products and their gradients, nothing counted twice.
    """

    examples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


class Throughput:
    """Counts the work of a log window.

    Args:
      mesh: of the run.
      step: the jitted update.
      measure_after: seconds of computing after which the devices' peak is measured.
    """

    def __init__(self, mesh: Mesh, step: Step, *, measure_after: float = _MEASURE_AFTER):
        self._mesh, self._step, self._measure_after = mesh, step, measure_after
        # This process has seen its own rows alone; of several hosts the whole is estimated.
        self._share = len(local_blocks(mesh)) / batch_blocks(mesh)
        self._flops: dict[tuple, float] = {}  # of a step, by the shapes of its batch
        self._device = next(iter(mesh.local_devices))
        self._chip = chip_of_kind(self._device.device_kind)
        self._window, self._computed = Work(), 0.0

    def count(self, host_batch: Any, state: TrainState, batch: Any) -> bool:
        """Counts a step; returns whether its program is new and will be compiled.

        Args:
          host_batch: this process's rows, as numpy arrays.
          state, batch: what the step is going to be called with.
        """
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        is_new = shapes not in self._flops
        if is_new:
            self._flops[shapes] = self._step.model_flops(state, batch)
        self._window.examples += min(shape[0] for shape in shapes)
        self._window.tokens += tokens_of(host_batch) / self._share
        self._window.flops += self._flops[shapes]
        return is_new

    def columns(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The columns of a log row, and an empty window.

        Args:
          seconds: of the window, as `TimeSplit.take` gives them. Rates are over the time in which
            steps were computed or waited for their batch.
        """
        work, self._window = self._window, Work()
        row = {f"{phase}_seconds": value for phase, value in seconds.items()}
        if not row["compile_seconds"]:
            del row["compile_seconds"]
        self._computed += seconds["compute"]
        passed = seconds["input"] + seconds["compute"]
        if passed > 0 and work.examples:
            row["examples_per_second"] = work.examples / passed
            if work.tokens:
                row["tokens_per_second"] = work.tokens / passed
            row |= self._flop_columns(work.flops / passed)
        if (used := self._most_bytes()) is not None:
            row["hbm_gib"] = used / GIB
        return row

    def _flop_columns(self, rate: float) -> dict[str, float]:
        row = {"tflops_per_second": rate / 1e12}
        devices = self._mesh.size
        if self._chip is not None:
            row["mfu"] = rate / (devices * self._chip.peak)
        if self._computed >= self._measure_after and jax.process_index() == 0:
            row["mfu_measured"] = rate / (devices * matmul_peak(self._device))
        return row

    def _most_bytes(self) -> int | None:
        """Most memory that a device of this process has held; None where it does not say."""
        found = [device.memory_stats() or {} for device in self._mesh.local_devices]
        return max((stats.get("peak_bytes_in_use") or 0 for stats in found), default=0) or None


def tokens_of(batch: Any) -> int:
    """Tokens of a batch of numpy arrays, padding left out; 0 if it has no masks."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""
        if name in _MASKS or name == _SEGMENTS:
            total += int(np.count_nonzero(leaf))
    return total
