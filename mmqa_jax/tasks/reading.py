"""The task that a config describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import read_typed
from mmqa_jax.tasks.answer import Answer
from mmqa_jax.tasks.contrastive import Contrastive
from mmqa_jax.tasks.example_retrieval import ExampleRetrieval
from mmqa_jax.tasks.fusion_in_decoder import FusionInDecoder
from mmqa_jax.tasks.language_model import LanguageModel
from mmqa_jax.tasks.modality import QuestionModality
from mmqa_jax.tasks.multimodal_cot import MultimodalCoT
from mmqa_jax.tasks.rerank import Rerank
from mmqa_jax.tasks.seq2seq import Seq2Seq
from mmqa_jax.tasks.task import Task
from mmqa_jax.tasks.vision_language import VisionLanguage
from mmqa_jax.tasks.vqa import VQA

BUILT_IN: tuple[type[Task], ...] = (
    *(Contrastive, Rerank, Answer),  # WebQA
    QuestionModality,
    VQA,  # MAVL
    *(ExampleRetrieval, LanguageModel, VisionLanguage),  # beyond RMR
    *(Seq2Seq, FusionInDecoder, MultimodalCoT),  # the tables' trained baselines
)


def known_tasks() -> dict[str, type[Task]]:
    """Every task by its name: those of the package, and those that a config file defines."""
    return {kind.name: kind for kind in (*BUILT_IN, *_below(Task)) if hasattr(kind, "name")}


def _below(kind: type[Task]) -> Iterator[type[Task]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def read_task(config: Any) -> Task:
    """The task that a config describes."""
    name, known = config.get("task"), known_tasks()
    if name not in known:
        raise UserError(f"config key task={name}: unknown; use one of {', '.join(known)}.")
    return read_typed(known[name], config)


def check_config(
    config: Any, devices: Sequence[jax.Device] | None = None, *, files: bool = True
) -> Task:
    """The task that a config describes, checked: see Task.check."""
    task = read_task(config)
    task.check(devices, files=files)
    return task
