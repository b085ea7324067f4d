"""Python processes that need not import JAX, Flax and Orbax: forks of one that has.

Imports take a process 2 s, most of what a tiny run costs. Before it is forked the server has opened
no device and started no thread; a fork reads its environment (devices, launch) as a fresh process
does, and ends as one. Unlike fresh processes, forks hash strings alike, so that a set has the same
order in all of them: a test for which that matters starts processes of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
ADDRESS = "MMQA_TESTS_FORKS"  # environment variable: of the server of all workers
_NUMBER = 4  # bytes of a process id or an exit code
# What the verbs, trainings and jobs that tests start import sooner or later (boto3: tensorboardX).
_IMPORTED = (
    "boto3",
    "grain",
    "mmqa_jax.cli",
    "mmqa_jax.commands.convert",
    "mmqa_jax.commands.demo",
    "mmqa_jax.commands.prompt",
    "mmqa_jax.data.batches.feed",
    "mmqa_jax.evaluation.fluency",
    "mmqa_jax.prompting.backends.engine",
    "mmqa_jax.prompting.backends.http",
    "mmqa_jax.prompting.backends.local_model",
    "mmqa_jax.prompting.run",
    "mmqa_jax.retrieval.embeddings",
    "mmqa_jax.retrieval.indexes.index",
    "mmqa_jax.runs.verbs.candidates",
    "mmqa_jax.runs.verbs.captioning",
    "mmqa_jax.runs.demo",
    "mmqa_jax.runs.verbs.indexing",
    "mmqa_jax.runs.run",
    "mmqa_jax.tasks.contrastive",
    "mmqa_jax.tasks.task",
    "mmqa_jax.tasks.run",
    "mmqa_jax.training.loop",
    "mmqa_jax.weights.folder",
    "orbax.checkpoint",
    "tensorflow_datasets",
    "tests.cheap_jax",
    "tests.object_store",
)
# Settings that JAX reads when it is imported, and a fork after that: their values, and the default.
_SETTINGS = {
    "JAX_COMPILATION_CACHE_DIR": (str, None),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": (lambda text: text != "0", False),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": (float, 1.0),
}


def _number(source: int) -> int:
    if not (read := os.read(source, _NUMBER)):
        raise RuntimeError("The server of a fork has ended.")
    return int.from_bytes(read, "little", signed=True)


class Fork:
    """A forked process, with what tests use of `subprocess.Popen`; stdout has stderr in it."""

    def __init__(self, out: int, status: int):
        self._out, self._status, self._printed = out, status, b""
        self.returncode: int | None = None
        self.pid = _number(self._status)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = _number(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it has ended, and is not yet said to have
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 600) -> tuple[str, None]:
        """What it has printed, once it has ended.

        Raises:
          TimeoutExpired: it has not.
        """
        until = time.monotonic() + timeout
        for source in (self._out, self._status):
            while self.returncode is None:
                left = max(0, until - time.monotonic())
                if not select.select([source], [], [], left)[0]:
                    raise subprocess.TimeoutExpired("a fork", timeout, self._printed)
                if source == self._status:
                    self.returncode = _number(self._status)
                elif read := os.read(source, 1 << 16):
                    self._printed += read
                else:
                    break
        while read := os.read(self._out, 1 << 16):
            self._printed += read
        return self._printed.decode(), None


class ForkServer:
    """Starts processes that have imported modules.

    Args:
      address: of the socket that it listens to.
    """

    def __init__(self, address: str):
        self.address = address

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Fork:
        """One process, in the repository's folder and without input.

        Args:
          arguments: of `python`: a script's file, or -c and code; and its own arguments.
          environment: the whole of it.
        """
        out, their_out = os.pipe()
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), their_out, their_out)
            status = self._request(arguments, environment, ROOT, streams)
        os.close(their_out)
        return Fork(out, status)

    def take_over(self, arguments: Sequence[str]) -> int:
        """A process in place of this one, with its folder, environment, input and output.

        Returns:
          Its exit code, once it has ended.
        """
        status = self._request(arguments, os.environ, Path.cwd(), (0, 1, 2))
        for stream in (0, 1, 2):  # who reads them is to see the other process end
            os.close(stream)
        _number(status)
        return _number(status)

    def _request(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        streams: tuple[int, int, int],
    ) -> int:
        """Asks for a process; where its id and later its exit code can be read."""
        status, their_status = os.pipe()
        request = json.dumps([list(arguments), dict(environment), str(folder)]).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
            requests.connect(self.address)
            socket.send_fds(requests, [request], [*streams, their_status])
        os.close(their_status)
        return status


class OwnForkServer(ForkServer):
    """One that ends with this process, or when it is closed.

    Args:
      modules: what it imports.
      environment: in which it imports them.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        super().__init__(f"{self._folder.name}/requests")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
            requests.bind(self.address)
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(requests.fileno()), *modules],
                cwd=ROOT,
                env={**environment, "PYTHONPATH": str(ROOT)},
                pass_fds=[requests.fileno()],
                stdin=subprocess.PIPE,  # ends with this process
            )

        atexit.register(self.close)

    def close(self) -> None:
        """Once its forks have ended."""
        self._server.stdin.close()
        self._server.wait(timeout=60)
        self._folder.cleanup()


def own_server() -> OwnForkServer:
    """Of what verbs, trainings and jobs import."""
    return OwnForkServer(_IMPORTED, os.environ | {"JAX_PLATFORMS": "cpu"})


@functools.cache
def server() -> ForkServer:
    """`own_server`, of all workers or of this process alone."""
    return ForkServer(os.environ[ADDRESS]) if ADDRESS in os.environ else own_server()


def _next_request(requests: socket.socket) -> tuple[list[str], dict[str, str], str] | None:
    """Forks for every request; returns it in the fork, and None in the server at the end."""
    while requests in select.select([requests, sys.stdin], [], [])[0]:  # nothing comes by stdin
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        while _reaped(os.WNOHANG):
            pass
        if os.fork() == 0:
            requests.close()
            _fork_watched(*descriptors)
            return json.loads(message)
        for descriptor in descriptors:
            os.close(descriptor)
    while _reaped(0):
        pass
    return None


def _reaped(options: int) -> bool:
    """Whether a child has ended, whose processor time is now the server's children's."""
    try:
        return os.waitpid(-1, options)[0] != 0
    except ChildProcessError:
        return False


def _fork_watched(stdin: int, stdout: int, stderr: int, status: int) -> None:
    """Returns in a child with these streams; `status` gets its process id and its exit code."""
    child = os.fork()
    if child == 0:
        os.close(status)
        for stream, given in enumerate((stdin, stdout, stderr)):
            os.dup2(given, stream)
            os.close(given)
        # Python's own would be those of what the server prints to.
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        return
    for stream in (stdin, stdout, stderr):
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):  # who asked for it has ended
        os.write(status, child.to_bytes(_NUMBER, "little", signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(status, code.to_bytes(_NUMBER, "little", signed=True))
    os._exit(0)


def _end(code: int) -> NoReturn:
    """As Python ends, but it does not free every object of the imported modules."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """python forks.py SOCKET MODULES...

    With `tests.cheap_jax` among them forks lower and keep programs as its functions say.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it is interrupted too, and closes it
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as in the tests' own process
    if (request := _next_request(requests)) is None:
        return
    arguments, environment, folder = request
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "jax" in sys.modules:  # which has read its variables
        for name, (parse, default) in _SETTINGS.items():
            value = parse(environment[name]) if name in environment else default
            sys.modules["jax"].config.update(name.lower(), value)
    if cheap_jax := sys.modules.get("tests.cheap_jax"):
        cheap_jax.lower_in_one_context()
        cheap_jax.keep_programs_of_every_process()
    code = 0
    try:
        _run(arguments)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    _end(code)


def _run(arguments: list[str]) -> None:
    """What `python` with these arguments runs."""
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
