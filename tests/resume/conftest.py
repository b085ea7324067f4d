"""What the tests of resumed runs share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from tests.forks import ForkServer

_TINY_RUN = str(Path(__file__).with_name("tiny_run.py"))
_IMPORTED = (
    "grain",
    "mmqa_jax.training.loop",
    "mmqa_jax.weights.folder",
    "orbax.checkpoint",
    "tests.object_store",
)


class Ended(NamedTuple):
    """How a process ended, and what it printed."""

    code: int
    said: str


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
def attempt(cli_cache) -> Iterator[Callable[..., Ended]]:
    """Runs tiny_run.py with its arguments in a process of its own."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(cli_cache / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    server = ForkServer(*_IMPORTED, environment=kept)

    def run(*arguments: object) -> Ended:
        fork = server.start(
            [_TINY_RUN, *map(str, arguments)], os.environ | kept | {"MMQA_PROGRESS": "off"}
        )
        said, _ = fork.communicate()
        return Ended(fork.returncode, said)

    yield run
    server.close()


@pytest.fixture(scope="session")
def killed_run(attempt) -> Callable[..., None]:
    """One attempt in a process of its own, which kill -9 ends."""

    def run(*arguments: object) -> None:
        ended = attempt(*arguments)
        assert ended.code == -signal.SIGKILL, ended.said

    return run
