"""Prophet's stage 1 in use (prophet/stage1/heuristics.py): what its prompts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.splits import split_questions, trains_on
from mmqa_jax.evaluation.candidates import score_candidates
from mmqa_jax.evaluation.vqa import has_answers
from mmqa_jax.inference.loading import load_vqa_model
from mmqa_jax.prompting.candidates import (
    ANSWER_AWARE,
    CANDIDATES,
    Candidates,
    write_answer_aware,
    write_candidates,
)

EXAMPLES = 100  # Prophet's EXAMPLE_NUM


def write_stage(
    data: Path, models: Sequence[Path], out: Path, *, split: str, examples_split: str
) -> dict[str, Any]:
    """Candidates of the questions of a split and of their examples, and which examples are near.

    A model serves the questions of `split` that it was not trained on; its examples are those of
    `examples_split` that it was trained on. An example that no model serves as a question gets the
    candidates of the model that was trained on it, as in Prophet.

    Raises:
      UserError: a question that no model may serve, or two do.
    """
    check_out(out, folder=True)
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    library = [q for q in split_questions(corpus, data, examples_split) if q.answers]
    served: Candidates = {}
    of_examples: Candidates = {}
    examples: dict[str, list[str]] = {}
    missing = 0
    for folder in models:
        model = load_vqa_model(folder)
        asked = [q for q in questions if not trains_on(model.config.data, q)]
        own = [q for q in library if trains_on(model.config.data, q)]
        _check(folder, asked, own, served, split, examples_split)
        found, latents = model.candidates_and_latents(asked)
        found_own, latents_own = model.candidates_and_latents(own)
        served |= found
        of_examples |= found_own
        examples |= nearest(asked, latents, own, latents_own)
        missing += model.features.missing.count if model.features else 0
    left = [question.id for question in questions if question.id not in served]
    if left:
        raise UserError(
            f"--model: {len(left):,} of the {len(questions):,} questions of {split} are in all "
            "models' training; add a run of another fold, or name another --split."
        )
    out.mkdir(parents=True, exist_ok=True)
    write_candidates(out / CANDIDATES, of_examples | served)
    write_answer_aware(out / ANSWER_AWARE, examples)
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
    found = {}
    for question, unit in zip(questions, units, strict=True):
        order = np.argsort(-(their_units @ unit), kind="stable")[:EXAMPLES]
        found[question.id] = [examples[row].id for row in order]
    return found


def _check(
    folder: Path,
    asked: Sequence[Question],
    own: Sequence[Question],
    served: Candidates,
    split: str,
    examples_split: str,
) -> None:
    if not asked or not own:
        what = f"trained on all of {split}" if not asked else f"trained on none of {examples_split}"
        raise UserError(f"--model {folder}: was {what}; name another --split or --examples_split.")
    twice = sum(question.id in served for question in asked)
    if twice:
        raise UserError(
            f"--model {folder}: {twice:,} of its questions are another model's already; name runs "
            "that were trained on different folds of one data set."
        )
