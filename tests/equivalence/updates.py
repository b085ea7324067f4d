"""Steps of our optimizers beside torch's: losses, gradients, and what becomes of the parameters."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import torch
from compare import deviation
from flax import nnx

from mmqa_jax.core.config import load_module
from mmqa_jax.core.typed import read_typed
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.state import Objective

RATE = 0.01  # so high that a decay of 0.01, and what leaves it out, shows within the bound
EPS = 1e4  # times as large: Adam makes a whole step of a gradient that is nothing but rounding
Arrays = Mapping[str, np.ndarray]


class Update(NamedTuple):
    """One update: the loss and its gradient before it, the parameters after it."""

    loss: float
    gradient: Arrays
    parameters: Arrays


class TransformersAdamW:
    """transformers 4.21 optimization.py, AdamW; Trainer's, where nothing else is said.

    eps is added before the second moment's bias is corrected, and the decay comes last.
    """

    def __init__(
        self, model: torch.nn.Module, rate: float, eps: float, decay: float, exempt: str = "(?!)"
    ):
        self.model, self.rate, self.eps, self.decay, self.exempt = model, rate, eps, decay, exempt
        self.moments = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in model.parameters()}
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        correction = (1 - 0.999**self.steps) ** 0.5 / (1 - 0.9**self.steps)
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            first, second = self.moments[p]
            first.mul_(0.9).add_(0.1 * p.grad)
            second.mul_(0.999).add_(0.001 * p.grad**2)
            p -= self.rate * correction * first / (second.sqrt() + self.eps)
            if not re.search(self.exempt, name):
                p -= self.rate * self.decay * p


def optimizer_section(file: str, mode: str = "") -> dict[str, Any]:
    """`train.optimizer` of a config file in configs/."""
    path = Path(__file__).parents[2] / "configs" / file
    return load_module(path).get_config(mode).train.optimizer.to_dict()


def at_one_rate(section: Mapping[str, Any], **changes: Any) -> OptimizerOptions:
    """The section with the rate RATE in place of its schedule, and with EPS times its eps."""
    changes = {
        **{"learning_rate": RATE, "schedule": "constant", "warmup": 0.0, "levels": ()},
        "eps": EPS * (section.get("eps") or 1e-8),
        **changes,
    }
    kept = {key: value for key, value in section.items() if key != "every"}
    return read_typed(OptimizerOptions, kept | changes, "train.optimizer")


def our_updates(
    objective: Objective,
    model: nnx.Module,
    options: OptimizerOptions,
    batches: Sequence[Any],
    publish: Callable[[Any], Iterable[tuple[str, np.ndarray]]],
) -> list[Update]:
    """Updates of our optimizer, one for each batch.

    Args:
      publish: names and arrays as the original has them, of a state like the parameters'.
    """
    transform, _ = make_optimizer(options, len(batches))
    graphdef, params = nnx.split(model)
    state = jax.jit(transform.init)(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return objective.loss(nnx.merge(graphdef, params), batch, None)[0]

        loss, gradient = jax.value_and_grad(loss_of)(params)
        changes, state = transform.update(gradient, state, params)
        return loss, gradient, optax.apply_updates(params, changes), state

    made = []
    for batch in batches:
        loss, gradient, params, state = step(params, state, batch)
        made.append(Update(float(loss), dict(publish(gradient)), dict(publish(params))))
    return made


def their_updates(
    model: torch.nn.Module,
    optimizer: Any,
    updates: Sequence[Sequence[Any]],
    loss_of: Callable[[Any], torch.Tensor],
    clip_norm: float | None = None,
) -> list[Update]:
    """Updates of a script in torch, whose loss is the mean over the parts of each."""
    made = []
    for parts in updates:
        model.zero_grad()
        loss = sum(loss_of(part) for part in parts) / len(parts)
        loss.backward()
        named = dict(model.named_parameters())
        gradient = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy().copy()
            for name, p in named.items()
        }
        if clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            assert norm > clip_norm
        optimizer.step()
        after = {name: p.detach().numpy().copy() for name, p in named.items()}
        made.append(Update(loss.item(), gradient, after))
    return made


def same_updates(got: Sequence[Update], wanted: Sequence[Update], zero: str = r"(?!)") -> None:
    """Compares losses, gradients (small ones by their size, too) and parameters, all to 1e-5.

    Args:
      zero: regular expression of names whose gradient is nothing but rounding.
    """
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=0, atol=1e-5)
        assert ours.parameters.keys() == theirs.parameters.keys()
        for name, want in theirs.gradient.items():
            np.testing.assert_allclose(ours.gradient[name], want, rtol=0, atol=1e-5, err_msg=name)
            if want.any() and not re.search(zero, name):
                assert deviation(ours.gradient[name], want) < 1e-4, name
            pair = ours.parameters[name], theirs.parameters[name]
            np.testing.assert_allclose(*pair, rtol=0, atol=1e-5, err_msg=name)
