"""Slots hold a state for each recurrent layer (the gated delta rule, short convolutions), beside
the pages of other layers.

A slot has one state for each such layer, which the chunks of its prompt and its steps carry on; the
first chunk of a prompt begins with zeros. States cannot be cut at a column, so that prompts which
begin alike share no pages, and no step takes several tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import partition_spec
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.gated_delta import DeltaState, State, state_shapes
from mmqa_jax.models.llama.network import LlamaLayer
from mmqa_jax.models.llama.short_conv import ConvState

# Logical axes, for core.mesh.partition_spec.
_OF_INPUTS = ("batch", "positions", "heads")
_OF_DELTA = DeltaState(("batch", "heads", "head_dim", "head_dim"), *[_OF_INPUTS] * 3)


def _names(state: State) -> State:
    return _OF_DELTA if isinstance(state, DeltaState) else ConvState(_OF_INPUTS)


def layout(config: LlamaConfig, slots: int, mesh: Mesh | None = None) -> State:
    """ShapeDtypeStructs of one layer's states of all slots, which are split like the slots."""

    def placed(shape: jax.ShapeDtypeStruct, names: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        spec = mesh and NamedSharding(mesh, partition_spec(names, shape.shape, mesh))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=spec)

    shapes = state_shapes(config, slots)
    return jax.tree.map(placed, shapes, _names(shapes))


def continued(
    layer: LlamaLayer,
    x: jax.Array,
    held: State,
    *,
    starts: jax.Array,
    ends: jax.Array,
    rows: jax.Array | None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, State]:
    """A recurrent layer on tokens x [R, L, H] that follow what their slots hold.

    Args:
      held: of all slots.
      starts, ends: int [R], columns of each row's first token, and behind its last real one; a row
        that starts at 0 begins with zeros, one that ends where it starts changes nothing.
      rows: int32 [R], slots; a number beyond all is a row of padding. None: the rows are the slots.
      mesh: where the states lie. If their rows are split, the R rows are split alike.
    """
    counts = jnp.clip(ends - starts, 0, x.shape[1])
    before = held if rows is None else _on_own_rows(_taken, held, mesh)(held, rows)
    begins = (starts == 0) & (counts > 0)

    def begun(state: jax.Array) -> jax.Array:
        return jnp.where(begins.reshape(-1, *[1] * (state.ndim - 1)), 0, state)

    x, new = layer.continued(x, jax.tree.map(begun, before), ends=counts)
    new = jax.tree.map(lambda x, before: x.astype(before.dtype), new, held)
    if rows is None:
        return x, new
    return x, _on_own_rows(_put, held, mesh)(held, rows, new)


def _taken(held: State, rows: jax.Array) -> State:
    return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), held)


def _put(held: State, rows: jax.Array, new: State) -> State:
    return jax.tree.map(lambda x, values: x.at[rows].set(values, mode="drop"), held, new)


def _on_own_rows(
    function: Callable[..., State], held: State, mesh: Mesh | None
) -> Callable[..., State]:
    """The function, each device with its own slots and rows; XLA else exchanges all states."""
    names = _names(held)
    specs = mesh and jax.tree.map(lambda x, n: partition_spec(n, x.shape, mesh), held, names)
    axes = specs and jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))[0][0]
    if axes is None:
        return function

    def local(held: State, rows: jax.Array, *new: State) -> State:
        count = len(jax.tree.leaves(held)[0])
        rows = rows - jax.lax.axis_index(axes) * count
        return function(held, jnp.where((rows < 0) | (rows > count), count, rows), *new)

    def split(held: State, rows: jax.Array, *new: State) -> State:
        in_specs = (specs, PartitionSpec(axes), *(specs for _ in new))
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False
        )
        return mapped(held, rows, *new)

    return split
