"""What every comparison with PyTorch wants."""

from __future__ import annotations

import jax
import pytest
import torch

pytest.register_assert_rewrite("compare")  # its assertions say what they compared, too


@pytest.fixture(scope="session", autouse=True)
def _torch_in_one_thread():
    """The original computes in one thread.

    In CI, what the second thread had of an elementwise tanh once came out 2e-5 off, while our
    side was bit-equal to what it is elsewhere.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _exact():
    """Matrix products in whole float32 on every device."""
    with jax.default_matmul_precision("highest"):
        yield
