"""JAX's cache of compiled programs, looked through after a process that was killed.

JAX writes an entry in place, and never again one that is there: half an entry, which kill -9 leaves
behind, would be met with a warning in every later run, its program compiled each time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
from pathlib import Path

_MARK = ".open-"  # then host and process


@functools.cache
def open_cache(folder: Path) -> None:
    """Removes broken entries of killed processes of this host, and marks the folder as in use."""
    host = socket.gethostname()
    for mark in folder.glob(f"{_MARK}{host}-*"):
        if not _is_running(mark.name.rpartition("-")[2]):
            with contextlib.suppress(OSError):  # another process was faster, or another user's
                _remove_broken(folder, mark.stat().st_mtime)
                mark.unlink()
    mark = folder / f"{_MARK}{host}-{os.getpid()}"
    with contextlib.suppress(OSError):  # a full disk: JAX then writes no entry either
        mark.touch()
        atexit.register(mark.unlink, missing_ok=True)


def is_whole(entry: bytes) -> bool:
    """Whether a file of the cache is as JAX wrote it."""
    from jax._src import compilation_cache  # JAX has no public way to look at one

    try:
        compilation_cache.decompress_executable(entry)
    except Exception:  # of the library that compressed it
        return False
    return True


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _remove_broken(folder: Path, since: float) -> None:
    """Deletes entries that were written after `since`, a time of files, and are not whole."""
    for file in folder.glob("*-cache"):
        if file.stat().st_mtime >= since and not is_whole(file.read_bytes()):
            file.unlink(missing_ok=True)
