"""A process of a launch that is lost is named by all others, which then end with exit code 1.

JAX's coordination service finds out: its heartbeats come from threads outside Python, so that
neither compiling nor loading delays them, and a closed connection to process 0 is seen at once.
Beats in its key-value store say who is lost, and what each process was doing. A process that was
itself stopped meanwhile (SIGSTOP, a suspended machine) has heard nothing of the others and is lost
to them: it says so, and names nobody.

JAX alone would end this process by abort() at that moment, with a stack trace (training/HOSTS.md):
`speak_before_abort` lets it say who is lost instead.
"""

import contextlib
import ctypes
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError, decimal_number, first_names
from mmqa_jax.core.terminal import escaped

DEFAULT_HEARTBEAT_SECONDS = 30
_VARIABLE = "MMQA_HEARTBEAT_SECONDS"
_LEAST_SECONDS = 4
_KEY = "mmqa/alive"
_SILENT_BEATS = 2.5  # a process without so many beats is silent
_TICK_SECONDS = 1.0
_ENDED = "ended"
# It runs while the machine is suspended, where there is such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def heartbeat_seconds(environment: Mapping[str, str]) -> int:
    """After how many seconds a silent process is lost: MMQA_HEARTBEAT_SECONDS, or else 30."""
    text = environment.get(_VARIABLE, "")
    if not text:
        return DEFAULT_HEARTBEAT_SECONDS
    if (seconds := decimal_number(text)) is None or seconds < _LEAST_SECONDS:
        raise UserError(
            f"environment: {_VARIABLE}={text}: whole seconds were expected, at least "
            f"{_LEAST_SECONDS}."
        )
    return seconds


class Peers:
    """Follows the other processes of this launch, and reports a lost one.

    Args:
      me, count: this process's number, and how many there are.
      address: HOST:PORT of process 0.
      heartbeat: seconds after which a process counts as lost.
      end: ends the process with an exit code (for tests).
    """

    def __init__(
        self,
        me: int,
        count: int,
        address: str,
        heartbeat: float,
        *,
        end: Callable[[int], Any] = os._exit,
    ):
        self.me, self.count, self._address, self._end = me, count, address, end
        self._beat_seconds = min(5.0, heartbeat / 4)
        self.patience = heartbeat + 2 * self._beat_seconds
        # JAX's heartbeats come twice in that time: a process that was away longer may be lost.
        self._long_away = heartbeat / 2
        self._ticked, self._woke, self._away = float("inf"), float("-inf"), 0.0
        self._fails: int | None = None
        self._step, self._doing, self._moves = 0, "starting", 0
        self._resumes: Callable[[], int | None] | None = None
        self._beat = 0
        self._answered = time.monotonic()
        self._heard: dict[int, float] = {}  # when a beat of a process came
        self._last: dict[int, list[Any]] = {}  # host, beat, step, doing, moves
        self._stop, self._once = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, client: Any) -> None:
        """Starts the beats, over JAX's connected client."""
        self._heard = dict.fromkeys(range(self.count), time.monotonic())
        self._exchange(client)
        self._was_away()
        threading.Thread(target=self._tick_on, daemon=True).start()
        self._thread = threading.Thread(target=self._run, args=(client,), daemon=True)
        self._thread.start()

    def at(self, step: int, doing: str, resumes: Callable[[], int | None] | None) -> None:
        """Says what this process does now, and from which step a restart would go on (None: from
        none).
        """
        self._step, self._doing, self._resumes = step, doing, resumes
        self._moves += 1

    def fails(self, exit_code: int) -> None:
        """This process has failed, and said so: it ends with that code, whatever JAX finds."""
        self._fails = exit_code

    def leave(self, client: Any) -> None:
        """This process ends by itself: what JAX finds out from now on is not told."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._beat_seconds)
        self._doing = _ENDED
        with contextlib.suppress(Exception):
            self._publish(client)

    def states(self) -> dict[int, tuple[str, int, int, str]] | None:
        """Host, moves, step and what it does of each process that was heard; None: 0 is silent."""
        if self.me and time.monotonic() - self._answered > _SILENT_BEATS * self._beat_seconds:
            return None
        return {
            process: (host, moves, step, doing)
            for process, (host, _, step, doing, moves) in sorted(self._last.items())
        }

    def lost(self) -> str | None:
        """Who is lost and how that is known, as far as can be seen from here."""
        if away := self._was_away():
            return (
                f"this process was itself away for {away:.0f} s (stopped, or its machine was), and "
                "is lost to the others"
            )
        now, silent_after = time.monotonic(), _SILENT_BEATS * self._beat_seconds
        if self.me and now - self._answered > silent_after:
            return f"{self._name(0)} is lost: it has not answered for {now - self._answered:.0f} s"
        silent = [
            process
            for process in range(self.count)
            if process != self.me
            and now - self._heard.get(process, now) > silent_after
            and self._last.get(process, [None] * 3 + [""])[3] != _ENDED
        ]
        if silent:
            names = first_names(map(self._name, silent))
            seconds = max(now - self._heard[process] for process in silent)
            are = "is" if len(silent) == 1 else "are"
            return f"{names} {are} lost: no sign of life for {seconds:.0f} s"
        if self.me and not self._reached():
            return f"{self._name(0)} is lost: nothing listens at {self._address} any more"
        return None

    def report(self) -> None:
        """JAX has found that a process is lost: says which, and ends this one."""
        if not self._once.acquire(blocking=False):
            time.sleep(self.patience)  # another thread is saying it
            return
        if self._fails is not None:
            self._end(self._fails)
            return
        if self._stop.is_set():
            self._say_and_end("another process of the launch was lost while all were ending")
            return
        # The beats may be a moment behind JAX's heartbeats.
        deadline = time.monotonic() + 2 * self._beat_seconds
        while (lost := self.lost()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self._say_and_end(lost or "another process of the launch is lost, not known which")

    def settle(self, raise_failure: Callable[[], None]) -> None:
        """Ends this process with a lost one's name after a collective has failed, if one is lost.

        `raise_failure` raises what another process has failed with by itself, if one has.
        """
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # JAX's, if process 0 is gone
                raise_failure()
            if (lost := self.lost()) is not None and self._once.acquire(blocking=False):
                self._say_and_end(lost)
                return
            time.sleep(0.1)

    def hold_errors_of_threads(self) -> None:
        """A save or prefetch that fails because a process is lost waits until that is said."""

        def settled(record: logging.LogRecord) -> bool:
            if record.exc_info and may_be_a_loss(record.exc_info[1]):
                self.settle(lambda: None)
            return True

        def hook(failed: Any) -> None:
            if may_be_a_loss(failed.exc_value):
                self.settle(lambda: None)
            before(failed)

        logging.getLogger("absl").addFilter(settled)  # Orbax's
        before, threading.excepthook = threading.excepthook, hook

    def _say_and_end(self, lost: str) -> None:
        # The main thread may hold the lock of a stream that nobody reads.
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(2)
        here = f"this process {self.me} was at step {self._step}, {self._doing}"
        line = f"mmqa: {lost}; {here}; {self._remedy()}.\n"
        if self.me == 0:
            # Before the line, which jaxlib's own would follow else. Others need its store to know
            # what it knows: they read that once a beat.
            time.sleep(1 if self.count == 2 else 1 + self._beat_seconds)
        os.write(2, escaped(line).encode(errors="replace"))
        self._end(1)

    def _remedy(self) -> str:
        if self._resumes is None:
            return "start the launch again"
        steps: list[int | None] = []
        ask = threading.Thread(target=lambda: steps.append(self._resumes()), daemon=True)
        ask.start()
        ask.join(5)  # the file system may be what is lost
        if not steps:
            return "start the launch again, and it resumes from its last checkpoint"
        if steps[0] is None:
            return "start the launch again; no checkpoint was saved yet"
        return f"start the launch again, and it resumes from step {steps[0]}"

    def _name(self, process: int) -> str:
        known = self._last.get(process)
        if known is None:
            return f"process {process}"
        host, _, step, doing, _ = known
        return f"process {process} on {host} (last seen at step {step}, {doing})"

    def _tick_on(self) -> None:
        """Notices suspensions, in a thread of its own that waits for nothing but the clock."""
        while not self._stop.wait(_TICK_SECONDS):
            self._was_away()

    def _was_away(self) -> float:
        """Seconds for which this process did not run, if that was long and has just ended; or 0."""
        now = time.clock_gettime(_CLOCK)
        gap, self._ticked = now - self._ticked, now
        if gap > self._long_away:
            self._woke, self._away = now, gap
        return self._away if now - self._woke < self.patience else 0.0

    def _reached(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
                return True
        except OSError:
            return False

    def _run(self, client: Any) -> None:
        wait = self._beat_seconds / 8  # who came a moment later is known soon, and can be named
        while not self._stop.wait(wait):
            wait = self._beat_seconds
            # If process 0 does not answer, JAX finds that out too.
            with contextlib.suppress(Exception):
                self._exchange(client)

    def _publish(self, client: Any) -> None:
        self._beat += 1
        value = [socket.gethostname(), self._beat, self._step, self._doing, self._moves]
        client.key_value_set(f"{_KEY}/{self.me}", json.dumps(value), allow_overwrite=True)

    def _exchange(self, client: Any) -> None:
        self._publish(client)
        for key, text in client.key_value_dir_get(_KEY):
            process, value = int(key.rpartition("/")[2]), json.loads(text)
            if self._last.get(process, [None, None])[1] != value[1]:
                self._heard[process] = time.monotonic()
                self._last[process] = value
        self._answered = time.monotonic()


def may_be_a_loss(error: BaseException | None) -> bool:
    """Whether an error comes from jaxlib, other than that memory is full."""
    while error is not None and type(error).__name__ != "JaxRuntimeError":
        error = error.__cause__ or error.__context__
    return error is not None and "RESOURCE_EXHAUSTED" not in str(error)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def speak_before_abort(report: Callable[[], None]) -> tuple[Callable[..., None] | None, Any]:
    """Returns a `missed_heartbeat_callback` for JAX's client that calls `report`.

    jaxlib 0.10 cannot pass the callback its argument, which ends in C++'s std::terminate: that is
    taken over here, for this one cause, with `report` in front of it.

    Returns:
      The callback, and what has to be kept as long as the process lives; None in its place where
      C++'s runtime is another one than jaxlib's for Linux: JAX ends the process as it always does.
    """
    try:
        library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        set_terminate = library["_ZSt13set_terminatePFvvE"]  # std::set_terminate(void (*)())
        current = library["__cxa_current_exception_type"]
    except (OSError, AttributeError):
        return None, None
    handler_type = ctypes.CFUNCTYPE(None)
    set_terminate.argtypes, set_terminate.restype = [handler_type], ctypes.c_void_p
    current.argtypes, current.restype = [], ctypes.c_void_p

    def handle() -> None:
        if _type_name(current()) == b"St8bad_cast":
            report()
        before()

    handler = handler_type(handle)
    before = handler_type(set_terminate(handler))
    return lambda *_: None, handler


def _type_name(type_info: int | None) -> bytes | None:
    """Reads the mangled name in a std::type_info: the pointer after its virtual table's."""
    if not type_info:
        return None
    place = type_info + ctypes.sizeof(ctypes.c_void_p)
    return ctypes.cast(ctypes.c_void_p.from_address(place).value, ctypes.c_char_p).value
