"""How arrays lie in memory for a platform: activations as rows, stacks as an array for each layer.

On TPUs activations of encoders are multiplied fastest as rows: of [B, L, H] XLA chooses the layout
by itself, most often with the positions outside, and changes it before and after each attention;
with the rows B * L as one dimension, whole registers of eight, it neither does that nor writes
norms to memory.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.mesh import batch_axes, column_shards, platform

_ROWS = 8  # of a register


def as_rows(x: jax.Array) -> jax.Array:
    """x [B, L, H] as [B * L, H] where that helps: in bfloat16 on TPUs, for a multiple of 8 rows.

    Otherwise, and of rows, x itself. Reshape back at the end of a layer.
    """
    if x.ndim == 2 or not _helps(x) or x.shape[1] % _ROWS:
        return x
    # The barrier keeps XLA from going back to three dimensions.
    return jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]))


def in_rows(x: jax.Array, body: Callable[..., Any]) -> tuple[jax.Array, Callable[..., Any]]:
    """x [B, L, H] and a `body` of `layers.scan_layers`, with x as rows between the layers, too.

    So what the backward pass keeps of them and adds up has one layout. Where a mesh splits the
    rows otherwise than x, both are returned as they are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows, shape = as_rows(x), x.shape
    if column_shards(shape[1]) > 1 or batch_axes(mesh, len(x)) != batch_axes(mesh, len(rows)):
        return x, body

    def of_rows(layer, rows, of_layer, key):
        x, y = body(layer, rows.reshape(shape), of_layer, key)
        return x.reshape(rows.shape), y

    return rows, of_rows


def pad_length(
    x: jax.Array, mask: jax.Array | None, *, is_causal: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Adds positions that no other sees, for `as_rows`: a picture's 197 become 200.

    Also on GPUs: cuDNN's attention has no gradient for odd lengths.
    x [B, L, H], mask bool [B or 1, 1, L or 1, L] or None; returned as they are where that does not
    help. Under a causal mask nothing sees what comes after it.
    """
    length = x.shape[1]
    padding = -length % _ROWS
    if not padding or not (_helps(x) or (platform() == "gpu" and x.dtype == jnp.bfloat16)):
        return x, mask
    x = jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
    if mask is not None:
        rows = padding if mask.shape[2] > 1 else 0
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, rows), (0, padding)))
    elif not is_causal:
        mask = (jnp.arange(length + padding) < length)[None, None, None]
    return x, mask


def _helps(x: jax.Array) -> bool:
    return platform() == "tpu" and x.dtype == jnp.bfloat16


# Stacks of layers as an array for each layer, for programs on CPUs.
#
# There XLA copies each layer out of a stacked parameter before it multiplies by it, in every
# call: three quarters of the time of a question by MiniLM. What a program itself stacks costs
# nothing, as XLA takes a slice of what was stacked for the array that it was.


_MOST = 1 << 30  # bytes of parameters: taking them apart holds them twice for a moment


def unstacked(state: Any) -> Any:
    """A model's state, with tuples of arrays in place of stacked parameters where that is faster.

    That is on a single CPU, for models of up to 1 GiB; elsewhere it is the state itself.
    """
    leaves = jax.tree.leaves(state)
    on_one = all(isinstance(leaf, jax.Array) and len(leaf.devices()) == 1 for leaf in leaves)
    if platform() != "cpu" or not on_one or sum(leaf.nbytes for leaf in leaves) > _MOST:
        return state
    return _of_stacks(state, tuple)


def restacked(state: Any) -> Any:
    """Undoes `unstacked`: inside a program, whose XLA then stacks nothing, or outside."""
    return _of_stacks(state, lambda value: jnp.stack(value) if isinstance(value, tuple) else value)


def _of_stacks(state: Any, change: Callable[[Any], Any]) -> Any:
    """The state with changed values of the parameters that `layers.stack_layers` stacked."""

    def changed(variable: Any) -> Any:
        names = isinstance(variable, nnx.Variable) and variable.get_metadata().get("out_sharding")
        return (
            variable.replace(change(variable.get_value()))
            if names and names[0] == "layers"
            else variable
        )

    return jax.tree.map(changed, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
