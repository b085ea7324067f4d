"""Training batches of the VQA models: questions on pictures, and soft targets of their answers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from mmqa_jax.data.answers import AnswerVocabulary
from mmqa_jax.data.batches.feed import (
    Batches,
    FeedConfig,
    PlannedBatch,
    Table,
    augmented,
    feed_batches,
)
from mmqa_jax.data.batches.packing import Bucket, Packed, RawExample, RawSource
from mmqa_jax.data.formats.official import CAPTION
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.published_tokenizers import QuestionWords
from mmqa_jax.data.records.grid_records import PictureFeatures
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer, cut, text_inputs


def vqa_batches(
    inputs: Sequence[VQAInputs],
    questions: Sequence[Question],
    vocabulary: AnswerVocabulary,
    feed: FeedConfig,
    *,
    lengths: Sequence[int],
) -> Batches:
    """Questions with the target of every answer.

    A batch: question_ids int32[B, L] and image, see data.batches.vqa; targets float32[B, V]; index
    int32[B]: indices into `questions`; truncated int32[B]: tokens lost.

    Args:
      inputs: one for each length; a question goes to the first that loses nothing of it.
      feed: an augmentation changes questions on pixels (PatchInputs) and their keywords alone.
      lengths: increasing, one static shape each.
    """
    targets = [vocabulary.targets(question) for question in questions]
    lost = np.stack([part.lost(questions) for part in inputs])  # [lengths, N]
    fits = (lost == 0) | (np.arange(len(lost)) == len(lost) - 1)[:, None]
    everything = {"index": np.arange(len(questions)), "bucket": fits.argmax(axis=0)}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        rows, part = table["index"], inputs[planned.bucket]
        batch_questions, wanted = [questions[row] for row in rows], [targets[row] for row in rows]
        if feed.augment is not None and isinstance(part, PatchInputs):
            examples = [
                augmented(part.raw(question), feed, planned, n)
                for n, question in enumerate(batch_questions)
            ]
            arrays = part.encode(examples)
            wanted = [
                vocabulary.targets(dataclasses.replace(question, keywords=example.keywords))
                for question, example in zip(batch_questions, examples, strict=True)
            ]
        else:
            arrays = part(batch_questions)
        return {**arrays, "targets": vocabulary.dense(wanted), "index": rows.astype(np.int32)}

    shapes = [Bucket(0, length) for length in lengths]
    return feed_batches(lambda _: everything, shapes, make, feed, inputs[0].broken)


# What a VQA model reads of a question: its tokens, and the picture or what stands for it.
#
# One class for each MCAN; all give `question_ids` int32[B, L] and `image`, and count in
# `truncated` int32[B] the tokens that did not fit; `lost` counts them without reading a picture.


class VQAInputs(abc.ABC):
    """Questions -> the arrays of a batch."""

    broken: tuple[BrokenPictures, ...] = ()  # the counters of pictures that could not be read

    @abc.abstractmethod
    def __call__(self, questions: Sequence[Question]) -> Packed:
        """Returns the arrays of a batch."""

    def lost(self, questions: Sequence[Question]) -> Int32[np.ndarray, " n"]:
        """How many tokens, or words, of each question do not fit."""
        return self._tokens(questions)[1]

    @abc.abstractmethod
    def _tokens(self, questions: Sequence[Question]) -> tuple[np.ndarray, np.ndarray]:
        """Returns `question_ids`, and how many tokens each question loses."""


class GridInputs(VQAInputs):
    """Inputs of Prophet's MCAN: `image` float32[B, cells, F], zeros for absent features.

    Args:
      tokenizer: BERT's.
      features: of the pictures, by image id.
      length: tokens of a question, [CLS] and [SEP] among them.
    """

    def __init__(self, tokenizer: Tokenizer, features: PictureFeatures, length: int):
        self._tokenizer, self._features, self._length = tokenizer, features, length
        self.broken = (features.missing,)

    def __call__(self, questions: Sequence[Question]) -> Packed:
        ids, lost = self._tokens(questions)
        image = self._features.batch([image_id(question) for question in questions])
        return {"question_ids": ids, "image": image, "truncated": lost}

    def _tokens(self, questions: Sequence[Question]) -> tuple[np.ndarray, np.ndarray]:
        return _question_ids([q.question for q in questions], self._length, self._tokenizer)


class PatchInputs(VQAInputs):
    """Inputs of MCAN on raw pictures: `image` has `pixels` and `shown`, see `stacked`.

    Args:
      tokenizer: BERT's.
      pictures: of the questions.
      length: tokens of a question, [CLS] and [SEP] among them.
      slots: pictures of a question, at most.
    """

    def __init__(self, tokenizer: Tokenizer, pictures: QuestionPictures, length: int, slots: int):
        self._tokenizer, self._pictures = tokenizer, pictures
        self._length, self._slots = length, slots
        self.broken = (pictures.missing,)

    def __call__(self, questions: Sequence[Question]) -> Packed:
        return self.encode([self.raw(question) for question in questions])

    def raw(self, question: Question) -> RawExample:
        """A question with its pixels, as an augmentation may change them."""
        sources = tuple(RawSource("", pixels=picture) for picture in self._pictures.of(question))
        return RawExample(question.question, sources, "", question, question.keywords)

    def encode(self, examples: Sequence[RawExample]) -> Packed:
        """The arrays of `raw` questions."""
        ids, lost = _question_ids([e.question for e in examples], self._length, self._tokenizer)
        pixels = [[source.pixels for source in example.sources] for example in examples]
        image = stacked(pixels, self._slots, self._pictures.store.size)
        return {"question_ids": ids, "image": image, "truncated": lost}

    def _tokens(self, questions: Sequence[Question]) -> tuple[np.ndarray, np.ndarray]:
        return _question_ids([q.question for q in questions], self._length, self._tokenizer)


class RegionInputs(GridInputs):
    """Inputs of openvqa's MCAN: `image` float32[B, slots, F], zeros behind the last region.

    Args:
      words: of the run's questions.
      features: as for GridInputs.
      length: words of a question.
    """

    def __init__(self, words: QuestionWords, features: PictureFeatures, length: int):
        self._words, self._features, self._length = words, features, length
        self.broken = (features.missing,)

    def _tokens(self, questions: Sequence[Question]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.zeros((len(questions), self._length), np.int32)
        lost = np.zeros(len(questions), np.int32)
        for row, question in enumerate(questions):
            numbers = self._words.encode(question.question)
            cut_numbers = numbers[: self._length]
            ids[row, : len(cut_numbers)] = cut_numbers
            lost[row] = len(numbers) - len(cut_numbers)
        return ids, lost


class CaptionInputs(VQAInputs):
    """Inputs of MCAN on captions, pairs of texts; `image` bool[B, L] marks the caption.

    Half of the tokens are the question's at most. Without a caption, its part is [SEP] alone.

    Args:
      tokenizer: BERT's.
      length: tokens of both, special tokens among them.
    """

    def __init__(self, tokenizer: Tokenizer, length: int):
        self._tokenizer, self._length = tokenizer, length

    def __call__(self, questions: Sequence[Question]) -> Packed:
        ids, image, lost = self._pairs(questions)
        return {"question_ids": ids, "image": image, "truncated": lost}

    def _tokens(self, questions: Sequence[Question]) -> tuple[np.ndarray, np.ndarray]:
        ids, _, lost = self._pairs(questions)
        return ids, lost

    def _pairs(self, questions: Sequence[Question]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokenizer = self._tokenizer
        asked = tokenizer.encode_batch([plain(q.question) for q in questions])
        captions = tokenizer.encode_batch([str(q.extra.get(CAPTION, "")) for q in questions])
        cut_questions = [cut(question, self._length // 2, None) for question in asked]
        pairs = [
            [*question, tokenizer.sep_id, *caption]
            for question, caption in zip(cut_questions, captions, strict=True)
        ]
        ids, real, lost = text_inputs(pairs, self._length, tokenizer)
        first = np.array([2 + len(question) for question in cut_questions])  # of the caption's part
        for row, (whole, cut_question) in enumerate(zip(asked, cut_questions, strict=True)):
            lost[row] += len(whole) - len(cut_question)
        return ids, real & (np.arange(self._length) >= first[:, None]), lost


def _question_ids(
    questions: Sequence[str], length: int, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32[B, L] of questions, and how many tokens each loses."""
    tokens = tokenizer.encode_batch([plain(question) for question in questions])
    ids, _, lost = text_inputs(tokens, length, tokenizer)
    return ids, lost


def plain(question: str) -> str:
    """A question as Prophet tokenizes it (load_data.py, `bert_tokenize`)."""
    return question.lower().replace("?", "")


def image_id(question: Question) -> Any:
    """The number of a question's picture in COCO, or the picture's name."""
    return question.extra.get("image_id", question.image)


# The pictures of questions: a question's own or, as in WebQA and Atlas, those of its sources.


class QuestionPictures:
    """Pixels of the pictures that a question is asked on, as the model takes them."""

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
            pixels_of = [self.store.question_pixels(question)]
        else:
            pixels_of = [self.store.pixels(row) for row in self.rows(question)]
        return [pixels for pixels in pixels_of if pixels is not None]

    def warn_missing(self) -> None:
        """Says on stderr how many pictures could not be decoded."""
        self.missing.warn("pictures that cannot be decoded, left out")

    def _is_picture(self, row: int) -> bool:
        return self.store.corpus.sources[row].image is not None


def stacked(
    pictures: Sequence[Sequence[np.ndarray]], slots: int, size: int
) -> dict[str, np.ndarray]:
    """Pictures of n questions as arrays: `pixels` uint8[n, slots, size, size, 3], `shown` bool.

    Empty slots are zeros; pictures beyond the slots are dropped.
    """
    pixels = np.zeros((len(pictures), slots, size, size, 3), np.uint8)
    has_picture = np.zeros((len(pictures), slots), bool)
    for row, of_example in enumerate(pictures):
        for slot, picture in enumerate(of_example[:slots]):
            pixels[row, slot] = picture
            has_picture[row, slot] = True
    return {"pixels": pixels, "shown": has_picture}
