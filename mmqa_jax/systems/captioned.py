"""Questions and shots that are shown with the captions of a side file in place of their own.

PromptCap describes a picture for each question (systems/captions.py reads its file). A question
that the file lacks keeps its own caption, is marked, and is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.benchmark import CAPTION
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.prompting.few_shot import OWN_CAPTION
from mmqa_jax.prompting.shots import Shot
from mmqa_jax.systems.captions import Captions


def with_captions(
    questions: Sequence[Question], shots: Sequence[Sequence[Shot]], captions: Captions | None
) -> tuple[Sequence[Question], Sequence[Sequence[Shot]]]:
    """Questions and their shots with the file's captions; None: as they are."""
    if captions is None:
        return questions, shots
    return [_captioned(question, captions) for question in questions], [
        [shot._replace(question=_captioned(shot.question, captions)) for shot in own]
        for own in shots
    ]


def traced(
    predictions: list[Prediction], questions: Sequence[Question], captions: Captions | None
) -> list[Prediction]:
    """The predictions, whose traces say what the file's caption was (None: it has none)."""
    if captions is None:
        return predictions
    return [
        dataclasses.replace(p, trace={**p.trace, "caption": captions.of_question(question)})
        for p, question in zip(predictions, questions, strict=True)
    ]


def check_captions(questions: Sequence[Question], captions: Captions | None) -> None:
    """Raises UserError if the file has a caption for none of the questions: it is of others."""
    if captions is None or not questions:
        return
    if all(captions.of_question(question) is None for question in questions):
        raise UserError(
            f"config key parts.captions.captions: no caption for any of the {len(questions):,} "
            f"questions there, the first is {questions[0].id}; name the file of this split."
        )


def check_no_tags(parts: Mapping[str, Any]) -> None:
    """Raises UserError for a file of tags, which only a setting that shows sources reads."""
    if tags := parts.get("captions", {}).get("tags"):
        raise UserError(
            f"config key parts.captions.tags={tags}: this setting does not read it; set it to ''. "
            "The tags of questions are those that `mmqa prepare` found."
        )


def _captioned(question: Question, captions: Captions) -> Question:
    found = captions.of_question(question)
    changed = {OWN_CAPTION: True} if found is None else {CAPTION: found}
    return dataclasses.replace(question, extra={**question.extra, **changed})
