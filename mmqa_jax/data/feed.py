"""What the training pipelines share: settings, what an epoch shows, the iterator."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.examples import Augment, RawExample
from mmqa_jax.data.sampling import BatchPlan, PlannedBatch, batch_iterator, merge_rare
from mmqa_jax.data.sequences import INPUT_FIELDS, Bucket, Packed

# Columns of what one epoch shows, a row per example; `bucket` among them.
Table = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class FeedConfig:
    """What all training pipelines have in common.

    Attributes:
      batch_size: examples of a batch over all processes.
      seed: of sampling, order, masking and augmentation.
      num_batches: None = without end.
      augment: changes every raw example, or None.
      inputs: what a batch's VLP arrays become, under the key `inputs`: models.vlp.VLPInputs;
        None leaves them flat under their names.
      slack: tokens by which augmentation may lengthen an example, for its bucket.
      process_index, process_count: this process's slice of every batch.
      threads: threads that make batches ahead.
    """

    batch_size: int
    seed: int = 0
    num_batches: int | None = None
    augment: Augment | None = None
    inputs: Callable[..., Any] | None = None
    slack: int = 0
    process_index: int = 0
    process_count: int = 1
    threads: int = 2

    def __post_init__(self):
        if self.seed < 0:
            raise UserError(f"seed={self.seed} is negative; give 0 or more.")


class Epochs:
    """What each epoch shows: sampled when first asked for, the last few kept."""

    def __init__(self, sample: Callable[[int], Table], shapes: Sequence[Bucket], minimum: int):
        self._sample, self._lock = sample, threading.Lock()
        self._tables: dict[int, Table] = {}
        self._merged = np.arange(len(shapes))
        counts = np.bincount(self(0)["bucket"], minlength=len(shapes))
        self._merged = merge_rare(counts, shapes, minimum)

    def __call__(self, epoch: int) -> Table:
        with self._lock:
            if epoch not in self._tables:
                self._tables = {e: t for e, t in self._tables.items() if e >= epoch - 1}
                self._tables[epoch] = self._sample(epoch)
            return self._tables[epoch]

    def buckets(self, epoch: int) -> np.ndarray:
        """Bucket of every example of the epoch, rare buckets merged."""
        return self._merged[self(epoch)["bucket"]]


def feed_batches(
    epochs: Epochs, make: Callable[[PlannedBatch], Packed], feed: FeedConfig
) -> grain.DatasetIterator[Packed]:
    """Iterates over `make(plan[i])` for a plan over what `epochs` shows."""
    plan = BatchPlan(
        epochs.buckets,
        feed.batch_size,
        feed.seed,
        num_batches=feed.num_batches,
        process_index=feed.process_index,
        process_count=feed.process_count,
    )
    return batch_iterator(plan, make, threads=feed.threads)


def nest_inputs(arrays: Packed, feed: FeedConfig) -> dict[str, Any]:
    """The VLP arrays of a batch as one `feed.inputs` object beside the others."""
    if feed.inputs is None:
        return arrays
    fields = {name: arrays.pop(name) for name in (*INPUT_FIELDS, "probe_mask") if name in arrays}
    return {"inputs": feed.inputs(**fields), **arrays}


def example_rng(
    feed: FeedConfig, planned: PlannedBatch, place: int, use: int
) -> np.random.Generator:
    """The example's own generator (`use`: 0 augmentation, 1 packing), whoever makes it."""
    return np.random.default_rng((20 + use, feed.seed, planned.index, planned.start + place))


def augmented(raw: RawExample, feed: FeedConfig, planned: PlannedBatch, place: int) -> RawExample:
    """`raw` after the feed's augmentation, if it has one."""
    if feed.augment is None:
        return raw
    return feed.augment(raw, example_rng(feed, planned, place, 0))
