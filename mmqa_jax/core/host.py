"""Facts about this host and its devices, for config.json and reports; the cache folder."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax


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


# What this machine is called, how fast it multiplies and reads, and in which precision.

_ROWS, _INNER, _COLUMNS = 3200, 384, 1536  # of the demo's largest products: one layer, one batch
_TIMES = 5
_WORTH = 1.3  # conversions cost some of what faster products save


@functools.cache
def matmul_rates() -> dict[str, float]:
    """GFLOP/s of products of float32 and of bfloat16 matrices, the best of several each.

    They are timed in turn, so that other work on the machine slows both alike, once in a process.
    """
    import jax
    import jax.numpy as jnp

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    product = jax.jit(product)
    dtypes = ("float32", "bfloat16")
    pairs = {
        name: (jnp.ones((_ROWS, _INNER), name), jnp.ones((_INNER, _COLUMNS), name))
        for name in dtypes
    }
    best = dict.fromkeys(dtypes, float("inf"))
    for attempt in range(_TIMES + 1):
        for name, pair in pairs.items():
            began = time.perf_counter()
            product(*pair).block_until_ready()
            if attempt:  # the first compiles
                best[name] = min(best[name], time.perf_counter() - began)
    work = 2 * _ROWS * _INNER * _COLUMNS / 1e9
    return {name: round(work / seconds, 1) for name, seconds in best.items()}


def best_precision(rates: dict[str, float]) -> str:
    """`bfloat16` where its products are clearly faster (AMX, AVX512_BF16), else `float32`."""
    return "bfloat16" if rates["bfloat16"] > _WORTH * rates["float32"] else "float32"


@functools.cache
def matmul_peak(device: jax.Device) -> float:
    """FLOP/s at which a device multiplies large square matrices, the best of several.

    In bfloat16, or in float32 on a CPU. Takes a second on an accelerator and a fifth of one on a
    CPU, once in a process.
    """
    import jax
    import jax.numpy as jnp

    on_cpu = device.platform == "cpu"
    side, dtype = (1024, "float32") if on_cpu else (8192, "bfloat16")
    x = jax.device_put(jnp.ones((side, side), dtype), device)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    return 2 * side**3 / _shortest(lambda: product(x).block_until_ready())


def threads() -> int:
    """Processors that this process may use: XLA uses them all, so PyTorch gets as many threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_name() -> str:
    """`Intel(R) Xeon(R) Processor, 2 threads` or `NVIDIA H200`: what jax computes on."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return host_name()
    count = len(jax.devices())
    return f"{count} x {device.device_kind}" if count > 1 else device.device_kind


def host_name() -> str:
    """The processor and the number of threads, without loading jax."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {threads()} threads"


def read_bandwidth(size: int | None = None) -> float:
    """Bytes per second that all threads, or the accelerator, read from memory at best.

    `size` bytes are read each time; None is more than any cache (1 GiB; 4 GiB on accelerators).
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    if jax.devices()[0].platform != "cpu":
        x = jnp.ones((size or 1 << 32) // 2, jnp.bfloat16)
        total = jax.jit(lambda x: x.max())
        return x.nbytes / _shortest(lambda: total(x).block_until_ready())
    # XLA may read with one thread; numpy's reductions run side by side.
    parts = np.ones((threads(), (size or 1 << 30) // 4 // threads()), np.float32)
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        return parts.nbytes / _shortest(lambda: list(pool.map(np.max, parts)))


def _shortest(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls; one before them compiles."""
    work()
    seconds = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
