"""Key and value heads repeated until a mesh divides them, so that each device caches its own."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mmqa_jax.core.mesh import DEFAULT_RULES, Rules, partition_spec
from mmqa_jax.models.llama import Llama


def repeat_key_heads(model: Llama, mesh: Mesh | None, rules: Rules = DEFAULT_RULES) -> None:
    """Repeats the key and value heads of all layers, in place, where `tensor` does not divide them.

    A cache of 8 key heads cannot be split over 16 devices and would be whole on each. With every
    head twice, which changes no result, each device keeps one: an eighth of that memory. A mesh
    that does not divide the query heads leaves the model as it is.
    """
    config = model.config
    heads = math.lcm(config.kv_heads, 1 if mesh is None else mesh.shape["tensor"])
    if heads == config.kv_heads or config.heads % heads:
        return
    times = heads // config.kv_heads
    model.config = dataclasses.replace(config, kv_heads=heads)
    for layer in model.layers if isinstance(model.layers, nnx.List) else [model.layers]:
        layer.config = model.config
        parameters = [x for linear in (layer.k, layer.v) for x in (linear.kernel, linear.bias)]
        if config.qk_norm == "whole":  # the mean over repeated heads is the same
            parameters.append(layer.k_norm.scale)
        for parameter in parameters:
            if parameter is not None:
                _repeat(parameter, config.kv_heads, times, mesh, rules)


def _repeat(parameter: nnx.Param, heads: int, times: int, mesh: Mesh, rules: Rules) -> None:
    """Repeats each head along the axis named `heads`, [.., heads * D, ..], onto its own shards."""
    names = parameter.get_metadata()["out_sharding"]
    axis, shape = names.index("heads"), parameter.shape
    split = (*shape[:axis], heads, -1, *shape[axis + 1 :])
    whole = (*shape[:axis], times * shape[axis], *shape[axis + 1 :])
    sharding = NamedSharding(mesh, partition_spec(names, whole, mesh, rules))

    @functools.partial(jax.jit, out_shardings=sharding)
    def repeat(array: jax.Array) -> jax.Array:
        return jnp.repeat(array.reshape(split), times, axis=axis).reshape(whole)

    parameter.set_value(repeat(parameter[...]))
