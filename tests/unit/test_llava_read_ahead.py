"""Pictures that threads decode ahead: order, bounds, what recurs, and what is broken."""

import dataclasses
import threading
import time

import numpy as np
import pytest
from PIL import Image
from test_engine_pictures import MODEL
from test_llava_features import tiny_llava
from tiny_llm import flag, text_tokenizer

from mmqa_jax.data.pictures.bounds import FREE_PIXELS
from mmqa_jax.data.pictures.decode import PictureError
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Unanswerable
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.prompting.backends import Completion, Decoding, Picture
from mmqa_jax.prompting.backends.cache import answer_all
from mmqa_jax.prompting.backends.engine import EngineBackend, read_ahead
from tests.pictures import encoded


def picture(number: int) -> Picture:
    return Picture(b"%d" % number, f"picture {number}")


def test_items_keep_their_order_and_pictures_are_read_ahead_once():
    read, begun = [], []

    def reader(one: Picture) -> np.ndarray:
        number = int(one.data)
        read.append(number)
        time.sleep(0.01 * (number % 3))  # later ones are ready first
        return np.full(2, number)

    def items():
        for number in range(30):
            begun.append(number)
            yield [] if number % 5 == 4 else [picture(number % 7), picture(number)]

    found = []
    for number, (shown, pixels) in enumerate(read_ahead(items(), list, reader, 8)):
        assert [int(one.data) for one in shown] == [int(one[0]) for one in pixels]
        found.append(len(shown))
        assert number < len(begun) <= number + 9
    assert found == [0 if number % 5 == 4 else 2 for number in range(30)]
    assert max(read.count(number) for number in range(7, 30)) == 1
    assert read.count(1) < 9  # of nine uses


def test_a_broken_picture_is_its_items_error():
    def reader(one: Picture) -> np.ndarray:
        if one.data == b"2":
            raise PictureError(f"{one.name}: broken")
        return np.full(2, int(one.data))

    found = list(read_ahead([[picture(n), picture(9)] for n in range(5)], list, reader, 4))
    kinds = [type(pixels) for _, pixels in found]
    assert kinds == [list, list, PictureError, list, list]
    assert str(found[2][1]) == "picture 2: broken"
    with pytest.raises(ZeroDivisionError):  # a mistake of ours is not a picture's
        list(read_ahead([[picture(0)]], list, lambda one: 1 // int(one.data), 4))


def test_closed_early_it_reads_no_further():
    waits, read = threading.Event(), []

    def reader(one: Picture) -> np.ndarray:
        read.append(one)
        if one.name != "picture 0":
            waits.wait(5)  # so that the others are queued still when it is closed
        return np.zeros(1)

    before = threading.active_count()
    running = read_ahead(([picture(n)] for n in range(10_000)), list, reader, 5_000)
    next(running)
    threading.Timer(0.1, waits.set).start()
    running.close()
    assert len(read) < 5_000
    assert threading.active_count() <= before + 1


def thin() -> Picture:
    """Only decoding shows that it cannot be used."""
    return Picture(encoded(Image.new("L", (1, FREE_PIXELS // 12 + 1))), "thin.png")


def test_a_served_query_with_a_broken_picture_is_refused():
    backend = EngineBackend(
        lambda demand: pytest.fail("the engine was made"), text_tokenizer(), length=64,
        fingerprint="llava", pictures=MODEL,
    )  # fmt: skip
    query = Completion("a", "Say", Decoding(max_new_tokens=3), (thin(),))
    backend.check(query)
    with pytest.raises(Unanswerable, match=r"thin\.png: too long and thin: .*; cut it into parts"):
        backend.engine_request(query)


@pytest.mark.slow
def test_a_broken_picture_fails_its_own_query():
    """One that only decoding shows to be broken: the others are answered."""
    sizes = EngineConfig(slots=2, length=64, buckets=(32,), prefill_tokens=64)
    engine = Engine(tiny_llava(), text_tokenizer(), config=sizes)
    backend = EngineBackend(
        lambda demand: engine, text_tokenizer(), length=64, fingerprint="llava", pictures=MODEL
    )
    decoding = Decoding(max_new_tokens=3)
    shown = [flag((10 * n, 0, 0)) for n in range(20)]
    queries = [Completion(n, f"Say{' x' * n}", decoding, (shown[n],)) for n in range(20)]
    queries[7] = dataclasses.replace(queries[7], images=(thin(),))
    for query in queries:
        backend.check(query)
    answers, failed, _ = answer_all(backend, queries)
    assert answers.keys() == set(range(20)) - {7}
    assert failed.keys() == {7}
    assert failed[7].startswith("thin.png: ")
    usage = backend.usage
    assert (usage.requests, usage.failures) == (19, 1)
    assert engine.throughput.pictures == 19
