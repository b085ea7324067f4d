"""What every run does first: compile cache, several hosts, and facts about host and devices."""

from __future__ import annotations

import logging
import os
import platform
import resource
import socket
import sys
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError

# Hosts of a pod come up minutes apart, and loading weights can keep one busy for long.
_INITIALIZATION_TIMEOUT_SECONDS = 1800
_HEARTBEAT_TIMEOUT_SECONDS = 600


def start(compilation_cache_dir: str | os.PathLike | None = None) -> None:
    """Prepares jax; call it before any other use of jax. Later calls change nothing.

    Turns on the persistent compilation cache, and joins the other hosts of a multi-host launch:
    on Slurm, TPU pods, GKE and Open MPI the launcher's environment tells; elsewhere set
    JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID on each.

    Args:
      compilation_cache_dir: where compiled programs are kept; by default $MMQA_CACHE/xla or
        ~/.cache/mmqa_jax/xla.

    Raises:
      UserError: an incomplete multi-host environment, or a cache folder that was asked for and
        cannot be written.
    """
    import jax

    cache = _compilation_cache(compilation_cache_dir)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    arguments = multi_host_arguments(os.environ)
    if arguments and not jax.distributed.is_initialized():
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=_INITIALIZATION_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS,
        )


def multi_host_arguments(environment: Any) -> dict[str, Any] | None:
    """Arguments for jax.distributed.initialize, or None for a launch on one host.

    Values None are left to jax's own detection of the cluster.

    Raises:
      UserError: some but not all of the JAX_* variables, or one that is not a number.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [name for name in names if environment.get(name)]
    if given and len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        raise UserError(
            f"environment: {given[0]} is set but {missing} is not; set all three on every host, "
            "or none."
        )
    if given:
        for name in names[1:]:
            if not environment[name].isdigit():
                raise UserError(
                    f"environment: {name}={environment[name]}: a whole number was expected."
                )
        return {
            "coordinator_address": environment[names[0]],
            "num_processes": int(environment[names[1]]),
            "process_id": int(environment[names[2]]),
        }
    tasks = [environment.get(name, "") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    # An interactive Slurm shell (salloc) sets SLURM_NTASKS too; only a task of srun is one of many.
    launched = "SLURM_STEP_ID" in environment or "OMPI_COMM_WORLD_RANK" in environment
    if launched and any(count.isdigit() and int(count) > 1 for count in tasks):
        return {"coordinator_address": None}
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return {"coordinator_address": None}
    return None


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
    """Most memory this process has held so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


def cache_dir() -> Path:
    """The folder for things kept between runs: $MMQA_CACHE, or ~/.cache/mmqa_jax."""
    return Path(os.environ.get("MMQA_CACHE") or Path.home() / ".cache" / "mmqa_jax")


def _compilation_cache(asked: str | os.PathLike | None) -> Path | None:
    folder = Path(asked) if asked is not None else cache_dir() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        return folder
    if asked is not None:
        raise UserError(
            f"{folder}: the compile cache cannot be written there; name a folder that can."
        )
    # A read-only home is no reason to stop: programs are compiled anew each time.
    logging.getLogger(__name__).warning("%s is not writable: no compile cache is kept", folder)
    return None
