"""The task of a training run, read again from the run's folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import read_typed
from mmqa_jax.core.workdir import read_config
from mmqa_jax.tasks.task import Task
from mmqa_jax.weights.record import read_metadata

T = TypeVar("T", bound=Task)
Options = Mapping[str, Any]  # of the section `inference`, in place of the run's own


def read_run(
    folder: str | os.PathLike, kinds: tuple[type[T], ...], options: Options | None = None
) -> tuple[T, Any]:
    """The task of a run, and the run's tokenizer.

    Args:
      kinds: the tasks whose runs are expected.
      options: of the section `inference`, in place of the run's own.
    """
    folder = Path(folder)
    named = {kind.name: kind for kind in kinds}
    found = read_metadata(folder).get("task")
    if found not in named:
        raise UserError(
            f"{folder}: holds a model of task {found!r}, {' or '.join(named)} was "
            "expected; name the workdir of such a training run."
        )
    config = read_config(folder)
    if config.get("task") != found:
        raise UserError(
            f"{folder / 'config.json'}: belongs to another run than model.json; copy the run "
            "again, or train it again in a new --workdir."
        )
    task = read_typed(named[found], config)
    return with_options(task, options).in_folder(folder), task.open_tokenizer(folder)


def with_options(task: T, options: Options | None) -> T:
    """The task with other values in its section `inference`."""
    if not options:
        return task
    return dataclasses.replace(task, inference=dataclasses.replace(task.inference, **options))
