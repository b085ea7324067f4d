"""Who is lost, by the beats in the key-value store."""

import json
import socket

import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import peers
from mmqa_jax.core.hosts.peers import Peers, may_be_a_loss
from tests.refusals import refuses


class Store:
    """As JAX's client."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite):
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [pair for pair in self.values.items() if pair[0].startswith(f"{folder}/")]

    def beat(self, process, number, doing="computing"):
        self.values[f"mmqa/alive/{process}"] = json.dumps([f"host{process}", number, 12, doing, 3])


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(peers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(peers.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def watching(store, address, me=1):
    codes = []
    found = Peers(me, 3, address, 20, end=codes.append)
    store.beat(0, 1)
    store.beat(2, 1)
    found.watch(store)
    found.at(13, "computing", lambda: 10)
    return found, codes


def beat(found, store, clock, *processes):
    """Five seconds pass."""
    clock[0] += 5
    for process in processes:
        store.beat(process, clock[0])
    found._exchange(store)


def test_a_process_without_beats_is_named_with_what_it_did(clock, server, capfd):
    store = Store()
    found, codes = watching(store, server)
    for _ in range(3):
        beat(found, store, clock, 0)
    found.settle(lambda: None)
    assert codes == [1]
    assert capfd.readouterr().err == (
        "mmqa: process 2 on host2 (last seen at step 12, computing) is lost: no sign of life for "
        "15 s; this process 1 was at step 13, computing; start the launch again, and it resumes "
        "from step 10.\n"
    )
    found.leave(store)


def test_process_0_that_does_not_answer_is_named_and_not_those_it_tells_of(clock, server):
    found, _ = watching(Store(), server)
    clock[0] += 14
    assert found.lost().startswith("process 0 on host0 (last seen at step 12, computing) is lost")
    assert "has not answered for 14 s" in found.lost()


def test_a_process_that_was_itself_away_names_nobody(clock, server, monkeypatch, capfd):
    """Until the others have had the time to be heard again."""
    own = [50.0]
    monkeypatch.setattr(peers.time, "clock_gettime", lambda _: own[0])
    found, codes = watching(Store(), server)
    clock[0] += 40
    own[0] += 40
    found.report()
    assert codes == [1]
    assert capfd.readouterr().err.startswith(
        "mmqa: this process was itself away for 40 s (stopped, or its machine was), and is lost to "
        "the others; this process 1 was at step 13, computing; start the launch again"
    )
    for _ in range(5):
        own[0] += 9  # a slow host, and no more
        found._was_away()
    assert found.lost().startswith("process 0 on host0")


def test_process_0_whose_port_is_closed_is_named_at_once(clock):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    found, _ = watching(Store(), address)
    assert found.lost().endswith(f"is lost: nothing listens at {address} any more")


def test_a_process_that_ended_by_itself_is_not_lost(clock, server):
    store = Store()
    found, codes = watching(store, server, me=0)
    store.beat(2, 2, "ended")
    for _ in range(4):
        beat(found, store, clock, 1)
    assert found.lost() is None
    assert codes == []


def test_what_another_process_failed_with_comes_first(clock, server):
    found, codes = watching(Store(), server)

    def fail():
        raise UserError("process 2 on host2: p.jpg is missing")

    refuses(r"p\.jpg", found.settle, fail)
    assert codes == []


def test_a_process_that_failed_ends_with_its_own_code(clock, server):
    found, codes = watching(Store(), server)
    found.fails(2)
    found.report()
    assert codes == [2]


def test_full_memory_is_no_loss():
    jax_error = type("JaxRuntimeError", (RuntimeError,), {})
    outer = TimeoutError("a save")
    outer.__cause__ = jax_error("UNAVAILABLE: Socket closed")
    assert may_be_a_loss(outer)
    assert not may_be_a_loss(jax_error("RESOURCE_EXHAUSTED: 3 GiB"))
    assert not may_be_a_loss(ValueError("a bug"))
