"""Runs functions on what nobody here wrote in a process of its own, with a budget.

A chat template is a program, and a tokenizer's regular expression can be one that never ends.
Python cannot stop either from within, so that a child process runs them: the system ends it at the
end of its processor time, and gives it no more memory than a call may take. The child gets its
requests as JSON lines, has no secrets in its environment, writes no files, and ends with the
process that started it. It is started once and stays for the next call.

This file is both sides: the child runs it as a script, and imports nothing of mmqa_jax.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

SECONDS = 3  # of processor time for a call
_PATIENCE = 5 * SECONDS  # seconds of the clock, for a machine whose processor timer stands still
_TO_START = 60  # seconds of the clock until the child has its imports, on a busy machine
MEMORY = 256 << 20  # bytes that a call may take, and `_OF_REQUEST` times those of its request
_OF_REQUEST = 16
# What Python needs to start, and what the time of day depends on.
_ENVIRONMENT = ("SYSTEMROOT", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG")


class OverBudget(Exception):
    """A call took more time or memory than it may, or the child crashed on it."""

    def __init__(self):
        super().__init__(
            f"it takes over {SECONDS} seconds of processor time, over {MEMORY >> 20} MiB of "
            "memory, or crashes"
        )


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

    Args:
      code: a Python file that imports nothing of mmqa_jax, whose functions take and return values
        that JSON has.
    """

    def __init__(self, code: Path):
        self._code = code
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def call(self, function: str, **request: Any) -> Any:
        """What a function of the file returns for these arguments.

        Raises:
          OverBudget: it took too much; the next call starts a new child.
          Failed: it raised an exception.
        """
        line = json.dumps([function, request]).encode() + b"\n"
        with self._lock:
            child = self._child or self._start()
            try:
                reply = _exchange(child, line, _PATIENCE)
            except BaseException:  # Ctrl-C: the reply would be taken for that of the next call
                self._end(child)
                raise
            if not reply.endswith(b"\n"):
                self._end(child)
                raise OverBudget
        answer = json.loads(reply)
        if "failed" in answer:
            raise Failed(*answer["failed"])
        return answer["value"]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-B", __file__, os.fspath(self._code)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        child = subprocess.Popen(
            [*command, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _ended, child, os.getpid())
        if _exchange(child, b"", _TO_START) != b"ready\n":
            _ended(child, os.getpid())
            raise RuntimeError(f"{self._code}: no process for it starts ({' '.join(command)})")
        self._child = child
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        _ended(child, os.getpid())


def _exchange(child: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """The child's next line after this one; cut short, or empty, where it has ended or is late."""
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(line)
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
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    limit = _Limit()
    replies.write(b"ready\n")
    replies.flush()
    for line in sys.stdin.buffer:
        limit.begin(len(line))
        try:
            function, request = json.loads(line)
            answer = {"value": functions[function](**request)}
        except MemoryError:
            os._exit(1)  # a new process begins with all of its memory
        except BaseException as error:  # that of a library in Rust is no Exception
            text, row = str(error), getattr(error, "lineno", None)
            answer = {"failed": [type(error).__name__, text[:2000], row]}
        reply = json.dumps(answer).encode() + b"\n"
        limit.end()
        replies.write(reply)
        replies.flush()


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
        with contextlib.suppress(OSError):  # other systems than Linux do not say it
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            self._memory = pages * resource.getpagesize() + MEMORY

    def begin(self, size: int) -> None:
        """Sets the limits of a call whose request has `size` bytes."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        else:
            import faulthandler

            faulthandler.dump_traceback_later(SECONDS, exit=True)
        most = self._memory + _OF_REQUEST * size
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
