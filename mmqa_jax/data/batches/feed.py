"""Settings, epochs and the iterator, which the batches of all tasks share."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
from absl import flags
from jaxtyping import Int

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.progress import announce
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.packing import Augment, Bucket, Packed, RawExample
from mmqa_jax.data.pictures.decode import BrokenPictures

if TYPE_CHECKING:
    import grain


@dataclasses.dataclass(frozen=True)
class BatchesSection:
    """The section `batches` of every task's config."""

    batch_size: int  # examples of a batch over all processes
    _: dataclasses.KW_ONLY
    # Tokens by which augmentation may lengthen an example; its bucket leaves room for them.
    slack: int = at_least(0, 0)
    threads: int = at_least(0, 2)  # that make batches ahead, in each process that makes them
    # Processes that make batches beside the run's own; 0: its threads make them.
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
    """Settings of the batches of all tasks."""

    _: dataclasses.KW_ONLY
    seed: int = 0  # of sampling, order, masking and augmentation
    augment: Augment | None = None  # applied to every raw example, or None
    # The dataclass that holds a batch's VLP arrays, under the key `inputs`:
    # models.vlp.network.VLPInputs; None leaves them flat under their names.
    inputs: type | None = None
    # This process's rows of every batch (core.mesh.local_rows); None: all.
    rows: tuple[int, ...] | None = None
    # Weights of the corpora that the examples are of; empty: each is shown once an epoch.
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
    """The examples of an epoch by the weights of their corpora: see mixture_epoch.

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
        table = {name: np.concatenate([part[name] for part in tables]) for name in tables[0]}
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


# Batches in the order of their plan, made ahead by threads, or by worker processes with theirs.


_BUFFERED = 4  # batches that wait for the step, at least
_DIED = "Worker process was terminated unexpectedly"  # how Grain's message begins


class Batches(Protocol):
    """Iterates over batches; a Grain iterator is one."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """JSON values, the same for any number of threads and workers."""

    def set_state(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def batch_iterator(
    plan: BatchPlan,
    make_batch: Callable[[PlannedBatch], Any],
    *,
    threads: int = 2,
    workers: int = 0,
    broken: Sequence[BrokenPictures] = (),
) -> Batches:
    """Iterates over `make_batch(plan[i])`, i = 0, 1, ..., made ahead.

    Its state (`get_state`, `set_state`) is its position alone, and so the batches do not depend on
    threads and workers, and a run resumes with others.

    Args:
      make_batch: a pure function of its argument.
      threads: that make batches, in each process that makes them.
      workers: processes that make them, in turn; 0: this one. Decoding releases Python's lock and
        needs no workers; what is written in Python (packing, augmentation) holds it.
      broken: what `make_batch` counts; the counts of the workers are added to it.

    Raises:
      RunError: a worker died; when its batch is due.
    """
    if workers < 0:
        raise UserError(f"workers={workers} is negative; give 0 or more processes.")
    if workers:
        return _WorkerBatches(plan, make_batch, threads, workers, broken)
    import grain

    return iter(
        grain.MapDataset.source(plan).map(make_batch).to_iter_dataset(_read_options(threads))
    )


def _read_options(threads: int) -> grain.ReadOptions:
    import grain

    # Grain never works on more elements than it buffers.
    buffered = max(_BUFFERED, threads) if threads else 0
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffered)


class _WorkerBatches:
    """Grain's worker processes, which start with the first batch; see `batch_iterator`.

    Grain's own state depends on the number of workers. Here they start at a position.
    """

    def __init__(
        self,
        plan: BatchPlan,
        make_batch: Callable[[PlannedBatch], Any],
        threads: int,
        workers: int,
        broken: Sequence[BrokenPictures],
    ):
        self._make = _Counted(plan, make_batch, tuple(broken))
        self._threads, self._workers, self._broken = threads, workers, broken
        self._position = 0
        self._running: Any = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._running is None:
            self._running = self._start()
        try:
            batch, reasons_of = next(self._running)
        except RuntimeError as error:
            if not str(error).startswith(_DIED):
                raise
            raise RunError(
                f"batch {self._position}: the worker process that makes it has died ("
                f"{_exit_code(error)}); the last complete checkpoint is as it was: start the same "
                "command again, with fewer batches.workers if memory is short."
            ) from error
        self._position += 1
        for count, reasons in zip(self._broken, reasons_of, strict=True):
            for name, reason in reasons:
                count.add(name, reason)
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._position = int(state["next_index"])

    def close(self) -> None:
        """Ends the workers."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _start(self) -> grain.DatasetIterator:
        import grain

        # Grain reads absl's flags here, which are only known to have their defaults once parsed.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        rest = grain.MapDataset.range(self._position, len(self._make.plan))
        batches = rest.map(self._make).to_iter_dataset(_read_options(self._threads))
        options = grain.MultiprocessingOptions(
            num_workers=self._workers, per_worker_buffer_size=-(-_BUFFERED // self._workers)
        )
        return iter(batches.mp_prefetch(options, worker_init_fn=_start_worker))


class _Counted:
    """Position -> its batch, and what has been counted as broken since the last one."""

    def __init__(
        self,
        plan: BatchPlan,
        make_batch: Callable[[PlannedBatch], Any],
        broken: tuple[BrokenPictures, ...],
    ):
        self.plan, self._make_batch, self._broken = plan, make_batch, broken
        self._told = [0] * len(broken)

    def __call__(self, position: int) -> tuple[Any, list[list[tuple[str, str]]]]:
        batch = self._make_batch(self.plan[position])
        new_reasons = []
        for number, count in enumerate(self._broken):
            # Of two threads both may tell the same: counting again changes nothing.
            reasons = list(count.reasons.items())
            new_reasons.append(reasons[self._told[number] :])
            self._told[number] = len(reasons)
        return batch, new_reasons


def _start_worker(number: int, count: int) -> None:
    """The first that a worker process runs."""
    import jax

    # A signal goes to all processes of a job: the run itself answers it, with a last checkpoint
    # that may take further batches.
    for received in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(received, signal.SIG_IGN)
    # Whatever computes in a worker, it leaves the accelerator to the run.
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    """Ends this process when the run was killed, which could not tell it to."""
    run = multiprocessing.parent_process()
    assert run is not None, "a worker has a parent"
    run.join()
    os._exit(1)


def _exit_code(error: BaseException) -> str:
    """`exit code -9, ...` of Grain's message."""
    words = str(error).partition("exit code ")[2].split()
    code = words[0].rstrip(".") if words else "unknown"
    known = {
        "-9": "killed, as the system does when memory is short",
        "-7": "shared memory, /dev/shm, is full",
    }
    return ", ".join(filter(None, [f"exit code {code}", known.get(code)]))


# Which examples are in batch i: a pure function of (seed, i), in any order, on any host.


_ENDLESS = 2**40

# The examples of one epoch by column, one row each; `bucket` is one of the columns.
Table = dict[str, np.ndarray]


class PlannedBatch(NamedTuple):
    """This process's rows of one batch of the plan."""

    index: int  # position of the batch in the plan
    epoch: int  # pass over the examples
    bucket: int  # the shape of the batch, which all its examples fit
    # Int64[b], the places of this process's rows in the whole batch, ascending.
    rows: Int[np.ndarray, " b"]
    table: Table  # the examples of these rows, b of each column


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
        batch_table = {name: column[chosen] for name, column in table.items()}
        return PlannedBatch(index, epoch, int(buckets[batch]), self._rows, batch_table)

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
        counts = [len(examples_of_bucket) // self.batch_size for examples_of_bucket in members]
        order = rng.permutation(np.repeat(np.arange(len(members)), counts))
        examples = np.empty((len(order), self.batch_size), np.int64)
        for bucket, examples_of_bucket in enumerate(members):
            examples[order == bucket] = examples_of_bucket.reshape(-1, self.batch_size)
        if epoch + 1 == len(self._first):
            self._first.append(self._first[-1] + len(order))
            self._left.append({name: column[rest] for name, column in table.items()})
        # Threads prefetch a few batches: at most this epoch and the one before are in use.
        self._epochs = {e: planned for e, planned in self._epochs.items() if e >= epoch - 1}
        self._epochs[epoch] = table, order, examples
        return self._epochs[epoch]

    def _fill_up(self, members: list[np.ndarray]) -> np.ndarray:
        """Makes whole batches of each bucket's examples, in place; returns the rest."""
        left = []
        for bucket in reversed(range(len(members))):
            filled, shorter = members[bucket], bucket - 1
            while (missing := -len(filled) % self.batch_size) and (
                shorter >= 0 and self._shapes[shorter].pictures == self._shapes[bucket].pictures
            ):
                filled = np.concatenate([filled, members[shorter][:missing]])
                members[shorter] = members[shorter][missing:]
                shorter -= 1
            whole = len(filled) - len(filled) % self.batch_size
            members[bucket] = filled[:whole]
            left.append(filled[whole:])
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
    """Draws the examples of a mixture's epoch, as many as there are.

    Every corpus's examples are shown in passes, each in an order of its own; an epoch goes on where
    the one before it ended. It depends on the arguments alone.

    `members`: number of each example's corpus, in order of `weights`.

    Returns:
      (pass, the examples that are shown in it), each example at most once in a pass of its corpus.
    """
    chosen: dict[int, list[np.ndarray]] = {}
    for member, count in enumerate(mixture_counts(len(members), weights).tolist()):
        examples_of_member = np.flatnonzero(members == member)
        if not count and weights[member]:
            raise UserError(
                f"config key data.mixture: corpus {member + 1} has less than one of the "
                f"{len(members)} examples of an epoch by its weight {weights[member]:g}, so that "
                "it would never be shown; raise its weight, or leave it out."
            )
        if not count:
            continue
        if not len(examples_of_member):
            raise UserError(
                f"config key data.mixture: corpus {member + 1} has no example to train on in this "
                "split; leave it out, or choose another split."
            )
        first, behind = epoch * count, (epoch + 1) * count
        for number in range(
            first // len(examples_of_member), -(-behind // len(examples_of_member))
        ):
            order = np.random.default_rng((16, seed, member, number)).permutation(
                examples_of_member
            )
            start = number * len(examples_of_member)
            part = order[max(first - start, 0) : behind - start]
            chosen.setdefault(number, []).append(part)
    return [(number, np.concatenate(parts)) for number, parts in sorted(chosen.items())]


def interleaved(members: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """An order in which every beginning has each corpus's share, as nearly as whole numbers can;
    the examples of one corpus keep their order."""
    places = np.empty(len(members))
    for member in np.unique(members):
        examples_of_member = np.flatnonzero(members == member)
        places[examples_of_member] = (np.arange(len(examples_of_member)) + 0.5) / len(
            examples_of_member
        )
    return np.argsort(places, kind="stable")
