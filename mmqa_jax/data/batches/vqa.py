"""Training batches of the VQA models: questions on pictures, and soft targets of their answers."""

from __future__ import annotations

from collections.abc import Sequence

import grain
import numpy as np

from mmqa_jax.data.answer_vocabulary import AnswerVocabulary
from mmqa_jax.data.batches.feed import FeedConfig, Table, feed_batches
from mmqa_jax.data.batches.sampling import PlannedBatch
from mmqa_jax.data.packing import Bucket, Packed
from mmqa_jax.data.schema import Question
from mmqa_jax.data.vqa_inputs import VQAInputs


def vqa_batches(
    inputs: Sequence[VQAInputs],
    questions: Sequence[Question],
    vocabulary: AnswerVocabulary,
    feed: FeedConfig,
    *,
    lengths: Sequence[int],
) -> grain.DatasetIterator[Packed]:
    """Questions with the target of every answer.

    A batch: question_ids int32[B, L] and image, see data.vqa_inputs; targets float32[B, V]; index
    int32[B]: indices into `questions`; truncated int32[B]: tokens lost.

    Args:
      inputs: one for each length; a question goes to the first that loses nothing of it.
      lengths: increasing, one static shape each.
    """
    targets = [vocabulary.targets(question) for question in questions]
    lost = np.stack([part(questions)["truncated"] for part in inputs])  # [lengths, N]
    fits = (lost == 0) | (np.arange(len(lost)) == len(lost) - 1)[:, None]
    everything = {"index": np.arange(len(questions)), "bucket": fits.argmax(axis=0)}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        rows = table["index"]
        return {
            **inputs[planned.bucket]([questions[row] for row in rows]),
            "targets": vocabulary.dense([targets[row] for row in rows]),
            "index": rows.astype(np.int32),
        }

    return feed_batches(lambda _: everything, [Bucket(0, n) for n in lengths], make, feed)
