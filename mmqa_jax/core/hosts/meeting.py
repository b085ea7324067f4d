"""The processes of a launch meet before JAX joins them, so that one that is absent is named.

JAX's own joining says nothing while it waits, and ends the process by abort() when it gives up.
Process 0 answers HTTP requests at the coordinator's port until all have come, and then leaves the
port to JAX, whose service ends the meeting for the others. Every ten seconds each process prints
whom it waits for.

    GET /?process=1&of=4&host=b&pid=7   ->   {"absent": [2, 3]} or {"refused": "there is ..."}
"""

from __future__ import annotations

import errno
import http.client
import http.server
import json
import os
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, NamedTuple

from mmqa_jax.core.errors import RunError, UserError, decimal_number, first_names

EVERY_SECONDS = 10.0  # between two lines
_LONGEST_LINE = 4096  # bytes of a reply
_BETWEEN_TRIES = 0.2  # seconds
_LONGEST_TURN = 10.0  # seconds; a turn that took longer was this process's own sleep
_PORT_SECONDS = 20.0  # until the port is free


def _print(line: str) -> None:
    print(f"mmqa: {line}", file=sys.stderr, flush=True)


class _Guest(NamedTuple):
    host: str
    pid: str
    seen: float


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
        self._guests: dict[int, _Guest] = {}
        self._all_are_there = threading.Event()
        self._server = _listen(bind, self)

    def wait(self) -> None:
        """Returns when all are there, and listens no more.

        Raises:
          RunError: some have not come within the limit; they are named.
        """
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        waited, due, last = 0.0, self._every, time.monotonic()
        try:
            while absent := self._absent():
                time.sleep(0.05)
                now = time.monotonic()
                if now - last < _LONGEST_TURN:
                    waited += now - last
                last = now
                if waited > self._limit:
                    raise RunError(
                        f"{self._sentence(absent, waited)}: gave up; start every process of the "
                        "launch, or set JAX_NUM_PROCESSES to how many there are."
                    )
                if waited > due:
                    due += self._every
                    self._say(
                        f"{self._sentence(absent, waited)}: check that each was started, and "
                        "reaches this port."
                    )
        finally:
            self._all_are_there.set()
            self._server.shutdown()
            self._server.server_close()

    def greet(self, query: str) -> dict[str, Any]:
        """The reply to a process, which waits for half a line's time if others are absent."""
        values = dict(urllib.parse.parse_qsl(query))
        process, count = (decimal_number(values.get(name, "")) for name in ("process", "of"))
        if process is None or not {"host", "pid"} <= values.keys():
            return {}  # a port scan, another program
        if count != self._count:
            problem = f"it was started as one of {count} processes, process 0 as one of"
            return {"refused": f"{problem} {self._count}; give all the same number"}
        guest = _Guest(values["host"], values["pid"], time.monotonic())
        known = self._guests.get(process, guest)
        if not 0 < process < self._count or (known[:2] != guest[:2] and self._is_there(process)):
            host = known.host if 0 < process < self._count else socket.gethostname()
            problem = f"there is a process {process} already, on {host}"
            return {"refused": f"{problem}; number the processes differently"}
        self._guests[process] = guest
        self._all_are_there.wait(self._every / 2)
        return {"absent": self._absent()}

    def _is_there(self, process: int) -> bool:
        seen = self._guests[process].seen if process in self._guests else float("-inf")
        return time.monotonic() - seen < self._every / 2 + 3 or self._all_are_there.is_set()

    def _absent(self) -> list[int]:
        return [process for process in range(1, self._count) if not self._is_there(process)]

    def _sentence(self, absent: list[int], seconds: float) -> str:
        came = [f"{process} ({guest.host})" for process, guest in list(self._guests.items())]
        others = f"; there are 0 ({socket.gethostname()}), {first_names(came)}" if came else ""
        return (
            f"process 0 has waited {seconds:.0f} s at {self._bind} for {_processes(absent)} "
            f"of {self._count}{others}"
        )


def join(
    address: str,
    process: int,
    count: int,
    limit: float,
    *,
    every: float = EVERY_SECONDS,
    say: Callable[[str], None] = _print,
) -> None:
    """Every other process's side: returns when JAX's own service answers at process 0's port.

    Args:
      address: HOST:PORT of process 0.

    Raises:
      RunError: process 0 was not reached, or others have not come, within the limit.
    """
    began, problem = time.monotonic(), "nothing was tried yet"
    due, absent = began + every, []
    host, _, port = address.rpartition(":")
    here = {"process": process, "of": count, "host": socket.gethostname(), "pid": os.getpid()}
    query = urllib.parse.urlencode(here)
    while time.monotonic() < began + limit:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=every)
        try:
            connection.request("GET", f"/?{query}")
            reply = json.loads(connection.getresponse().read(_LONGEST_LINE))
            refused, absent = reply.get("refused"), reply.get("absent", [])
            # Another process of this number may be this one's last start, which has just ended.
            if refused and time.monotonic() > began + every:
                raise UserError(f"process 0 at {address} refuses process {process}: {refused}.")
            problem = refused or "JAX's service is not there"
        except http.client.RemoteDisconnected:
            problem = "it closed the connection"
        except (http.client.HTTPException, ValueError):
            return  # JAX's service is there, and decides
        except socket.gaierror as error:
            problem = f"its name is not known here: {error.strerror}"
        except TimeoutError:
            problem = "no answer: a firewall, or a host that is down"
        except OSError as error:
            problem = f"{(error.strerror or str(error)).lower()}"
        finally:
            connection.close()
        if time.monotonic() > due:
            due = time.monotonic() + every
            say(_waiting(process, address, absent, time.monotonic() - began, problem))
        time.sleep(_BETWEEN_TRIES)
    raise RunError(
        f"process {process} has waited {time.monotonic() - began:.0f} s for process 0 at {address} "
        f"({problem}): gave up; start every process of the launch with the address of process 0."
    )


def _waiting(process: int, address: str, absent: list[int], seconds: float, problem: str) -> str:
    if absent:
        return (
            f"process {process} has waited {seconds:.0f} s for {_processes(absent)}, as process 0 "
            f"at {address} does: check that each was started."
        )
    return (
        f"process {process} has waited {seconds:.0f} s for process 0 at {address} ({problem}): "
        "check that it was started with this address, and that this host reaches the port."
    )


def _processes(absent: list[int]) -> str:
    return f"process{'es' if len(absent) > 1 else ''} {first_names(map(str, absent))}"


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024

    def __init__(self, host: str, port: int, meeting: Meeting):
        self.meeting = meeting
        if host == "::" and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        (self.address_family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)  # without a look-up of this host's name

    def handle_error(self, *_: Any) -> None:
        """A connection that breaks is no error of this process."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = EVERY_SECONDS

    def do_GET(self) -> None:
        reply = json.dumps(self.server.meeting.greet(self.path.partition("?")[2])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


def _listen(bind: str, meeting: Meeting) -> _Server:
    host, _, port = bind.rpartition(":")
    deadline = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return _Server(host.strip("[]"), int(port), meeting)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.5)  # the attempt before this one is still ending
                continue
            why = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror
            raise UserError(
                f"process 0 cannot listen at {bind} ({why}): choose another port in "
                "JAX_COORDINATOR_ADDRESS, or an address of this host in MMQA_COORDINATOR_BIND."
            ) from error
