"""The FLOPs of a model itself: products of its jaxpr, before any compiler has touched it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

# cuDNN's attention: products as large as the scores, which are not computed again.
_CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 4}
# How JAX names the scope of what jax.checkpoint computes a second time.
_RECOMPUTED = "rematted_computation"


def traced_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """FLOPs of the products (dots, convolutions) in one call on arrays of these shapes.

    Loops are multiplied out, a `while` by the constant that its counter stays below (else once);
    of a conditional the dearest branch counts. Nothing is compiled.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def jaxpr_flops(jaxpr: Any, *, kernels_only: bool = False, recomputed: bool = True) -> float:
    """As `traced_flops`, of a jaxpr.

    Args:
      kernels_only: counts the Pallas kernels in it alone, of those that state no cost.
      recomputed: whether to count what jax.checkpoint computes once more in the backward pass.
    """
    return sum(_equation(equation, kernels_only, recomputed) for equation in jaxpr.eqns)


def _equation(equation: Any, kernels_only: bool, recomputed: bool) -> float:
    name, params = equation.primitive.name, equation.params
    if not recomputed and _RECOMPUTED in str(equation.source_info.name_stack):
        return 0.0
    if name == "pallas_call":
        stated = params.get("cost_estimate")
        if stated is not None:  # its body may multiply padding, too
            return 0.0 if kernels_only else float(stated.flops)
        inner = sum(map(jaxpr_flops, _inner(params)))
        return inner * math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
    if kernels_only and name in ("dot_general", "conv_general_dilated", *_CUDNN):
        return 0.0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * equation.outvars[0].aval.size * math.prod(shape[n] for n in contracted)
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        kernel = equation.invars[1].aval
        features = kernel.shape[numbers.rhs_spec[0]]
        return 2.0 * equation.outvars[0].aval.size * kernel.size / features
    if name in _CUDNN:  # queries [B, Lq, heads, D], keys [B, Lk, kv_heads, D]
        queries, keys = (variable.aval for variable in equation.invars[:2])
        return 2.0 * _CUDNN[name] * queries.size * keys.shape[1]
    count = functools.partial(jaxpr_flops, kernels_only=kernels_only, recomputed=recomputed)
    if name == "cond":
        branches = (branch.jaxpr for branch in params["branches"])
        return max(count(branch) for branch in branches)
    inner = sum(map(count, _inner(params)))
    if name == "scan":
        return inner * params["length"]
    if name == "while":
        return inner * (_most_turns(params["cond_jaxpr"].jaxpr) or 1)
    if name == "shard_map":  # what one device does
        return inner * params["mesh"].size
    return inner


def _most_turns(condition: Any) -> int | None:
    """The constant below which a loop's counter stays; None: there is none."""
    limits = [
        int(variable.val)
        for equation in condition.eqns
        if equation.primitive.name == "lt"
        for variable in equation.invars[1:]
        if hasattr(variable, "val")
    ]
    return min(limits, default=None)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation calls."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                yield one
            elif hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                yield one.jaxpr
