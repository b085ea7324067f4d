"""Optimizers and learning-rate schedules from config.

`adam` is the WebQA code's optimizer (plain torch Adam, constant rate), `adamw` the usual choice,
`bert_adam` VLP's: no bias correction, every parameter's gradient clipped separately;
`transformers_adamw` that of transformers and its Trainer until 2023; `adafactor` keeps almost no
state (training.optimizer); `muon` moves the matrices of stacked layers along their orthogonalized
momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon), and all others as `adamw` does.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.trees import flatten_named, name_of

Schedule = Callable[[Any], jax.Array]

# Names of the parameters that are matrices of a layer, where they are stacks.
_MATRICES = re.compile(r"(^|/)(kernels?|lora_[ab])$")
# Biases, norm gains, and the factor and bias of CLIP's and SigLIP's logits are not decayed.
_NO_DECAY = r"(^|/)(bias|scale|logit_scale|logit_bias|picture_gate)$|norm"


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The section `train.optimizer` of a config."""

    # Adam | adamw | bert_adam | transformers_adamw | adafactor | muon.
    name: Literal["adam", "adamw", "bert_adam", "transformers_adamw", "adafactor", "muon"] = "adamw"
    # The highest rate of the schedule; of adafactor a share of each parameter's root mean square
    # (T5: 1e-3).
    learning_rate: float = 1e-4
    # After the warm-up constant | linear | cosine, inverse_sqrt (the rate falls with the root of
    # the step, as T5's) or wsd (it is constant until the last `decay` of the steps, and then falls:
    # MiniCPM, Hu et al. 2024); stairs: see `levels`.
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd", "stairs"] = "linear"
    # Warm-up from 0, a number of steps (updates, as in `train.steps`), or below 1 a fraction of all
    # steps.
    warmup: float = 0.1
    # Where linear, cosine and wsd end, as a fraction of `learning_rate`.
    final_fraction: float = 0.0
    # Of wsd, the number of last steps in which the rate falls, or below 1 their fraction of all
    # steps.
    decay: float = 0.1
    # Of wsd, how it falls: linear | cosine | sqrt (1 - root, Hagele et al. 2024).
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    # Of stairs: ((first step, factor on the rate), ...), the first from step 0 on. They say all, so
    # that `warmup` and `final_fraction` do not count.
    levels: tuple[tuple[int, float], ...] = ()
    # b1, b2: decay of the first and second moment; adafactor has no first, and a schedule of its
    # own for the second.
    b1: float = 0.9
    b2: float = 0.999
    # Added to the root of the second moment; None is 1e-8, for bert_adam and transformers_adamw,
    # which add it before the moment's bias is corrected, 1e-6. Of adafactor added to squared
    # gradients, 1e-30.
    eps: float | None = None
    # Of muon's matrices, whose momentum is Nesterov's; the others have b1, b2, eps.
    muon_momentum: float = 0.95
    # The root mean square of muon's updates of a matrix before the rate is applied: 0.2 is what
    # AdamW's have, so that one rate serves all (Liu et al. 2025, arXiv 2502.16982); None scales a
    # matrix [in, out] by max(1, out / in) ** 0.5, as Jordan's code does.
    muon_rms: float | None = 0.2
    weight_decay: float | None = None  # decoupled; None is 0.01, for adam and adafactor none
    no_decay: str = _NO_DECAY  # regular expression over parameter names that are not decayed
    # The gradient's global norm is clipped to this; None does not clip.
    clip_norm: float | None = None
    # The parameters of each of `multipliers`, and all others, have a norm of their own that is
    # clipped (Prophet stage1/utils/optim.py: its optimizer's groups).
    clip_apart: bool = False
    # bert_adam alone: each parameter's gradient norm is clipped to this.
    clip_parameter_norm: float = 1.0
    # ((regular expression over parameter names, factor on the rate), ...); the first that matches
    # counts.
    multipliers: tuple[tuple[str, float], ...] = ()
    # Regular expression over parameter names: the others stay as they are, and have no optimizer
    # state; None: all are trained.
    trainable: str | None = None

    def __post_init__(self):
        if self.name == "adam" and self.weight_decay:
            raise UserError(
                "config key train.optimizer.weight_decay: adam has no weight decay; set "
                "train.optimizer.name to adamw or leave weight_decay out."
            )
        if self.name == "bert_adam" and self.trainable is not None:
            raise UserError(
                "config key train.optimizer.trainable: bert_adam trains all parameters; set "
                "train.optimizer.name to adamw or leave trainable out."
            )
        if self.warmup < 0 or self.learning_rate <= 0:
            raise UserError(
                "config section train.optimizer: learning_rate must be above 0 and warmup not "
                f"below 0; they are {self.learning_rate} and {self.warmup}."
            )
        for keys, wanted, is_right in (
            (("b1", "b2", "muon_momentum"), "from 0 to less than 1", lambda value: 0 <= value < 1),
            (
                ("eps", "clip_norm", "clip_parameter_norm", "muon_rms", "decay"),
                "above 0",
                lambda value: value > 0,
            ),
            (("weight_decay",), "not below 0", lambda value: value >= 0),
        ):
            for key in keys:
                if (value := getattr(self, key)) is not None and not is_right(value):
                    raise UserError(
                        f"config key train.optimizer.{key}={value}: a number {wanted} was "
                        "expected; change it."
                    )
        if self.schedule == "inverse_sqrt" and not self.warmup:
            raise UserError(
                "config key train.optimizer.warmup=0: the schedule inverse_sqrt falls from the "
                "last step of the warm-up on; set warmup above 0."
            )
        starts = [first for first, _ in self.levels]
        if (0 not in starts) if self.schedule == "stairs" else starts:
            raise UserError(
                f"config key train.optimizer.levels={self.levels}: pairs of first step and factor, "
                "from step 0 on, were expected for the schedule stairs, and none for others."
            )
        patterns = [self.no_decay, *(pattern for pattern, _ in self.multipliers)]
        for pattern in [*patterns, self.trainable or ""]:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"config section train.optimizer: {pattern!r} is not a regular expression "
                    f"({error}); correct it."
                ) from error


# From 1 to 0 while the rest of the fall goes from 1 to 0.
_FALLS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda rest: rest,
    "cosine": lambda rest: 0.5 * (1 - jnp.cos(jnp.pi * rest)),
    "sqrt": lambda rest: 1 - jnp.sqrt(1 - rest),
}


def make_schedule(options: OptimizerOptions, steps: int) -> Schedule:
    """Learning rate by step (the first step is 0): linear warm-up, then the schedule.

    linear is BertAdam's `warmup_linear`: x/w below the warm-up share w, then (1-x)/(1-w), with
    x = step/steps, which makes the very first update one with rate 0.
    """
    if options.schedule == "stairs":
        return _stairs(options)
    warm, fall_share = (
        value if value < 1 else min(value / steps, 1.0) for value in (options.warmup, options.decay)
    )
    if options.schedule == "wsd" and warm + fall_share > 1:
        raise UserError(
            f"config section train.optimizer: warmup={options.warmup} and decay={options.decay} "
            f"take more than the {steps} steps of the run; lower one of them."
        )

    def schedule(step: Any) -> jax.Array:
        x = jnp.asarray(step, jnp.float32) / steps
        span = fall_share if options.schedule == "wsd" else 1 - warm
        rest = jnp.clip((1 - x) / max(span, 1e-9), 0.0, 1.0)
        if options.schedule == "constant":
            level = jnp.ones_like(x)
        elif options.schedule == "inverse_sqrt":
            level = jnp.sqrt(warm / jnp.maximum(x, warm))
        else:
            shape = options.decay_shape if options.schedule == "wsd" else options.schedule
            fall = _FALLS[shape](rest)
            level = options.final_fraction + (1 - options.final_fraction) * fall
        if warm > 0:
            level = jnp.where(x < warm, x / warm, level)
        return options.learning_rate * level

    return schedule


def _stairs(options: OptimizerOptions) -> Schedule:
    first, factor = zip(*sorted(options.levels), strict=True)
    # Of NumPy: they become constants of the step, and no programs of their own.
    starts, factors = np.array(first, np.int32), np.array(factor, np.float32)

    def schedule(step: Any) -> jax.Array:
        level = jnp.searchsorted(starts, jnp.asarray(step), side="right") - 1
        return options.learning_rate * jnp.asarray(factors)[level]

    return schedule


def rates(options: OptimizerOptions, steps: int, taken: int) -> np.ndarray:
    """The schedule's first `taken` learning rates, float32 [taken]."""
    return np.asarray(jax.jit(make_schedule(options, steps))(np.arange(taken)))


def make_optimizer(
    options: OptimizerOptions, steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer for `steps` updates, and its schedule (for the logs).

    The transformation's trees keep the parameters' Flax metadata, so optimizer state is sharded
    like the parameters.
    """
    schedule = make_schedule(options, steps)
    decay, decays = _weight_decay(options)
    parts = []
    if options.clip_norm is not None:
        clip = optax.clip_by_global_norm(options.clip_norm)
        parts.append(_apart(clip, options.multipliers) if options.clip_apart else clip)
    if options.name == "bert_adam":
        parts.append(clip_each_parameter(options.clip_parameter_norm))
        parts.append(scale_by_bert_adam(options.b1, options.b2, options.eps or 1e-6, decay, decays))
        # Where the others decay: the state's names number the parts.
        parts += [optax.identity()] if decay else []
    elif options.name == "transformers_adamw":
        parts.append(scale_by_bert_adam(options.b1, options.b2, options.eps or 1e-6))
        parts.append(optax.scale_by_schedule(lambda step: _correction(options, step + 1)))
    elif options.name == "adafactor":
        parts.append(scale_by_adafactor(options.eps or 1e-30))
    else:
        adam = optax.scale_by_adam(options.b1, options.b2, options.eps or 1e-8)
        parts.append(scale_by_muon(options, adam) if options.name == "muon" else adam)
    if decay and options.name != "bert_adam":
        parts.append(optax.add_decayed_weights(decay, lambda params: _by_name(params, decays)))
    if options.multipliers:
        parts.append(scale_by_name(options.multipliers))
    parts.append(optax.scale_by_learning_rate(schedule))
    optimizer = optax.chain(*parts)
    if options.trainable is not None:
        optimizer = only(options.trainable, optimizer)
    return optimizer, schedule


def _weight_decay(options: OptimizerOptions) -> tuple[float, Callable[[str], bool]]:
    """The weight decay, and whether a trained parameter's name has it."""
    decay = options.weight_decay
    if decay is None:
        decay = 0.0 if options.name in ("adam", "adafactor") else 0.01
    exempt = re.compile(options.no_decay, re.IGNORECASE)
    return decay, lambda name: not exempt.search(name)


def parameter_table(options: OptimizerOptions, params: Any) -> dict[str, dict[str, Any]]:
    """Shape and weight decay of every parameter by its name; a decay of None: it is not trained."""
    decay, decays = _weight_decay(options)
    trains = re.compile(options.trainable or "")
    return {
        name: {
            "shape": list(leaf.shape),
            "weight_decay": decay * decays(name) if trains.search(name) else None,
        }
        for name, leaf in flatten_named(params).items()
    }


def decay_line(table: Mapping[str, Mapping[str, Any]]) -> str:
    """What a `parameter_table` says, in one sentence."""
    decayed = {name for name, facts in table.items() if facts["weight_decay"]}
    trained = [name for name, facts in table.items() if facts["weight_decay"] is not None]
    others = collections.Counter(name.split("/")[-1] for name in trained if name not in decayed)
    named = ", ".join(f"{kind} ({count})" for kind, count in sorted(others.items()))
    sizes = [math.prod(table[name]["shape"]) for name in trained]
    return (
        f"{len(trained)} parameters ({sum(sizes):,} numbers) are trained; weight decay acts on "
        f"{len(decayed)} of them, not on {named or 'any other'}"
    )


def _correction(options: OptimizerOptions, step: jax.Array) -> jax.Array:
    """Corrects the bias of Adam's moments at a step from 1 on."""
    return jnp.sqrt(1 - options.b2**step) / (1 - options.b1**step)


def only(pattern: str, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer over the parameters whose name matches; the others are not updated."""
    matches = re.compile(pattern)

    def trained(params: Any) -> Any:
        return _by_name(params, lambda name: bool(matches.search(name)))

    def frozen(params: Any) -> Any:
        return _by_name(params, lambda name: not matches.search(name))

    def init(params: Any) -> Any:
        names = list(flatten_named(params))
        if not any(map(matches.search, names)):
            raise UserError(
                f"config key train.optimizer.trainable: {pattern!r} matches no parameter; "
                f"parameters are named like {names[0]!r}."
            )
        return both.init(params)

    both = optax.chain(optax.masked(optimizer, trained), optax.masked(optax.set_to_zero(), frozen))
    return optax.GradientTransformation(init, both.update)


class BertAdamState(NamedTuple):
    """First and second moments of the gradient."""

    mu: Any
    nu: Any


def scale_by_bert_adam(
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float = 0.0,
    decayed: Callable[[str], bool] = lambda name: True,
) -> optax.GradientTransformation:
    """Adam without bias correction (VLP, pytorch_pretrained_bert/optimization.py), with decay.

    The original passes over a parameter whose gradient is None, which therefore is not decayed:
    one that no loss has reached since the run began (the pooler, or the picture layers while all
    batches were text). Its zero_grad wrote zeros, so that a parameter that has once had a gradient
    goes on to decay and to move in steps without one. Here a gradient that nothing reaches is 0,
    and a parameter has had one if its moments are not all 0.

    `decayed`: whether a parameter's name is decayed.
    """

    def decay(path: Any, update: Any, mu: Any, nu: Any, param: Any) -> Any:
        if not decayed(name_of(path)):
            return update
        axes = _axes_of_one(param)
        reached = jnp.any((_value(mu) != 0) | (_value(nu) != 0), axis=axes, keepdims=True)
        made = _value(update) + weight_decay * _value(param) * reached
        return update.replace(made) if _is_variable(update) else made

    def init(params: Any) -> BertAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return BertAdamState(mu=zeros, nu=jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: BertAdamState, params: Any = None) -> tuple[Any, BertAdamState]:
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        if weight_decay:
            updates = jax.tree_util.tree_map_with_path(
                decay, updates, mu, nu, params, is_leaf=_is_variable
            )
        return updates, BertAdamState(mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_muon(
    options: OptimizerOptions, others: optax.GradientTransformation
) -> optax.GradientTransformation:
    """optax' Muon for each matrix [in, out] of stacked layers and experts, `others` for the rest.

    optax corrects the bias of both terms of Nesterov's momentum, which torch.optim.Muon does not:
    they agree in the first step and about 1 / (1 - momentum) steps later.
    """

    def factor(update: jax.Array) -> jax.Array:
        inputs, outputs = update.shape[-2:]
        if options.muon_rms is None:
            return update * max(1.0, outputs / inputs) ** 0.5
        return update * (options.muon_rms * max(inputs, outputs) ** 0.5)

    def labels(tree: Any) -> Any:
        def label(path: Any, leaf: Any) -> Any:
            kind = "muon" if _MATRICES.search(name_of(path)) and _is_matrix(leaf) else "others"
            return jax.tree.map(lambda _: kind, leaf)

        return jax.tree_util.tree_map_with_path(label, tree, is_leaf=_is_variable)

    def init(params: Any) -> Any:
        if "muon" not in jax.tree.leaves(labels(params)):
            raise UserError(
                "config key train.optimizer.name=muon: the parameters that are trained have no "
                "matrices of stacked layers; set it to adamw."
            )
        return both.init(params)

    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    matrices = optax.contrib.scale_by_muon(
        beta=options.muon_momentum,
        weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: axes, tree),
    )
    scaled = optax.chain(matrices, optax.stateless_with_tree_map(lambda g, _: factor(g)))
    both = optax.partition({"muon": scaled, "others": others}, labels)
    return optax.GradientTransformation(init, both.update)


def _is_matrix(leaf: Any) -> bool:
    """Whether a parameter is a stack of matrices, of layers and perhaps experts."""
    if not jax.tree.leaves(leaf) or not _is_variable(leaf):
        return False
    names = leaf.get_metadata().get("out_sharding") or ()
    return "layers" in names and len(names) - 2 == sum(x in ("layers", "experts") for x in names)


def clip_each_parameter(max_norm: float) -> optax.GradientTransformation:
    """Clips the gradient of each parameter to its own L2 norm (torch's clip_grad_norm_).

    A stacked parameter (an axis with the logical name "layers") is one parameter per layer, as
    in the original, where each layer has its own.
    """

    def clip(grad: Any) -> Any:
        value = _value(grad)
        norm = jnp.sqrt(jnp.sum(jnp.square(value), axis=_axes_of_one(grad), keepdims=True))
        clipped = value * jnp.minimum(max_norm / (norm + 1e-6), 1.0)
        return grad.replace(clipped) if _is_variable(grad) else clipped

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(clip, grads, is_leaf=_is_variable), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _value(leaf: Any) -> jax.Array:
    return leaf.get_value() if _is_variable(leaf) else leaf


def _axes_of_one(leaf: Any) -> tuple[int, ...]:
    """The axes of one of the original's parameters: all but that of stacked layers."""
    names = (leaf.get_metadata().get("out_sharding") or ()) if _is_variable(leaf) else ()
    layers = [axis for axis, name in enumerate(names) if name == "layers"]
    return tuple(axis for axis in range(_value(leaf).ndim) if axis not in layers)


def scale_by_name(multipliers: tuple[tuple[str, float], ...]) -> optax.GradientTransformation:
    """Multiplies the update of the parameters whose name matches, e.g. 10x for a fresh head."""
    patterns = [(re.compile(pattern), factor) for pattern, factor in multipliers]

    def factor_of(name: str) -> float:
        group = _group(patterns, name)
        return 1.0 if group is None else patterns[group][1]

    def init(params: Any) -> optax.EmptyState:
        names = list(flatten_named(params))
        for pattern, _ in patterns:
            if not any(pattern.search(name) for name in names):
                raise UserError(
                    f"config key train.optimizer.multipliers: {pattern.pattern!r} matches no "
                    f"parameter; parameters are named like {names[0]!r}."
                )
        return optax.EmptyState()

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        factors = _by_name(grads, factor_of)
        return jax.tree.map(lambda g, factor: g * factor, grads, factors), state

    return optax.GradientTransformation(init, update)


def _group(patterns: Sequence[tuple[re.Pattern[str], float]], name: str) -> int | None:
    """The first of the multipliers that a parameter's name matches."""
    numbers = (number for number, (pattern, _) in enumerate(patterns) if pattern.search(name))
    return next(numbers, None)


def _apart(
    clip: optax.GradientTransformation, multipliers: tuple[tuple[str, float], ...]
) -> optax.GradientTransformation:
    """`clip` for the parameters of each multiplier, and for all others, by themselves."""
    patterns = [(re.compile(pattern), factor) for pattern, factor in multipliers]
    groups = {str(number): clip for number in (None, *range(len(patterns)))}
    return optax.partition(
        groups, lambda tree: _by_name(tree, lambda name: str(_group(patterns, name)))
    )


def _by_name(tree: Any, value_of: Callable[[str], Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: value_of(name_of(path)), tree)


# Adafactor (Shazeer and Stern 2018) over parameters that are stacks of layers, by optax' parts.
#
# Of a matrix the second moments are kept as the means of its rows and columns: LLaMA-2-7B has 11
# MiB of optimizer state in place of Adam's 50 GiB. A stack is one parameter for each of its
# layers, as where layers are apart, and the state of a parameter is sharded like it.

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

    `eps`: added to squared gradients.
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

        return AdafactorState(jnp.zeros((), jnp.int32), *_map_apart(params, zeros, 3))

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        def factored_update(
            grad: jax.Array, param: jax.Array, *moments: jax.Array
        ) -> tuple[jax.Array, ...]:
            factors = optax.FactoredState(state.count, *moments)
            made, factors = factored.update(grad, factors, param)
            made, _ = clip.update(made, optax.EmptyState(), param)
            made, _ = relative.update(made, optax.EmptyState(), param)
            return made, factors.v_row, factors.v_col, factors.v

        def of(parameter: Any, *arrays: Any) -> tuple[Any, ...]:
            run = jax.vmap(factored_update) if _is_stack(parameter) else factored_update
            grad, *moments = arrays
            made, *factors = run(*map(_value, (grad, parameter, *moments)))
            return (_with(parameter, made), *_like(parameter, tuple(factors)))

        made, *factors = _map_apart(params, of, 4, grads, *state[1:])
        return made, AdafactorState(optax.safe_increment(state.count), *factors)

    return optax.GradientTransformation(init, update)


def _map_apart(params: Any, function: Any, count: int, *rest: Any) -> tuple[Any, ...]:
    """`function` of each parameter -> `count` values; as many trees. What an optimizer's filter
    has masked stays as it is."""

    def each(parameter: Any, *leaves_of_others: Any) -> tuple[Any, ...]:
        if not jax.tree.leaves(parameter):
            return (parameter,) * count
        return function(parameter, *leaves_of_others)

    leaves, structure = jax.tree.flatten(params, is_leaf=_is_variable)
    others = [structure.flatten_up_to(tree) for tree in rest]
    results = [each(*result) for result in zip(leaves, *others, strict=True)]
    return tuple(structure.unflatten([result[n] for result in results]) for n in range(count))


def _names(leaf: Any) -> tuple[str | None, ...]:
    """The logical name of each axis."""
    value = _value(leaf)
    known = leaf.get_metadata().get("out_sharding") if _is_variable(leaf) else None
    return tuple(known) if known else (None,) * value.ndim


def _is_stack(leaf: Any) -> bool:
    return _names(leaf)[:1] == ("layers",)


def _with(leaf: Any, value: jax.Array, names: tuple[str | None, ...] | None = None) -> Any:
    """A value in a parameter's place; names of its axes where they are not the parameter's."""
    if not _is_variable(leaf):
        return value
    if names is None:
        return leaf.replace(value)
    return type(leaf)(value, out_sharding=names, eager_sharding=False)


def _like(leaf: Any, moments: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Rows, columns and whole moments of a parameter with the names of their axes."""
    names, shape = _names(leaf), _value(leaf).shape
    first = int(_is_stack(leaf))
    names_of_axes, axes = list(names[first:]), np.argsort(shape[first:])
    rows = columns = whole = (None,)
    if len(axes) > 1 and shape[first:][axes[-2]] >= _LEAST:
        # The means over the longest side, and over the next.
        rows, columns = (
            tuple(name for axis, name in enumerate(names_of_axes) if axis != left_out)
            for left_out in (axes[-1], axes[-2])
        )
    else:
        whole = tuple(names_of_axes)
    return tuple(
        _with(leaf, value, (*names[:first], *of_axes))
        for value, of_axes in zip(moments, (rows, columns, whole), strict=True)
    )
