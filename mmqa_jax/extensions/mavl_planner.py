"""A planner for MAVL that learns (ours): fine-tuned on the plans that answered right.

What a plan earns is looked up in a finished row that has executed all of them (mavl_plans.py).
For every question of one half and every agent, the plan with the highest reward becomes an example,
of equal ones that with fewer actions. Only questions whose plans score differently are learned
from: of the others all that can be learned is to plan nothing. The other half judges.
Training by reward, on plans that the planner draws itself: `RewardedPlans`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh, mesh_in_use, put_batch, state_shardings
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.texts import RowSize, TokenExample, language_model_batches, packed_batch
from mmqa_jax.data.corpus import Corpus, evenly, fold_of
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Candidate, Request, Result
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.extensions.mavl_plans import PlanTable, read_plan_table
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import merge_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.papers import mavl
from mmqa_jax.prompting.backends import Message
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.tasks.base_llm import TextModelTask, base_loader, check_rows, model_config
from mmqa_jax.tasks.language_model import LanguageModelSection, RowBatches
from mmqa_jax.tasks.language_model_objective import LanguageModelObjective, target_log_probs
from mmqa_jax.tasks.task import ANY_VOCABULARY, Recipe, floats

_NO_ACTION = "No action"  # how an empty plan is written; it names no action


# What a planner reads and writes.


class PlanPrompt(NamedTuple):
    """A planner's prompt for a question, in tokens with all special ones."""

    question_id: str
    role: mavl.Role
    tokens: tuple[int, ...]


def written_plan(actions: mavl.Actions) -> str:
    """A plan as the planner's prompt asks for it."""
    return ", ".join(f"Action_{action}" for action in actions) or _NO_ACTION


def plan_prompts(
    questions: Sequence[Question],
    agents: Sequence[mavl.Role],
    tokenizer: TextTokenizer,
    *,
    chat: bool,
) -> list[PlanPrompt]:
    """Writes the prompts of all agents' planners, as a row with `task=test_input` asks them; with
    `chat` each is a user's message to a chat model."""
    if chat and tokenizer.template is None:
        raise UserError(
            "config key data.chat=True: the model has no chat template; set it, and options.chat "
            "of the row, to False."
        )

    def encode(text: str) -> list[int]:
        if not chat:
            return tokenizer.encode(tokenizer.shield(text))
        return tokenizer.encode_plain(tokenizer.template.render("", [Message("user", (text,))]))

    return [
        PlanPrompt(q.id, role, tuple(encode(mavl.planner_prompt(role, mavl.test_input(q)))))
        for q in questions
        for role in agents
    ]


def plan_examples(
    prompts: Sequence[PlanPrompt], table: PlanTable, tokenizer: TextTokenizer
) -> list[TokenExample]:
    """Every prompt with its best plan and the end token; none where no plan answered right."""
    end = list(tokenizer.end_ids[:1])
    examples = []
    for prompt in prompts:
        plan = table.best(prompt.question_id, prompt.role)
        if plan is not None:
            tokens = [*prompt.tokens, *tokenizer.encode_plain(written_plan(plan)), *end]
            examples.append(TokenExample(np.array(tokens, np.int32), len(prompt.tokens)))
    return examples


def learned_plans(prompts: Sequence[PlanPrompt], table: PlanTable) -> str:
    """How often each plan is the best one of these prompts: `20 No action; 2 Action_1`."""
    best = [table.best(prompt.question_id, prompt.role) for prompt in prompts]
    counts = Counter(written_plan(plan) for plan in best if plan is not None)
    return "; ".join(f"{count} {plan}" for plan, count in counts.most_common())


# The planner in use while it is trained.


class PlanSampler:
    """Draws plans from the planner that is being trained, on the generation engine.

    The engine holds a copy of the model, its additions merged, and keeps its programs.

    Args:
      tokenizer: of the model.
      mesh: of the training run.
      length: the most tokens of a prompt with its plan.
      slots: plans that are drawn at once.
    """

    def __init__(self, tokenizer: TextTokenizer, mesh: Mesh, *, length: int, slots: int):
        self._tokenizer = tokenizer
        self._mesh = mesh_in_use(mesh) if mesh.size > 1 else None
        self._config = EngineConfig(slots=slots, length=length, buckets=(32,))
        self._engine: Engine | None = None

    def use(self, model: Llama) -> None:
        """Draws from this model from now on; its arrays are not kept."""
        served = _served(model, self._mesh)
        if self._engine is None:
            ends = self._tokenizer.end_ids
            self._engine = Engine(
                served, self._tokenizer, end_ids=ends, config=self._config, mesh=self._mesh
            )
        else:
            self._engine.use(served)

    def draw(
        self,
        prompts: Sequence[PlanPrompt],
        *,
        new_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seeds: Sequence[int] | None = None,
    ) -> list[Result]:
        """n plans of every prompt, or one greedy one; in the order of the prompts."""
        assert self._engine is not None, "`use` comes first"
        requests = [
            Request(
                number, prompt.tokens, max_new_tokens=new_tokens, temperature=temperature, n=n,
                stop=mavl.STOP, seed=0 if seeds is None else seeds[number],
            )
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
        return sorted(self._engine.generate(requests), key=lambda result: result.id)


def _served(model: Llama, mesh: Mesh | None) -> Llama:
    """A copy of a model for the engine, which frees what it is given, on the engine's mesh."""

    plain = nnx.eval_shape(lambda: Llama(model.config, rngs=nnx.Rngs()))
    copy = _merged_copy(*nnx.split(model))
    if mesh is not None:
        copy = jax.device_put(copy, state_shardings(copy, mesh))
    return nnx.merge(nnx.graphdef(plain), copy)


@functools.partial(jax.jit, static_argnums=0)  # one program for all steps of a run
def _merged_copy(graphdef: nnx.GraphDef, state: nnx.State) -> nnx.State:
    merged = merge_lora(nnx.merge(graphdef, state))
    return jax.tree.map(jnp.copy, nnx.state(merged))


# The tasks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedData:
    """The section `data`.

    Attributes:
      dir: folder of `mmqa prepare`.
      split: of the questions.
      outcomes: workdir of a finished row of `mavl` with `plans=oracle`; its questions are learned.
      folds, fold: of these only the part `fold` of `folds` (data.splits.fold_of).
      cost: of one action of a plan, in units of the score.
      taught: prompts that are learned from: `deciding`, those whose plans score differently, or
        `all`. Those that judge are all in either case.
      agents: whose planners learn.
      chat, reading: options `chat` and `plan_reading` of the row that uses the planner.
    """

    dir: str
    split: str
    outcomes: str
    folds: int = at_least(1, 2)
    fold: int = at_least(0, 0)
    cost: float = at_least(0, 0.02)
    taught: Literal["deciding", "all"] = "deciding"
    agents: tuple[mavl.Role, ...] = tuple(mavl.ROLES)
    chat: bool = True
    reading: mavl.PlanReading = "strict"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidatePlans:
    """The section `validate`: what the planner's greedy plans earn.

    Attributes:
      fold: the part of the questions that judges.
      questions: how many of it, evenly; 0: all.
      metric: decides on the best step; None: none is chosen. With the part that judges in the end,
        choose none.
    """

    fold: int = at_least(0)
    questions: int = at_least(0, 0)
    metric: Literal["reward", "score"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnPlans:
    """The section `inference`: plans that are drawn at once, and the tokens of one."""

    slots: int = at_least(1, 16)
    new_tokens: int = at_least(1, 24)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerTask(TextModelTask):
    """The base of both ways to train a planner. `batches.length`: tokens of a row."""

    product: ClassVar[str] = "planner"
    unit: ClassVar[str] = "rows"
    architecture: ClassVar[str] = "llama"

    data: PlannedData
    model: LanguageModelSection
    inference: DrawnPlans = DrawnPlans()
    validate: ValidatePlans | None = None

    def _check(self, files: bool) -> None:
        self.check_trained()
        self.config(ANY_VOCABULARY)
        for key, fold in (("data", self.data.fold), ("validate", self._judging_fold())):
            if fold >= self.data.folds:
                raise UserError(
                    f"config key {key}.fold={fold}: 0 to {self.data.folds - 1} was expected, of "
                    f"data.folds={self.data.folds}; change one of them."
                )
        if not self.data.agents:
            raise UserError(
                f"config key data.agents=(): some of {', '.join(mavl.ROLES)} were expected; name "
                "one."
            )
        if self.inference.new_tokens >= self.batches.length:
            raise UserError(
                f"config key batches.length={self.batches.length}: holds no prompt beside a plan "
                f"of inference.new_tokens={self.inference.new_tokens}; raise it."
            )

    @property
    def row_length(self) -> int:
        return self.batches.length

    def _judging_fold(self) -> int:
        return 0 if self.validate is None else self.validate.fold

    def config(self, vocab_size: int) -> LlamaConfig:
        """The model's."""
        return model_config(self, vocab_size)

    def prompts(
        self, questions: Sequence[Question], table: PlanTable, fold: int, tokenizer: TextTokenizer
    ) -> list[PlanPrompt]:
        """The planners' prompts of a part of the table's questions that fit a row with a plan."""
        known = [q for q in questions if q.id in table.scores]
        known = [q for q in known if fold_of(q.id, self.data.folds) == fold]
        asked = plan_prompts(known, self.data.agents, tokenizer, chat=self.data.chat)
        room = self.batches.length - self.inference.new_tokens
        fitting = [prompt for prompt in asked if len(prompt.tokens) <= room]
        if not fitting:
            raise UserError(
                f"config key data.outcomes={self.data.outcomes}: of its questions {len(known):,} "
                f"are of split {self.data.split} and part {fold}, and none has a planner's prompt "
                f"of at most {room} tokens (batches.length less a plan); change one of them."
            )
        if len(fitting) < len(asked) and jax.process_index() == 0:
            print(f"{len(asked) - len(fitting)} prompts that fit no row left out.", file=sys.stderr)
        return fitting

    def taught(
        self, questions: Sequence[Question], table: PlanTable, tokenizer: TextTokenizer
    ) -> list[PlanPrompt]:
        """The prompts that are learned from: of the part `data.fold`, as `data.taught` says."""
        prompts = self.prompts(questions, table, self.data.fold, tokenizer)
        if self.data.taught == "all":
            return prompts
        deciding = [prompt for prompt in prompts if table.decides(prompt.question_id, prompt.role)]
        if not deciding:
            raise UserError(
                f"config key data.taught=deciding: none of the {len(prompts):,} planners' prompts "
                f"of part {self.data.fold} has plans that score differently; take more questions "
                "into the row data.outcomes, or set this to all."
            )
        if jax.process_index() == 0:
            print(
                f"plans decide the score of {len(deciding)} of {len(prompts)} prompts.",
                file=sys.stderr,
            )
        return deciding

    def sampler(self, tokenizer: TextTokenizer) -> PlanSampler:
        """The planner in use; its engine is made when it is needed."""
        if jax.process_count() > 1:
            raise UserError(
                f"config key task={self.task}: plans are drawn by one process, and this launch has "
                f"{jax.process_count()}; start one that has all devices."
            )
        slots, mesh = self.inference.slots, make_mesh(self.mesh)
        return PlanSampler(tokenizer, mesh, length=self.batches.length, slots=slots)

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        section, data = self.validate, self.data
        assert section is not None
        table, sampler = read_plan_table(data.outcomes, data.cost), self.sampler(tokenizer)
        known = [q for q in corpus.questions(data.split) if q.id in table.scores]
        judging = [q for q in known if fold_of(q.id, data.folds) == section.fold]
        prompts = self.prompts(evenly(judging, section.questions), table, section.fold, tokenizer)

        def evaluate(model: nnx.Module) -> dict[str, float]:
            sampler.use(model)
            results = sampler.draw(prompts, new_tokens=self.inference.new_tokens)
            plans = [
                mavl.parse_plan(prompt.role, result.text or "", data.reading).actions
                for prompt, result in zip(prompts, results, strict=True)
            ]
            return earned(table, prompts, plans)

        return evaluate


def earned(
    table: PlanTable, prompts: Sequence[PlanPrompt], plans: Sequence[mavl.Actions]
) -> dict[str, float]:
    """The mean score, reward and tool calls of plans, and each agent's score."""
    pairs = list(zip(prompts, plans, strict=True))
    scores = [table.score(prompt.question_id, plan) for prompt, plan in pairs]
    values = {
        "score": float(np.mean(scores)),
        "reward": float(np.mean([table.reward(prompt.question_id, p) for prompt, p in pairs])),
        "calls": float(np.mean([len(plan) for plan in plans])),
    }
    for role in dict.fromkeys(prompt.role for prompt in prompts):
        of_role = [score for score, (prompt, _) in zip(scores, pairs, strict=True)
               if prompt.role == role]  # fmt: skip
        values[f"score_{role}"] = float(np.mean(of_role))
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class RightPlans(PlannerTask):
    """A LLaMA learns to write the best plan behind a planner's prompt."""

    name: ClassVar[str] = "mavl_planner"

    batches: RowBatches

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> LanguageModelObjective:
        return LanguageModelObjective(self.config(vocab_size), self.model.lora)

    def batch(self) -> dict[str, Any]:
        return self.batches.arrays

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        objective, size = self.objective(tokenizer.vocab_size), self.batches
        check_rows(self, objective.config, tokenizer)
        table = read_plan_table(self.data.outcomes, self.data.cost)
        prompts = self.taught(questions, table, tokenizer)
        examples_of_plans = plan_examples(prompts, table, tokenizer)
        row = RowSize(size.length, size.targets)
        examples = [example for example in examples_of_plans if row.holds(example)]
        if not examples:
            raise UserError(
                f"config key data.outcomes={self.data.outcomes}: no plan of its questions in part "
                f"{self.data.fold} answered right and fits a row of batches.length={size.length} "
                f"tokens, {size.targets} of them learned (batches.targets); take more questions, "
                "or longer rows."
            )
        if jax.process_index() == 0:
            print(
                f"{len(examples)} plans are learned, of {len(prompts)} prompts: "
                f"{learned_plans(prompts, table)}.",
                file=sys.stderr,
            )
        batches = language_model_batches(
            [[example] for example in examples], [1.0], self.feed(),
            length=size.length, targets=size.targets,
        )  # fmt: skip
        return Recipe(
            objective,
            batches,
            base_loader(self),
            finish=self.finisher(objective),
            metadata=self.metadata(tokenizer),
        )


# A planner for MAVL that learns by reward (ours): GRPO on plans that it draws itself.
#
# Group relative policy optimization (Shao et al. 2024, DeepSeekMath, section 4.1). For every
# prompt of a planner the policy draws a group of plans; a plan's reward is what it earns
# (mavl_plans.py), and its advantage the reward less the group's mean, over the group's spread.
# The loss is equation 3 with the divergence from the reference of equation 4. The reference is
# the model without its additions: the run's base.
#
# Plans are drawn by the engine in the training process, before the step that learns from them.


_PLANS = tuple(plan.actions for plan in mavl.every_plan("manager"))
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
        """Returns the mean over the rows, one drawn plan each, of the mean over its tokens, of a
        batch of `PlanGroups`. Without `old_log_probs` the plans were drawn from this very model."""
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


def _plan_name(plan: mavl.Actions) -> str:
    """Names the metric of a plan's share among the drawn plans."""
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
        reading: mavl.PlanReading,
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
        batch = self._batch if self._left else {}
        values = {name: [str(array.dtype), array.tolist()] for name, array in batch.items()}
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
        rows = [[_example(prompt, plan)] for prompt, drawn in groups for plan in drawn]
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
            (prompt, mavl.parse_plan(prompt.role, reply.text or "", self._reading).actions)
            for prompt, drawn in groups
            for reply in drawn
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
            "plans": [[plan == plan_actions for plan_actions in _PLANS] for _, plan in plans],
        }
        return {name: np.array(value, np.float32) for name, value in values.items()}


def _example(prompt: PlanPrompt, drawn: Candidate) -> TokenExample:
    """Returns a row's tokens: the prompt and the drawn tokens, the end included."""
    return TokenExample(np.array([*prompt.tokens, *drawn.tokens], np.int32), len(prompt.tokens))


def make_log_probs(objective: GrpoObjective, mesh: Mesh, *, old: bool) -> LogProbs:
    """Makes the log-probabilities of drawn tokens that `PlanGroups` takes, with `old` also those of
    the policy that drew them."""

    def both(model: Llama, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        models = {"reference_log_probs": _without_additions(model)}
        models |= {"old_log_probs": model} if old else {}
        return {
            name: target_log_probs(judge, batch, temperature=objective.temperature)
            for name, judge in models.items()
        }

    compiled: dict[nnx.GraphDef, Any] = {}

    def log_probs(model: Llama, batch: Arrays) -> Arrays:
        graphdef, state = nnx.split(model)
        if graphdef not in compiled:
            compiled[graphdef] = jax.jit(lambda state, x: both(nnx.merge(graphdef, state), x))
        names = ("input_ids", "segments", "positions", "target_positions", "target_ids")
        with jax.set_mesh(mesh):
            on_device = compiled[graphdef](state, put_batch(mesh, {n: batch[n] for n in names}))
        return jax.device_get(on_device)

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
            finish=self.finisher(objective),
            metadata=self.metadata(tokenizer),
        )
