"""The task that a config describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import read_typed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality
from mmqa_jax.inference.fusion_reader import FusionReader
from mmqa_jax.models.t5.network import T5
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.tasks.answer import Answer, load_reader
from mmqa_jax.tasks.contrastive import Contrastive
from mmqa_jax.tasks.example_retrieval import ExampleRetrieval
from mmqa_jax.tasks.fusion_in_decoder import FusionInDecoder, load_fusion_reader
from mmqa_jax.tasks.language_model import LanguageModel
from mmqa_jax.tasks.modality import QuestionModality
from mmqa_jax.tasks.multimodal_cot import MultimodalCoT
from mmqa_jax.tasks.rerank import Rerank
from mmqa_jax.tasks.reranker import Reranker
from mmqa_jax.tasks.retriever import Retriever
from mmqa_jax.tasks.seq2seq import Seq2Seq
from mmqa_jax.tasks.task import Options, Task, read_run
from mmqa_jax.tasks.vision_language import VisionLanguage
from mmqa_jax.tasks.vqa import VQA
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder

BUILT_IN: tuple[type[Task], ...] = (
    *(Contrastive, Rerank, Answer),  # WebQA
    QuestionModality,
    VQA,  # MAVL
    *(Retriever, Reranker),
    *(ExampleRetrieval, LanguageModel, VisionLanguage),  # beyond RMR
    *(Seq2Seq, FusionInDecoder, MultimodalCoT),  # the tables' trained baselines
)


def known_tasks() -> dict[str, type[Task]]:
    """Every task by its name: those of the package, and those that a config file defines."""
    return {kind.name: kind for kind in (*BUILT_IN, *_below(Task)) if hasattr(kind, "name")}


def _below(kind: type[Task]) -> Iterator[type[Task]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _below(subclass)


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


# Opens what answers in words: a run of VLP's reader, or of Fusion-in-Decoder.


def open_reader(folder: str | Path, corpus: Corpus, options: Options | None = None) -> Any:
    """The trained reader of a run over a corpus, with other `options` of `inference`."""
    task, _ = read_run(folder, (Answer, FusionInDecoder))
    load = load_fusion_reader if isinstance(task, FusionInDecoder) else load_reader
    return load(folder, corpus, options)


def open_published_reader(
    folder: str | Path, tokenizer: str, config: Any, corpus: Corpus
) -> FusionReader:
    """A published or converted T5 as Fusion-in-Decoder.

    Args:
      tokenizer: folder of its tokenizer; "": the model's.
      config: of task fusion_in_decoder, whose passages and inference are used.
    """
    task, path = read_task(config), Path(folder)
    if not isinstance(task, FusionInDecoder):
        raise UserError(
            f"config key parts.fusion_reader.config: describes task {task.task}; name a config of "
            "fusion_in_decoder."
        )
    mesh, text = task.serving_mesh(), open_text_tokenizer(tokenizer or path)
    if is_weights_folder(path):
        model = load_converted(path, mesh=mesh)
    else:
        model = load_published("t5", path, mesh=mesh)
    if not isinstance(model, T5) or text.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{path}: holds no T5, or one with fewer tokens than its tokenizer; name a T5 and its "
            "own tokenizer (parts.fusion_reader.tokenizer)."
        )
    return FusionReader(task, corpus, text, model)


def reader_modality(folder: str | Path) -> Modality | None:
    """The modality of the sources that the reader of a run was trained on, if only one."""
    task, _ = read_run(folder, (Answer, FusionInDecoder))
    return task.data.modality
