"""Compiled programs of all tests, kept for runs of any checkout on this machine.

A run works in a folder of its checkout: processes that tests kill may leave half an entry there,
which JAX would meet again and again. Whole entries alone are kept beyond the run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
from pathlib import Path

from mmqa_jax.core.hosts.distributed import is_whole

_ROOT = Path(__file__).parents[1]
FOLDER = _ROOT / ".pytest_cache" / "jax"  # of the run
_MOST = 2 * 2**30  # bytes; when there are more, all are compiled anew


@functools.cache
def _processor() -> str:
    """What differs between processors that cannot run each other's programs, shortened."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:16]


def _machine() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "mmqa_jax_tests"


def _kept() -> Path:
    return _machine() / _processor()


def take() -> None:
    """Before a run: what earlier ones compiled is laid into its folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a home that cannot be written keeps nothing
        _kept().mkdir(parents=True, exist_ok=True)
        if sum(file.stat().st_size for file in _kept().iterdir()) > _MOST:
            shutil.rmtree(_kept())
            _kept().mkdir()
        _lay(_kept(), FOLDER)


def keep() -> None:
    """After a run: what it compiled is laid beside what is kept."""
    there = set(os.listdir(_kept())) if _kept().is_dir() else set()
    for file in FOLDER.iterdir():
        if file.name not in there and not is_whole(file.read_bytes()):
            file.unlink()
    with contextlib.suppress(OSError):
        _lay(FOLDER, _kept())


def _lay(source: Path, target: Path) -> None:
    """Links, or copies, the files that `target` lacks; each appears whole."""
    there = set(os.listdir(target))
    with os.scandir(source) as files:
        for file in files:
            if file.name in there or file.name.startswith(".") or not file.is_file():
                continue
            try:
                os.link(file.path, f"{target}/{file.name}")
            except FileExistsError:  # another run's
                pass
            except OSError:
                made = target / f".{file.name}.{os.getpid()}"
                shutil.copy2(file.path, made)
                os.replace(made, target / file.name)
