"""Steps whose loss or gradient is not finite: stop, or leave them out up to a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.progress import announce

OnNan = Literal["stop", "skip"]
_SHOWN = 16


class NotFinite(RunError):
    """A run ended since a loss or gradient was not finite."""


class FiniteCheck:
    """Looks at the metrics of every step, some steps after it was dispatched.

    Args:
      on_nan: `stop` the run, or `skip`: the step has left the state as it was (see make_step).
      limit: how many steps a run may skip.
      skipped: of this run's earlier attempts.
    """

    def __init__(self, on_nan: OnNan, limit: int, skipped: int = 0):
        self._on_nan, self._limit, self.skipped = on_nan, limit, skipped

    def counts(self, step: int, ids: Sequence[Any], values: Mapping[str, Any], saved: int) -> bool:
        """Whether the values are finite; False: the step was skipped.

        Args:
          ids: names of this process's examples of each part of the step, by kind.
          saved: step of the last good checkpoint.

        Raises:
          NotFinite: they are not, and the run stops; with step and examples.
        """
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        if not bad:
            return True
        found = f"step {step}: {bad[0]} is {float(values[bad[0]])}{_named(ids)}"
        remedy = "lower the learning rate, clip the gradient, or look at those examples."
        if self._on_nan == "stop":
            raise NotFinite(f"{found}; the last good checkpoint is step {saved}; {remedy}")
        self.skipped += 1
        if self.skipped > self._limit:
            raise NotFinite(
                f"{found}: {self.skipped} steps were skipped, train.skip_at_most is {self._limit}; "
                f"the last good checkpoint is step {saved}; {remedy}"
            )
        announce(f"{found}: skipped ({self.skipped} of at most {self._limit})")
        return False


def _named(ids: Sequence[Any]) -> str:
    if not all(ids):
        return ""
    shown = []
    for name in ids[0]:
        listed = [x for part in ids for x in np.asarray(part[name]).reshape(-1).tolist()]
        more = f", ... ({len(listed)} in all)" if len(listed) > _SHOWN else ""
        shown.append(f"{name} {', '.join(map(str, listed[:_SHOWN]))}{more}")
    return f" on the batch with {'; '.join(shown)}"
