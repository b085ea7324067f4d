"""Looks up what MAVL's plans earn; a team with one plan for all questions (ours).

A team has few plans: which of its level's actions. A finished row of `mavl` with `plans=oracle` has
executed all of them, and its trace tells what each one answered. So the tools and agents run once,
and what a plan earns is looked up:

  reward(question, plan) = score of the plan's answer - cost x actions of the plan

What a planner is worth shows beside the best it could do without reading the question: the plan
that earned most on other questions, for every question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.data.corpus import fold_of
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.vqa import answer_scorer
from mmqa_jax.papers import mavl

_REMEDY = "run its row again with --config.options.plans=oracle, or name another workdir"


@dataclasses.dataclass(frozen=True)
class PlanTable:
    """Every plan's answer to some questions, and its score.

    Attributes:
      scores: question id -> the actions whose tools an answer used -> its score; of questions
        whose answers count.
      available: question id -> the actions whose tools returned something; others change no prompt.
      cost: of one action of a plan, in units of the score.
    """

    scores: Mapping[str, Mapping[mavl.Actions, float]]
    available: Mapping[str, mavl.Actions]
    cost: float

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
