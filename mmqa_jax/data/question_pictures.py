"""The pictures of questions: a question's own or, as in WebQA and Atlas, those of its sources."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from mmqa_jax.core.errors import UserError, first_names
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.datasets.benchmark import CAPTION
from mmqa_jax.data.images import BrokenPictures
from mmqa_jax.data.picture_store import PictureStore
from mmqa_jax.data.schema import Question, Source

GoldContext = Literal["pictures", "sources"]


class QuestionPictures:
    """Pixels of the pictures that a question is asked on.

    Args:
      pictures: the corpus's, as the model takes them.
    """

    def __init__(self, pictures: PictureStore):
        self.store = pictures

    @property
    def missing(self) -> BrokenPictures:
        """Pictures that could not be decoded."""
        return self.store.broken

    def rows(self, question: Question) -> list[int]:
        """Rows of the gold sources that are pictures, in the order in which they are named."""
        return [r for r in self.store.corpus.positive_rows(question) if self._is_picture(r)]

    def count(self, question: Question) -> int:
        """How many pictures a question has; decodes none."""
        return 1 if question.image is not None else len(self.rows(question))

    def of(self, question: Question) -> list[UInt8[np.ndarray, "S S 3"]]:
        """The question's own picture, or else its gold pictures; a broken one is left out."""
        if question.image is not None:
            found = [self.store.question_pixels(question)]
        else:
            found = [self.store.pixels(row) for row in self.rows(question)]
        return [pixels for pixels in found if pixels is not None]

    def warn_missing(self) -> None:
        """Says on stderr how many pictures could not be decoded."""
        if self.missing.count:
            print(
                f"pictures that cannot be decoded, left out: {self.missing.count} "
                f"({first_names(self.missing.names)}).",
                file=sys.stderr,
            )

    def _is_picture(self, row: int) -> bool:
        return self.store.corpus.sources[row].image is not None


def with_gold_sources(corpus: Corpus, context: GoldContext) -> Corpus:
    """The corpus with its gold sources brought by the questions, as VQA's bring a picture.

    A question's picture is then its first gold picture, and its caption what its gold sources say,
    in their order. So the systems of picture questions (PICa, Prophet, MAVL, RMR) run on WebQA and
    Atlas. A question on snippets alone has no picture.

    Args:
      context: the caption is that of the gold `pictures`, or the text of all gold `sources`.
    """
    if not any(question.positives for question in corpus.questions()):
        raise UserError(
            f"config key data.context={context}: no question of this corpus names a gold source; "
            "leave it out."
        )

    def brought(question: Question) -> Question:
        gold = [corpus.sources[row] for row in corpus.positive_rows(question)]
        pictures = [source for source in gold if source.modality == "image"]
        said = " ".join(map(_sentence, gold if context == "sources" else pictures))
        return dataclasses.replace(
            question,
            image=pictures[0].image if pictures else None,
            extra={**question.extra, CAPTION: said},
        )

    return corpus.with_questions([brought(question) for question in corpus.questions()])


def _sentence(source: Source) -> str:
    text = " ".join(source.text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def stacked(
    pictures: Sequence[Sequence[np.ndarray]], slots: int, size: int
) -> dict[str, np.ndarray]:
    """Pictures of n questions as arrays: `pixels` uint8[n, slots, size, size, 3], `shown` bool.

    Empty slots are zeros; pictures beyond the slots are dropped.
    """
    pixels = np.zeros((len(pictures), slots, size, size, 3), np.uint8)
    shown = np.zeros((len(pictures), slots), bool)
    for row, own in enumerate(pictures):
        for slot, picture in enumerate(own[:slots]):
            pixels[row, slot] = picture
            shown[row, slot] = True
    return {"pixels": pixels, "shown": shown}
