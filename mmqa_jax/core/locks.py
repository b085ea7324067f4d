"""A lock on a folder for as long as a process writes into it.

In the file system it is a record lock, in an object store what `StoreLock` makes of objects.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from mmqa_jax.core.errors import EXIT_HANGING, UserError
from mmqa_jax.core.paths import in_store

LOCK = ".lock"  # the locked file of a folder
_FLOCK = "hhqqi"  # struct flock of Linux: type, whence, start, length, process


class Busy(Exception):
    """Another process holds the lock; the message says which."""


def hold(path: Path, *, shared: bool = False) -> IO | StoreLock:
    """Locks the file `path`, made if missing, until the returned handle is closed.

    A record lock dies with its process, however that ends, and worker processes do not inherit it.

    `shared`: many processes may hold it, as long as none holds it alone.

    Raises:
      Busy: another process holds it.
      OSError: the file cannot be opened, or its file system has no locks.
    """
    if in_store(path):
        lock = StoreLock(path, shared=shared)
        if owner := lock.take():
            raise Busy(owner)
        return lock
    file = _open(path)
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise Busy(owner) from error
        raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def holder(path: Path) -> str | None:
    """Which process of this or another host holds the lock on a file; "": none does.

    The lock is looked at and not taken; a process that holds it itself would lose it. None: an
    object store, or a system that does not tell.
    """
    if in_store(path) or not sys.platform.startswith("linux"):
        return None
    try:
        with path.open("r+", encoding="utf-8") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                return ""
            return file.read().strip() or "another process"
    except FileNotFoundError:
        return ""
    except OSError:
        return None


def nobody_else(lock: IO | StoreLock) -> bool:
    """Whether no other process holds a lock of `hold`; if so, this one now holds it alone."""
    if isinstance(lock, StoreLock):
        return lock.is_only_one()
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Waits for the lock on the file `path`, made if missing, and holds it within the block."""
    if in_store(path):
        with StoreLock(path, shared=False) as lock:
            lock.wait()
            yield
        return
    with contextlib.ExitStack() as closing:
        try:
            file = closing.enter_context(_open(path))
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be locked ({error.strerror}); name a place on a file system with "
                "locks."
            ) from error
        yield


def _open(path: Path) -> IO:
    """The file, made if missing; OSError for a link, which would have another file overwritten."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "a+", encoding="utf-8")


# Locks in an object store, which has none: who holds one has an object there.
#
# A lock is a name; `NAME/shared-...` and `NAME/alone-...` are the objects of its holders, one
# each. To take it, a process first writes its own object and then looks at the others: since a
# store lists what is written, of two that begin at once at least one sees the other. One that sees
# a holder it cannot share with removes its own object again.
#
# A holder rewrites its object every few seconds. One that does not for `PATIENCE_SECONDS` is dead,
# or of a process of this host that has ended: its object is removed by the next that wants the
# lock. A process whose object was removed all the same (it was frozen, or had no network for so
# long) ends at once, with an exit code at which launchers start it again.

BEAT_SECONDS = 10.0
PATIENCE_SECONDS = 40.0


class StoreLock:
    """This process's object of a lock; use it as a context manager, or close it.

    Args:
      path: the lock's name in the store.
      shared: whether others may hold it too, that share it as well.
    """

    def __init__(self, path: Path, *, shared: bool):
        self._folder, self._shared = path, shared
        self._own = self._name(shared)
        self._watched: dict[str, tuple[str, float]] = {}  # other -> content, since when
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._beats = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._own.unlink(missing_ok=True)

    def take(self) -> str | None:
        """Takes the lock, or returns who holds it; waits while it is not known if they live."""
        self._beat()
        while others := self._others():
            if alive := next((name for name in others if self._lives(name) is True), None):
                owner = self._owner(alive)
                self._own.unlink(missing_ok=True)
                return owner
            time.sleep(BEAT_SECONDS / 10)
            self._beat()  # others may be looking at this one
        self._keep()
        return None

    def wait(self) -> None:
        """Takes the lock as soon as nobody else holds it."""
        pause = 0.05
        while True:
            self._beat()
            others = [name for name in self._others() if self._lives(name) is not False]
            if not others:
                self._keep()
                return
            self._own.unlink(missing_ok=True)
            time.sleep(random.uniform(0.5, 1) * pause)
            pause = min(2 * pause, 2.0)

    def is_only_one(self) -> bool:
        """Whether nobody else holds a shared lock; if so, this process now holds it alone."""
        shared, alone = self._own, self._name(False)
        self._beat(alone)
        self._own, self._shared = alone, False
        if any(name != shared.name for name in self._others()):
            self._own, self._shared = shared, True
            alone.unlink(missing_ok=True)
            return False
        shared.unlink(missing_ok=True)
        return True

    def _name(self, shared: bool) -> Path:
        kind = "shared" if shared else "alone"
        return self._folder / f"{kind}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def _others(self) -> list[str]:
        """Lists the objects of processes with which this one cannot share the lock."""
        # Not is_dir(), which says no where the store cannot be reached.
        with contextlib.suppress(FileNotFoundError):
            return self._of_others(list(self._folder.iterdir()))
        return []

    def _of_others(self, holders: list[Path]) -> list[str]:
        others = []
        for path in holders:
            if _has_ended(path.name):
                path.unlink(missing_ok=True)
            elif path.name != self._own.name and not (
                self._shared and path.name.startswith("shared-")
            ):
                others.append(path.name)
        return others

    def _lives(self, name: str) -> bool | None:
        """Whether a holder is alive, None while that is not known; the dead's object is removed."""
        try:
            content = (self._folder / name).read_text()
        except FileNotFoundError:
            return False
        now = time.monotonic()
        before, since = self._watched.setdefault(name, (content, now))
        if before == content and now - since > PATIENCE_SECONDS:
            (self._folder / name).unlink(missing_ok=True)
            return False
        return True if before != content else None

    def _owner(self, name: str) -> str:
        try:
            return json.loads((self._folder / name).read_text())["owner"]
        except (FileNotFoundError, ValueError, KeyError):
            return "another process"

    def _beat(self, file: Path | None = None) -> None:
        self._beats += 1
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        content = {"owner": owner, "time": round(time.time()), "beats": self._beats}
        (file or self._own).write_text(json.dumps(content))

    def _keep(self) -> None:
        self._thread = threading.Thread(target=self._beat_on, daemon=True)
        self._thread.start()

    def _beat_on(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                if not self._own.exists():
                    print(
                        f"mmqa: {self._folder}: another process took this lock, after this one had "
                        f"not been heard of for {PATIENCE_SECONDS:.0f} seconds; start it again.",
                        file=sys.stderr,
                    )
                    os._exit(EXIT_HANGING)
                self._beat()
            except Exception as error:  # the network may come back before patience ends
                print(f"mmqa: {self._folder}: {error}", file=sys.stderr)


def _has_ended(name: str) -> bool:
    """Whether a holder's process was of this host and has ended."""
    holder = name.partition("-")[2].rsplit("-", 2)
    if len(holder) != 3 or holder[0] != socket.gethostname() or not holder[1].isdigit():
        return False
    try:
        os.kill(int(holder[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        return False
    return False
