"""Runs functions on what nobody here wrote in a process of its own, with a budget.

A chat template is a program, a tokenizer's regular expression can be one that never ends, and a
document's parser can be led in circles. Python cannot stop them from within, so that a child
process runs them: the system ends it at the end of its processor time, and gives it no more memory
than a call may take. The child gets its requests as JSON lines, each followed by the bytes that
belong to it, has no secrets in its environment, writes no files, opens no sockets, starts no
programs, and ends with the process that started it. It is started once and stays for the next call.

This file is both sides: the child runs it as a script, and imports nothing of mmqa_jax.
"""

import contextlib
import json
import math
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

_PATIENCE = 5  # seconds of the clock for each of the processor's, which may stand still
_TO_START = 60  # seconds of the clock until the child has its imports, on a busy machine
_OF_REQUEST = 16  # bytes of memory that a call may take beyond its budget, for each of its request
_NO_MEMORY, _NO_ROOM = 1, 3  # how a child ends itself
# Python's audit events (PEP 578) of what no function in a box needs.
_FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork")
# What Python needs to start, and what the time of day depends on.
_ENVIRONMENT = ("SYSTEMROOT", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG")


class Budget(NamedTuple):
    """The limits that a call must keep."""

    seconds: int = 3  # of processor time
    memory: int = 256 << 20  # bytes, and `_OF_REQUEST` times those of the request
    output: int = 256 << 20  # bytes of the reply


class OverBudget(Exception):
    """A call took more than it may, or the child crashed on it.

    `status`: with which the child ended; None: it was late, and had to be ended.
    """

    def __init__(self, budget: Budget, status: int | None):
        seconds = f"it takes over {budget.seconds} seconds of processor time"
        memory = f"it takes over {budget.memory >> 20} MiB of memory"
        output = f"over {budget.output >> 20} MiB come out of it"
        named = {None: seconds, _NO_MEMORY: memory, _NO_ROOM: output}
        if hasattr(signal, "SIGPROF"):
            named[-signal.SIGPROF] = seconds
        super().__init__(named.get(status, f"it crashes, as it may where {memory}"))
        self.is_late = named.get(status) == seconds


class Failed(Exception):
    """A function raised an exception.

    Attributes:
      kind: name of the exception's class.
      line: its attribute `lineno`, if it has one.
    """

    def __init__(self, kind: str, message: str, line: int | None):
        super().__init__(message)
        self.kind, self.line = kind, line


class Box:
    """A child process that calls the functions of a file; it starts with the first call.

    `code`: a Python file whose functions take and return values that JSON has.
    """

    def __init__(self, code: Path):
        self._code = code
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def call(self, function: str, **request: Any) -> Any:
        """Returns what a function of the file returns for these arguments.

        Raises:
          OverBudget: it took too much; the next call starts a new child.
          Failed: it raised an exception.
        """
        return self._called(Budget(), None, function, request)[0]

    def call_on(
        self, data: bytes, budget: Budget, function: str, **request: Any
    ) -> tuple[Any, list[bytes]]:
        """Calls a function that takes bytes first and returns (a value, a list of bytes)."""
        return self._called(budget, data, function, request)

    def close(self) -> None:
        """Ends the child, and a call of another thread with it."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()

    def _called(
        self, budget: Budget, data: bytes | None, function: str, request: dict[str, Any]
    ) -> tuple[Any, list[bytes]]:
        size = None if data is None else len(data)
        line = json.dumps([function, request, size, budget]).encode() + b"\n"
        with self._lock:
            is_new = self._child is None
            try:
                answer, blobs = self._asked(line, data or b"", budget)
            except OverBudget as error:
                # Calls before it may have left less memory than a new child has.
                if is_new or error.is_late or self._is_closed:
                    raise
                answer, blobs = self._asked(line, data or b"", budget)
        if "failed" in answer:
            raise Failed(*answer["failed"])
        return answer["value"], blobs

    def _asked(self, line: bytes, data: bytes, budget: Budget) -> tuple[Any, list[bytes]]:
        child = self._child or self._start()
        try:
            reply = _exchange(child, line, data, _PATIENCE * budget.seconds)
            answer = json.loads(reply) if reply.endswith(b"\n") else {"sizes": []}
            blobs = [child.stdout.read(size) for size in answer["sizes"]]
        except BaseException:  # Ctrl-C: the reply would be taken for that of the next call
            self._end(child)
            raise
        if "value" not in answer and "failed" not in answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
            status = child.returncode
            self._end(child)
            raise OverBudget(budget, status)
        return answer, blobs

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-B", __file__, os.fspath(self._code)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        child = subprocess.Popen(
            [*command, *filter(None, sys.path), os.fspath(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _ended, child, os.getpid())
        self._child = child
        if self._is_closed:  # another thread has closed the box, and saw no child to end
            child.kill()
        if _exchange(child, b"", b"", _TO_START) != b"ready\n":
            self._end(child)
            raise RuntimeError(f"{self._code}: no process for it starts ({' '.join(command)})")
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        _ended(child, os.getpid())


def _exchange(child: subprocess.Popen[bytes], line: bytes, data: bytes, seconds: float) -> bytes:
    """The child's next line after this one; cut short, or empty, where it has ended or is late."""
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(line)
        child.stdin.write(data)
        child.stdin.flush()
    if hasattr(select, "poll"):  # Windows has none for pipes
        poll = select.poll()
        poll.register(child.stdout, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return b""
    return child.stdout.readline()


def _ended(child: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() != parent:  # a fork ends, and the child is not its own
        return
    child.kill()
    child.wait()
    child.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()


# The child's side.


def _serve(code: str, paths: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, whose end ends this one
    sys.path.extend(path for path in paths if path not in sys.path)
    functions = runpy.run_path(code)
    requests, replies, sys.stdout = sys.stdin.buffer, sys.stdout.buffer, sys.stderr
    limit = _Limit()
    sys.addaudithook(_refuse)
    replies.write(b"ready\n")
    replies.flush()
    for line in requests:
        function, request, size, budget = json.loads(line)
        budget = Budget(*budget)
        limit.begin(budget, len(line) + (size or 0))
        if limit.left() < budget.memory // 2:  # calls before this one have taken it
            os._exit(_NO_MEMORY)
        blobs: list[bytes] = []
        try:
            if size is None:
                answer = {"value": functions[function](**request)}
            else:
                value, blobs = functions[function](requests.read(size), **request)
                answer = {"value": value}
        except MemoryError:
            os._exit(_NO_MEMORY)  # a new process begins with all of its memory
        except BaseException as error:  # that of a library in Rust is no Exception
            if limit.left() < budget.memory // 8:  # libraries raise errors of their own for it
                os._exit(_NO_MEMORY)
            text, row = str(error), getattr(error, "lineno", None)
            answer = {"failed": [type(error).__name__, text[:2000], row]}
        try:
            reply = json.dumps(answer | {"sizes": list(map(len, blobs))}).encode() + b"\n"
        except MemoryError:
            os._exit(_NO_MEMORY)
        if len(reply) + sum(map(len, blobs)) > budget.output:
            os._exit(_NO_ROOM)
        limit.end()
        replies.write(reply)
        replies.writelines(blobs)
        replies.flush()


def _refuse(event: str, _: Any) -> None:
    """An audit hook, which nothing can remove."""
    if event.startswith(_FORBIDDEN):
        raise PermissionError(f"{event}: not in a box")


class _Limit:
    """The budget of a call, kept by the system as far as it can: Windows has no bound of memory."""

    def __init__(self):
        self._memory = self._most = 0
        try:
            import resource
        except ImportError:
            return
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            resource.setrlimit(kind, (0, 0))
        self._page = resource.getpagesize()
        with contextlib.suppress(OSError):  # other systems than Linux do not say it
            self._memory = self._used()

    def _used(self) -> int:
        """Bytes of the address space that are in use."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * self._page

    def left(self) -> float:
        """Bytes of memory that the call may still take."""
        return self._most - self._used() if self._most else math.inf

    def begin(self, budget: Budget, size: int) -> None:
        """Sets the limits of a call whose request has `size` bytes."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, budget.seconds)  # its signal ends the process
        else:
            import faulthandler

            faulthandler.dump_traceback_later(budget.seconds, exit=True)
        most = self._memory + budget.memory + _OF_REQUEST * size
        if self._memory and most != self._most:
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            if hard == resource.RLIM_INFINITY or most < hard:
                resource.setrlimit(resource.RLIMIT_AS, (most, hard))
            self._most = most

    def end(self) -> None:
        """The call has its answer."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        else:
            import faulthandler

            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
