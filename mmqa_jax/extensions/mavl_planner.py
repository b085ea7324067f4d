"""A planner for MAVL that learns (ours): fine-tuned on the plans that answered right.

What a plan earns is looked up in a finished row that has executed all of them (mavl_plans.py).
For every question of one half and every agent, the plan with the highest reward becomes an example,
of equal ones that with fewer actions. Only questions whose plans score differently are learned
from: of the others all that can be learned is to plan nothing. The other half judges.
Training by reward, on plans that the planner draws itself: `RewardedPlans`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.texts import RowSize, TokenExample, language_model_batches
from mmqa_jax.data.corpus import Corpus, evenly, fold_of
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Candidate, Request, Result
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.extensions.mavl_plans import PlanTable, read_plan_table
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.papers import mavl
from mmqa_jax.prompting.backends import Message
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.tasks.base_llm import TextModelTask, check_rows, model_config
from mmqa_jax.tasks.language_model import LanguageModelSection, RowBatches
from mmqa_jax.tasks.language_model_objective import LanguageModelObjective
from mmqa_jax.tasks.policy import (
    Answer,
    Group,
    GrpoSection,
    LogProbs,
    PolicyBatches,
    PolicyObjective,
    PolicyRows,
    batch_shapes,
    check_groups,
    engine_mesh,
    make_log_probs,
    served_copy,
)
from mmqa_jax.tasks.task import ANY_VOCABULARY, Recipe

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
        self._mesh = engine_mesh(mesh)
        self._config = EngineConfig(slots=slots, length=length, buckets=(32,))
        self._engine: Engine | None = None

    def use(self, model: Llama) -> None:
        """Draws from this model from now on; its arrays are not kept."""
        served = served_copy(model, self._mesh)
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
        return self.recipe_of(objective, batches, tokenizer)


# A planner for MAVL that learns by reward (ours): GRPO on plans that it draws itself
# (tasks/policy.py), whose rewards are what they earn (mavl_plans.py).


# Metrics: each plan's share among the drawn ones.
_PLANS = {
    "plan/" + ("+".join(map(str, plan.actions)) or "none"): plan.actions
    for plan in mavl.every_plan("manager")
}


class PlanGroups(PolicyBatches):
    """Draws groups of plans.

    Args:
      prompts: that are asked.
      table: what plans earn.
      sampler: draws them.
      reading: how a plan is read.
      log_probs, options: see PolicyBatches.
    """

    def __init__(
        self,
        prompts: Sequence[PlanPrompt],
        table: PlanTable,
        sampler: PlanSampler,
        reading: mavl.PlanReading,
        log_probs: LogProbs,
        **options: Any,
    ):
        super().__init__(len(prompts), log_probs, **options)
        self._planners, self._table = prompts, table
        self._sampler, self._reading = sampler, reading

    def _groups(self, model: Llama, prompts: Sequence[int], seeds: Sequence[int]) -> list[Group]:
        asked = [self._planners[number] for number in prompts]
        self._sampler.use(model)
        results = self._sampler.draw(
            asked,
            new_tokens=self._size.targets,
            temperature=self._options.temperature,
            n=self._options.group,
            seeds=seeds,
        )
        return [
            Group([self._answer(prompt, drawn) for drawn in result.candidates])
            for prompt, result in zip(asked, results, strict=True)
        ]

    def _answer(self, prompt: PlanPrompt, drawn: Candidate) -> Answer:
        """A drawn plan, the end included, and what it earned."""
        plan = mavl.parse_plan(prompt.role, drawn.text or "", self._reading).actions
        measured = {
            "score": self._table.score(prompt.question_id, plan),
            "calls": float(len(plan)),
            **{name: float(plan == actions) for name, actions in _PLANS.items()},
        }
        tokens = np.array([*prompt.tokens, *drawn.tokens], np.int32)
        example = TokenExample(tokens, len(prompt.tokens))
        return Answer(example, self._table.reward(prompt.question_id, plan), measured)


# The task.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardedPlans(PlannerTask):
    """A LLaMA learns by LoRA which plans earn more than the others that it would have made."""

    name: ClassVar[str] = "mavl_planner_reward"

    batches: PolicyRows
    grpo: GrpoSection = dataclasses.field(default_factory=GrpoSection)

    def _check(self, files: bool) -> None:
        super()._check(files)
        check_groups(self)

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> PolicyObjective:
        return PolicyObjective(self.config(vocab_size), self.model.lora, self.grpo)

    def batch(self) -> dict[str, Any]:
        rows, size = self.batches.batch_size, self._row_size
        return batch_shapes(self.grpo, size, rows, ("score", "calls", *_PLANS))

    @property
    def _row_size(self) -> RowSize:
        return RowSize(self.batches.length, self.inference.new_tokens)

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        objective = self.objective(tokenizer.vocab_size)
        check_rows(self, objective.config, tokenizer)
        table = read_plan_table(self.data.outcomes, self.data.cost)
        batches = PlanGroups(
            self.taught(questions, table, tokenizer),
            table,
            self.sampler(tokenizer),
            self.data.reading,
            make_log_probs(objective, make_mesh(self.mesh)),
            per_batch=self.part().batches.batch_size // self.grpo.rows,
            size=self._row_size,
            options=self.grpo,
            seed=self.seed,
        )
        return self.recipe_of(objective, batches, tokenizer)
