"""Training batches of Fusion-in-Decoder: a question with N passages, one of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mmqa_jax.data.batches.feed import Batches, FeedConfig, PlannedBatch, Table, feed_batches
from mmqa_jax.data.batches.packing import Bucket, Packed
from mmqa_jax.data.batches.seq2seq import target_arrays
from mmqa_jax.data.truncation import cut_before_end

Tokens = Sequence[int]


class PassagesSize(NamedTuple):
    """What a row holds: `count` passages of `length` tokens, and an answer of `targets`."""

    count: int
    length: int
    targets: int


def passage_batches(
    passages: Callable[[int], tuple[Sequence[Tokens], int]],
    answers: Sequence[Sequence[Tokens]],
    feed: FeedConfig,
    size: PassagesSize,
) -> Batches:
    """Passages and answers; an epoch shows every question once, with one of its answers by chance.

    A batch: the arrays of `passage_arrays` and `target_arrays`, index int32[B]: the questions, and
    truncated int32[B]: tokens lost.

    Args:
      passages: of a question, by its number, each as tokens; and how many tokens they have lost.
      answers: of every question, each with its end token, which stays where tokens beyond
        `size.targets` are cut.
    """
    counts = np.array([len(own) for own in answers])

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((16, feed.seed, epoch))
        numbers = np.arange(len(answers))
        return {
            "question": numbers,
            "answer": rng.integers(0, counts),
            "bucket": np.zeros_like(numbers),
        }

    def make(planned: PlannedBatch, table: Table) -> Packed:
        questions = table["question"]
        whole = [answers[q][a] for q, a in zip(questions, table["answer"], strict=True)]
        chosen = [cut_before_end(answer, size.targets) for answer in whole]
        shown, lost = zip(*map(passages, questions), strict=True)
        lost_targets = [len(a) - len(b) for a, b in zip(whole, chosen, strict=True)]
        return {
            **passage_arrays(shown, size),
            **target_arrays(chosen, size.targets),
            "index": questions.astype(np.int32),
            "truncated": np.add(lost, lost_targets).astype(np.int32),
        }

    return feed_batches(sample, [Bucket(0, size.count * size.length)], make, feed)


def passage_arrays(
    questions: Sequence[Sequence[Tokens]], size: PassagesSize, rows: int = 0
) -> Packed:
    """Passages as arrays of a static shape; what is beyond the size is cut.

    Args:
      rows: at least so many; those without a question have one passage of one token.

    Returns:
      input_ids int32[B, count, length], prompt_lengths int32[B, count]: 0 where there is none.
    """
    rows = max(rows, len(questions))
    ids = np.zeros((rows, size.count, size.length), np.int32)
    lengths = np.zeros((rows, size.count), np.int32)
    lengths[len(questions) :, 0] = 1
    for row, passages in enumerate(questions):
        for place, tokens in enumerate(passages[: size.count]):
            kept = tokens[: size.length]
            ids[row, place, : len(kept)] = kept
            lengths[row, place] = len(kept)
    return {"input_ids": ids, "prompt_lengths": lengths}
