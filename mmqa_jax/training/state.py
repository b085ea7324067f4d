"""The state of a training run: its initialization, and the jitted step that updates it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import jaxpr_flops
from mmqa_jax.core.mesh import (
    EXACT_ON_CPU,
    batch_sharding,
    on_device,
    on_shardings,
    replicated,
    state_shardings,
    training_options,
)
from mmqa_jax.core.trees import flatten_named, unflatten_named
from mmqa_jax.models.common.layers import with_rounded_products
from mmqa_jax.training.optimizer import Schedule
from mmqa_jax.training.options import Precision

# What the keys of random rounding are folded with; dropout's have the number of a part.
_ROUNDING = 2**32 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What the parts of an update have summed up so far."""

    parts: jax.Array  # int32 scalar, how many
    weight: jax.Array  # float32 scalar, the sum of their weights
    loss: jax.Array  # float32 scalar, the sum of their weighted losses
    # The same of the gradients of the trained parameters, in `Precision.gradients`.
    gradient: list[jax.Array]

    def plus(self, weight: jax.Array, loss: jax.Array, gradient: list[jax.Array]) -> Sums:
        """With one part more."""
        total = [
            _moved_like((on_device(old) + weight * on_device(new)).astype(old.dtype), old)
            for old, new in zip(self.gradient, gradient, strict=True)
        ]
        return Sums(self.parts + 1, self.weight + weight, self.loss + weight * loss, total)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What changes from step to step."""

    step: jax.Array  # int32 scalar, updates done
    params: Any  # nnx.State of the parameters that are trained
    optimizer: Any  # Optax state
    frozen: Any  # nnx.State of the other parameters, which no step changes and no checkpoint holds
    # nnx.State, float32: the moving average of `params`; None: the run has none.
    average: Any = None
    # Of the update that is not complete (`Step.begin`); None: a batch is an update.
    sums: Sums | None = None

    @property
    def saved_params(self) -> Any:
        """What is validated and saved as weights."""
        return self.params if self.average is None else self.average


@dataclasses.dataclass(frozen=True)
class Model:
    """A task's model, split once: its graph, the shapes of its parameters, and its constants."""

    graphdef: Any  # static; merged with arrays it gives a module
    # params, frozen: nnx.State of jax.ShapeDtypeStructs: the parameters that are trained, and the
    # others (`Objective.trained`).
    params: Any
    frozen: Any
    constants: Any  # nnx.State of the variables that are not parameters; not trained, not saved
    # Jitted, (key) -> parameters, frozen ones and constants.
    draw: Callable[[jax.Array], tuple[Any, Any, Any]]
    # precision, ema, offload: of LoopOptions.
    precision: Precision = Precision()
    ema: float = 0.0
    offload: str = ""

    def merge(self, params: Any, frozen: Any) -> nnx.Module:
        """The module with these parameters."""
        return nnx.merge(self.graphdef, params, frozen, self.constants)


def split_model(
    objective: Objective,
    seed: int,
    precision: Precision = Precision(),
    ema: float = 0.0,
    offload: str = "",
) -> Model:
    """The task's model without values for its parameters; the others are of LoopOptions."""
    traced: list[Any] = []
    pattern = re.compile(getattr(objective, "trained", None) or "")

    def is_trained(path: tuple[Any, ...], value: Any) -> bool:
        return isinstance(value, nnx.Param) and bool(pattern.search("/".join(map(str, path))))

    def split(module: nnx.Module) -> tuple[Any, Any, Any]:
        graphdef, params, *arrays = nnx.split(module, is_trained, nnx.Param, ...)
        traced.append(graphdef)
        assert graphdef == traced[0], "what is drawn has another structure than the outline"
        return _held(params, precision.parameters), *arrays

    @jax.jit
    def draw(key: jax.Array) -> tuple[Any, Any, Any]:
        return split(objective.init(key))

    params, frozen, constants = jax.eval_shape(lambda: split(outline(objective)))
    if jax.tree.leaves(constants):
        constants = jax.jit(lambda: draw(jax.random.key(seed))[2])()
    return Model(traced[0], params, frozen, constants, draw, precision, ema, offload)


def outline(objective: Objective) -> nnx.Module:
    """The task's model of which only structure and shapes are wanted; to be traced."""
    if isinstance(objective, Outlined):
        return objective.outline()
    return objective.init(jax.random.key(0))


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, rules: Any
) -> TrainState:
    """Shapes and shardings of the state: optimizer moments are sharded like their parameters."""
    shapes = jax.eval_shape(
        lambda params, frozen: _fresh(model, params, frozen, optimizer), model.params, model.frozen
    )
    state = on_shardings(shapes, state_shardings(shapes, mesh, rules))
    if not model.offload:
        return state

    def on_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        kind = leaf.sharding.with_memory_kind("pinned_host")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kind) if leaf.ndim else leaf

    optimizer, average = jax.tree.map(on_host, (state.optimizer, state.average))
    state = dataclasses.replace(state, optimizer=optimizer, average=average)
    if model.offload == "optimizer":
        return state

    def stack_on_host(variable: nnx.Variable) -> nnx.Variable:
        names = variable.get_metadata().get("out_sharding") or ("",)
        return jax.tree.map(on_host, variable) if names[0] == "layers" else variable

    parameters = jax.tree.map(stack_on_host, (state.params, state.frozen), is_leaf=_is_variable)
    if all(leaf.sharding.memory_kind == "device" for leaf in jax.tree.leaves(parameters)):
        raise UserError(
            "config key train.offload=parameters: the model has no stacked layers, whose "
            "parameters come to the devices one by one; set it to optimizer."
        )
    params, frozen = parameters
    return dataclasses.replace(state, params=params, frozen=frozen)


def initial_state(
    model: Model, optimizer: optax.GradientTransformation, seed: int, abstract: TrainState
) -> TrainState:
    """The state before the first step; each device makes its own shards of it."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def make() -> TrainState:
        params, frozen, _ = model.draw(jax.random.key(seed))
        return _fresh(model, params, frozen, optimizer)

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

    `load_pretrained`: puts the weights, arrays of JAX or NumPy, into a module of shapes with
    shardings, in place; on every process, the same ones.
    """
    # Of a copy: the module shares its variables with what it is merged of.
    module = model.merge(*jax.tree.map(lambda leaf: leaf, (abstract.params, abstract.frozen)))
    load_pretrained(module)
    loaded = flatten_named(nnx.state(module, nnx.Param))
    wanted = flatten_named(abstract.params) | flatten_named(abstract.frozen)
    pretrained = {
        name: _placed(value.astype(wanted[name].dtype, copy=False), wanted[name].sharding)
        for name, value in loaded.items()
        if not isinstance(value, jax.ShapeDtypeStruct)
    }

    def make(pretrained: dict[str, jax.Array]) -> TrainState:
        drawn = {}
        if pretrained.keys() != wanted.keys():
            params, frozen, _ = model.draw(jax.random.key(seed))
            every = flatten_named(params) | flatten_named(frozen)
            drawn = {name: leaf for name, leaf in every.items() if name not in pretrained}
        parts = _unflattened(abstract, on_device(pretrained) | drawn)
        return dataclasses.replace(_fresh(model, *parts, optimizer), params=drawn, frozen=None)

    missing = {name: leaf.sharding for name, leaf in wanted.items() if name not in pretrained}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    shardings = dataclasses.replace(shardings, params=missing, frozen=None)
    state = jax.jit(make, out_shardings=shardings)(pretrained)
    params, frozen = _unflattened(abstract, pretrained | state.params)
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
    if finish is None:
        return model.merge(params, frozen), params
    module = finish(model.merge(*on_device((params, frozen))))
    return module, nnx.state(module, nnx.Param)


def _fresh(
    model: Model, params: Any, frozen: Any, optimizer: optax.GradientTransformation
) -> TrainState:
    wide = _held(params, "float32")
    moments = _held(optimizer.init(wide), model.precision.moments)
    average = wide if model.ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, moments, frozen, average)


def _held(tree: Any, dtype: str) -> Any:
    """The float32 and bfloat16 arrays of Variables in a dtype; what else an optimizer keeps, such
    as its counts, stays as it is."""

    def held(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return leaf
        return jax.tree.map(lambda x: x.astype(dtype) if x.dtype in _HELD else x, leaf)

    return jax.tree.map(held, tree, is_leaf=_is_variable)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


_HELD = (jnp.float32, jnp.bfloat16)


def _rounded_like(tree: Any, old: Any, key: jax.Array) -> Any:
    """The arrays in the dtypes of `old`: from float32 to bfloat16 they are rounded at random."""
    leaves, structure = jax.tree.flatten(tree)

    def rounded(number: int, x: jax.Array, dtype: Any) -> jax.Array:
        if dtype == x.dtype:
            return x
        # A bfloat16 is the upper half of a float32.
        noise = jax.random.bits(jax.random.fold_in(key, number), x.shape, jnp.uint16)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
        up = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.where(jnp.isfinite(x), up, x).astype(dtype)

    dtypes = [leaf.dtype for leaf in jax.tree.leaves(old)]
    numbered = enumerate(zip(leaves, dtypes, strict=True))
    return structure.unflatten([rounded(number, *pair) for number, pair in numbered])


def _moved_like(tree: Any, old: Any) -> Any:
    """The arrays of the devices in the host's memory where those of `old` are; traced."""
    host = jax.memory.Space.Host
    return jax.tree.map(
        lambda x, old: jax.device_put(x, host) if jax.typeof(old).memory_space == host else x,
        tree,
        old,
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """The jitted update of a run, or a part of one; see `make_step`.

    Moments that lie in the host's memory need a program of their own: in one program XLA for TPU
    brings them to the devices while the activations are there, and nothing is gained.
    """

    # (state, constants, batch) -> (state, metrics). With `update`: (state without moments and
    # average, sums, constants, batch) -> (metrics, gradients or sums).
    jitted: Any
    constants: Any  # of the model
    # Shapes and shardings of the state, the sums over an update's parts included.
    abstract: TrainState
    mesh: Mesh  # for which the step is traced and compiled
    # (state, loss, gradients or sums) -> (state, metrics of an update); None: `jitted` does all.
    update: Any = None
    gradients: Any = None  # shapes and shardings of what `jitted` gives `update`

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update, or a part; the batch lies on the mesh as `batch_sharding` has it."""
        with jax.set_mesh(self.mesh):
            result = self.jitted(*self._arguments(state, self.constants, batch))
            if self.update is None:
                return result
            metrics, gradients = result
            rest = dataclasses.replace(state, sums=None)
            state, values = self.update(rest, metrics["loss"], gradients)
            return state, metrics | values

    def _arguments(self, state: TrainState, constants: Any, batch: Any) -> tuple[Any, ...]:
        """What `jitted` takes."""
        if self.update is None:
            return state, constants, batch
        light = dataclasses.replace(state, optimizer=None, average=None, sums=None)
        return light, state.sums, constants, batch

    def begin(self, state: TrainState) -> TrainState:
        """The state with empty sums, if an update has several parts."""
        shapes = self.abstract.sums
        if shapes is None:
            return state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        empty = jax.jit(lambda: _zeros(shapes), out_shardings=shardings)()
        return dataclasses.replace(state, sums=empty)

    def model_flops(self, state: TrainState, batch: Any) -> float:
        """FLOPs of the products of one call over all devices, recomputed ones left out.

        They are counted in the jaxpr, which the call with the same arguments uses too.
        """
        with jax.set_mesh(self.mesh):
            traced = self.jitted.trace(*self._arguments(state, self.constants, batch))
        return jaxpr_flops(traced.jaxpr.jaxpr, recomputed=False)

    def abstract_arguments(self, batch: Any) -> tuple[Any, ...]:
        """What `jitted` takes, as shapes with shardings, for a global batch without its entries for
        the host.
        """
        split, whole = batch_sharding(self.mesh), replicated(self.mesh)

        def struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        batch = jax.tree.map(lambda leaf: struct(leaf, split), batch)
        constants = jax.tree.map(lambda leaf: struct(leaf, whole), self.constants)
        return self._arguments(self.abstract, constants, batch)

    def abstract_update(self) -> tuple[Any, ...]:
        """What `update` takes, as shapes with shardings."""
        loss = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(self.mesh))
        return dataclasses.replace(self.abstract, sums=None), loss, self.gradients

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
    trainable: str | None = None,
    skip_nonfinite: bool = False,
) -> Step:
    """The jitted update: (state, batch) -> (state, metrics); the old state is donated.

    With `accumulate` k the batch is one of k parts of an update, each of a shape of its own: only
    the k-th updates the parameters, by the mean gradient of all parts. A part counts by its
    `weight` (Objective.loss), so that the update is that of one batch with the examples of all.
    Dropout keys depend on seed, step and part alone, so a resumed run draws the same.
    With `skip_nonfinite` a step whose loss or gradient is not finite changes nothing but the number
    of the step.
    Metrics: those of the task and `loss`, of the batch; `grad_norm` (of the trained parameters,
    before clipping) and `learning_rate`, of the update that it completes.

    `trainable`: regular expression over the names of the parameters that are trained, as the
    optimizer's; None: all.
    """
    leaves, structure = jax.tree_util.tree_flatten(abstract.params)
    trains, precision = re.compile(trainable or ""), model.precision
    is_trained = [bool(trains.search(name)) for name in flatten_named(abstract.params)]
    if accumulate > 1:
        sums = _abstract_sums(leaves, is_trained, mesh, precision.gradients)
        abstract = dataclasses.replace(abstract, sums=sums)

    def loss_fn(params: Any, fixed: tuple[Any, Any], batch: Any, key: jax.Array) -> Any:
        module = nnx.merge(model.graphdef, params, *fixed)
        call, kind = objective.loss, precision.products
        if kind:
            loss, metrics = with_rounded_products(module, call, kind, batch, key)
        else:
            loss, metrics = call(module, batch, key)
        return loss, {**metrics, "loss": loss}

    def gradient(params: Any, fixed: tuple[Any, Any], batch: Any, key: jax.Array) -> Any:
        if precision.gradients != "float32":
            params = _held(params, precision.gradients)
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, fixed, batch, key)
        marked = zip(jax.tree.leaves(grads), is_trained, strict=True)
        return metrics, [leaf for leaf, trained in marked if trained]

    def update(state: TrainState, loss: jax.Array, gradient: list[jax.Array]) -> Any:
        before = state.params, state.optimizer, state.average
        old = on_device(before)
        params, moments, average = old
        trained_gradients = iter(on_device(gradient))
        marked = zip(jax.tree.leaves(params), is_trained, strict=True)
        whole = [
            next(trained_gradients) if trained else jnp.zeros_like(leaf) for leaf, trained in marked
        ]
        grads = _held(jax.tree.unflatten(structure, whole), "float32")
        values = {"grad_norm": optax.tree.norm(grads), "learning_rate": schedule(state.step)}
        wide = _held(params, "float32")
        updates, moments = optimizer.update(grads, _held(moments, "float32"), wide)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        key = jax.random.fold_in(key, _ROUNDING)
        new = (optax.apply_updates(wide, updates), moments)
        params, moments = _rounded_like(new, old[:2], key)
        if average is not None:
            average = jax.tree.map(
                lambda mean, x: mean + (1 - model.ema) * (x - mean),
                average,
                _held(params, "float32"),
            )
        new = params, moments, average
        if skip_nonfinite:
            finite = jnp.isfinite(loss) & jnp.isfinite(values["grad_norm"])
            new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        params, moments, average = _moved_like(new, before)
        return dataclasses.replace(
            state, step=state.step + 1, params=params, optimizer=moments, average=average
        ), values

    def complete(state: TrainState) -> Any:
        sums = state.sums
        weight = jnp.where(sums.weight == 0, 1.0, sums.weight)
        means = [x.astype(jnp.float32) / weight for x in on_device(sums.gradient)]
        empty = _moved_like(_zeros(sums), sums)
        return update(dataclasses.replace(state, sums=empty), sums.loss / weight, means)

    def wait(state: TrainState) -> Any:
        return state, {"grad_norm": jnp.zeros(()), "learning_rate": schedule(state.step)}

    def gradients(state: TrainState, sums: Sums | None, constants: Any, batch: Any) -> Any:
        key, fixed = jax.random.fold_in(jax.random.key(seed), state.step), (state.frozen, constants)
        if accumulate == 1:
            return gradient(state.params, fixed, batch, key)
        key = jax.random.fold_in(key, sums.parts)
        metrics, grads = gradient(state.params, fixed, batch, key)
        return metrics, sums.plus(metrics.get(WEIGHT, jnp.ones(())), metrics["loss"], grads)

    def updated(state: TrainState, loss: jax.Array, grads: Any) -> tuple[TrainState, Any]:
        if accumulate == 1:
            return update(state, loss, grads)
        state = dataclasses.replace(state, sums=grads)
        return jax.lax.cond(grads.parts == accumulate, complete, wait, state)

    def step(state: TrainState, constants: Any, batch: Any) -> tuple[TrainState, Any]:
        metrics, grads = gradients(state, state.sums, constants, batch)
        state, values = updated(state, metrics["loss"], grads)
        return state, metrics | values

    # The old parameters make room for the new ones: one copy in memory, not two.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    whole, options = replicated(mesh), {"compiler_options": training_options(mesh)}
    if getattr(objective, "exact", False) and mesh.devices.flat[0].platform == "cpu":
        options = {"compiler_options": EXACT_ON_CPU}
    if not model.offload:
        out = (shardings, whole)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=out, **options)
        return Step(jitted, model.constants, abstract, mesh)
    gradient_shapes = abstract.sums or _abstract_gradients(leaves, is_trained, precision.gradients)
    out = (whole, jax.tree.map(lambda leaf: leaf.sharding, gradient_shapes))
    jitted = jax.jit(gradients, donate_argnums=1, out_shardings=out, **options)
    donated = 0 if accumulate == 1 else (0, 2)  # the sums are part of the new state
    out = (shardings, whole)
    apart = jax.jit(updated, donate_argnums=donated, out_shardings=out, **options)
    return Step(jitted, model.constants, abstract, mesh, apart, gradient_shapes)


def _abstract_gradients(leaves: list[Any], is_trained: list[bool], gradients: str) -> list[Any]:
    """Shapes and shardings of the gradients of the trained parameters."""
    return [
        jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype if gradients == "float32" else gradients, sharding=leaf.sharding
        )
        for leaf, trained in zip(leaves, is_trained, strict=True)
        if trained
    ]


def _abstract_sums(leaves: list[Any], is_trained: list[bool], mesh: Mesh, gradients: str) -> Sums:
    """Shapes and shardings of the sums over the parts of an update: gradients as parameters."""

    def struct(shape: tuple[int, ...], sharding: Any, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    whole = replicated(mesh)
    trained_leaves = [leaf for leaf, trained in zip(leaves, is_trained, strict=True) if trained]
    gradient = [struct(leaf.shape, leaf.sharding, gradients) for leaf in trained_leaves]
    return Sums(struct((), whole, jnp.int32), struct((), whole), struct((), whole), gradient)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def of_update(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of an update of those of its parts.

    They are means over the parts by their weights, but for counts, which are summed up, and what
    only the last part has.
    """
    weights = np.array([part.get(WEIGHT, 1.0) for part in parts], np.float64)
    weights = weights / weights.sum() if weights.sum() else np.full(len(parts), 1 / len(parts))
    means = {
        name: float(np.dot(weights, [part[name] for part in parts]))
        for name in parts[0]
        if name != WEIGHT
    }
    totals = {name: float(sum(part[name] for part in parts)) for name in COUNTS & means.keys()}
    last = {name: float(parts[-1][name]) for name in ("grad_norm", "learning_rate")}
    return means | totals | last


# What the training loop needs of a task: an objective and, if it evaluates, a validation.


# Metrics: what a part of an update counts by, and those that are summed up over its parts.
WEIGHT = "weight"
COUNTS = frozenset({"targets", "truncated"})


class Objective(Protocol):
    """What is trained: a model and its loss; each of tasks/ has one.

    One that trains a part of its model has `trained`, a regular expression over the names of the
    parameters that are (None: all). The others get no gradient and stand in no checkpoint: they are
    loaded, or drawn, at each start of the run.
    """

    def init(self, key: jax.Array) -> nnx.Module:
        """Makes the model with its initial weights (traced)."""

    def loss(
        self, model: nnx.Module, batch: Any, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Scalar loss and scalar metrics of one batch; pure and traced.

        A loss that is not a mean over the rows has a metric WEIGHT, what it is divided by: by that
        the parts of an update count (`train.accumulate`). It is not logged.
        """


@runtime_checkable
class Outlined(Protocol):
    """An objective whose model is quicker to trace where only its structure is wanted."""

    def outline(self) -> nnx.Module:
        """Makes the model as `init` does, of the same structure and shapes, with any values."""


class OfLayers:
    """An objective whose model is of `models.common.layers`: a parameter without a key is 0."""

    network: ClassVar[type[nnx.Module]]  # the model

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized model; without a key, one of zeros."""
        return self.network(self.config, rngs=nnx.Rngs(key))

    def outline(self) -> nnx.Module:
        """The model of zeros; no initializer is traced."""
        return self.init(None)


@runtime_checkable
class ModelBatches(Protocol):
    """Batches that are made with the model itself, such as what it writes when it is asked."""

    def use(self, model: nnx.Module) -> None:
        """Called before each batch with the current model, whose arrays the next step donates: what
        is needed for longer is copied."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """A judgement of the current parameters."""

    # Model -> values by name. It must not keep the model's arrays for longer than the call: the
    # next step donates them.
    evaluate: Callable[[nnx.Module], Mapping[str, float]]
    # The value that the best step has the highest of; None: no best step is kept.
    metric: str | None = None
