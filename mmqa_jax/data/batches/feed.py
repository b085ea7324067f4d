"""What the batches of all tasks share: settings, the examples of an epoch, the iterator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.progress import announce
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.reading import Batches, batch_iterator
from mmqa_jax.data.batches.sampling import BatchPlan, PlannedBatch, Table, mixture_epoch
from mmqa_jax.data.images import BrokenPictures
from mmqa_jax.data.packing import Bucket, Packed
from mmqa_jax.data.raw_examples import Augment, RawExample


@dataclasses.dataclass(frozen=True)
class BatchesSection:
    """What the section `batches` of every task's config holds.

    Attributes:
      batch_size: examples of a batch over all processes.
      slack: tokens by which augmentation may lengthen an example; its bucket leaves room for them.
      threads: that make batches ahead, in each process that makes them.
      workers: processes that make batches beside the run's own; 0: its threads make them.
    """

    batch_size: int
    _: dataclasses.KW_ONLY
    slack: int = at_least(0, 0)
    threads: int = at_least(0, 2)
    workers: int = at_least(0, 0)


def check_shares(section: Any, *names: str) -> None:
    """Refuses fields of a section `batches` that are no shares or probabilities."""
    for name in names:
        if not 0 <= getattr(section, name) <= 1:
            raise UserError(
                f"config key batches.{name}={getattr(section, name)}: a share in 0..1 was "
                "expected; change it."
            )


@dataclasses.dataclass(frozen=True)
class FeedConfig(BatchesSection):
    """Settings of the batches of all tasks.

    Attributes:
      seed: of sampling, order, masking and augmentation.
      augment: applied to every raw example, or None.
      inputs: the dataclass that holds a batch's VLP arrays, under the key `inputs`:
        models.vlp.network.VLPInputs; None leaves them flat under their names.
      rows: this process's rows of every batch (core.mesh.local_rows); None: all.
      mixture: weights of the corpora that the examples are of; empty: each is shown once an epoch.
    """

    _: dataclasses.KW_ONLY
    seed: int = 0
    augment: Augment | None = None
    inputs: type | None = None
    rows: tuple[int, ...] | None = None
    mixture: tuple[float, ...] = ()

    def __post_init__(self):
        if self.seed < 0:
            raise UserError(f"seed={self.seed} is negative; give 0 or more.")


def feed_batches(
    sample: Callable[[int], Table],
    shapes: Sequence[Bucket],
    make: Callable[[PlannedBatch, Table], Packed],
    feed: FeedConfig,
    broken: Sequence[BrokenPictures] = (),
) -> Batches:
    """Iterates over the batches of a task.

    Args:
      sample: epoch -> its examples; a pure function.
      shapes: the buckets of the examples.
      make: a batch from its entry in the plan and the rows of its examples; a pure function.
      broken: what `make` counts; with `feed.workers` the counts of the workers are added to it.
    """
    plan = BatchPlan(sample, shapes, feed.batch_size, feed.seed, rows=feed.rows)
    if feed.rows is None or 0 in feed.rows:
        for pictures, count in plan.too_few().items():
            announce(
                f"{count} training examples with {pictures} pictures are fewer than the "
                f"{feed.batch_size} of a batch, so that each is shown in one of "
                f"{-(-feed.batch_size // count)} epochs; for more, lower batches.batch_size or "
                "raise train.accumulate."
            )
    return batch_iterator(
        plan,
        lambda planned: make(planned, planned.table),
        threads=feed.threads,
        workers=feed.workers,
        broken=broken,
    )


def mixed(
    sample: Callable[[int], Table], members: Sequence[int], feed: FeedConfig
) -> Callable[[int], Table]:
    """The examples of an epoch by the weights of their corpora: see sampling.mixture_epoch.

    Args:
      sample: pass -> the examples; the column `question` has their numbers, and an example may have
        several rows.
      members: the corpus of every example, by its number.
    """
    if not feed.mixture:
        return sample
    asked = np.unique(sample(0)["question"])
    of_asked = np.asarray(members)[asked]

    def sample_mixed(epoch: int) -> Table:
        tables = []
        for number, chosen in mixture_epoch(of_asked, feed.mixture, feed.seed, epoch):
            table = sample(number)
            rows = np.flatnonzero(np.isin(table["question"], asked[chosen]))
            tables.append({name: column[rows] for name, column in table.items()})
        table = {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}
        return {**table, "member": np.asarray(members)[table["question"]]}

    return sample_mixed


def nest_inputs(arrays: Packed, feed: FeedConfig) -> dict[str, Any]:
    """The VLP arrays of a batch as one `feed.inputs` object beside the others."""
    if feed.inputs is None:
        return arrays
    names = [field.name for field in dataclasses.fields(feed.inputs)]
    inputs = feed.inputs(**{name: arrays.pop(name) for name in names})
    return {"inputs": inputs, **arrays}


def example_rng(
    feed: FeedConfig, planned: PlannedBatch, index: int, use: int
) -> np.random.Generator:
    """Generator of the example at `index` of the process's rows, the same for any split.

    `use`: 0 augmentation, 1 packing.
    """
    place = planned.index * feed.batch_size + int(planned.rows[index])  # among all of the run
    return np.random.default_rng((20 + use, feed.seed, place))


def augmented(raw: RawExample, feed: FeedConfig, planned: PlannedBatch, index: int) -> RawExample:
    """`raw` after the feed's augmentation, if it has one."""
    if feed.augment is None:
        return raw
    return feed.augment(raw, example_rng(feed, planned, index, 0))
