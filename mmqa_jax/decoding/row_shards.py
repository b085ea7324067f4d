"""A cache whose rows are split over devices: each reads, writes and copies its own rows alone.

Left to itself, XLA would exchange rows, since it does not know which device a row's number is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

C = TypeVar("C")
Axes = str | tuple[str, ...]  # of the mesh, that rows are split over


def first_row(axes: Axes, count: int) -> jax.Array:
    """Within a shard_map: the number of this device's first row, of `count` to each."""
    return jax.lax.axis_index(axes) * count


def on_own_rows(
    attend: Callable[..., tuple[jax.Array, C]], specs: C, axes: Axes | None, mesh: Mesh
) -> Callable[..., tuple[jax.Array, C]]:
    """`attend(q, k, v, held, rows, *more)` -> (attended, held), each device its rows and heads.

    Args:
      specs: the PartitionSpec of each array of a layer `held`, [S, kv_heads, ...].
      axes: None where heads alone are split, and every device has all rows.
    """
    row, of_heads = PartitionSpec(axes), jax.tree.leaves(specs, is_leaf=_is_spec)[0][1]
    of_token = PartitionSpec(axes, None, of_heads)  # [R, L, heads, D]

    def local(q, k, v, held, rows, *more):
        count = jax.tree.leaves(held)[0].shape[0]
        first = 0 if axes is None else first_row(axes, count)
        return attend(q, k, v, held, rows - first, *more)

    def split(q, k, v, held, rows, *more):
        function = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(of_token, of_token, of_token, specs, row, *(row for _ in more)),
            out_specs=(of_token, specs),
            check_vma=False,
        )
        return function(q, k, v, held, rows, *more)

    return split


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def copy_within(
    copy: Callable[[C, jax.Array, jax.Array, jax.Array], C],
    specs: C,
    axes: Axes,
    count: int,
    mesh: Mesh,
) -> Callable[[C, jax.Array, jax.Array, jax.Array], C]:
    """`copy(cache, source, target, end)` of two rows that are on the same device, which does it.

    Args:
      specs: the PartitionSpec of each array of the cache.
      count: rows of a device.
    """

    def local(cache: C, source: jax.Array, target: jax.Array, end: jax.Array) -> C:
        first = first_row(axes, count)
        own = (source >= first) & (source < first + count)
        # Elsewhere nothing is copied, from row 0 to itself.
        source, target = jnp.where(own, source - first, 0), jnp.where(own, target - first, 0)
        return copy(cache, source, target, jnp.where(own, end, 0))

    whole = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, whole, whole, whole),
        out_specs=specs,
        check_vma=False,
    )
