"""How fast this machine multiplies matrices, and the precision in which models best compute."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

_ROWS, _INNER, _COLUMNS = 3200, 384, 1536  # of the demo's largest products: one layer, one batch
_TIMES = 5
_WORTH = 1.3  # conversions cost some of what faster products save


def matmul_rates() -> dict[str, float]:
    """GFLOP/s of products of float32 and of bfloat16 matrices, the best of several each.

    They are timed in turn, so that other work on the machine slows both alike.
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
    product(x).block_until_ready()  # compiles
    best = float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * side**3 / best
