"""The batch plan: complete, in any order, resumable, sharded."""

import itertools
import json
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmqa_jax.data.batches.feed import BatchPlan, PlannedBatch, Table, batch_iterator, merge_rare
from mmqa_jax.data.batches.packing import Bucket
from tests.refusals import refuses

SHAPES = [Bucket(0, 32), Bucket(0, 64), Bucket(1, 32)]
BUCKETS = np.random.default_rng(7).choice([0, 1, 2], 103, p=[0.6, 0.3, 0.1])


def table(buckets) -> Table:
    return {"example": np.arange(len(buckets)), "bucket": np.asarray(buckets)}


def plan(buckets=BUCKETS, batch_size=8, **changes) -> BatchPlan:
    """Of the same buckets in each epoch, or of a function of the epoch."""
    sample = buckets if callable(buckets) else lambda epoch: buckets
    changes = {"shapes": SHAPES, "seed": 3, **changes}
    return BatchPlan(lambda epoch: table(sample(epoch)), batch_size=batch_size, **changes)


def epochs_of(ours: BatchPlan, count: int) -> list[list[PlannedBatch]]:
    """The batches of the first epochs."""
    batches = itertools.takewhile(
        lambda planned: planned.epoch < count, map(ours.__getitem__, itertools.count())
    )
    shown: list[list[PlannedBatch]] = [[] for _ in range(count)]
    for planned in batches:
        shown[planned.epoch].append(planned)
    return shown


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 3))
def test_every_example_is_shown_as_often_as_every_other(buckets, batch_size, seed):
    """Once in each epoch, up to less than a batch of a kind that waits for the next epoch."""
    shapes = [Bucket(0, 8), Bucket(0, 16), Bucket(0, 32), Bucket(1, 8), Bucket(1, 16)]
    ours = plan(np.array(buckets), batch_size, shapes=shapes, seed=seed)
    shown, epochs = Counter(), 4
    for epoch, batches in enumerate(epochs_of(ours, epochs), start=1):
        for planned in batches:
            longest = shapes[planned.bucket]
            for example, bucket in zip(*planned.table.values(), strict=True):
                assert shapes[bucket].pictures == longest.pictures
                assert shapes[bucket].text <= longest.text
                shown[int(example)] += 1
        for kind in (0, 1):
            own = [i for i, bucket in enumerate(buckets) if shapes[bucket].pictures == kind]
            waiting = [epoch - shown[i] for i in own]
            assert min(waiting, default=0) >= 0  # none is shown more often
            assert sum(waiting) < batch_size
            if len(own) >= batch_size:
                assert max(waiting) <= 1


@given(st.integers(1, 50), st.integers(1, 6), st.integers(1, 4))
def test_batches_of_one_shape_are_parts_of_larger_ones(examples, size, parts):
    """So `train.accumulate` changes no update."""
    buckets = np.zeros(examples, int)
    whole, small = plan(buckets, size * parts), plan(buckets, size)
    for i in range(5):
        pieces = [small[i * parts + part].table["example"] for part in range(parts)]
        assert whole[i].table["example"].tolist() == np.concatenate(pieces).tolist()


def test_three_long_examples_of_a_thousand_are_shown_once_an_epoch():
    """With repeats to fill its batch, a long one was shown 86 times in an epoch."""
    buckets = np.array([0] * 997 + [1] * 3)
    for batches in epochs_of(plan(buckets, 256), 2):
        shown = Counter(np.concatenate([p.table["example"] for p in batches]).tolist())
        assert [shown[i] for i in (997, 998, 999)] == [1, 1, 1]
        assert sum(p.bucket == 1 for p in batches) == 1
        assert max(shown.values()) <= 2  # those that the first epoch left


def test_examples_that_fill_no_batch_are_told():
    """They wait for as many epochs as fill one, which shows them as often as others in the long run."""
    buckets = np.array([0] * 20 + [2] * 3)
    assert plan(buckets, 8).too_few() == {1: 3}
    shown = Counter(
        int(i) for p in itertools.chain(*epochs_of(plan(buckets, 8), 8)) for i in p.table["example"]
    )
    assert [shown[i] for i in (20, 21, 22)] == [8, 8, 8]


def test_order_changes_with_seed_and_epoch():
    def order(seed, epoch):
        return [p.table["example"].tolist() for p in epochs_of(plan(seed=seed), 2)[epoch]]

    orders = [order(3, 0), order(3, 1), order(4, 0)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert order(3, 0) == orders[0]
    # Buckets are mixed over the epoch, not shown one after the other.
    assert len(list(itertools.groupby(p.bucket for p in epochs_of(plan(), 1)[0]))) > 3


def test_random_access_equals_reading_in_order():
    forward = [planned.table["example"].tolist() for planned in map(plan().__getitem__, range(60))]
    ours = plan()
    ours[70]  # looking ahead changes nothing
    for i in np.random.default_rng(0).permutation(60):
        assert ours[int(i)].table["example"].tolist() == forward[i]
        assert plan()[int(i)].table["example"].tolist() == forward[i]


def test_processes_take_rows_of_the_same_batches():
    """Rows follow the mesh: not always neighbours, and several processes may feed the same."""
    taken = [(0, 1, 6, 7), (2, 3, 4, 5), (2, 3, 4, 5)]
    whole, parts = plan(), [plan(rows=rows) for rows in taken]
    for i in range(40):
        for rows, part in zip(taken, [part[i] for part in parts], strict=True):
            for name, column in whole[i].table.items():
                assert part.table[name].tolist() == column[list(rows)].tolist()
            assert part.rows.tolist() == list(rows)
            assert part.bucket == whole[i].bucket


def test_epochs_may_differ_in_what_they_hold():
    asked = []

    def buckets(epoch):
        asked.append(epoch)
        return np.full(10 * (epoch + 1), epoch % 2)

    ours = plan(buckets, batch_size=5)
    for epoch, batches in enumerate(epochs_of(ours, 4)):
        members = np.concatenate([planned.table["example"] for planned in batches])
        assert sorted(members.tolist()) == list(range(10 * (epoch + 1)))
        assert {planned.bucket for planned in batches} == {epoch % 2}
    assert asked == [0, 1, 2, 3, 4]  # sampled once each


def test_iterator_state_is_its_position_whatever_the_threads():
    def make(planned):
        rng = np.random.default_rng((1, planned.index))
        return {"i": np.int64(planned.index), "x": planned.table["example"] + rng.random(8)}

    straight = batch_iterator(plan(), make, threads=0)
    reference = [next(straight)["x"].tolist() for _ in range(30)]
    first = batch_iterator(plan(), make, threads=3)
    assert [next(first)["x"].tolist() for _ in range(11)] == reference[:11]
    state = json.loads(json.dumps(first.get_state()))  # survives a checkpoint file
    further = [next(first)["x"].tolist() for _ in range(19)]
    fresh = batch_iterator(plan(), make, threads=2)
    next(fresh)
    fresh.set_state(state)
    resumed = [next(fresh) for _ in range(19)]
    assert [r["x"].tolist() for r in resumed] == further == reference[11:]
    assert resumed[0]["i"] == 11


def test_rare_buckets_join_the_next_longer_of_their_kind():
    shapes = [Bucket(0, 64), Bucket(0, 96), Bucket(0, 128), Bucket(1, 64), Bucket(1, 96)]
    assert merge_rare([3, 4, 90, 2, 1], shapes, 8).tolist() == [2, 2, 2, 4, 4]
    assert merge_rare([30, 4, 4, 20, 9], shapes, 8).tolist() == [0, 2, 2, 3, 4]
    assert merge_rare([30, 0, 4, 20, 9], shapes, 8).tolist() == [0, 1, 2, 3, 4]


def test_bad_input():
    refuses("batch_size=0", plan, batch_size=0)
    refuses("No example to train on", plan, np.zeros(0, int))
