"""The cache of compiled programs after processes that were killed."""

import os
import socket
import subprocess
import sys
import time

import pytest
from jax._src import compilation_cache

from mmqa_jax.core.hosts.distributed import is_whole, open_cache

ENTRY = compilation_cache.compress_executable(b"program" * 1000)
HALF = ENTRY[: len(ENTRY) // 2]


@pytest.fixture
def killed():
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def mark(folder, process):
    file = folder / f".open-{socket.gethostname()}-{process}"
    file.touch()
    return file


def test_what_a_killed_process_left_is_removed(tmp_path, killed):
    older = tmp_path / "jit_a-cache"
    older.write_bytes(HALF)  # before it began: not its
    os.utime(older, (time.time() - 60,) * 2)
    of_killed = mark(tmp_path, killed)
    for name, content in (("b", HALF), ("c", ENTRY), ("d", b"")):
        (tmp_path / f"jit_{name}-cache").write_bytes(content)
    open_cache(tmp_path)
    assert not of_killed.exists()
    assert sorted(file.name for file in tmp_path.glob("jit*")) == ["jit_a-cache", "jit_c-cache"]


def test_what_others_are_writing_is_left_alone(tmp_path):
    of_other = mark(tmp_path, os.getppid())
    elsewhere = tmp_path / ".open-another.host-1"
    elsewhere.touch()
    (tmp_path / "jit_b-cache").write_bytes(HALF)
    open_cache(tmp_path)
    assert of_other.exists()
    assert elsewhere.exists()
    assert (tmp_path / "jit_b-cache").exists()


def test_a_process_marks_the_cache_while_it_runs(tmp_path):
    code = (
        "import pathlib, sys; from mmqa_jax.core.hosts.distributed import open_cache;"
        "folder = pathlib.Path(sys.argv[1]); open_cache(folder);"
        "print(*(file.name for file in folder.iterdir()))"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert ran.stdout.startswith(f".open-{socket.gethostname()}-"), ran.stderr
    assert not list(tmp_path.iterdir())


def test_whole_entries():
    assert is_whole(ENTRY)
    assert not is_whole(HALF)
    assert not is_whole(b"")
