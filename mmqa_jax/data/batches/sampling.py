"""Which examples are in batch i: a pure function of (seed, i), in any order, on any host."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.packing import Bucket

_ENDLESS = 2**40

# The examples of one epoch by column, one row each; `bucket` is one of the columns.
Table = dict[str, np.ndarray]


class PlannedBatch(NamedTuple):
    """This process's rows of one batch of the plan.

    Attributes:
      index: position of the batch in the plan.
      epoch: pass over the examples.
      bucket: the shape of the batch, which all its examples fit.
      rows: int64[b], the places of this process's rows in the whole batch, ascending.
      table: the examples of these rows, b of each column.
    """

    index: int
    epoch: int
    bucket: int
    rows: Int[np.ndarray, " b"]
    table: Table


class BatchPlan:
    """Random-access sequence of batches, each of a single shape.

    An epoch shows every example once. Its examples are shuffled and divided by their buckets; what
    a bucket lacks of a full last batch comes from the next shorter buckets, whose examples fit its
    shape too. So less than one batch is left of all buckets with equally many pictures, and it is
    shown first in the next epoch. The order of the buckets is shuffled. Batch i depends on
    (seed, i) alone, so a data iterator's whole state is its position, any number of threads may
    read ahead, and every process can take its rows of each batch.

    With a single bucket the examples follow each other in an order that does not depend on
    `batch_size`: k batches of b examples are one batch of k * b.

    Args:
      sample: epoch -> its examples; a pure function.
      shapes: the buckets, sorted by pictures, then length; rare ones are merged (`merge_rare`).
      batch_size: examples of a batch over all processes.
      seed: not negative.
      rows: which rows of every batch to take (core.mesh.local_rows); None: all.
    """

    def __init__(
        self,
        sample: Callable[[int], Table],
        shapes: Sequence[Bucket],
        batch_size: int,
        seed: int,
        *,
        rows: Sequence[int] | None = None,
    ):
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: give 1 or more.")
        self._sample, self._shapes = sample, shapes
        self.batch_size, self.seed = batch_size, seed
        self._rows = np.arange(batch_size) if rows is None else np.array(rows, np.int64)
        self._lock = threading.Lock()
        self._first = [0]  # index of the first batch of each epoch planned so far
        self._left: list[Table] = [{}]  # what each of these epochs takes over from the one before
        self._epochs: dict[int, tuple[Table, np.ndarray, np.ndarray]] = {}
        self._merged: np.ndarray | None = None
        self._order(0)  # an epoch without examples is refused at once

    def __len__(self) -> int:
        return _ENDLESS  # Grain needs a length

    def __getitem__(self, index: int) -> PlannedBatch:
        with self._lock:
            while self._first[-1] <= index:
                self._order(len(self._first) - 1)
            epoch = int(np.searchsorted(self._first, index, side="right")) - 1
            table, buckets, examples = self._order(epoch)
        batch = index - self._first[epoch]
        chosen = examples[batch, self._rows]
        own = {name: column[chosen] for name, column in table.items()}
        return PlannedBatch(index, epoch, int(buckets[batch]), self._rows, own)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def too_few(self) -> dict[int, int]:
        """How many examples the first epoch has of each number of pictures, where these do not fill
        a batch: several epochs fill one."""
        table = self._order(0)[0]
        pictures = np.array([shape.pictures for shape in self._shapes])[table["bucket"]]
        kinds = zip(*np.unique(pictures, return_counts=True), strict=True)
        return {int(kind): int(count) for kind, count in kinds if count < self.batch_size}

    def _order(self, epoch: int) -> tuple[Table, np.ndarray, np.ndarray]:
        """The epoch's examples, and the bucket [n] and examples [n, batch_size] of its batches."""
        if epoch in self._epochs:
            return self._epochs[epoch]
        table, left = self._sample(epoch), self._left[epoch]
        if not len(table["bucket"]):
            raise UserError("No example to train on: the questions of this split are empty.")
        if self._merged is None:
            counts = np.bincount(table["bucket"], minlength=len(self._shapes))
            self._merged = merge_rare(counts, self._shapes, self.batch_size)
        rng = np.random.default_rng((10, self.seed, epoch))
        waiting = rng.permutation(len(table["bucket"]))
        if "member" in table:
            waiting = waiting[interleaved(table["member"][waiting])]
        if left:  # these come first
            waiting = np.concatenate(
                [np.arange(len(left["bucket"])), waiting + len(left["bucket"])]
            )
            table = {name: np.concatenate([left[name], column]) for name, column in table.items()}
        buckets = self._merged[table["bucket"]]
        members = [waiting[buckets[waiting] == bucket] for bucket in range(len(self._shapes))]
        rest = self._fill_up(members)
        counts = [len(own) // self.batch_size for own in members]
        order = rng.permutation(np.repeat(np.arange(len(members)), counts))
        examples = np.empty((len(order), self.batch_size), np.int64)
        for bucket, own in enumerate(members):
            examples[order == bucket] = own.reshape(-1, self.batch_size)
        if epoch + 1 == len(self._first):
            self._first.append(self._first[-1] + len(order))
            self._left.append({name: column[rest] for name, column in table.items()})
        # Threads prefetch a few batches: at most this epoch and the one before are in use.
        self._epochs = {e: planned for e, planned in self._epochs.items() if e >= epoch - 1}
        self._epochs[epoch] = table, order, examples
        return self._epochs[epoch]

    def _fill_up(self, members: list[np.ndarray]) -> np.ndarray:
        """Makes whole batches of the examples of each bucket, in place; returns what is left."""
        left = []
        for bucket in reversed(range(len(members))):
            own, shorter = members[bucket], bucket - 1
            while (missing := -len(own) % self.batch_size) and (
                shorter >= 0 and self._shapes[shorter].pictures == self._shapes[bucket].pictures
            ):
                own = np.concatenate([own, members[shorter][:missing]])
                members[shorter] = members[shorter][missing:]
                shorter -= 1
            whole = len(own) - len(own) % self.batch_size
            members[bucket] = own[:whole]
            left.append(own[whole:])
        return np.concatenate(left)


def merge_rare(
    counts: Sequence[int] | np.ndarray, shapes: Sequence[Bucket], minimum: int
) -> Int[np.ndarray, " buckets"]:
    """The bucket to use for every bucket: rare ones join the next larger shape.

    A bucket with fewer than `minimum` examples would cost a compilation of its own. It joins the
    next longer bucket with as many pictures; the longest stays. `shapes` is sorted by pictures,
    then length.
    """
    counts, target = np.array(counts), np.arange(len(shapes))
    for index in range(len(shapes) - 1):
        larger = shapes[index + 1].pictures == shapes[index].pictures
        if larger and 0 < counts[index] < minimum:
            counts[index + 1] += counts[index]
            target[target == index] = index + 1
    return target


# Mixtures of corpora: an epoch shows so many examples of each as its weight asks for, those of a
# small corpus several times before another's second pass.


def mixture_counts(total: int, weights: Sequence[float]) -> Int[np.ndarray, " members"]:
    """`total` examples divided by weights, the rest by the largest remainders; weights of 0 get
    none."""
    shares = total * np.asarray(weights, np.float64) / math.fsum(weights)
    counts = np.floor(shares).astype(np.int64)
    order = np.argsort(counts - shares, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def mixture_epoch(
    members: Int[np.ndarray, " examples"], weights: Sequence[float], seed: int, epoch: int
) -> list[tuple[int, Int[np.ndarray, " chosen"]]]:
    """Which examples an epoch of a mixture shows: as many as there are.

    Every corpus's examples are shown in passes, each in an order of its own; an epoch goes on where
    the one before it ended. It depends on the arguments alone.

    Args:
      members: number of each example's corpus, in order of `weights`.

    Returns:
      (pass, the examples that are shown in it), each example at most once in a pass of its corpus.
    """
    chosen: dict[int, list[np.ndarray]] = {}
    for member, count in enumerate(mixture_counts(len(members), weights).tolist()):
        own = np.flatnonzero(members == member)
        if not count and weights[member]:
            raise UserError(
                f"config key data.mixture: corpus {member + 1} has less than one of the "
                f"{len(members)} examples of an epoch by its weight {weights[member]:g}, so that "
                "it would never be shown; raise its weight, or leave it out."
            )
        if not count:
            continue
        if not len(own):
            raise UserError(
                f"config key data.mixture: corpus {member + 1} has no example to train on in this "
                "split; leave it out, or choose another split."
            )
        first, behind = epoch * count, (epoch + 1) * count
        for number in range(first // len(own), -(-behind // len(own))):
            order = np.random.default_rng((16, seed, member, number)).permutation(own)
            start = number * len(own)
            part = order[max(first - start, 0) : behind - start]
            chosen.setdefault(number, []).append(part)
    return [(number, np.concatenate(parts)) for number, parts in sorted(chosen.items())]


def interleaved(members: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """An order in which every beginning has each corpus's share, as nearly as whole numbers can;
    the examples of one corpus keep their order."""
    places = np.empty(len(members))
    for member in np.unique(members):
        own = np.flatnonzero(members == member)
        places[own] = (np.arange(len(own)) + 0.5) / len(own)
    return np.argsort(places, kind="stable")
