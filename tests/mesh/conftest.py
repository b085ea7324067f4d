"""Eight fake CPU devices in one process.

Their number is fixed when JAX starts, so that these tests run apart from all others:
`launch/test.sh` starts pytest for them; by hand, name this folder or files of it alone.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.fake_devices import fake_devices

# Before jax is imported.
os.environ.update(fake_devices(8))
for _folder in ("equivalence", "unit"):  # their helpers
    sys.path.append(str(Path(__file__).parents[1] / _folder))

import jax  # noqa: E402
import pytest  # noqa: E402

pytest.register_assert_rewrite("compare", "one_step")


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    assert len(jax.devices()) == 8


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Matrix products in whole float32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(autouse=True)
def _whole_failure_messages() -> None:
    """Nothing of one test's mesh reaches the next."""
    assert jax.sharding.get_abstract_mesh().empty
