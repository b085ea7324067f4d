"""The weights of the best step so far, by validation during training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from mmqa_jax.core.checkpoints.checkpoint import Best, Checkpoints, find_damage_together
from mmqa_jax.core.hosts import distributed
from mmqa_jax.training.state import Model, finished
from mmqa_jax.weights.folder import replace_trained
from mmqa_jax.weights.record import RECORD, RUN_FILES, WEIGHTS, read_metadata

BEST = "best"  # in a run's workdir
_KEPT = ("config.json", *RUN_FILES)


class BestWeights:
    """The folder `best` of a workdir: a weights folder of the run's best step so far.

    It is derived from the committed checkpoints, of which the best one is kept, and so it is never
    ahead of them: a killed run that resumes has the same best step as an uninterrupted one. Where
    the best one was set aside as damaged, the folder stays until a better step comes.

    Args:
      workdir: of the run; its config.json, answers.json and the files of its tokenizer are copied,
        so that the folder is all that other verbs need.
      model: the run's.
      metadata: for model.json.
      metric: what the checkpoints' scores are.
      finish: as of training.loop.train.
    """

    def __init__(
        self,
        workdir: Path,
        checkpoints: Checkpoints,
        model: Model,
        metadata: Mapping[str, Any],
        metric: str,
        finish: Callable[[nnx.Module], nnx.Module] | None = None,
    ):
        self._workdir, self._folder = workdir, workdir / BEST
        self._checkpoints, self._model, self._finish = checkpoints, model, finish
        self._metadata, self._metric = metadata, metric
        self._kept: Best | None = None  # what the folder holds and no checkpoint

    def beats(self, score: float | None) -> bool:
        """Whether a score is higher than the best so far."""
        if score is None:
            return False
        known = (self._checkpoints.best(), self._kept)
        return all(best is None or score > best.score for best in known)

    def write(self, params: Any, frozen: Any) -> None:
        """Writes the parameters of the step that was saved last, which is the best."""
        self._checkpoints.wait()
        best = self._checkpoints.best()
        assert best is not None
        self._write(params, frozen, best)

    def repair(self, params: Any, frozen: Any) -> None:
        """On resuming: writes the folder if a kill came between checkpoint and folder.

        Or if its files are damaged since.

        Args:
          params: abstract, with the shardings that the parameters shall have.
          frozen: the run's parameters that are not trained.
        """
        best = self._checkpoints.best()
        written = (self._folder / RECORD).exists()
        places = (self._folder, self._folder / WEIGHTS) if written else ()
        damaged = [place for place in places if find_damage_together(place) is not None]
        record = read_metadata(self._folder) if written and not damaged else {}
        distributed.barrier("the best step is read")
        self._kept = self._better(record, best)
        if best is not None and self._kept is None and record.get("step") != best.step:
            self._write(self._checkpoints.restore_params(best.step, params), frozen, best)

    def _better(self, record: Mapping[str, Any], best: Best | None) -> Best | None:
        """The step of the folder's record, if this run has taken it and it beats `best`."""
        step, value = record.get("step"), record.get("value")
        if record.get("metric") != self._metric or not isinstance(value, int | float):
            return None
        if step > (self._checkpoints.latest_step() or 0):
            return None
        held = Best(step, value)
        return held if best is None or (value, -step) > (best.score, -best.step) else None

    def _write(self, params: Any, frozen: Any, best: Best) -> None:
        files = [self._workdir / name for name in _KEPT]
        replace_trained(
            self._folder,
            *finished(self._model, params, frozen, self._finish),
            {**self._metadata, "step": best.step, "metric": self._metric, "value": best.score},
            [file for file in files if file.exists()],
        )


def read_best(workdir: Path) -> dict[str, Any] | None:
    """Step, metric, value and weights folder of the best step; None if none is kept."""
    if not (workdir / BEST / RECORD).exists():
        return None
    record = read_metadata(workdir / BEST)
    return {name: record[name] for name in ("step", "metric", "value")} | {
        "weights": str(workdir / BEST)
    }
