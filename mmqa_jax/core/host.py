"""Facts about this host and its devices, for config.json and reports; the cache folder."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from pathlib import Path
from typing import Any


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
