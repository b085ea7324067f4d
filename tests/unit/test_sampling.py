"""The batch plan: complete, in any order, resumable, sharded."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.reading import batch_iterator
from mmqa_jax.data.batches.sampling import BatchPlan, merge_rare
from mmqa_jax.data.packing import Bucket

BUCKETS = np.random.default_rng(7).choice([0, 1, 2], 103, p=[0.6, 0.3, 0.1])
EPOCH = sum(-(-n // 8) for n in np.bincount(BUCKETS))  # batches of one


def plan(**changes) -> BatchPlan:
    return BatchPlan(**{"buckets": lambda epoch: BUCKETS, "batch_size": 8, "seed": 3, **changes})


def test_an_epoch_shows_every_example_and_wraps_within_its_bucket():
    ours = plan()
    size = EPOCH
    for epoch in range(3):
        seen = Counter()
        for i in range(epoch * size, (epoch + 1) * size):
            planned = ours[i]
            assert (planned.index, planned.epoch) == (i, epoch)
            assert (BUCKETS[planned.examples] == planned.bucket).all()
            seen.update(planned.examples.tolist())
        assert set(seen) == set(range(103))
        assert set(seen.values()) <= {1, 2}  # a remainder is filled up, once
        assert sum(seen.values()) == size * 8


def test_order_changes_with_seed_and_epoch():
    size = EPOCH

    def order(seed, epoch):
        ours = plan(seed=seed)
        return [ours[i].examples.tolist() for i in range(epoch * size, (epoch + 1) * size)]

    orders = [order(3, 0), order(3, 1), order(4, 0)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert order(3, 0) == orders[0]
    # Buckets are mixed over the epoch, not shown one after the other.
    assert len(list(itertools.groupby(plan()[i].bucket for i in range(size)))) > 3


def test_random_access_equals_reading_in_order():
    forward = [plan_of.examples.tolist() for plan_of in map(plan().__getitem__, range(60))]
    ours = plan()
    ours[4 * EPOCH]  # looking ahead changes nothing
    for i in np.random.default_rng(0).permutation(60):
        assert ours[int(i)].examples.tolist() == forward[i]
        assert plan()[int(i)].examples.tolist() == forward[i]


def test_processes_take_rows_of_the_same_batches():
    """Rows follow the mesh: not always neighbours, and several processes may feed the same."""
    taken = [(0, 1, 6, 7), (2, 3, 4, 5), (2, 3, 4, 5)]
    whole, parts = plan(), [plan(rows=rows) for rows in taken]
    for i in range(40):
        for rows, part in zip(taken, [part[i] for part in parts], strict=True):
            assert part.examples.tolist() == whole[i].examples[list(rows)].tolist()
            assert part.rows.tolist() == list(rows)
            assert part.bucket == whole[i].bucket


def test_epochs_may_differ_in_what_they_hold():
    """Buckets given as a function: -1 leaves an example out, epochs have different lengths."""
    asked = []

    def buckets(epoch):
        asked.append(epoch)
        chosen = np.full(50, -1)
        chosen[: 10 * (epoch + 1)] = epoch % 2
        return chosen

    ours = plan(buckets=buckets, batch_size=5)
    expected = [epoch for epoch in range(4) for _ in range(2 * (epoch + 1))]
    shown = [ours[i] for i in range(len(expected))]
    assert [p.epoch for p in shown] == expected
    for epoch in range(4):
        members = np.concatenate([p.examples for p in shown if p.epoch == epoch])
        assert sorted(members.tolist()) == list(range(10 * (epoch + 1)))
        assert {p.bucket for p in shown if p.epoch == epoch} == {epoch % 2}
    assert asked == [0, 1, 2, 3]  # sampled once each


def test_iterator_state_is_its_position_whatever_the_threads():
    def make(planned):
        rng = np.random.default_rng((1, planned.index))
        return {"i": np.int64(planned.index), "x": planned.examples + rng.random(8)}

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
    with pytest.raises(UserError, match="batch_size=0"):
        plan(batch_size=0)
    with pytest.raises(UserError, match="No example to train on"):
        plan(buckets=lambda epoch: np.zeros(0, int))[0]
    with pytest.raises(UserError, match="No example to train on"):
        plan(buckets=lambda epoch: np.full(5, -1))[0]
