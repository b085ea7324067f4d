"""Our models as `python -m tests.bench models` runs them: in several compute types, and trained by AdamW."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.core.mesh import init_sharded, make_mesh


class OurTrainStep:
    """AdamW on one batch, step after step; the counterpart of `torch_reference.TrainStep`.

    The first step donates the model's arrays.

    Args:
      task: of training/, with the loss of `batch`.
      adamw: arguments of torch's AdamW.
    """

    def __init__(
        self, model: nnx.Module, task: Any, batch: Mapping[str, Any], adamw: Mapping[str, Any]
    ):
        self._graphdef, params = nnx.split(model)
        options = dict(adamw)
        b1, b2 = options.pop("betas")
        self._optimizer = optax.adamw(options.pop("lr"), b1, b2, **options)
        self._task, self._batch = task, jax.device_put(batch)
        # All on one device, where every step leaves it: it would be compiled twice otherwise.
        self._carry = jax.device_put(
            (params, jax.jit(self._optimizer.init)(params), jnp.zeros((), jnp.int32)),
            jax.devices()[0],
        )
        self._step = jax.jit(self._one, donate_argnums=0, static_argnums=2)

    def _one(self, carry: Any, batch: Any, dropout: bool) -> tuple[Any, jax.Array]:
        params, moments, number = carry
        key = jax.random.fold_in(jax.random.key(0), number) if dropout else None

        def loss(params):
            return self._task.loss(nnx.merge(self._graphdef, params), batch, key)[0]

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = self._optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments, number + 1), value

    def __call__(self, dropout: bool) -> jax.Array:
        """One step; returns the loss before it."""
        self._carry, loss = jax.block_until_ready(self._step(self._carry, self._batch, dropout))
        return loss


def maker(kind: type[nnx.Module], config: Any) -> Callable[..., nnx.Module]:
    """Builds a model of a config with changes."""
    return lambda rngs, **changes: kind(dataclasses.replace(config, **changes), rngs=rngs)


def initial(build: Callable[..., nnx.Module]) -> nnx.Module:
    """The random model in float32, on the first device."""
    mesh = make_mesh(devices=jax.devices()[:1])
    return init_sharded(lambda: build(nnx.Rngs(0), dtype="float32"), mesh)


def in_types(build: Callable[..., nnx.Module]) -> Callable[..., nnx.Module]:
    """One random model in several compute types.

    Args:
      build: makes the module of keys, with changes of its config.

    Returns:
      (dtype, params=None, abstract=False, **changes) -> the model with compute type `dtype`; its
      parameters are a copy in `params`, or in `dtype` too, or shapes only if `abstract`.
    """
    state = nnx.state(initial(build))

    @functools.cache
    def graphdef_of(dtype: str, **changes: Any) -> nnx.GraphDef:
        return nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(), dtype=dtype, **changes)))

    @functools.partial(jax.jit, static_argnums=1)
    def cast(state: nnx.State, dtype: str) -> nnx.State:
        return jax.tree.map(lambda x: jnp.array(x, dtype), state)

    def of_type(
        dtype: str, params: str | None = None, *, abstract: bool = False, **changes: Any
    ) -> nnx.Module:
        made = (cast.eval_shape if abstract else cast)(state, params or dtype)
        return nnx.merge(graphdef_of(dtype, **changes), made)

    return of_type
