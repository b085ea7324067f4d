"""What the tests of several processes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import FEW, finish, tiny_runs


@contextlib.contextmanager
def _kept_in(cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMQA_CACHE", str(cache))
        yield


@pytest.fixture(scope="module", autouse=True)
def _kept_programs_of_launches(cli_cache) -> Iterator[None]:
    """In the folder of all tests' programs."""
    with _kept_in(cli_cache):
        yield


@pytest.fixture(scope="session")
def by_one(made_once, cli_cache):
    """Two tiny runs of one process with four devices: `whole`, and `started` from its weights."""

    def train(folder: Path) -> None:
        whole = folder / "whole"
        runs = {
            whole: {"mesh": {"data": 4}},
            folder / "started": {"mesh": {"data": 4}, "start": str(whole), "train": FEW},
        }
        with _kept_in(cli_cache):
            finish(tiny_runs(1, runs, devices=4))

    return made_once("tiny_runs_by_one", train)


@pytest.fixture(scope="session")
def alone(by_one):
    """The workdir of the tiny run on one process."""
    return by_one / "whole"
