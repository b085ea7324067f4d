"""Training batches of the VQA models: questions on pictures, and soft targets of their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmqa_jax.data.answer_vocabulary import AnswerVocabulary
from mmqa_jax.data.batches.feed import FeedConfig, Table, augmented, feed_batches
from mmqa_jax.data.batches.reading import Batches
from mmqa_jax.data.batches.sampling import PlannedBatch
from mmqa_jax.data.packing import Bucket, Packed
from mmqa_jax.data.schema import Question
from mmqa_jax.data.vqa_inputs import PatchInputs, VQAInputs


def vqa_batches(
    inputs: Sequence[VQAInputs],
    questions: Sequence[Question],
    vocabulary: AnswerVocabulary,
    feed: FeedConfig,
    *,
    lengths: Sequence[int],
) -> Batches:
    """Questions with the target of every answer.

    A batch: question_ids int32[B, L] and image, see data.vqa_inputs; targets float32[B, V]; index
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
        own, wanted = [questions[row] for row in rows], [targets[row] for row in rows]
        if feed.augment is not None and isinstance(part, PatchInputs):
            examples = [
                augmented(part.raw(question), feed, planned, n) for n, question in enumerate(own)
            ]
            arrays = part.encode(examples)
            wanted = [
                vocabulary.targets(dataclasses.replace(question, keywords=example.keywords))
                for question, example in zip(own, examples, strict=True)
            ]
        else:
            arrays = part(own)
        return {
            **arrays,
            "targets": vocabulary.dense(wanted),
            "index": rows.astype(np.int32),
        }

    shapes = [Bucket(0, length) for length in lengths]
    return feed_batches(lambda _: everything, shapes, make, feed, inputs[0].broken)
