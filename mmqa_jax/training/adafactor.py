"""Adafactor (Shazeer and Stern 2018) over parameters that are stacks of layers, by optax' parts.

Of a matrix the second moments are kept as the means of its rows and columns: LLaMA-2-7B has 11 MiB
of optimizer state in place of Adam's 50 GiB. A stack is one parameter for each of its layers, as
where layers are apart, and the state of a parameter is sharded like it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

_LEAST = 128  # sides of a matrix that is factored, as of optax.adafactor
_CLIPPED = 1.0  # root mean square of an update, the same


class AdafactorState(NamedTuple):
    """Second moments: of matrices those of rows and columns, of other parameters all; where there
    are none, one zero."""

    count: jax.Array
    rows: Any
    columns: Any
    whole: Any


def scale_by_adafactor(eps: float = 1e-30) -> optax.GradientTransformation:
    """What optax.adafactor does without momentum and decay; the rate is relative to the root mean
    square of a parameter.

    Args:
      eps: added to squared gradients.
    """
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=_LEAST, epsilon=eps)
    clip = optax.clip_by_block_rms(_CLIPPED)
    relative = optax.scale_by_param_block_rms()

    def init(params: Any) -> AdafactorState:
        def zeros(parameter: Any) -> tuple[Any, ...]:
            def of(x: jax.Array) -> tuple[jax.Array, ...]:
                state = factored.init(x)
                return state.v_row, state.v_col, state.v

            made = jax.vmap(of) if _is_stack(parameter) else of
            return _like(parameter, made(_value(parameter)))

        return AdafactorState(jnp.zeros((), jnp.int32), *_apart(params, zeros, 3))

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        def one(grad: jax.Array, param: jax.Array, *moments: jax.Array) -> tuple[jax.Array, ...]:
            kept = optax.FactoredState(state.count, *moments)
            made, kept = factored.update(grad, kept, param)
            made, _ = clip.update(made, optax.EmptyState(), param)
            made, _ = relative.update(made, optax.EmptyState(), param)
            return made, kept.v_row, kept.v_col, kept.v

        def of(parameter: Any, *given: Any) -> tuple[Any, ...]:
            run = jax.vmap(one) if _is_stack(parameter) else one
            grad, *moments = given
            made, *kept = run(*map(_value, (grad, parameter, *moments)))
            return (_with(parameter, made), *_like(parameter, tuple(kept)))

        made, *kept = _apart(params, of, 4, grads, *state[1:])
        return made, AdafactorState(optax.safe_increment(state.count), *kept)

    return optax.GradientTransformation(init, update)


def _apart(params: Any, function: Any, count: int, *rest: Any) -> tuple[Any, ...]:
    """`function` of each parameter -> `count` values; as many trees. What an optimizer's filter
    has masked stays as it is."""

    def each(parameter: Any, *given: Any) -> tuple[Any, ...]:
        if not jax.tree.leaves(parameter):
            return (parameter,) * count
        return function(parameter, *given)

    leaves, structure = jax.tree.flatten(params, is_leaf=_is_parameter)
    others = [structure.flatten_up_to(tree) for tree in rest]
    found = [each(*own) for own in zip(leaves, *others, strict=True)]
    return tuple(structure.unflatten([own[n] for own in found]) for n in range(count))


def _is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _value(leaf: Any) -> jax.Array:
    return leaf.get_value() if _is_parameter(leaf) else leaf


def _names(leaf: Any) -> tuple[str | None, ...]:
    """The logical name of each axis."""
    value = _value(leaf)
    known = leaf.get_metadata().get("out_sharding") if _is_parameter(leaf) else None
    return tuple(known) if known else (None,) * value.ndim


def _is_stack(leaf: Any) -> bool:
    return _names(leaf)[:1] == ("layers",)


def _with(leaf: Any, value: jax.Array, names: tuple[str | None, ...] | None = None) -> Any:
    """A value in a parameter's place; names of its axes where they are not the parameter's."""
    if not _is_parameter(leaf):
        return value
    if names is None:
        return leaf.replace(value)
    return type(leaf)(value, out_sharding=names, eager_sharding=False)


def _like(leaf: Any, moments: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Rows, columns and whole moments of a parameter with the names of their axes."""
    names, shape = _names(leaf), _value(leaf).shape
    first = int(_is_stack(leaf))
    own, axes = list(names[first:]), np.argsort(shape[first:])
    rows = columns = whole = (None,)
    if len(axes) > 1 and shape[first:][axes[-2]] >= _LEAST:
        # The means over the longest side, and over the next.
        rows, columns = (
            tuple(name for axis, name in enumerate(own) if axis != left_out)
            for left_out in (axes[-1], axes[-2])
        )
    else:
        whole = tuple(own)
    return tuple(
        _with(leaf, value, (*names[:first], *of_axes))
        for value, of_axes in zip(moments, (rows, columns, whole), strict=True)
    )
