"""Facts about this host and its devices, for config.json and reports; the cache folder."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import socket
import sys
from pathlib import Path
from typing import Any

_PCI, _GOOGLE = Path("/sys/bus/pci/devices"), "0x1ae0"  # as JAX finds a TPU
_DEVICES = ("/dev/accel0", "/dev/vfio/0", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


def device_facts() -> dict[str, Any]:
    """Kind and number of devices and processes, for config.json and reports."""
    import jax

    devices = jax.devices()
    facts: dict[str, Any] = {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
    }
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if memory:
        facts["memory_gib_per_device"] = round(memory / 2**30, 1)
    return facts


def skip_absent_tpu() -> None:
    """Keeps JAX from looking for a TPU where libtpu is installed for `mmqa plan` alone.

    Its compiler is a package that JAX takes for a TPU's driver: without one it warns at every
    start, and holds a lock that keeps other processes from planning. Where a TPU or a GPU is
    there, or JAX_PLATFORMS says what to use, nothing changes. Call it before JAX starts.
    """
    if "JAX_PLATFORMS" in os.environ or importlib.util.find_spec("libtpu") is None:
        return
    vendors = (file.read_text().strip() for file in _PCI.glob("*/vendor"))
    if (
        os.environ.get("TPU_NAME")
        or any(Path(path).exists() for path in _DEVICES)
        or _GOOGLE in vendors
    ):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"


def host_facts() -> dict[str, Any]:
    """Name, system, python and CPU count of this host."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpus": cpus,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def peak_rss_mib() -> int:
    """Peak resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


def cache_dir() -> Path:
    """The folder for files that are kept between runs: $MMQA_CACHE, or ~/.cache/mmqa_jax."""
    return Path(os.environ.get("MMQA_CACHE") or Path.home() / ".cache" / "mmqa_jax")
