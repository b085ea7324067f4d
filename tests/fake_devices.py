"""Several CPU devices in one process, in place of accelerators."""

from __future__ import annotations

import os
import re

_NUMBER = "--xla_force_host_platform_device_count"


def fake_devices(count: int) -> dict[str, str]:
    """The environment variables of a process with so many devices, read when its JAX starts.

    XLA's other flags stay as they are here.
    """
    flags = re.sub(rf"{_NUMBER}=\d+", "", os.environ.get("XLA_FLAGS", "")).split()
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*flags, f"{_NUMBER}={count}"])}
