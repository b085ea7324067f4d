"""Questions of several users are computed in one call; one spoils no other."""

import concurrent.futures
import threading
import time

import pytest

from mmqa_jax.serve.systems import Threads


class Doubler:
    """Doubles numbers once it may; keeps what each call was given."""

    def __init__(self):
        self.calls, self.may, self.begun = [], threading.Event(), threading.Event()

    def compute(self, items):
        self.begun.set()
        self.may.wait(10)
        self.calls.append(items)
        return [2 * item if item != 13 else 1 // 0 for item in items]


def asked(threads, doubler, items):
    """The Asking of each, of which the first has the turn and the others wait in a known order."""
    askings = []
    for item in items:
        waiting = len(threads._line)
        askings.append(
            threads.start(lambda turn, item=item: threads.together(doubler.compute, item, turn))
        )
        while len(threads._line) == waiting:
            time.sleep(0.001)
        doubler.begun.wait(10)
    return askings


def test_who_waits_is_computed_in_one_call():
    threads, doubler = Threads(8), Doubler()
    askings = asked(threads, doubler, range(6))
    doubler.may.set()
    assert [asking.future.result(10) for asking in askings] == [0, 2, 4, 6, 8, 10]
    assert doubler.calls == [[0], [1, 2, 3, 4, 5]]
    assert list(threads._wishes.values()) == [[]]
    threads.close()


def test_an_item_that_fails_and_a_user_who_leaves_spoil_no_other(monkeypatch):
    monkeypatch.setattr("mmqa_jax.serve.systems._TOGETHER", 3)
    threads, doubler = Threads(8), Doubler()
    askings = asked(threads, doubler, (1, 2, 13, 4, 5, 6))
    askings[4].cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        askings[4].future.result(10)
    doubler.may.set()
    results = [asking.future.exception(10) or asking.future.result() for asking in askings[:4]]
    assert results[:2] == [2, 4]
    assert isinstance(results[2], ZeroDivisionError)
    assert (results[3], askings[5].future.result(10)) == (8, 12)
    assert doubler.calls == [[1], [2, 13, 4], [2], [13], [4], [6]]
    threads.close()
