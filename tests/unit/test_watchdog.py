"""A run that stands still is ended; one that moves, rests or was suspended is not."""

import threading
import time

from mmqa_jax.core.errors import EXIT_HANGING
from mmqa_jax.core.hosts.watchdog import Watchdog, last_seen


def test_a_run_that_moves_or_rests_goes_on():
    codes = []
    with Watchdog(0.5, end=codes.append) as watchdog:
        for step in range(8):
            watchdog.beat(step, "computing")
            time.sleep(0.1)
        watchdog.rest()  # an evaluation of unknown length
        time.sleep(1.0)
    assert codes == []


def test_a_run_that_stands_still_is_ended_with_what_it_did(capfd):
    ended = threading.Event()
    codes = []

    def end(code):
        codes.append(code)
        ended.set()

    with Watchdog(0.3, end=end) as watchdog:
        watchdog.beat(7, "reading the batch")
        assert ended.wait(30)
    assert codes == [EXIT_HANGING]
    printed = capfd.readouterr().err
    assert "was at step 7, reading the batch" in printed
    assert "test_a_run_that_stands_still" in printed  # the stack of the thread that hangs


def test_a_suspended_process_does_not_count_as_hanging(monkeypatch):
    jumps = iter([0.0, *(1000.0 * n for n in range(1, 1000))])
    monkeypatch.setattr("mmqa_jax.core.hosts.watchdog.time.monotonic", lambda: next(jumps))
    codes = []
    with Watchdog(1.0, end=codes.append):  # looks ten times a second: a jump counts two looks
        time.sleep(0.3)
    assert codes == []


def test_the_process_behind_the_others_is_named_first():
    computing, reading = (41, 20, "computing"), (40, 20, "reading the batch")
    states = {0: ("a", *computing), 1: ("b", *reading), 2: ("c", *computing)}
    lines = [
        "process 1 on b: step 20, reading the batch, behind the others",
        "process 0 on a: step 20, computing",
        "process 2 on c: step 20, computing",
    ]
    assert last_seen(states, 3) == lines
    assert last_seen(states, 5) == ["nothing was heard from process 3, process 4", *lines]
