"""A planner for MAVL that learns (ours): fine-tuned on the plans that answered right.

For every question of one half and every agent, the plan with the highest reward becomes an example,
of equal ones that with fewer actions. Only questions whose plans score differently are learned
from: of the others all that can be learned is to plan nothing. The other half judges.
Training by reward, on plans that the planner draws itself: `RewardedPlans`.

A team has few plans: which of its level's actions. A finished row of `mavl` with `plans=oracle` has
executed all of them, and its trace tells what each one answered. So the tools and agents run once,
and what a plan earns is looked up:

  reward(question, plan) = score of the plan's answer - cost x actions of the plan

What a planner is worth shows beside the best it could do without reading the question: the plan
that earned most on other questions, for every question.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.texts import RowSize, TokenExample, language_model_batches
from mmqa_jax.data.corpus import Corpus, evenly, fold_of
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Candidate, Request, Result
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.evaluation.vqa import answer_scorer
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.papers import mavl
from mmqa_jax.prompting.backends import Message
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.tasks import policy
from mmqa_jax.tasks.base_llm import TextModelTask, check_rows, model_config
from mmqa_jax.tasks.language_model import LanguageModelObjective, LanguageModelSection, RowBatches
from mmqa_jax.tasks.task import ANY_VOCABULARY, Recipe

_REMEDY = "run its row again with --config.options.plans=oracle, or name another workdir"


@dataclasses.dataclass(frozen=True)
class PlanTable:
    """Every plan's answer to some questions, and its score."""

    # Question id -> the actions whose tools an answer used -> its score; of questions whose answers
    # count.
    scores: Mapping[str, Mapping[mavl.Actions, float]]
    # Question id -> the actions whose tools returned something; others change no prompt.
    available: Mapping[str, mavl.Actions]
    cost: float  # of one action of a plan, in units of the score

    def score(self, question_id: str, plan: mavl.Actions) -> float:
        """The score of the answer after a plan."""
        return self.scores[question_id][_used(plan, self.available[question_id])]

    def reward(self, question_id: str, plan: mavl.Actions) -> float:
        """The score less the cost of the plan's tool calls."""
        return self.score(question_id, plan) - self.cost * len(plan)

    def best(self, question_id: str, role: mavl.Role) -> mavl.Actions | None:
        """The plan of an agent with the highest reward, with fewer actions first.

        None where no plan of it has a score above 0: nothing can be learned there.
        """
        plans = [plan.actions for plan in mavl.every_plan(role)]
        right = [plan for plan in plans if self.score(question_id, plan) > 0]
        return max(right, key=lambda plan: self.reward(question_id, plan), default=None)

    def decides(self, question_id: str, role: mavl.Role) -> bool:
        """Whether an agent's answers score differently, depending on its plan."""
        return len({self.score(question_id, plan.actions) for plan in mavl.every_plan(role)}) > 1

    def best_for_all(self, question_ids: Iterable[str], role: mavl.Role) -> mavl.Actions:
        """The plan of an agent that earns most if it is the only one, with fewer actions first."""
        names = list(question_ids)
        plans = [plan.actions for plan in mavl.every_plan(role)]
        return max(plans, key=lambda plan: np.mean([self.reward(name, plan) for name in names]))


def _used(plan: mavl.Actions, available: mavl.Actions) -> mavl.Actions:
    return tuple(action for action in plan if action in available)


def read_plan_table(run: str, cost: float) -> PlanTable:
    """Reads the table of a finished row of the setting `mavl` with `plans=oracle`, from its
    workdir."""
    path = Path(run) / "trace.jsonl"
    if not run or not path.is_file():
        raise UserError(f"config key data.outcomes={run}: has no trace.jsonl; {_REMEDY}.")
    return plan_table(((f"{path}, line {number}", line) for number, line in read_jsonl(path)), cost)


def plan_table(lines: Iterable[tuple[str, Any]], cost: float) -> PlanTable:
    """The table of lines of a finished row's trace.jsonl, each with its place for messages."""
    scores: dict[str, dict[mavl.Actions, float]] = {}
    available: dict[str, mavl.Actions] = {}
    for place, line in lines:
        try:
            name, tools = line["question_id"], line["tools"]
            answers = {tuple(entry["actions"]): entry["score"] for entry in line["by_actions"]}
        except (KeyError, TypeError):
            raise UserError(f"{place}: not of a row of mavl; {_REMEDY}.") from None
        actions_of_question = tuple(
            action for action in mavl.ROLES["manager"] if tools.get(str(action))
        )
        used = {_used(plan.actions, actions_of_question) for plan in mavl.every_plan("manager")}
        if not used <= answers.keys():
            raise UserError(
                f"{place}: {len(used - answers.keys())} of {len(used)} plans of question {name} "
                f"were not executed; {_REMEDY}."
            )
        available[name] = actions_of_question
        if None not in answers.values():
            scores[name] = answers
    return PlanTable(scores, available, cost)


def answer_with_one_plan(
    questions: Sequence[Question],
    finished: Mapping[str, Mapping[str, Any]],
    *,
    agents: tuple[mavl.Role, ...] = tuple(mavl.ROLES),
    votes: tuple[float, ...] = (2.0, 3.0, 4.0),
    cost: float = 0.02,
    folds: int = 2,
) -> list[Prediction]:
    """The team's vote if every agent has one plan for all questions; no model is asked (ours).

    The plan of an agent is the one that earned most on the questions of the other parts.

    Args:
      finished: question id -> its line in the trace.jsonl of a row of `mavl` with `plans=oracle`.
      cost: of one action of a plan, in units of the score.
      folds: the questions are dealt into so many parts by the hash of their ids.
    """
    where = "config key parts.finished.run, its trace.jsonl, question"
    table = plan_table(((f"{where} {name}", line) for name, line in finished.items()), cost)
    if lost := [question.id for question in questions if question.id not in table.available]:
        raise UserError(
            f"config key parts.finished.run: no answers to {len(lost):,} of {len(questions):,} "
            f"questions there, the first is {lost[0]}; {_REMEDY}."
        )
    parts = sorted({fold_of(question.id, folds) for question in questions})
    chosen = {fold: _chosen(table, agents, fold, folds) for fold in parts}
    predictions = []
    for question in questions:
        line, plans = finished[question.id], chosen[fold_of(question.id, folds)]
        answers = {tuple(entry["actions"]): entry["answer"] for entry in line["by_actions"]}
        used = {role: _used(plan, table.available[question.id]) for role, plan in plans.items()}
        answer_of_role = {role: answers[actions] for role, actions in used.items()}
        passages = line.get("passages", ())
        trace = {
            "plans": {role: list(plan) for role, plan in plans.items()},
            "answers": answer_of_role,
            "passages": passages,
            "scored_by": answer_scorer(question),
        }
        ballots = list(zip(answer_of_role.values(), votes, strict=True))[::-1]
        elected = mavl.elect_answer(question, ballots, trace, line["fallback"])
        team = [{"answer": answer_of_role[role], "used": actions} for role, actions in used.items()]
        predictions.append(mavl.citing_passages(elected, team, passages))
    return predictions


def _chosen(
    table: PlanTable, agents: Sequence[mavl.Role], fold: int, folds: int
) -> dict[mavl.Role, mavl.Actions]:
    """The plan of each agent for the questions of a part."""
    others = [name for name in table.scores if fold_of(name, folds) != fold]
    if not others:
        raise UserError(
            f"config key options.folds={folds}: the finished row has no question outside part "
            f"{fold}, so that no plan can be chosen; take more questions, or more than one part."
        )
    return {role: table.best_for_all(others, role) for role in agents}


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
        self._mesh = policy.engine_mesh(mesh)
        self._config = EngineConfig(slots=slots, length=length, buckets=(32,))
        self._engine: Engine | None = None

    def use(self, model: Llama) -> None:
        """Draws from this model from now on; its arrays are not kept."""
        served = policy.served_copy(model, self._mesh)
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
    """The section `data`."""

    dir: str  # folder of `mmqa prepare`
    split: str  # of the questions
    # Workdir of a finished row of `mavl` with `plans=oracle`; its questions are learned.
    outcomes: str
    # folds, fold: of these only the part `fold` of `folds` (data.splits.fold_of).
    folds: int = at_least(1, 2)
    fold: int = at_least(0, 0)
    cost: float = at_least(0, 0.02)  # of one action of a plan, in units of the score
    # Prompts that are learned from: `deciding`, those whose plans score differently, or `all`.
    # Those that judge are all in either case.
    taught: Literal["deciding", "all"] = "deciding"
    agents: tuple[mavl.Role, ...] = tuple(mavl.ROLES)  # whose planners learn
    # chat, reading: options `chat` and `plan_reading` of the row that uses the planner.
    chat: bool = True
    reading: mavl.PlanReading = "strict"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidatePlans:
    """The section `validate`: what the planner's greedy plans earn."""

    fold: int = at_least(0)  # the part of the questions that judges
    questions: int = at_least(0, 0)  # how many of it, evenly; 0: all
    # Decides on the best step; None: none is chosen. With the part that judges in the end, choose
    # none.
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
# (tasks/policy.py), whose rewards are what they earn.


# Metrics: each plan's share among the drawn ones.
_PLANS = {
    "plan/" + ("+".join(map(str, plan.actions)) or "none"): plan.actions
    for plan in mavl.every_plan("manager")
}


class PlanGroups(policy.PolicyBatches):
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
        log_probs: policy.LogProbs,
        **options: Any,
    ):
        super().__init__(len(prompts), log_probs, **options)
        self._planners, self._table = prompts, table
        self._sampler, self._reading = sampler, reading

    def _groups(
        self, model: Llama, prompts: Sequence[int], seeds: Sequence[int]
    ) -> list[policy.Group]:
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
            policy.Group([self._answer(prompt, drawn) for drawn in result.candidates])
            for prompt, result in zip(asked, results, strict=True)
        ]

    def _answer(self, prompt: PlanPrompt, drawn: Candidate) -> policy.Answer:
        """A drawn plan, the end included, and what it earned."""
        plan = mavl.parse_plan(prompt.role, drawn.text or "", self._reading).actions
        measured = {
            "score": self._table.score(prompt.question_id, plan),
            "calls": float(len(plan)),
            **{name: float(plan == actions) for name, actions in _PLANS.items()},
        }
        tokens = np.array([*prompt.tokens, *drawn.tokens], np.int32)
        example = TokenExample(tokens, len(prompt.tokens))
        return policy.Answer(example, self._table.reward(prompt.question_id, plan), measured)


# The task.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardedPlans(PlannerTask):
    """A LLaMA learns by LoRA which plans earn more than the others that it would have made."""

    name: ClassVar[str] = "mavl_planner_reward"

    batches: policy.PolicyRows
    grpo: policy.GrpoSection = dataclasses.field(default_factory=policy.GrpoSection)

    def _check(self, files: bool) -> None:
        super()._check(files)
        policy.check_groups(self)

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> policy.PolicyObjective:
        return policy.PolicyObjective(self.config(vocab_size), self.model.lora, self.grpo)

    def batch(self) -> dict[str, Any]:
        rows, size = self.batches.batch_size, self._row_size
        return policy.batch_shapes(self.grpo, size, rows, ("score", "calls", *_PLANS))

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
            policy.make_log_probs(objective, make_mesh(self.mesh)),
            per_batch=self.part().batches.batch_size // self.grpo.rows,
            size=self._row_size,
            options=self.grpo,
            seed=self.seed,
            mesh=make_mesh(self.mesh),
        )
        return self.recipe_of(objective, batches, tokenizer)
