"""The FLOPs of a model itself: products of its jaxpr, before any compiler has touched it."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

# Attention of cuDNN, and JAX's kernel for GPUs, which states no cost and whose loops have no known
# end: products as large as the scores, which are not computed again.
_CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 4}
_TRITON = {"mha_forward": 2, "mha_backward": 4}
_KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "s8", "uint8": "u8"}
# How JAX names the scope of what jax.checkpoint computes a second time.
_RECOMPUTED = "rematted_computation"
_ONE_IN = re.compile(r"one_in_([\d.]+)")


def one_in(count: float) -> Any:
    """A context for products of which the model needs one in so many: each counts as that share.

    Their other rows or matrices are zeros, or another device's, as in a mixture of experts.
    """
    return jax.named_scope(f"one_in_{float(count)!r}")


def traced_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """FLOPs of the products (dots, convolutions) in one call on arrays of these shapes.

    Loops are multiplied out, a `while` by the constant that its counter stays below (else once);
    of a conditional the dearest branch counts. Nothing is compiled.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def jaxpr_flops(jaxpr: Any, *, kernels_only: bool = False, recomputed: bool = True) -> float:
    """Counts the FLOPs of a jaxpr as `traced_flops` does.

    Args:
      kernels_only: counts the Pallas kernels in it alone, of those that state no cost.
      recomputed: whether to count what jax.checkpoint computes once more in the backward pass.
    """
    return sum(flops_by_type(jaxpr, kernels_only=kernels_only, recomputed=recomputed).values())


def flops_by_type(
    jaxpr: Any, *, kernels_only: bool = False, recomputed: bool = True
) -> Counter[str]:
    """Counts a jaxpr's FLOPs by the type of the factors: a key of Chip.rates, such as `bf16`."""
    total: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        total.update(_equation(equation, kernels_only, recomputed))
    return total


def _equation(equation: Any, kernels_only: bool, recomputed: bool) -> dict[str, float]:
    name, params = equation.primitive.name, equation.params
    if not (equation.outvars or equation.effects):  # what nobody reads, no compiler makes
        return {}
    if not recomputed and _RECOMPUTED in str(equation.source_info.name_stack):
        return {}
    if name == "pallas_call":
        stated = params.get("cost_estimate")
        kind, products = _rate(equation.outvars[0].aval.dtype), _TRITON.get(params["name"])
        if products is not None:
            return {kind: _attention(equation, products)}
        if stated is not None:  # its body may multiply padding, too
            return {} if kernels_only else {kind: float(stated.flops)}
        inner = sum(map(jaxpr_flops, inner_jaxprs(params)))
        grid = math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
        return {kind: inner * grid}
    products = ("dot_general", "ragged_dot_general", "conv_general_dilated", *_CUDNN)
    if kernels_only and name in products:
        return {}
    needed = _ONE_IN.search(str(equation.source_info.name_stack))
    share = 1 / float(needed[1]) if needed else 1.0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        factor = equation.invars[0].aval
        flops = 2.0 * equation.outvars[0].aval.size * share
        flops *= math.prod(factor.shape[n] for n in contracted)
        return {_rate(factor.dtype, params.get("precision")): flops}
    if name == "ragged_dot_general":  # each row of the first with the matrix of its group
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        rows, second = (variable.aval for variable in equation.invars[:2])
        others = {*contracted, *batch, *numbers.rhs_group_dimensions}
        columns = math.prod(n for axis, n in enumerate(second.shape) if axis not in others)
        flops = 2.0 * rows.size * columns * share
        return {_rate(rows.dtype, params.get("precision")): flops}
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        kernel = equation.invars[1].aval
        features = kernel.shape[numbers.rhs_spec[0]]
        flops = 2.0 * equation.outvars[0].aval.size * kernel.size / features * share
        return {_rate(kernel.dtype, params.get("precision")): flops}
    if name in _CUDNN:
        return {_rate(equation.invars[0].aval.dtype): _attention(equation, _CUDNN[name])}
    count = functools.partial(flops_by_type, kernels_only=kernels_only, recomputed=recomputed)
    if name == "cond":
        branches = [count(branch.jaxpr) for branch in params["branches"]]
        return max(branches, key=lambda branch: branch.total())
    times = times_run(equation)
    total: Counter[str] = Counter()
    for jaxpr in inner_jaxprs(params):
        total.update({kind: flops * times for kind, flops in count(jaxpr).items()})
    return total


def _attention(equation: Any, products: int) -> float:
    """FLOPs of so many products of queries [B, Lq, heads, D] and keys [B, Lk, kv_heads, D]."""
    queries, keys = (variable.aval for variable in equation.invars[:2])
    return 2.0 * products * queries.size * keys.shape[1]


def times_run(equation: Any) -> int:
    """How often the jaxprs that an equation calls are run, over all devices."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "while":
        return _most_turns(params["cond_jaxpr"].jaxpr) or 1
    if name == "shard_map":  # its jaxpr is what one device does
        return params["mesh"].size
    return 1


def _rate(dtype: Any, precision: Any = None) -> str:
    """Returns the key of the chip's rate at which a product of this type runs."""
    kind = _KINDS.get(str(dtype), str(dtype))
    highest = precision is not None and "HIGHEST" in str(precision)
    return f"{kind}:highest" if kind == "f32" and highest else kind


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


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation calls."""
    for value in params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(inner, "eqns"):
                yield inner
            elif hasattr(inner, "jaxpr") and hasattr(inner.jaxpr, "eqns"):
                yield inner.jaxpr
