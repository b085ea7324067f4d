"""What tests of every kind share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


def pytest_sessionstart():
    # A shell's background job ignores Ctrl-C, and so would all that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run_on_devices(request) -> Callable[..., str]:
    """Runs a script of the test's folder on fake CPU devices, and returns what it prints.

    Their number is fixed when JAX starts, so that these are processes of their own.
    """

    def run(devices: int, script: str, *arguments: Any) -> str:
        done = subprocess.run(
            [sys.executable, str(request.path.with_name(script)), *map(str, arguments)],
            env=os.environ
            | {
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                "JAX_PLATFORMS": "cpu",
            },
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
