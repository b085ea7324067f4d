"""Metrics of a run: rows in metrics.jsonl, and the same in TensorBoard and Weights & Biases."""

import importlib.util
import json
import math
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json, read_json, write_json, write_jsonl
from mmqa_jax.core.paths import absolute, as_path, in_store, upload

METRICS = "metrics.jsonl"
_PUT_SECONDS = 30.0  # a store takes whole files only: how often they are put there


class MetricsWriter:
    """Appends rows `{"step": n, "time": unix seconds, name: value, ...}` to metrics.jsonl.

    Several rows may share a step (training and evaluation). A run that resumes from step s
    drops the rows after s that the killed attempt wrote, so that no step appears twice. Only
    process 0 writes.

    In an object store, which cannot append, both files grow on this host and are put there twice a
    minute, by `flush`, and at the end.

    Args:
      folder: workdir of the run.
      restored_step: step of the checkpoint that the run resumes from, 0 for a new run.
      wandb: project in Weights & Biases, which gets the rows too; None: none does.
    """

    def __init__(
        self, folder: str | os.PathLike, *, restored_step: int = 0, wandb: str | None = None
    ):
        import jax

        self._file: Any = None
        self._events: Any = None
        self._wandb: WandbLog | None = None
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._put = False  # whether the files are in the store
        if jax.process_index() != 0:
            return
        self._folder = here = as_path(folder)
        rows = read_metrics(folder)
        earlier = [row for row in rows if row["step"] <= restored_step]
        if in_store(folder):
            self._temporary = tempfile.TemporaryDirectory(prefix="mmqa-metrics-")
            here = Path(self._temporary.name)
        here.mkdir(parents=True, exist_ok=True)
        if wandb is not None:
            self._wandb = WandbLog(wandb, self._folder, here)
        self._here, self._put_at = here, time.monotonic()
        if (self._folder / METRICS).exists():
            write_jsonl(here / METRICS, earlier)  # also drops a line that a kill cut short
        self._file = open(here / METRICS, "a", encoding="utf-8")  # noqa: SIM115
        # purge_step hides the dropped steps of earlier event files in TensorBoard.
        self._events = _summary_writer()(str(here), purge_step=restored_step + 1 if rows else None)
        self.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row; it is on disk when this returns."""
        if self._file is None:
            return
        row = {"step": int(step), "time": round(time.time(), 3)}
        numbers = {name: float(value) for name, value in values.items()}
        # JSON has no NaN; null stands for it.
        row.update({n: value if math.isfinite(value) else None for n, value in numbers.items()})
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        if self._wandb is not None:
            self._wandb.write(step, numbers)
        if time.monotonic() - self._put_at > _PUT_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Puts all rows into the store, if the run's folder is in one.

        Call it before the checkpoint that a resumed run begins with is complete.
        """
        if self._temporary is None:
            return
        if self._put and not (self._folder / METRICS).exists():
            return  # the workdir was deleted, and is not made anew
        self._put = True
        for file in self._here.iterdir():
            if file.is_file():  # W&B's folder stays here
                upload(file, self._folder / file.name)
        self._put_at = time.monotonic()

    def close(self) -> None:
        """Closes the files, and the run in Weights & Biases."""
        if self._file is None:
            return
        self._file.close()
        self._events.close()
        self._file = None
        self.flush()
        if self._wandb is not None:  # its files are in the temporary folder too
            self._wandb.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summary_writer() -> Any:
    """TensorBoard's writer, without PyTorch, which tensorboardX imports wherever it is installed.

    That takes more than a second of every start, and only its tensors need it.
    """
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # importing it fails
    try:
        from tensorboardX import SummaryWriter
    finally:
        if absent:
            del sys.modules["torch"]
    return SummaryWriter


def read_metrics(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; a last line cut short by a kill is left out."""
    path = as_path(folder) / METRICS
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder, a file was expected; move it away.") from error
    rows, lines = [], data.splitlines()
    for number, line in enumerate(lines, start=1):
        where, remedy = f"{path}, line {number}", "repair or remove that line"
        try:
            row = parse_json(line, where, remedy=remedy)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise UserError(f"{where}: not a row of metrics; {remedy}.")
        except UserError:
            if number < len(lines) or data.endswith(b"\n"):  # not cut by a kill
                raise
        else:
            rows.append(row)
    return rows


# A run's rows in Weights & Biases, beside metrics.jsonl (`mmqa train --wandb=PROJECT`).

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
