"""Prophet's stage 1 in use (prophet/stage1/heuristics.py): what its prompts are made of."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out
from mmqa_jax.data.corpus import open_corpus, split_questions, trains_on
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.vqa import has_answers, score_candidates
from mmqa_jax.prompting.examples import side_files as heuristics
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.tasks.task import read_run
from mmqa_jax.tasks.vqa import VQA, FoldedData, load_prophets_mcan, load_vqa_model
from mmqa_jax.weights.record import is_converted

EXAMPLES = 100  # Prophet's EXAMPLE_NUM


def write_stage(
    data: Path,
    models: Sequence[Path],
    out: Path,
    *,
    split: str,
    examples_split: str,
    config: ConfigDict | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Candidates of the questions of a split and of their examples, and which examples are near.

    A model serves the questions of `split` that it was not trained on; its examples are those of
    `examples_split` that it was trained on. An example that no model serves as a question gets the
    candidates of the model that was trained on it, as in Prophet. Converted checkpoints lack a
    config: the section `data` of the one that is given says what they were trained on. `options`:
    see tasks.embedder.open_embedder.
    """
    check_out(out, folder=True)
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    library = [q for q in split_questions(corpus, data, examples_split) if q.answers]
    described = None if config is None else _vqa_task(config)
    trained = [_trained_on(folder, described) for folder in models]
    shares = [_share(data, questions, library) for data in trained]
    _check(models, shares, questions, split, examples_split)
    served: heuristics.Candidates = {}
    of_examples: heuristics.Candidates = {}
    examples: dict[str, list[str]] = {}
    missing, placed = 0, {}
    for folder, share in zip(models, shares, strict=True):
        if described is None:
            model = load_vqa_model(folder, corpus, options)
        else:
            model = load_prophets_mcan(folder, described, options)
        print(f"candidates: {model.serving}", file=sys.stderr)
        placed = model.serving.to_json()
        candidates, latents = model.candidates_and_latents(share.asked)
        found_own, latents_own = model.candidates_and_latents(share.examples)
        served |= candidates
        of_examples |= found_own
        examples |= nearest(share.asked, latents, share.examples, latents_own)
        if model.features is not None:
            model.features.warn_missing()
            missing += model.features.missing.count
    out.mkdir(parents=True, exist_ok=True)
    heuristics.write_candidates(out / heuristics.CANDIDATES, of_examples | served)
    heuristics.write_answer_aware(out / heuristics.ANSWER_AWARE, examples)
    scored = [question for question in questions if has_answers(question)]
    scores = score_candidates(scored, served) if scored else {}
    for name, value in scores.items():
        print(f"{name:<12} {value:.4f}")
    print(f"{len(served):,} questions, {len(of_examples):,} examples: {out}")
    return {
        "questions": len(served),
        "examples": len(of_examples),
        "pictures_without_features": missing,
        "scores": scores,
        "out": str(out),
        **placed,
    }


def nearest(
    questions: Sequence[Question],
    latents: Float32[np.ndarray, "n D"],
    examples: Sequence[Question],
    of_examples: Float32[np.ndarray, "N D"],
) -> dict[str, list[str]]:
    """question_id -> ids of the examples whose latents have the highest cosine, best first."""
    units, their_units = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        for x in (latents, of_examples)
    )
    examples_of = {}
    for question, unit in zip(questions, units, strict=True):
        order = np.argsort(-(their_units @ unit), kind="stable")[:EXAMPLES]
        examples_of[question.id] = [examples[row].id for row in order]
    return examples_of


class _Share(NamedTuple):
    """The questions that one model serves."""

    asked: list[Question]
    examples: list[Question]  # its examples


def _vqa_task(config: ConfigDict) -> VQA:
    """The task that a config of converted checkpoints describes."""
    task = read_task(config)
    if not isinstance(task, VQA):
        raise UserError(f"--config: is of the task {task.name}, vqa was expected; name another.")
    return task


def _trained_on(folder: Path, described: VQA | None) -> FoldedData:
    """The section `data` of a model's run, or of the config that stands for it."""
    converted = is_converted(folder)
    if converted != (described is not None):
        remedy = (
            "a converted checkpoint does not say how it was trained; give its config, such as "
            "--config=configs/okvqa/mcan.py:finetune"
            if converted
            else "--config is for checkpoints that `mmqa convert` wrote, which this is not; leave "
            "it out"
        )
        raise UserError(f"--model {folder}: {remedy}.")
    return (read_run(folder, (VQA,))[0] if described is None else described).data


def _share(data: FoldedData, questions: Sequence[Question], library: Sequence[Question]) -> _Share:
    return _Share(
        [question for question in questions if not trains_on(data, question)],
        [question for question in library if trains_on(data, question)],
    )


def _check(
    models: Sequence[Path],
    shares: Sequence[_Share],
    questions: Sequence[Question],
    split: str,
    examples_split: str,
) -> None:
    served: set[str] = set()
    for folder, (asked, examples) in zip(models, shares, strict=True):
        if not asked or not examples:
            what = f"none of {examples_split}" if asked else f"all of {split}"
            raise UserError(
                f"--model {folder}: was trained on {what}; name another --split or "
                "--examples_split."
            )
        twice = sum(question.id in served for question in asked)
        if twice:
            raise UserError(
                f"--model {folder}: {twice:,} of its questions are another model's already; name "
                "runs that were trained on different folds of one data set."
            )
        served |= {question.id for question in asked}
    if left := len(questions) - len(served):
        raise UserError(
            f"--model: {left:,} of the {len(questions):,} questions of {split} are in every "
            "model's training; add a run of another fold, or name another --split."
        )
