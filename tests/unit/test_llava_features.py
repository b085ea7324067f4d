"""Pictures of the requests in flight: each is encoded once, and gone with its last chunk."""

import collections
import dataclasses
import functools

import numpy as np
import pytest
from flax import nnx
from test_engine_pictures import IMAGE, MODEL
from tiny_llm import by_id

from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.image_tower import PatchIds
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llava.network import Llava
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

# Nine patches: a picture and its words take three chunks.
SIZES = EngineConfig(slots=4, length=48, buckets=(8,), prefill_tokens=32)


def tiny_llava() -> Llava:
    """The tiny model: an engine owns its own."""
    return drawn(lambda: Llava(MODEL, rngs=nnx.Rngs()), 3, MODEL.llama.init_stddev)


class Watched:
    """An engine whose tower and decode steps are watched.

    Attributes:
      encoded: how often the tower got each picture, by its bytes.
      kept: pictures on the device after each batch of chunks.
      decoding: the same at each decode step.
    """

    def __init__(self, slots: int):
        sizes = dataclasses.replace(SIZES, slots=slots)
        self.engine = Engine(tiny_llava(), config=sizes)
        self.features = self.engine._pictures
        self.encoded: collections.Counter[bytes] = collections.Counter()
        self.kept, self.decoding = [], []
        programs, runner = self.features._programs, self.engine._runner
        encode, chunks, step = programs.encode, runner.encode, runner.step

        def counted(state, pixels):
            rows = [row.tobytes() for row in np.asarray(pixels) if row.any()]  # not the padding
            assert len(pixels) in programs.batches
            self.encoded.update(rows)
            return encode(state, pixels)

        def with_chunks(*arguments):
            self.kept.append(len(self.features))
            return chunks(*arguments)

        def with_step(*arguments):
            self.decoding.append(len(self.features))
            return step(*arguments)

        programs.encode, runner.encode, runner.step = counted, with_chunks, with_step

    def serve(self, requests):
        self.encoded.clear(), self.kept.clear(), self.decoding.clear()
        return by_id(self.engine.generate(requests))


_of_slots = functools.cache(Watched)


def watch(slots: int, batches: tuple[int, ...]) -> Watched:
    """One of these slots that knows nothing of what was served before."""
    watched = _of_slots(slots)
    watched.features._programs.batches = batches
    watched.engine.forget()
    return watched


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 12, 12, 3)).astype(np.uint8)


def request(number: int, shown, new: int = 4, before: tuple[int, ...] = (5, 6)) -> Request:
    tokens = [*before, *[IMAGE] * len(shown), *(np.arange(7) * (number + 1) % 60).tolist()]
    return Request(number, tokens, new, images=list(shown), logprobs=True)


def test_more_slots_than_any_cache_encode_each_picture_once():
    """24 slots with prompts of three chunks, and twice as many requests."""
    watched, shown = watch(24, (1, 8)), pictures(48)
    requests = [request(n, [shown[n]]) for n in range(48)]
    many = watched.serve(requests)
    assert set(watched.encoded.values()) == {1}
    assert len(watched.encoded) == 48 == watched.engine.throughput.pictures
    assert max(watched.kept) <= 24 + 8
    assert watched.decoding[-1] == 0  # dropped with the last chunk, not at the end
    few = watch(4, (1,)).serve(requests[::4])
    for n in few:
        one, other = many[n].candidates[0], few[n].candidates[0]
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


def test_requests_in_flight_share_a_picture():
    """Its place in the prompts differs, so that no keys and values are shared."""
    watched, shown = watch(4, (1,)), pictures(3)
    requests = [request(n, [shown[n % 3]], before=tuple(range(1, n + 2))) for n in range(12)]
    watched.serve(requests)
    assert sorted(watched.encoded.values()) == [1, 1, 1]
    # Begun alike, the keys and values are copied, and with them the picture.
    requests = [request(n, [shown[0], shown[n % 3]]) for n in range(12)]
    watched.engine.forget()
    watched.serve(requests)
    assert sorted(watched.encoded.values()) == [1, 1, 1]


def test_what_is_on_the_device_follows_from_the_slots():
    """Long prompts of three pictures out of twenty: not all can stay until they are used again."""
    watched, shown = watch(4, (1, 4)), pictures(20)
    rng = np.random.default_rng(1)
    chosen = [rng.choice(20, 3, replace=False) for _ in range(24)]
    requests = [request(n, shown[rows], new=1) for n, rows in enumerate(chosen)]
    found = watched.serve(requests)
    assert max(watched.kept) <= 4 * 3 + 4
    assert len(watched.encoded) == len(np.unique(chosen))
    alone = watch(4, (1,))
    for n in (0, 7, 23):
        (expected,) = alone.serve(requests[n : n + 1]).values()
        np.testing.assert_allclose(
            found[n].candidates[0].logprobs, expected.candidates[0].logprobs, rtol=0, atol=1e-4
        )


def test_an_ended_run_leaves_nothing():
    watched, shown = watch(4, (1,)), pictures(30)  # alone, as on a CPU: bits are equal
    requests = [request(n, [shown[n]], new=1 + n % 5) for n in range(30)]
    expected = watched.serve(requests)
    running = watched.engine.generate(requests)
    next(running)
    running.close()
    assert len(watched.features) == 0

    def broken():
        yield from requests[:20]
        raise OSError("the disk is gone")

    watched.engine.forget()
    with pytest.raises(OSError, match="the disk is gone"):
        list(watched.engine.generate(broken()))
    assert len(watched.features) == 0
    again = watched.serve(requests)
    assert {n: one.candidates for n, one in again.items()} == {
        n: one.candidates for n, one in expected.items()
    }


def test_ids_of_patches_are_the_pictures():
    """Whatever was served before, and of any size of the prompt's integers."""
    ids, (first, second) = PatchIds(MODEL), pictures(2)
    tokens, shown = ids.expand("a", [1, IMAGE, 2, IMAGE, 3], [first, second])
    assert [token < 0 for token in tokens] == [False, *[True] * 9, False, *[True] * 9, False]
    one, other = shown
    places = [(1 + n, one, n) for n in range(9)] + [(11 + n, other, n) for n in range(9)]
    assert ids.of(tokens) == places
    again, _ = PatchIds(MODEL).expand("b", [IMAGE], [second.copy()])
    assert again == tokens[11:20]


def test_pictures_of_a_chunk():
    programs = watch(4, (1,)).features._programs
    assert [programs.in_chunk(tokens) for tokens in (1, 2, 10, 11)] == [1, 2, 2, 3]
