"""A lock on a folder for as long as a process writes into it.

In the file system it is a record lock, in an object store what `core.store_locks` makes of objects.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import in_store
from mmqa_jax.core.store_locks import StoreLock


class Busy(Exception):
    """Another process holds the lock; the message says which."""


def hold(path: Path, *, shared: bool = False) -> IO | StoreLock:
    """Locks the file `path`, made if missing, until what is returned is closed.

    A record lock dies with its process, however that ends, and worker processes do not inherit it.

    Args:
      shared: many processes may hold it, as long as none holds it alone.

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
