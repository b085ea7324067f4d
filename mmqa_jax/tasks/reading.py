"""The task that a config describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import read_typed
from mmqa_jax.tasks.answer import Answer
from mmqa_jax.tasks.contrastive import Contrastive
from mmqa_jax.tasks.example_retrieval import ExampleRetrieval
from mmqa_jax.tasks.language_model import LanguageModel
from mmqa_jax.tasks.modality import ModalityTask
from mmqa_jax.tasks.rerank import Rerank
from mmqa_jax.tasks.task import Task
from mmqa_jax.tasks.vqa import VQATask

TASKS: dict[str, type[Task]] = {
    kind.name: kind
    for kind in (
        *(Contrastive, Rerank, Answer),  # WebQA
        ModalityTask,
        VQATask,  # MAVL
        *(ExampleRetrieval, LanguageModel),  # beyond RMR
    )
}


def read_task(config: Any) -> Task:
    """The task that a config describes.

    Raises:
      UserError: an unknown task; a key that is unknown or missing, or a value of another type.
    """
    name = config.get("task")
    if name not in TASKS:
        raise UserError(f"config key task={name}: unknown; use one of {', '.join(TASKS)}.")
    return read_typed(TASKS[name], config)


def check_config(
    config: Any, devices: Sequence[jax.Device] | None = None, *, files: bool = True
) -> Task:
    """The task that a config describes, checked: see Task.check."""
    task = read_task(config)
    task.check(devices, files=files)
    return task
