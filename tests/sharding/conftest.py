"""What the tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import finish, forks, tiny


@pytest.fixture(scope="session", autouse=True)
def _forks() -> Iterator[None]:
    yield
    if forks.cache_info().currsize:
        forks().close()


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The workdir of the tiny run on one process with four devices."""
    workdir = tmp_path_factory.mktemp("alone")
    finish(tiny(1, workdir, devices=4, mesh={"data": 4}))
    return workdir
