"""Training batches of an encoder-decoder: one example in a row, prompts in buckets of lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mmqa_jax.data.batches.feed import Batches, FeedConfig, PlannedBatch, Table, feed_batches, mixed
from mmqa_jax.data.batches.language_model import TokenExample
from mmqa_jax.data.batches.packing import Bucket, Packed
from mmqa_jax.data.pictures.decode import BrokenPictures


class PairSize(NamedTuple):
    """What a row holds: a prompt of `length` tokens, and an answer of `targets`."""

    length: int
    targets: int

    def holds(self, example: TokenExample) -> bool:
        """Whether an example fits a row."""
        return example.start <= self.length and example.targets <= self.targets


def seq2seq_batches(
    versions: Sequence[Sequence[TokenExample]],
    probabilities: Sequence[float],
    feed: FeedConfig,
    *,
    lengths: Sequence[int],
    targets: int,
    more: Callable[[Sequence[int]], Packed] | None = None,
    members: Sequence[int] = (),
) -> Batches:
    """Prompts and answers; an epoch shows every example once, in one of its versions.

    A batch: the arrays of `pair_batch`, and index int32[B]: the examples.

    Args:
      versions: of every example, as many as `probabilities`, each of which fits the longest row.
      probabilities: of each version in an epoch; they sum up to 1.
      lengths: of prompts, ascending; each is padded to the first that holds it, and a batch has
        prompts of one.
      targets: tokens of an answer.
      more: of the numbers of a batch's examples: further arrays of it.
      members: of a mixture (`feed.mixture`), the corpus of every example.
    """

    def make(examples: Sequence[TokenExample], bucket: Bucket) -> Packed:
        return pair_batch(examples, PairSize(bucket.text, targets))

    return example_batches(
        versions,
        probabilities,
        feed,
        shapes=[Bucket(0, length) for length in lengths],
        bucket_of=lambda example: int(np.searchsorted(np.array(lengths), example.start)),
        make=make,
        more=more,
        members=members,
    )


def pair_batch(examples: Sequence[TokenExample], size: PairSize, rows: int = 0) -> Packed:
    """Examples as arrays of a static shape.

    Args:
      rows: at least so many; those without an example have a prompt of one token and no target.

    Returns:
      input_ids int32[B, length], prompt_lengths int32[B]; target_ids int32[B, targets],
      target_lengths int32[B].
    """
    rows = max(rows, len(examples))
    answers = [example.tokens[example.start :] for example in examples]
    batch = {
        "input_ids": np.zeros((rows, size.length), np.int32),
        "prompt_lengths": np.ones(rows, np.int32),
        **target_arrays(answers, size.targets, rows),
    }
    for row, example in enumerate(examples):
        batch["input_ids"][row, : example.start] = example.tokens[: example.start]
        batch["prompt_lengths"][row] = example.start
    return batch


def target_arrays(answers: Sequence[Sequence[int]], targets: int, rows: int = 0) -> Packed:
    """Answers of at most `targets` tokens as target_ids int32[B, targets], target_lengths int32[B].

    rows: at least so many; those without an answer have no target.
    """
    rows = max(rows, len(answers))
    ids, lengths = np.zeros((rows, targets), np.int32), np.zeros(rows, np.int32)
    for row, answer in enumerate(answers):
        ids[row, : len(answer)] = answer
        lengths[row] = len(answer)
    return {"target_ids": ids, "target_lengths": lengths}


# Training batches with one example in a row, in buckets of shapes.


def example_batches(
    versions: Sequence[Sequence[TokenExample]],
    probabilities: Sequence[float],
    feed: FeedConfig,
    *,
    shapes: Sequence[Bucket],
    bucket_of: Callable[[TokenExample], int],
    make: Callable[[Sequence[TokenExample], Bucket], Packed],
    more: Callable[[Sequence[int]], Packed] | None = None,
    broken: Sequence[BrokenPictures] = (),
    members: Sequence[int] = (),
) -> Batches:
    """An epoch shows every example once, in one of its versions; a batch has one shape.

    A batch: what `make` gives, and index int32[B]: the examples.

    Args:
      versions: of every example, as many as `probabilities`.
      probabilities: of each version in an epoch; they sum up to 1.
      shapes: the buckets; rare ones are merged (feed.merge_rare).
      bucket_of: the smallest of `shapes` that holds an example.
      make: a batch's arrays; a pure function.
      more: further ones, of the numbers of its examples.
      broken: what `make` counts.
      members: of a mixture (`feed.mixture`), the corpus of every example.
    """
    count, flat = len(probabilities), [example for own in versions for example in own]
    buckets = np.array([bucket_of(example) for example in flat])

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((15, feed.seed, epoch))
        chosen = np.arange(len(versions)) * count + rng.choice(
            count, len(versions), p=probabilities
        )
        return {"example": chosen, "question": chosen // count, "bucket": buckets[chosen]}

    def make_planned(planned: PlannedBatch, table: Table) -> Packed:
        examples = table["example"]
        arrays = make([flat[i] for i in examples], shapes[planned.bucket])
        named = table["question"].astype(np.int32)
        added = {} if more is None else more(named.tolist())
        return {**arrays, "index": named, **added}

    return feed_batches(mixed(sample, members, feed), shapes, make_planned, feed, broken)
