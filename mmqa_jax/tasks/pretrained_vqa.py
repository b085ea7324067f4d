"""What a VQA run starts from: its answer vocabulary, and weights.

`init` is `scratch`; `minilm` or the folder of a BERT (the question encoder alone); GloVe's text
file (openvqa's words); or the workdir of another VQA run, or a converted MCAN, whose answers the
run's may extend (Prophet stage1/model/mcan_for_finetune.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core import distributed
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.answer_vocabulary import (
    FILE,
    AnswerVocabulary,
    make_vocabulary,
    read_vocabulary,
)
from mmqa_jax.data.question_words import QuestionWords, read_glove
from mmqa_jax.data.schema import Question
from mmqa_jax.retrieval.minilm import load_minilm_embedder
from mmqa_jax.tasks.pretrained import Loader, bert_folder, bert_rows
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.pretrained import fill_bert
from mmqa_jax.weights.record import is_weights_folder


def make_answers(section: Any, questions: Sequence[Question]) -> AnswerVocabulary:
    """The answers of a section `answers` (tasks.vqa.AnswersSection).

    Args:
      questions: the training questions.
    """
    if section.file:
        return read_vocabulary(section.file)
    base = read_vocabulary(section.base).answers if section.base else ()
    return make_vocabulary(questions, section.min_questions, base)


def keep_vocabulary(answers: AnswerVocabulary, folder: Path) -> None:
    """Writes answers.json of a run; of a run that resumes, compares it."""
    kept = folder / FILE
    if kept.exists() and read_vocabulary(kept).answers != answers.answers:
        raise UserError(
            f"{kept}: this run began with other answers than the config and data give now; put "
            "the data back, or name another --workdir."
        )
    if jax.process_index() == 0 and not kept.exists():
        answers.save(kept)
    distributed.barrier("answers")


def pretrained_answers(task: Any, answers: AnswerVocabulary) -> int:
    """How many of the answers the model's first head has: those of the weights in `init`."""
    if not is_weights_folder(task.init):
        return len(answers)
    record = read_record(task.init)
    wanted = task.model.kind
    if record.architecture.name == "bert":
        return len(answers)
    place = f"config key init={task.init}"
    if record.architecture.name != wanted:
        raise UserError(
            f"{place}: holds a model of kind {record.architecture.name!r}, {wanted} was expected "
            f"for model.image={task.model.image}; name another."
        )
    old, new = record.config.answers, getattr(record.config, "new_answers", 0)
    known = Path(task.init) / FILE
    theirs = read_vocabulary(known).answers if known.exists() else answers.answers[: old + new]
    if len(theirs) != old + new or answers.answers[: old + new] != theirs:
        raise UserError(
            f"{place}: its head has {old + new} answers, and the first {old + new} of the run's "
            f"{len(answers)} are not the same; set answers.base to the vocabulary that it was "
            "trained with."
        )
    if wanted != "mcan" and len(answers) != old:
        raise UserError(
            f"{place}: its head has {old} answers, the run has {len(answers)}; only "
            "model.image=grid can be extended, so set answers.file to its vocabulary."
        )
    return old


def vqa_loader(task: Any, tokenizer: Any, answers: AnswerVocabulary) -> Loader | None:
    """Loads what `init` names; see this file's beginning."""
    if task.init == "scratch":
        return None

    def load(model: Any) -> None:
        if is_weights_folder(task.init) and read_record(task.init).architecture.name != "bert":
            _extend(model, load_converted(task.init, param_dtype="float32"), task.init)
        elif isinstance(tokenizer, QuestionWords):
            vectors = read_glove(task.init, tokenizer)
            if vectors.shape != model.words.table.shape:
                raise UserError(
                    f"config key init={task.init}: vectors of {vectors.shape[1]} values, the "
                    f"model has {model.words.table.shape[1]}; set model.word_features."
                )
            model.words.table.set_value(vectors.astype(model.words.table.dtype))
        else:
            layers = model.bert.config.layers
            rows = bert_rows(task, tokenizer)
            fill_bert(model.bert, bert_folder(task), num_layers=layers, rows=rows)
        if task.model.answer_embeddings:
            _start_head(model.head, answers)

    return load


def _extend(model: Any, pretrained: nnx.Module, init: str) -> None:
    """Takes all parameters; answers that are new start as in mcan_for_finetune.py.

    Their weights are 0, their biases the mean of the others'.
    """
    theirs = flatten_named(nnx.state(pretrained))
    ours = flatten_named(nnx.state(model))
    differing = [
        f"{name} {list(theirs[name].shape)} (config: {list(leaf.shape)})"
        for name, leaf in ours.items()
        if name in theirs and theirs[name].shape != leaf.shape
    ]
    missing = [n for n in ours if n not in theirs and not n.startswith("new_head/")]
    if differing or missing:
        raise UserError(
            f"config key init={init}: its model differs in {', '.join((differing + missing)[:3])}; "
            "set the section model to its sizes."
        )
    nnx.update(model, nnx.state(pretrained))
    if getattr(model, "new_head", None) is not None and "new_head/kernel" not in theirs:
        kernel, bias = model.new_head.kernel, model.new_head.bias
        kernel.set_value(np.zeros(kernel.shape, kernel.dtype))
        bias.set_value(np.full(bias.shape, model.head.bias[...].mean(), bias.dtype))


def _start_head(head: Any, answers: AnswerVocabulary) -> None:
    """Starts each answer's weights as its MiniLM embedding (ours), and all biases low.

    So answers of few questions are scored by those of like meaning.
    """
    vectors = load_minilm_embedder().embed_questions(list(answers.answers))  # [V, 384]
    # The latent has unit variance: its product with a vector of length 1 too.
    head.kernel.set_value(vectors.T.astype(head.kernel.dtype))
    head.bias.set_value(np.full(head.bias.shape, -np.log(len(answers)), head.bias.dtype))
