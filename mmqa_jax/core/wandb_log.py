"""A run's rows in Weights & Biases, beside metrics.jsonl (`mmqa train --wandb=PROJECT`)."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.paths import absolute

_RECORD = "wandb.json"


def check_wandb(project: str) -> None:
    """UserError if the package is missing."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"--wandb={project}: the package wandb is not installed; "
            "pip install 'mmqa-jax[wandb]', or leave the flag out."
        )


class WandbLog:
    """Logs rows to one Weights & Biases run, which every attempt of a workdir continues.

    Login, server and mode are wandb's own: `wandb login` or WANDB_API_KEY, WANDB_BASE_URL,
    WANDB_MODE (`offline` needs no network; `wandb sync` uploads it later).

    Args:
      project: where the run is listed.
      folder: workdir of the run; wandb.json in it names the run.
      files: folder in the file system for wandb's own files.

    Raises:
      UserError: wandb refuses to start.
    """

    def __init__(self, project: str, folder: Path, files: Path):
        check_wandb(project)
        import wandb

        record, config = folder / _RECORD, folder / "config.json"
        if not record.exists():
            write_json(record, {"id": uuid.uuid4().hex[:12]})
        try:
            self._run: Any = wandb.init(
                project=project,
                id=read_json(record)["id"],
                name=absolute(folder).name,
                dir=str(files),
                config=read_json(config).get("config") if config.exists() else None,
                resume="allow",
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"--wandb={project}: Weights & Biases does not start "
                f"({str(error).splitlines()[0]}); log in with `wandb login`, or set "
                "WANDB_MODE=offline."
            ) from error
        # As a value of its own: an attempt repeats steps of a killed one, and wandb's own counter
        # only moves forward.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs one row."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Ends this attempt's part of the run."""
        self._run.finish()
