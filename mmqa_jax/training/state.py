"""The state of a training run: its initialization, and the jitted step that updates it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.compiler_options import training_options
from mmqa_jax.core.flops import jaxpr_flops
from mmqa_jax.core.mesh import batch_sharding, replicated, state_shardings
from mmqa_jax.core.trees import flatten_named, unflatten_named
from mmqa_jax.training.objective import Objective, Outlined
from mmqa_jax.training.optimizer import Schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What changes from step to step.

    Attributes:
      step: int32 scalar, updates done.
      params: nnx.State of the parameters that are trained.
      optimizer: Optax state.
      frozen: nnx.State of the other parameters, which no step changes and no checkpoint holds.
    """

    step: jax.Array
    params: Any
    optimizer: Any
    frozen: Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A task's model, split once: its graph, the shapes of its parameters, and its constants.

    Attributes:
      graphdef: static; merged with arrays it gives a module.
      params, frozen: nnx.State of jax.ShapeDtypeStructs: the parameters that are trained, and the
        others (`Objective.trained`).
      constants: nnx.State of the variables that are not parameters; not trained, not saved.
      draw: jitted, (key) -> parameters, frozen ones and constants.
    """

    graphdef: Any
    params: Any
    frozen: Any
    constants: Any
    draw: Callable[[jax.Array], tuple[Any, Any, Any]]

    def merge(self, params: Any, frozen: Any) -> nnx.Module:
        """The module with these parameters."""
        return nnx.merge(self.graphdef, params, frozen, self.constants)


def split_model(objective: Objective, seed: int) -> Model:
    """The task's model without values for its parameters."""
    traced: list[Any] = []
    pattern = re.compile(getattr(objective, "trained", None) or "")

    def is_trained(path: tuple[Any, ...], value: Any) -> bool:
        return isinstance(value, nnx.Param) and bool(pattern.search("/".join(map(str, path))))

    def split(module: nnx.Module) -> tuple[Any, Any, Any]:
        graphdef, *arrays = nnx.split(module, is_trained, nnx.Param, ...)
        traced.append(graphdef)
        assert graphdef == traced[0], "what is drawn has another structure than the outline"
        return tuple(arrays)

    @jax.jit
    def draw(key: jax.Array) -> tuple[Any, Any, Any]:
        return split(objective.init(key))

    params, frozen, constants = jax.eval_shape(lambda: split(outline(objective)))
    if jax.tree.leaves(constants):
        constants = jax.jit(lambda: draw(jax.random.key(seed))[2])()
    return Model(traced[0], params, frozen, constants, draw)


def outline(objective: Objective) -> nnx.Module:
    """The task's model of which only structure and shapes are wanted; to be traced."""
    if isinstance(objective, Outlined):
        return objective.outline()
    return objective.init(jax.random.key(0))


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, rules: Any
) -> TrainState:
    """Shapes and shardings of the state: optimizer moments are sharded like their parameters."""
    shapes = jax.eval_shape(lambda *arrays: _fresh(*arrays, optimizer), model.params, model.frozen)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh, rules),
    )


def initial_state(
    model: Model, optimizer: optax.GradientTransformation, seed: int, abstract: TrainState
) -> TrainState:
    """The state before the first step; each device makes its own shards of it."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def make() -> TrainState:
        params, frozen, _ = model.draw(jax.random.key(seed))
        return _fresh(params, frozen, optimizer)

    return jax.jit(make, out_shardings=shardings)()


def pretrained_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    seed: int,
    abstract: TrainState,
    load_pretrained: Callable[[nnx.Module], None],
) -> TrainState:
    """The state before the first step of a run from pretrained weights.

    What they lack is as `initial_state` has it; nothing else is drawn, and the model is in memory
    once.

    Args:
      load_pretrained: puts the weights, arrays of JAX or NumPy, into a module of shapes with
        shardings, in place; on every process, the same ones.
    """
    # Of a copy: the module shares its variables with what it is merged of.
    module = model.merge(*jax.tree.map(lambda leaf: leaf, (abstract.params, abstract.frozen)))
    load_pretrained(module)
    found = flatten_named(nnx.state(module, nnx.Param))
    wanted = flatten_named(abstract.params) | flatten_named(abstract.frozen)
    given = {
        name: _placed(value, wanted[name].sharding)
        for name, value in found.items()
        if not isinstance(value, jax.ShapeDtypeStruct)
    }

    def make(given: dict[str, jax.Array]) -> TrainState:
        drawn = {}
        if given.keys() != wanted.keys():
            params, frozen, _ = model.draw(jax.random.key(seed))
            every = flatten_named(params) | flatten_named(frozen)
            drawn = {name: leaf for name, leaf in every.items() if name not in given}
        parts = _unflattened(abstract, given | drawn)
        return dataclasses.replace(_fresh(*parts, optimizer), params=drawn, frozen=None)

    missing = {name: leaf.sharding for name, leaf in wanted.items() if name not in given}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    shardings = dataclasses.replace(shardings, params=missing, frozen=None)
    state = jax.jit(make, out_shardings=shardings)(given)
    params, frozen = _unflattened(abstract, given | state.params)
    return dataclasses.replace(state, params=params, frozen=frozen)


def _unflattened(abstract: TrainState, named: dict[str, Any]) -> tuple[Any, Any]:
    """Named arrays as the trained and the frozen parameters of a state."""
    return tuple(
        unflatten_named(part, {name: named[name] for name in flatten_named(part)})
        for part in (abstract.params, abstract.frozen)
    )


def _placed(value: jax.Array | np.ndarray, sharding: Any) -> jax.Array:
    """The array on a sharding; where that spans processes, each brings a copy of the whole."""
    here = isinstance(value, np.ndarray) or value.is_fully_addressable
    if here and not sharding.is_fully_addressable:
        whole = np.asarray(value)
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
    return jax.device_put(value, sharding)


def finished(
    model: Model, params: Any, frozen: Any, finish: Callable[[nnx.Module], nnx.Module] | None
) -> tuple[nnx.Module, Any]:
    """The module whose weights are kept, and those; `finish` None: the trained parameters."""
    module = model.merge(params, frozen)
    if finish is None:
        return module, params
    module = finish(module)
    return module, nnx.state(module, nnx.Param)


def _fresh(params: Any, frozen: Any, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), frozen)


@dataclasses.dataclass(frozen=True)
class Step:
    """The jitted update of a run: (state, batch) -> (state, metrics); the old state is donated.

    Attributes:
      jitted: (state, constants, batch) -> (state, metrics).
      constants: of the model.
      abstract: shapes and shardings of the state.
      mesh: for which the step is traced and compiled.
    """

    jitted: Any
    constants: Any
    abstract: TrainState
    mesh: Mesh

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; the batch lies on the mesh as `batch_sharding` has it."""
        with jax.set_mesh(self.mesh):
            return self.jitted(state, self.constants, batch)

    def model_flops(self, state: TrainState, batch: Any) -> float:
        """FLOPs of the products of one update over all devices, recomputed ones left out.

        They are counted in the jaxpr, which the call with the same arguments uses too.
        """
        with jax.set_mesh(self.mesh):
            traced = self.jitted.trace(state, self.constants, batch)
        return jaxpr_flops(traced.jaxpr.jaxpr, recomputed=False)

    def abstract_arguments(self, batch: Any) -> tuple[Any, Any, Any]:
        """What `jitted` takes, as shapes with shardings.

        Args:
          batch: as the loop's, without the entries that stay on the host, of arrays or
            jax.ShapeDtypeStructs; sizes are those of the global batch.
        """
        split, whole = batch_sharding(self.mesh), replicated(self.mesh)

        def struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        batch = jax.tree.map(lambda leaf: struct(leaf, split), batch)
        constants = jax.tree.map(lambda leaf: struct(leaf, whole), self.constants)
        return self.abstract, constants, batch

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The program of such a batch; nothing is run, the devices need not be there."""
        with jax.set_mesh(self.mesh):
            return self.jitted.lower(*self.abstract_arguments(batch))


def make_step(
    objective: Objective,
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    seed: int,
    accumulate: int,
    abstract: TrainState,
    mesh: Mesh,
    skip_nonfinite: bool = False,
) -> Step:
    """The jitted update: (state, batch) -> (state, metrics); the old state is donated.

    Dropout keys depend on seed and step alone, so a resumed run draws the same. With
    `accumulate` k, the batch is taken in k interleaved parts whose gradients are averaged
    (a loss with in-batch negatives sees only those of its part).
    With `skip_nonfinite` a step whose loss or gradient is not finite changes nothing but the number
    of the step.
    Metrics: those of the task, `loss`, `grad_norm` (global, before clipping), `learning_rate`.
    """

    def loss_fn(params: Any, fixed: tuple[Any, Any], batch: Any, key: jax.Array) -> Any:
        module = nnx.merge(model.graphdef, params, *fixed)
        loss, metrics = objective.loss(module, batch, key)
        return loss, {**metrics, "loss": loss}

    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def accumulated(params: Any, fixed: tuple[Any, Any], batch: Any, key: jax.Array) -> Any:
        batch = objective.whole(batch) if hasattr(objective, "whole") else batch
        # [B, ...] -> [B / k, k, ...]: part i is column i, so each device keeps its own rows.
        columns = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]), batch)

        def part(i: Any) -> Any:
            rows = jax.tree.map(lambda x: x[:, i], columns)
            (_, metrics), grads = gradient(params, fixed, rows, jax.random.fold_in(key, i))
            return metrics, grads

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, 0))
        total = jax.lax.fori_loop(
            0, accumulate, lambda i, sums: jax.tree.map(jnp.add, sums, part(i)), zeros
        )
        return jax.tree.map(lambda x: x / accumulate, total)

    def step(state: TrainState, constants: Any, batch: Any) -> tuple[TrainState, Any]:
        key, fixed = jax.random.fold_in(jax.random.key(seed), state.step), (state.frozen, constants)
        if accumulate == 1:
            (_, metrics), grads = gradient(state.params, fixed, batch, key)
        else:
            metrics, grads = accumulated(state.params, fixed, batch, key)
        metrics["grad_norm"] = optax.tree.norm(grads)
        metrics["learning_rate"] = schedule(state.step)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        if skip_nonfinite:
            finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            params, moments = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, moments),
                (state.params, state.optimizer),
            )
        return TrainState(state.step + 1, params, moments, state.frozen), metrics

    # The old parameters make room for the new ones: one copy in memory, not two.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    jitted = jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, replicated(mesh)),
        compiler_options=training_options(mesh),
    )
    return Step(jitted, model.constants, abstract, mesh)
