"""Stacks of layers as an array for each layer, for programs on CPUs.

There XLA copies each layer out of a stacked parameter before it multiplies by it, in every call:
three quarters of the time of a question by MiniLM. What a program itself stacks costs nothing, as
XLA takes a slice of what was stacked for the array that it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.mesh import platform

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
