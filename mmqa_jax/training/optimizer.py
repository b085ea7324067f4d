"""Optimizers and learning-rate schedules from config.

`adam` is the WebQA code's optimizer (plain torch Adam, constant rate), `adamw` the usual choice,
`bert_adam` VLP's: no bias correction, every parameter's gradient clipped separately;
`transformers_adamw` that of transformers and its Trainer until 2023; `adafactor` keeps almost no
state (training.adafactor).
"""

from __future__ import annotations

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
from mmqa_jax.training.adafactor import scale_by_adafactor

Schedule = Callable[[Any], jax.Array]

# Biases, norm gains, and the factor and bias of CLIP's and SigLIP's logits are not decayed.
_NO_DECAY = r"(^|/)(bias|scale|logit_scale|logit_bias|picture_gate)$|norm"


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The section `train.optimizer` of a config.

    Attributes:
      name: adam | adamw | bert_adam | transformers_adamw | adafactor.
      learning_rate: the highest rate of the schedule; of adafactor a share of each parameter's root
        mean square (T5: 1e-3).
      schedule: constant | linear | cosine, after the warm-up; stairs: see `levels`.
      warmup: warm-up from 0, a number of steps (updates, as in `train.steps`), or below 1 a
        fraction of all steps.
      final_fraction: where linear and cosine end, as a fraction of `learning_rate`.
      levels: of stairs: ((first step, factor on the rate), ...), the first from step 0 on. They say
        all, so that `warmup` and `final_fraction` do not count.
      b1, b2: decay of the first and second moment; adafactor has no first, and a schedule of its
        own for the second.
      eps: added to the root of the second moment; None is 1e-8, for bert_adam and
        transformers_adamw, which add it before the moment's bias is corrected, 1e-6. Of adafactor
        added to squared gradients, 1e-30.
      weight_decay: decoupled; None is 0.01, for adam and adafactor none.
      no_decay: regular expression over parameter names that are not decayed.
      clip_norm: the gradient's global norm is clipped to this; None does not clip.
      clip_apart: the parameters of each of `multipliers`, and all others, have a norm of their own
        that is clipped (Prophet stage1/utils/optim.py: its optimizer's groups).
      clip_parameter_norm: bert_adam alone: each parameter's gradient norm is clipped to this.
      multipliers: ((regular expression over parameter names, factor on the rate), ...); the
        first that matches counts.
      trainable: regular expression over parameter names: the others stay as they are, and have no
        optimizer state; None: all are trained.
    """

    name: Literal["adam", "adamw", "bert_adam", "transformers_adamw", "adafactor"] = "adamw"
    learning_rate: float = 1e-4
    schedule: Literal["constant", "linear", "cosine", "stairs"] = "linear"
    warmup: float = 0.1
    final_fraction: float = 0.0
    levels: tuple[tuple[int, float], ...] = ()
    b1: float = 0.9
    b2: float = 0.999
    eps: float | None = None
    weight_decay: float | None = None
    no_decay: str = _NO_DECAY
    clip_norm: float | None = None
    clip_apart: bool = False
    clip_parameter_norm: float = 1.0
    multipliers: tuple[tuple[str, float], ...] = ()
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
            (("b1", "b2"), "from 0 to less than 1", lambda value: 0 <= value < 1),
            (("eps", "clip_norm", "clip_parameter_norm"), "above 0", lambda value: value > 0),
            (("weight_decay",), "not below 0", lambda value: value >= 0),
        ):
            for key in keys:
                if (value := getattr(self, key)) is not None and not is_right(value):
                    raise UserError(
                        f"config key train.optimizer.{key}={value}: a number {wanted} was "
                        "expected; change it."
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


def make_schedule(options: OptimizerOptions, steps: int) -> Schedule:
    """Learning rate by step (the first step is 0): linear warm-up, then the schedule.

    linear is BertAdam's `warmup_linear`: x/w below the warm-up share w, then (1-x)/(1-w), with
    x = step/steps, which makes the very first update one with rate 0.
    """
    if options.schedule == "stairs":
        return _stairs(options)
    warm = options.warmup if options.warmup < 1 else min(options.warmup / steps, 1.0)

    def schedule(step: Any) -> jax.Array:
        x = jnp.asarray(step, jnp.float32) / steps
        rest = jnp.clip((1 - x) / max(1 - warm, 1e-9), 0.0, 1.0)
        if options.schedule == "constant":
            level = jnp.ones_like(x)
        elif options.schedule == "linear":
            level = options.final_fraction + (1 - options.final_fraction) * rest
        else:
            fall = 0.5 * (1 - jnp.cos(jnp.pi * rest))
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

    Raises:
      UserError: on `init`, a multiplier that matches no parameter.
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
        parts.append(optax.scale_by_adam(options.b1, options.b2, options.eps or 1e-8))
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

    Args:
      decayed: whether a parameter's name is decayed.
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
