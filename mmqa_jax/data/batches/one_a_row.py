"""Training batches with one example in a row, in buckets of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mmqa_jax.data.batches.feed import FeedConfig, Table, feed_batches, mixed
from mmqa_jax.data.batches.language_model import TokenExample
from mmqa_jax.data.batches.reading import Batches
from mmqa_jax.data.batches.sampling import PlannedBatch
from mmqa_jax.data.images import BrokenPictures
from mmqa_jax.data.packing import Bucket, Packed


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
      shapes: the buckets; rare ones are merged (sampling.merge_rare).
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
