"""Which examples are in batch i: a pure function of (seed, i), in any order, on any host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.packing import Bucket

_ENDLESS = 2**40


class PlannedBatch(NamedTuple):
    """This process's rows of one batch of the plan.

    Attributes:
      index: position of the batch in the plan.
      epoch: pass over the examples.
      bucket: the bucket all its examples are in.
      examples: int64[b], example indices of this process's rows.
      rows: int64[b], the places of these examples in the whole batch, ascending.
    """

    index: int
    epoch: int
    bucket: int
    examples: Int[np.ndarray, " b"]
    rows: Int[np.ndarray, " b"]


class BatchPlan:
    """Random-access sequence of batches, each from a single bucket.

    Per epoch the examples are shuffled within their buckets and chunked (the last chunk is
    filled up from the bucket's beginning), and the order of the batches is shuffled. Batch i
    depends on (seed, i) alone, so a data iterator's whole state is its position, any number
    of threads may read ahead, and every process can take its rows of each batch.

    Args:
      buckets: epoch -> bucket of every example, int[N], -1 = not in this epoch.
      batch_size: examples of a batch over all processes.
      seed: not negative.
      rows: which rows of every batch to take (core.mesh.local_rows); None: all.
    """

    def __init__(
        self,
        buckets: Callable[[int], Int[np.ndarray, " N"]],
        batch_size: int,
        seed: int,
        *,
        rows: Sequence[int] | None = None,
    ):
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: give 1 or more.")
        self._buckets, self.batch_size, self.seed = buckets, batch_size, seed
        self._rows = np.arange(batch_size) if rows is None else np.array(rows, np.int64)
        self._lock = threading.Lock()
        self._first = [0]  # index of the first batch of each epoch planned so far
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return _ENDLESS  # Grain needs a length

    def __getitem__(self, index: int) -> PlannedBatch:
        with self._lock:
            while self._first[-1] <= index:
                batches = len(self._order(len(self._first) - 1)[0])
                self._first.append(self._first[-1] + batches)
            epoch = int(np.searchsorted(self._first, index, side="right")) - 1
            buckets, examples = self._order(epoch)
        row = index - self._first[epoch]
        part = examples[row, self._rows]
        return PlannedBatch(index, epoch, int(buckets[row]), part, self._rows)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Buckets [n] and examples [n, batch_size] of one epoch's batches, in order."""
        if epoch in self._epochs:
            return self._epochs[epoch]
        buckets = np.asarray(self._buckets(epoch))
        rng = np.random.default_rng((10, self.seed, epoch))
        shuffled = rng.permutation(len(buckets))
        bucket_of, chunks = [np.zeros(0, np.int64)], [np.zeros((0, self.batch_size), np.int64)]
        for bucket in np.unique(buckets[buckets >= 0]):
            members = shuffled[buckets[shuffled] == bucket]
            count = -(-len(members) // self.batch_size)
            filled = np.resize(members, (count, self.batch_size))  # wraps within the bucket
            chunks.append(filled)
            bucket_of.append(np.full(count, bucket))
        if len(chunks) == 1:
            raise UserError("No example to train on: the questions of this split are empty.")
        order = rng.permutation(sum(map(len, bucket_of)))
        planned = np.concatenate(bucket_of)[order], np.concatenate(chunks)[order]
        # Threads prefetch a few batches: at most this epoch and the one before are in use.
        self._epochs = {e: v for e, v in self._epochs.items() if e >= epoch - 1}
        self._epochs[epoch] = planned
        return planned


def merge_rare(
    counts: Sequence[int], shapes: Sequence[Bucket], minimum: int
) -> Int[np.ndarray, " buckets"]:
    """The bucket to use for every bucket: rare ones join the next larger shape.

    A bucket with fewer than `minimum` examples would repeat them to fill its batches, and
    cost a compilation of its own. It joins the next longer bucket with as many pictures;
    the longest stays. `shapes` is sorted by pictures, then length.
    """
    counts, target = np.array(counts), np.arange(len(shapes))
    for index in range(len(shapes) - 1):
        larger = shapes[index + 1].pictures == shapes[index].pictures
        if larger and 0 < counts[index] < minimum:
            counts[index + 1] += counts[index]
            target[target == index] = index + 1
    return target
