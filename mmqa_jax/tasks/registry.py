"""The task that a config describes."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import read_typed
from mmqa_jax.tasks.task import Task

# A task's name -> its class in the file of that name; the file is imported when a config names it.
BUILT_IN = {
    **{"contrastive": "Contrastive", "rerank": "Rerank", "answer": "Answer"},  # WebQA
    "modality": "QuestionModality",
    "vqa": "VQA",  # MAVL
    **{"retriever": "Retriever", "reranker": "Reranker"},
    "example_retrieval": "ExampleRetrieval",  # beyond RMR, as the next two
    "language_model": "LanguageModel",
    "vision_language": "VisionLanguage",
    "seq2seq": "Seq2Seq",  # the tables' trained baselines, as the next two
    "fusion_in_decoder": "FusionInDecoder",
    "multimodal_cot": "MultimodalCoT",
}


def known_tasks() -> dict[str, type[Task]]:
    """Every task by its name: those of the package, and those that a config file defines."""
    return {name: _built_in(name) for name in BUILT_IN} | _defined()


def _built_in(name: str) -> type[Task]:
    return getattr(importlib.import_module(f"mmqa_jax.tasks.{name}"), BUILT_IN[name])


def _defined() -> dict[str, type[Task]]:
    """The tasks whose classes are there by now, by name; of one name the last that was defined."""
    return {kind.name: kind for kind in _below(Task) if hasattr(kind, "name")}


def _below(kind: type[Task]) -> Iterator[type[Task]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _below(subclass)


def read_task(config: Any) -> Task:
    """The task that a config describes."""
    name = config.get("task")
    if name in BUILT_IN:
        _built_in(name)  # defines it
    defined = _defined()
    if name not in defined:
        raise UserError(f"config key task={name}: unknown; use one of {', '.join(known_tasks())}.")
    return read_typed(defined[name], config)


def check_config(
    config: Any, devices: Sequence[jax.Device] | None = None, *, files: bool = True
) -> Task:
    """The task that a config describes, checked: see Task.check."""
    task = read_task(config)
    task.check(devices, files=files)
    return task
