"""A planner for MAVL that learns by reward (ours): GRPO on plans that it draws itself.

Group relative policy optimization (Shao et al. 2024, DeepSeekMath, section 4.1). For every prompt
of a planner the policy draws a group of plans; a plan's reward is what it earns (mavl_plans.py),
and its advantage the reward less the group's mean, over the group's spread. The loss is equation 3
with the divergence from the reference of equation 4. The reference is the model without its
additions: the run's base.

Plans are drawn by the engine in the training process, before the step that learns from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh, put_batch
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.language_model import RowSize, TokenExample, packed_batch
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.requests import Candidate
from mmqa_jax.extensions.mavl_planner import (
    PlannerTask,
    PlanPrompt,
    PlanSampler,
)
from mmqa_jax.extensions.mavl_plans import PlanTable, read_plan_table
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.papers.mavl import Actions, PlanReading, every_plan, parse_plan
from mmqa_jax.tasks.base_llm import base_loader, check_rows
from mmqa_jax.tasks.language_model import RowBatches
from mmqa_jax.tasks.objectives import LanguageModelObjective, target_log_probs
from mmqa_jax.tasks.task import Recipe, floats

_PLANS = tuple(plan.actions for plan in every_plan("manager"))
_LEAST_SPREAD = 1e-4  # added to a group's spread, as TRL's GRPOTrainer does
Arrays = dict[str, np.ndarray]
LogProbs = Callable[[Llama, Arrays], Arrays]


# Advantages and the loss.


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean) / std within each group; rewards and advantages are float [P, G]."""
    spread = rewards.std(axis=1, ddof=1, keepdims=True)
    return (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + _LEAST_SPREAD)


@dataclasses.dataclass(frozen=True)
class GrpoObjective(LanguageModelObjective):
    """Equation 3: the clipped gain of the drawn tokens, less their divergence from the reference.

    Attributes:
      temperature: at which plans were drawn; the policy is softmax(logits / temperature).
      clip: epsilon, how far a token's probability may move from the one that it was drawn with.
      kl_weight: beta, of the divergence.
    """

    temperature: float = 1.0
    clip: float = 0.2
    kl_weight: float = 0.04

    def loss(
        self, model: Llama, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean over the rows, one drawn plan each, of the mean over its tokens.

        Args:
          batch: of `PlanGroups`. Without `old_log_probs` the plans were drawn from this very model.
        """
        log_probs = target_log_probs(model, batch, dropout_key, self.temperature)  # [B, T]
        is_token = batch["target_segments"] > 0
        old = batch.get("old_log_probs", jax.lax.stop_gradient(log_probs))
        ratio = jnp.exp(jnp.where(is_token, log_probs - old, 0.0))
        advantages = batch["advantages"][:, None]
        within = jnp.clip(ratio, 1 - self.clip, 1 + self.clip)
        gain = jnp.minimum(ratio * advantages, within * advantages)
        # Equation 4: unbiased, and never negative.
        above = jnp.where(is_token, batch["reference_log_probs"] - log_probs, 0.0)
        kl = jnp.exp(above) - above - 1

        def mean(values: jax.Array) -> jax.Array:
            return (jnp.where(is_token, values, 0.0).sum(axis=1) / is_token.sum(axis=1)).mean()

        metrics = {
            **{name: batch[name].mean() for name in ("reward", "score", "calls", "deciding")},
            "kl": mean(kl),
            "clipped": mean(jnp.where(jnp.abs(ratio - 1) > self.clip, 1.0, 0.0)),
            "tokens": is_token.sum(axis=1).mean(dtype=jnp.float32),
            **{_plan_name(plan): batch["plans"][:, i].mean() for i, plan in enumerate(_PLANS)},
        }
        return mean(self.kl_weight * kl - gain), metrics


def _plan_name(plan: Actions) -> str:
    """Names the metric that is the share of a plan among those drawn."""
    return "plan/" + ("+".join(map(str, plan)) or "none")


# The batches: groups of drawn plans.


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoSection:
    """The section `grpo`.

    Attributes:
      group: plans that are drawn for a prompt.
      temperature: at which they are drawn.
      updates: steps that learn from the same plans.
      clip, kl_weight: see GrpoObjective; DeepSeekMath's weight is 0.04.
    """

    group: int = at_least(2, 8)
    temperature: float = at_least(1e-3, 1.0)
    updates: int = at_least(1, 1)
    clip: float = at_least(0, 0.2)
    kl_weight: float = at_least(0, 0.04)


class PlanGroups:
    """Draws groups of plans from the current model, batch after batch; see `ModelBatches`.

    An epoch asks every prompt once, in an order of its own. Which prompts are asked, and the seeds
    of the draws, depend on the run's seed and the number of the batch alone. The state holds the
    plans that are still to be learned from, which the model of a later step would not draw.

    Args:
      prompts: that are asked.
      table: what plans earn.
      sampler: draws them.
      log_probs: (model, batch) -> `reference_log_probs` and, if plans are learned from more than
        once, `old_log_probs`, float32 [B, T].
      per_batch: prompts of a batch.
      size: of a row, one plan each.
      options: see GrpoSection.
      reading: how a plan is read.
      seed: of the run.
    """

    def __init__(
        self,
        prompts: Sequence[PlanPrompt],
        table: PlanTable,
        sampler: PlanSampler,
        log_probs: LogProbs,
        *,
        per_batch: int,
        size: RowSize,
        options: GrpoSection,
        reading: PlanReading,
        seed: int,
    ):
        self._prompts, self._table, self._sampler = prompts, table, sampler
        self._log_probs, self._per_batch, self._size = log_probs, per_batch, size
        self._options, self._reading, self._seed = options, reading, seed
        self._model: Llama | None = None
        self._drawn, self._left = 0, 0  # batches so far; times that the last one is still learned
        self._batch: Arrays = {}

    def use(self, model: Llama) -> None:
        """The model that the next plans are drawn from."""
        self._model = model

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Arrays:
        if not self._left:
            self._batch, self._left = self._draw(self._drawn), self._options.updates
            self._drawn += 1
        self._left -= 1
        return self._batch

    def get_state(self) -> dict[str, Any]:
        kept = self._batch if self._left else {}
        values = {name: [str(array.dtype), array.tolist()] for name, array in kept.items()}
        return {"drawn": self._drawn, "left": self._left, "batch": values}

    def set_state(self, state: dict[str, Any]) -> None:
        self._drawn, self._left = int(state["drawn"]), int(state["left"])
        self._batch = {name: np.array(x, kind) for name, (kind, x) in state["batch"].items()}

    def close(self) -> None:
        """Nothing is open."""

    def _draw(self, number: int) -> Arrays:
        """A batch by its number: plans of the next prompts, what they earn, log-probabilities."""
        assert self._model is not None, "`use` comes first"
        asked = [self._prompts[place] for place in self._order(number)]
        options = self._options
        seeds = np.random.default_rng((27, self._seed, number)).integers(2**31, size=len(asked))
        self._sampler.use(self._model)
        results = self._sampler.draw(
            asked,
            new_tokens=self._size.targets,
            temperature=options.temperature,
            n=options.group,
            seeds=seeds.tolist(),
        )
        groups = [(p, r.candidates) for p, r in zip(asked, results, strict=True)]
        rows = [[_example(prompt, one)] for prompt, drawn in groups for one in drawn]
        batch = {**packed_batch(rows, self._size), **self._earned(groups)}
        return {**batch, **self._log_probs(self._model, batch)}

    def _order(self, number: int) -> list[int]:
        """The prompts of a batch, by number."""
        count, first = len(self._prompts), number * self._per_batch
        places = []
        for position in range(first, first + self._per_batch):
            epoch, place = divmod(position, count)
            order = np.random.default_rng((28, self._seed, epoch)).permutation(count)
            places.append(int(order[place]))
        return places

    def _earned(self, groups: Sequence[tuple[PlanPrompt, Sequence[Candidate]]]) -> Arrays:
        """Returns each drawn plan's advantage, reward, score, calls, and its number, by row."""
        plans = [
            (prompt, parse_plan(prompt.role, one.text or "", self._reading).actions)
            for prompt, drawn in groups
            for one in drawn
        ]
        rewards = np.array([self._table.reward(p.question_id, plan) for p, plan in plans])
        advantages = group_advantages(rewards.reshape(len(groups), -1))
        values = {
            "advantages": advantages.ravel(),
            "reward": rewards,
            "score": [self._table.score(p.question_id, plan) for p, plan in plans],
            "calls": [len(plan) for _, plan in plans],
            # Whether its group's plans earn different rewards: only those teach something.
            "deciding": np.repeat((advantages != 0).any(axis=1), self._options.group),
            "plans": [[plan == one for one in _PLANS] for _, plan in plans],
        }
        return {name: np.array(value, np.float32) for name, value in values.items()}


def _example(prompt: PlanPrompt, drawn: Candidate) -> TokenExample:
    """A row's tokens: the prompt and what was drawn, the end included."""
    return TokenExample(np.array([*prompt.tokens, *drawn.tokens], np.int32), len(prompt.tokens))


def make_log_probs(objective: GrpoObjective, mesh: Mesh, *, old: bool) -> LogProbs:
    """Log-probabilities of drawn tokens as `PlanGroups` takes them.

    Args:
      old: those of the policy that drew them, too.
    """

    def both(model: Llama, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        found = {"reference_log_probs": _without_additions(model)}
        found |= {"old_log_probs": model} if old else {}
        return {
            name: target_log_probs(one, batch, temperature=objective.temperature)
            for name, one in found.items()
        }

    compiled: dict[nnx.GraphDef, Any] = {}

    def log_probs(model: Llama, batch: Arrays) -> Arrays:
        graphdef, state = nnx.split(model)
        if graphdef not in compiled:
            compiled[graphdef] = jax.jit(lambda state, x: both(nnx.merge(graphdef, state), x))
        names = ("input_ids", "segments", "positions", "target_positions", "target_ids")
        with jax.set_mesh(mesh):
            found = compiled[graphdef](state, put_batch(mesh, {n: batch[n] for n in names}))
        return jax.device_get(found)

    return log_probs


def _without_additions(model: Llama) -> Llama:
    """The reference: the same model, its additions zero."""
    graphdef, state = nnx.split(model)
    named = [
        (path, value.replace(jnp.zeros_like(value.get_value())) if path[-1] == "lora_b" else value)
        for path, value in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(named))


# The task.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRows:
    """The section `batches`: rows of a batch, one drawn plan each, and tokens of a row."""

    batch_size: int = at_least(1)
    length: int = at_least(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardedPlans(PlannerTask):
    """A LLaMA learns by LoRA which plans earn more than the others that it would have made."""

    name: ClassVar[str] = "mavl_planner_reward"

    batches: PlanRows
    grpo: GrpoSection = GrpoSection()

    def _check(self, files: bool) -> None:
        super()._check(files)
        if self.model.lora is None:
            raise UserError(
                "config key model.lora=none: the reference is the model without its additions, "
                f"which task={self.task} needs; give it a rank."
            )
        accumulate, group = self.loop.accumulate, self.grpo.group
        if self.batches.batch_size % (accumulate * group):
            raise UserError(
                f"config key batches.batch_size={self.batches.batch_size}: a multiple of "
                f"grpo.group={group}, the plans of one prompt, times train.accumulate={accumulate} "
                "was expected; change it."
            )
        if accumulate > 1 and self.grpo.updates > 1:
            raise UserError(
                f"config key train.accumulate={accumulate}: the parts of an update are drawn anew, "
                f"and grpo.updates={self.grpo.updates} learns from each again; set one of them to "
                "1."
            )

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> GrpoObjective:
        options = self.grpo
        return GrpoObjective(
            self.config(vocab_size),
            self.model.lora,
            options.temperature,
            options.clip,
            options.kl_weight,
        )

    def batch(self) -> dict[str, Any]:
        size, plan = self.batches, self.inference.new_tokens
        rows = size.batch_size
        arrays = RowBatches(batch_size=rows, length=size.length, targets=plan).arrays
        names = ["reference_log_probs", *(["old_log_probs"] if self.grpo.updates > 1 else [])]
        of_rows = ("advantages", "reward", "score", "calls", "deciding")
        return {
            **arrays,
            **{name: floats(rows) for name in of_rows},
            "plans": floats(rows, len(_PLANS)),
            **{name: floats(rows, plan) for name in names},
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        objective = self.objective(tokenizer.vocab_size)
        check_rows(self, objective.config, tokenizer)
        table = read_plan_table(self.data.outcomes, self.data.cost)
        batches = PlanGroups(
            self.taught(questions, table, tokenizer),
            table,
            self.sampler(tokenizer),
            make_log_probs(objective, make_mesh(self.mesh), old=self.grpo.updates > 1),
            per_batch=self.part().batches.batch_size // self.grpo.group,
            size=RowSize(self.batches.length, self.inference.new_tokens),
            options=self.grpo,
            reading=self.data.reading,
            seed=self.seed,
        )
        return Recipe(
            objective,
            batches,
            base_loader(self),
            finish=self.kept(objective),
            metadata=self.metadata(tokenizer),
        )
