"""The processes of a launch meet before JAX joins them, so that one that is absent is named.

JAX's own joining says nothing while it waits and ends the process when it gives up. Here process 0
listens at the coordinator's port until all have come, and then leaves the port to JAX. Every ten
seconds each process prints what it waits for.

A process says who it is in a line of JSON, and is told in such lines who is awaited:

    {"process": 1, "of": 4, "host": "b"}   ->   {"absent": [2, 3]} ... {"absent": []}
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from mmqa_jax.core.errors import RunError, UserError, first_names

EVERY_SECONDS = 10.0  # between two lines
_LONGEST_LINE = 4096  # bytes; who sends more is none of ours
_BETWEEN_TRIES = 0.5  # seconds
_LONGEST_TURN = 10.0  # seconds, of which one may be waited for somebody to come
_PORT_SECONDS = 20.0  # until the port is free


def _print(line: str) -> None:
    print(f"mmqa: {line}", file=sys.stderr, flush=True)


@dataclasses.dataclass
class _Guest:
    """A connection at process 0; `process` is known once its line has come."""

    line: bytes = b""
    process: int | None = None
    host: str = ""


class Meeting:
    """Process 0's side.

    Args:
      bind: HOST:PORT to listen at; [::] are all addresses.
      count: how many processes the launch has.
      limit: seconds until it gives up.
      every: seconds between two lines.
      say: prints a line.
    """

    def __init__(
        self,
        bind: str,
        count: int,
        limit: float,
        *,
        every: float = EVERY_SECONDS,
        say: Callable[[str], None] = _print,
    ):
        self._bind, self._count, self._limit = bind, count, limit
        self._every, self._say = every, say
        self._guests: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._server = _listen(bind)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)

    def wait(self) -> None:
        """Returns when all are there, and listens no more.

        Raises:
          RunError: some have not come within the limit; they are named.
        """
        began = last = time.monotonic()
        due = began + self._every
        try:
            while absent := self._absent():
                now = time.monotonic()
                if now - last > _LONGEST_TURN:  # this process was itself stopped: it did not wait
                    began += now - last
                last = now
                if now > began + self._limit:
                    raise RunError(
                        f"{self._waited(absent, now - began)}: gave up; start every process of the "
                        "launch, or set JAX_NUM_PROCESSES to how many there are."
                    )
                if now > due:
                    due += self._every
                    self._say(
                        f"{self._waited(absent, now - began)}: check that each was started, and "
                        "reaches this port."
                    )
                    self._tell({"absent": absent})
                for key, _ in self._selector.select(min(1.0, max(0.0, due - now))):
                    self._accept() if key.fileobj is self._server else self._read(key.fileobj)
        except BaseException:
            self._close_guests()
            raise
        finally:
            self._selector.close()
            self._server.close()

    def release(self) -> None:
        """Tells all that JAX's service is there now."""
        self._tell({"absent": []})
        self._close_guests()

    def _absent(self) -> list[int]:
        there = {guest.process for guest in self._guests.values()}
        return [process for process in range(1, self._count) if process not in there]

    def _waited(self, absent: list[int], seconds: float) -> str:
        came = [f"{guest.process} ({guest.host})" for guest in self._guests.values() if guest.host]
        others = f"; there are 0 ({socket.gethostname()}), {first_names(came)}" if came else ""
        noun = "process" if len(absent) == 1 else "processes"
        return (
            f"process 0 has waited {seconds:.0f} s at {self._bind} for {noun} "
            f"{first_names(map(str, absent))} of {self._count}{others}"
        )

    def _accept(self) -> None:
        try:
            guest, _ = self._server.accept()
        except OSError:  # gone again
            return
        guest.setblocking(False)
        self._guests[guest] = _Guest()
        self._selector.register(guest, selectors.EVENT_READ)

    def _read(self, connection: Any) -> None:
        guest = self._guests[connection]
        try:
            received = connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received or guest.process is not None:  # gone, or more than its line
            self._leave(connection)
            return
        guest.line += received
        if len(guest.line) > _LONGEST_LINE:
            self._leave(connection)
        elif guest.line.endswith(b"\n"):
            self._greet(connection, guest)

    def _greet(self, connection: socket.socket, guest: _Guest) -> None:
        said = _object(guest.line)
        process, count, host = (said.get(name) for name in ("process", "of", "host"))
        if not isinstance(process, int) or not isinstance(host, str):
            self._leave(connection)  # a port scan, another program
            return
        twin = next((g.host for g in self._guests.values() if g.process == process), None)
        problem = None
        if count != self._count:
            problem = f"it was started as one of {count} processes, process 0 as one of"
            problem += f" {self._count}; give all the same number"
        elif not 0 < process < self._count or twin is not None:
            problem = f"there is a process {process} already, on {twin or socket.gethostname()}"
            problem += "; number the processes differently"
        if problem is not None:
            self._send(connection, {"refused": problem})
            self._leave(connection)
            return
        guest.process, guest.host = process, host

    def _tell(self, message: Any) -> None:
        for connection, guest in list(self._guests.items()):
            if guest.process is not None:
                self._send(connection, message)

    def _send(self, connection: socket.socket, message: Any) -> None:
        with contextlib.suppress(OSError):  # seen when it is read
            connection.sendall(json.dumps(message).encode() + b"\n")

    def _leave(self, connection: Any) -> None:
        del self._guests[connection]
        self._selector.unregister(connection)
        connection.close()

    def _close_guests(self) -> None:
        for connection in self._guests:
            connection.close()
        self._guests.clear()


def join(
    address: str,
    process: int,
    count: int,
    limit: float,
    *,
    every: float = EVERY_SECONDS,
    say: Callable[[str], None] = _print,
) -> None:
    """Every other process's side: returns when process 0 says that all are there.

    Args:
      address: HOST:PORT of process 0.

    Raises:
      RunError: process 0 was not reached, or others have not come, within the limit.
    """
    began, problem = time.monotonic(), "nothing was tried yet"
    due = began + every
    while (now := time.monotonic()) < began + limit:
        try:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), timeout=every) as server:
                hello = {"process": process, "of": count, "host": socket.gethostname()}
                server.sendall(json.dumps(hello).encode() + b"\n")
                server.settimeout(max(0.1, began + limit - now))
                if _all_are_there(server, process, address, began, say):
                    return
            problem = "it closed the connection"
        except socket.gaierror as error:
            problem = f"its name is not known here: {error.strerror}"
        except TimeoutError:
            problem = "no answer: a firewall, or a host that is down"
        except OSError as error:
            problem = f"{(error.strerror or str(error)).lower()}"
        if time.monotonic() > due:
            due = time.monotonic() + every
            say(
                f"process {process} has waited {time.monotonic() - began:.0f} s for process 0 at "
                f"{address} ({problem}): check that it was started with this address, and that "
                "this host reaches the port."
            )
        time.sleep(_BETWEEN_TRIES)
    raise RunError(
        f"process {process} has waited {time.monotonic() - began:.0f} s for process 0 at {address} "
        f"({problem}): gave up; start every process of the launch with the address of process 0."
    )


def _all_are_there(
    server: socket.socket, process: int, address: str, began: float, say: Callable[[str], None]
) -> bool:
    """Reads process 0's lines to the last one; False if it leaves before."""
    received = b""
    while more := server.recv(_LONGEST_LINE):
        received += more
        if not received.startswith(b"{"):
            return True  # JAX's service is there already, and decides
        *lines, received = received.split(b"\n")
        for line in lines:
            said = _object(line)
            if "refused" in said:
                raise UserError(f"process 0 at {address} refuses process {process}: "
                                f"{said['refused']}.")  # fmt: skip
            if not said.get("absent"):
                return True
            noun = "process" if len(said["absent"]) == 1 else "processes"
            say(
                f"process {process} has waited {time.monotonic() - began:.0f} s for {noun} "
                f"{first_names(map(str, said['absent']))}, as process 0 at {address} does: check "
                "that each was started."
            )
    return False


def _object(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _listen(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    deadline = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return _server(host.strip("[]"), int(port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_BETWEEN_TRIES)  # the attempt before this one is still ending
                continue
            why = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror
            raise UserError(
                f"process 0 cannot listen at {bind} ({why}): choose another port in "
                "JAX_COORDINATOR_ADDRESS, or an address of this host in MMQA_COORDINATOR_BIND."
            ) from error


def _server(host: str, port: int) -> socket.socket:
    if host == "::" and socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, dualstack_ipv6=True, backlog=1024)
    host = "0.0.0.0" if host == "::" else host
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=1024)
