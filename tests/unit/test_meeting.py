"""The processes of a launch meet: who is absent is named, and a wrong number is refused."""

import socket
import threading
import time

import pytest

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.hosts import distributed as module
from mmqa_jax.core.hosts.distributed import Meeting, bound, join
from tests.refusals import refuses

pytestmark = pytest.mark.slow


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def in_thread(work):
    """Runs work; its result, or what it raised, is put into the list that is returned."""
    ended = []

    def run():
        try:
            ended.append(work())
        except (RunError, UserError) as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def jaxs_service(address):
    """What JAX's service answers to a request of HTTP/1."""
    name, _, port = address.rpartition(":")
    server = socket.create_server((name, int(port)))

    def answer():
        with server:
            while True:
                connection, _ = server.accept()
                connection.recv(4096)
                connection.sendall(b"\x00\x00\x18\x04\x00\x00")  # SETTINGS of HTTP/2
                connection.close()

    threading.Thread(target=answer, daemon=True).start()


def test_all_are_told_who_is_awaited_until_the_last_one_comes(address):
    said, told = [], []
    meeting = Meeting(address, 3, 60, every=0.3, say=said.append)
    host = in_thread(meeting.wait)
    early = in_thread(lambda: join(address, 1, 3, 60, every=0.3, say=told.append))
    deadline = time.monotonic() + 30
    while not (told and said) and time.monotonic() < deadline:
        time.sleep(0.05)
    late = in_thread(lambda: join(address, 2, 3, 60))
    host[0].join(30)
    assert host[1] == [None]
    jaxs_service(address)
    for thread, ended in (early, late):
        thread.join(30)
        assert ended == [None]
    name = socket.gethostname()
    assert any(f"for process 2 of 3; there are 0 ({name}), 1 ({name})" in line for line in said)
    assert "s for process 2, as process 0 at 127.0.0.1" in told[0]


def test_who_does_not_come_is_named(address):
    meeting = Meeting(address, 4, 1)
    with socket.create_connection(address.rsplit(":", 1)) as scan:
        scan.sendall(b"GET / HTTP/1.1\r\n\r\n")  # none of ours
        refuses(r"for processes 1, 2, 3 of 4: gave up; start every", meeting.wait, error=RunError)


def test_process_0_that_was_itself_stopped_gives_nobody_up(address, monkeypatch):
    clock, stopped = time.monotonic, []
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + sum(stopped))
    meeting = Meeting(address, 2, 30)
    host = in_thread(meeting.wait)
    time.sleep(0.2)
    stopped.append(3600)
    time.sleep(0.5)  # some turns
    late = in_thread(lambda: join(address, 1, 2, 30))
    host[0].join(30)
    assert host[1] == [None]
    jaxs_service(address)
    late[0].join(30)
    assert late[1] == [None]


@pytest.mark.parametrize(
    ("place", "why"),
    [(None, "connection refused"), ("no.host.invalid:1234", "its name is not known here")],
)
def test_a_coordinator_that_is_not_there_is_named_with_the_reason(address, place, why):
    said = []
    refuses(why, join, place or address, 1, 2, 1.2, every=0.2, say=said.append, error=RunError)
    assert said
    assert f"for process 0 at {place or address} ({why}" in said[0]
    assert "check that it was started with this address" in said[0]


def test_a_wrong_number_is_refused(address, monkeypatch):
    host = in_thread(Meeting(address, 3, 60, every=0.4).wait)
    for process, count, message in (
        (1, 2, "started as one of 2 processes, process 0 as one of 3"),
        (0, 3, "there is a process 0 already"),
    ):
        refuses(message, join, address, process, count, 30, every=0.4)
    first = in_thread(lambda: join(address, 1, 3, 60, every=0.4, say=print))
    time.sleep(0.5)
    monkeypatch.setattr(module.os, "getpid", lambda: 7)  # another process of this host
    refuses("there is a process 1 already, on ", join, address, 1, 3, 60, every=0.4)
    in_thread(lambda: join(address, 2, 3, 60))
    host[0].join(30)
    assert host[1] == [None]
    jaxs_service(address)
    first[0].join(30)
    assert first[1] == [None]


def test_a_port_that_is_taken_is_named(address, monkeypatch):
    monkeypatch.setattr(module, "_PORT_SECONDS", 0.1)
    name, _, port = address.rpartition(":")
    with socket.create_server((name, int(port))), pytest.raises(UserError, match=address):
        Meeting(address, 2, 1)
    refuses("MMQA_COORDINATOR_BIND", Meeting, "192.0.2.1:1234", 2, 1)


def test_where_process_0_listens_comes_from_the_environment():
    assert bound("[::]:8476", {}) == "[::]:8476"
    assert bound("[::]:8476", {"MMQA_COORDINATOR_BIND": "10.0.0.1"}) == "10.0.0.1:8476"
    assert bound("[::]:8476", {"MMQA_COORDINATOR_BIND": "fd00::1"}) == "[fd00::1]:8476"
    refuses(r"BIND_ADDRESS=10\.0\.0\.1: host:port", bound, "10.0.0.1", {})
    for bad in ("10.0.0.1:8476", "tcp://10.0.0.1"):
        refuses("MMQA_COORDINATOR_BIND", bound, "[::]:8476", {"MMQA_COORDINATOR_BIND": bad})
