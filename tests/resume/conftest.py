"""What the tests of resumed runs share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _quiet(cli_cache):
    """No progress lines, and one compile cache for all attempts, as real runs have."""
    cache = str(cli_cache / "xla")
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_PROGRESS", "off")
        for name, value in zip(names, (cache, 0), strict=True):
            patch.setenv(name.upper(), str(value))  # of the processes to be killed
            jax.config.update(name, value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def attempt(cli_cache) -> Callable[..., dict]:
    """Runs tiny_run.py with its arguments in a process of its own; how it ended."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(cli_cache / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "MMQA_PROGRESS": "off",
    }
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("attempts.py"))],
        env=os.environ | kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip

        def run(*arguments: object) -> dict:
            asked = {"arguments": [*map(str, arguments)], "environment": dict(os.environ)}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


@pytest.fixture(scope="session")
def killed_run(attempt) -> Callable[..., None]:
    """One attempt in a process of its own, which kill -9 ends."""

    def run(*arguments: object) -> None:
        ended = attempt(*arguments)
        assert ended["code"] == -signal.SIGKILL, ended["err"]

    return run
