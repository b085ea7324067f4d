"""A small file system of its own, which can be filled; asserts nothing itself."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A tmpfs; `leave` fills it up to so many bytes, `free` empties it of that filling."""

    def __init__(self, folder: Path):
        self.folder, self._ballast = folder, folder / "ballast"

    def leave(self, size: int) -> None:
        """Leaves so many bytes, in whole pages of 4 KiB."""
        self.free()
        stat = os.statvfs(self.folder)
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(stat.f_bavail * stat.f_bsize - size, 1))

    def free(self) -> None:
        """Frees what `leave` took."""
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: int = 64 * 2**20, options: str = "") -> Iterator[SmallDisk]:
    """Mounts one on `folder`; the test is skipped where that is not permitted."""
    folder.mkdir(exist_ok=True)
    try:
        flags = f"size={size}{options}"
        mount = ["mount", "-t", "tmpfs", "-o", flags, "none", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here, and no small tmpfs")
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
