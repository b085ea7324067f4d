"""Where tests write: in memory, where there is plenty. Waiting for a disk took a third of a run's time.

pytest's own rule holds there: folders of tests that passed go at once. Those of a run that failed stay
until the next run begins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
# Bytes that must be free there, a multiple of what a whole run holds at a time.
_FREE = 8 * 2**30
_NAME = "mmqa_jax_tests-"  # then the process


def take() -> Path | None:
    """Before a run: removes what earlier ones left, and chooses its folder; None: the system's own."""
    if "TMPDIR" in os.environ or not _MEMORY.is_dir():
        return None
    for left in _MEMORY.glob(f"{_NAME}*"):
        if left.stat().st_uid == os.getuid() and not _runs(int(left.name.removeprefix(_NAME))):
            shutil.rmtree(left, ignore_errors=True)
    folder = _MEMORY / f"{_NAME}{os.getpid()}"
    with contextlib.suppress(OSError):
        if shutil.disk_usage(_MEMORY).free < _FREE:
            return None
        folder.mkdir(mode=0o700)
        os.environ["TMPDIR"] = str(folder)  # of processes that tests start, too
        tempfile.tempdir = None
        return folder
    return None


def give_back(folder: Path | None) -> None:
    """After a run: removes its folder, unless a test that failed has left something there."""
    if folder is not None and not any(path.is_file() for path in folder.rglob("*")):
        shutil.rmtree(folder, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
