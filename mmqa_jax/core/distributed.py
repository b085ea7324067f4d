"""What every run does first: sets up the compilation cache and joins the other hosts."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import cache_dir

# Hosts of a pod come up minutes apart, and loading weights can keep one busy for long.
_INITIALIZATION_TIMEOUT_SECONDS = 1800
_HEARTBEAT_TIMEOUT_SECONDS = 600


def start(compilation_cache_dir: str | os.PathLike | None = None, *, join: bool = True) -> None:
    """Prepares JAX; call it before any JAX computation. Later calls have no effect.

    Turns on the persistent compilation cache, and joins the other hosts of a multi-host launch.
    On Slurm, TPU pods, GKE and Open MPI the launcher's environment describes them; elsewhere set
    JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID on each host.

    Args:
      compilation_cache_dir: where compiled programs are kept; by default $MMQA_CACHE/xla or
        ~/.cache/mmqa_jax/xla.
      join: whether to join the other hosts of a launch; False for a program of its own, such as a
        shard of a job.

    Raises:
      UserError: an incomplete multi-host environment, or a given cache folder that cannot be
        written.
    """
    import jax

    cache = _compilation_cache(compilation_cache_dir)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    arguments = multi_host_arguments(os.environ) if join else None
    if arguments and not jax.distributed.is_initialized():
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=_INITIALIZATION_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS,
        )


def multi_host_arguments(environment: Any) -> dict[str, Any] | None:
    """Arguments for jax.distributed.initialize, or None for a launch on one host.

    JAX itself detects the cluster where the address is None.

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


def barrier(name: str) -> None:
    """Waits until every process of the launch is here."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _compilation_cache(given: str | os.PathLike | None) -> Path | None:
    folder = Path(given) if given is not None else cache_dir() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        return folder
    if given is not None:
        raise UserError(
            f"{folder}: the compilation cache cannot be written there; name another folder."
        )
    # A read-only home is no reason to stop: programs are then compiled in every run.
    logging.getLogger(__name__).warning("%s is not writable: there is no compilation cache", folder)
    return None
