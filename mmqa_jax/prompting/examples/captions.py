"""Descriptions of pictures from side files, for prompts to a model that does not see.

    captions TSV     name TAB [{"caption", "conf"}, ...]              VinVL's and Oscar+'s (PICa)
    captions JSON    {name: {"pred_captions": [...]}} or {name: text} PromptCap's, Prophet's
    tags TSV         name TAB [{"class", "conf"}, ...]                object tags (PICa)

A name is the id of a question (PromptCap describes a picture for a question), of a picture
(image_id: VinVL and Prophet) or of a source. A question that PromptCap's file lacks keeps its own
caption, is marked, and is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats.coco import read_captions, read_named_captions, read_scored_tsv
from mmqa_jax.data.formats.official import CAPTION
from mmqa_jax.data.schema import Prediction, Question, Source
from mmqa_jax.prompting.examples.library import Shot
from mmqa_jax.prompting.few_shot import OWN_CAPTION


class Captions:
    """Captions and tags by name; with `by_picture` a question's caption has the name of its
    picture, not its own."""

    def __init__(
        self,
        captions: Mapping[str, str],
        tags: Mapping[str, tuple[str, ...]] | None = None,
        *,
        by_picture: bool = False,
    ):
        self._captions, self._tags, self._by_picture = captions, tags or {}, by_picture

    def of_question(self, question: Question) -> str | None:
        """The caption of a question's picture; None where there is none."""
        return self._captions.get(_picture(question) if self._by_picture else question.id)

    def of_source(self, source: Source) -> tuple[str, tuple[str, ...]]:
        """Caption and tags of a source's picture; empty where there are none."""
        return self._captions.get(source.id, ""), self._tags.get(source.id, ())


def open_captions(captions: str, tags: str = "", questions: Sequence[Question] = ()) -> Captions:
    """Reads the files; UserError names the one that is malformed.

    Args:
      questions: that are asked. Whether captions have the names of questions or of pictures is told
        by which of the two are more often in the file, since some numbers are of both kinds: those
        of 30 questions of OK-VQA are also of other questions' pictures.
    """
    path = Path(captions)
    if path.suffix == ".json":
        by_name = read_named_captions(path)
    else:
        by_name = {str(name): text for name, text in read_captions(path).items()}
    names: dict[str, tuple[str, ...]] = {}
    if tags:
        for name, rows in read_scored_tsv(Path(tags), "class").items():
            names[str(name)] = tuple(row["class"] for row in rows)
    of_questions = sum(question.id in by_name for question in questions)
    of_pictures = sum(_picture(question) in by_name for question in questions)
    return Captions(by_name, names, by_picture=of_pictures > of_questions)


def _picture(question: Question) -> str:
    """The number of a question's picture in COCO; "" where it has none."""
    return str(question.extra.get("image_id", ""))


def with_captions(
    questions: Sequence[Question], shots: Sequence[Sequence[Shot]], captions: Captions | None
) -> tuple[Sequence[Question], Sequence[Sequence[Shot]]]:
    """Questions and their shots with the file's captions; None: as they are."""
    if captions is None:
        return questions, shots
    return [_captioned(question, captions) for question in questions], [
        [shot._replace(question=_captioned(shot.question, captions)) for shot in chosen]
        for chosen in shots
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


def check_no_tags(tags: str) -> None:
    """Raises UserError for a file of tags, which only a setting that shows sources reads."""
    if tags:
        raise UserError(
            f"config key parts.captions.tags={tags}: this setting does not read it; set it to ''. "
            "The tags of questions are those that `mmqa prepare` found."
        )


def caption_sentence(question: Question) -> str:
    """The picture's caption, which ends with a period (Prophet)."""
    caption = str(question.extra.get(CAPTION, "")).strip()
    return caption if not caption or caption.endswith(".") else f"{caption}."


def _captioned(question: Question, captions: Captions) -> Question:
    caption = captions.of_question(question)
    changed = {OWN_CAPTION: True} if caption is None else {CAPTION: caption}
    return dataclasses.replace(question, extra={**question.extra, **changed})
