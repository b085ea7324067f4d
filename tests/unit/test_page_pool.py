"""Which pages sequences get: none twice, none lost, prefixes shared and evicted."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqa_jax.decoding.page_pool import PagePool
from mmqa_jax.decoding.scheduler import Chunking, prefix_keys


def keys_of(tokens, buckets, unit, adapter=0):
    return prefix_keys(Chunking(buckets).split(tokens, adapter=adapter), unit)


def check(pool, size):
    """Every page of every shard is free, idle, or held, once; what is held has users."""
    for number, shard in enumerate(pool._shards):
        held = [one for slot, one in pool._held.items() if pool.shard(slot) == number]
        users = [prefix for one in held for prefix in one.prefixes]
        shared = {id(prefix): prefix for prefix in users}
        for prefix in shared.values():
            assert prefix.users == sum(other is prefix for other in users)
        assert not shared.keys() & {id(prefix) for prefix in shard.idle.values()}
        pages = [*shard.pages]
        pages += [page for one in held for page in one.pages]
        pages += [page for prefix in shared.values() for page in prefix.pages]
        pages += [page for prefix in shard.idle.values() for page in prefix.pages]
        assert sorted(pages) == list(range(1, size + 1))
        assert len(shard.slots) + len(held) == pool._slots_of_shard
        for key, prefix in shard.idle.items():
            assert (prefix.users, prefix.encoded) == (0, True)
            assert shard.prefixes[key] is prefix


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2),
    st.sampled_from([(4, (8,)), (8, (2, 4)), (4, (4,))]),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4), st.integers(1, 40)), max_size=40),
)
def test_no_page_is_used_twice_and_none_is_lost(shards, sizes, moves):
    """Prompts of few beginnings come, are encoded in part or whole, and go, in any order."""
    (width, buckets), size = sizes, 14
    pool = PagePool(4 * shards, size, width, buckets[-1], shards)
    content = {}  # (shard, page) -> what is encoded there
    running = {}  # slot -> tokens, placement
    for kind, beginning, length in moves:
        if kind < 5:
            tokens = [beginning] * min(length, 24) + [9] * max(0, length - 24)
            keys = keys_of(tokens, buckets, pool.unit)
            placement = pool.place(keys, length + 3, max(0, length - 1))
            if placement is None:
                continue
            assert placement.slot not in running
            assert len(placement.pages) == -(-(length + 3) // width)
            assert placement.reused <= max(0, length - 1)
            running[placement.slot] = tokens, placement
            if placement.awaited is None:
                shard = pool.shard(placement.slot)
                for n in range(placement.reused // width):  # what is reused is there
                    held = content[shard, placement.pages[n]]
                    assert held == tokens[: (n + 1) * width]
        elif running:
            slot = sorted(running)[beginning % len(running)]
            tokens, placement = running[slot]
            ready = placement.awaited is None or placement.awaited.encoded
            if kind < 7 and ready:
                shard = pool.shard(slot)
                for n in range(placement.reused // width, len(tokens) // width):
                    content[shard, placement.pages[n]] = tokens[: (n + 1) * width]
                pool.encoded(slot, len(tokens))
            elif kind == 7 and (ready or placement.awaited.users):
                del running[slot]
                pool.release(slot)
                # As the engine does: who waits for what is given up ends with it.
                for other, (_, one) in list(running.items()):
                    if one.awaited is not None and not one.awaited.encoded:
                        del running[other]
                        pool.release(other)
        check(pool, size)
    pool.release_all()
    check(pool, size)
    pool.clear()
    assert all(len(shard.pages) == size for shard in pool._shards)


def test_shards_are_filled_evenly_and_share_within_themselves():
    """8 slots of 2 shards; prompts that begin alike."""
    pool, placed = PagePool(8, 20, 8, 8, 2), []
    for n in range(8):
        placed.append(pool.place(keys_of([1] * 8 + [n], (8,), 8), 10, 8))
    of_shard = [[one for one in placed if pool.shard(one.slot) == shard] for shard in (0, 1)]
    assert [len(own) for own in of_shard] == [4, 4]
    for first, *rest in of_shard:
        assert [one.reused for one in (first, *rest)] == [0, 8, 8, 8]
        assert {one.pages[0] for one in rest} == {first.pages[0]}
        assert not any(one.awaited.encoded for one in rest)
        pool.encoded(first.slot, 8)
        assert all(one.awaited.encoded for one in rest)


def test_a_prefix_stays_until_its_place_is_needed():
    """The least recently used goes first, its end before its beginning."""
    pool = PagePool(2, 4, 4, 4)
    first, second = [1] * 9, [2] * 5
    for tokens in (first, second, first):
        keys = keys_of(tokens, (4,), 4)
        placement = pool.place(keys, len(tokens), len(tokens) - 1)
        pool.encoded(placement.slot, len(tokens))
        pool.release(placement.slot)
    assert placement.reused == 8
    assert pool.reusable(keys_of(second, (4,), 4), 4) == 4
    pool.place(keys_of([3] * 3, (4,), 4), 8, 2)  # one free page, and the second's
    assert pool.reusable(keys_of(second, (4,), 4), 4) == 0
    assert pool.reusable(keys_of(first, (4,), 4), 8) == 8
    pool.place([], 4, 0)
    assert pool.reusable(keys_of(first, (4,), 4), 8) == 4
    assert pool.place([], 4, 0) is None  # no slot


def test_pages_are_waited_for():
    pool = PagePool(4, 6, 4, 4)
    first = pool.place([], 16, 0)
    assert pool.place([], 12, 0) is None
    assert pool.place([], 8, 0) is not None
    pool.release(first.slot)
    assert len(pool.place([], 12, 0).pages) == 3


def test_equal_chunks_behind_a_different_one_are_no_common_prefix():
    """Keys and values depend on all tokens before them, and on the adapter."""
    keys = keys_of([1, 2, 3, 4, 5, 6], (2,), 2)
    other = keys_of([1, 2, 9, 9, 5, 6], (2,), 2)
    assert [one == two for one, two in zip(keys, other, strict=True)] == [True, False, False]
    assert keys[0] != keys_of([1, 2], (2,), 2, adapter=1)[0]
    assert len(keys_of([1] * 9, (2,), 4)) == 2  # of two chunks each


@pytest.mark.parametrize("length", [1000])
def test_placing_takes_no_longer_with_many_slots(length):
    """512 slots that all hold prompts with a beginning of 512 tokens: below .1 ms each."""
    tokens = np.random.default_rng(0).integers(0, 30000, (512, length))
    tokens[:, :512] = tokens[0, :512]
    pool, seconds = PagePool(512, 512 * 9, 128, 512), []
    for row in tokens.tolist():
        chunks = Chunking((128, 512)).split(row)
        began = time.thread_time()
        placement = pool.place(prefix_keys(chunks, pool.unit), length + 64, length - 1)
        pool.encoded(placement.slot, length)
        seconds.append(time.thread_time() - began)
    assert placement.reused == 512
    print(f"{np.median(seconds) * 1e3:.3f} ms a prompt")
    assert np.median(seconds) < 5e-4
