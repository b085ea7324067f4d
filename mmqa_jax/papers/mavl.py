"""MAVL (Hu et al., 2024): agents of three levels plan, use tools, answer, and vote.

Every agent's planner reads the task and names actions of its level; the tools behind them add
candidate answers, retrieved and generated knowledge to the agent's prompt; the language model
answers each prompt, and the answers are voted on with 2, 3 and 4 votes.

  heuristics.select(questions, library, count, selection) -> shots of every question
  knowledge.find(texts, top_k)                            -> passages of every text
  llm.answer(queries)                                     -> a continuation of every prompt
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mmqa_jax.core.sections import Count
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.papers.mavl_checks import check_knowledge, check_oracle, check_revote, check_team
from mmqa_jax.papers.mavl_votes import Asked, Weighting, elect, revote, vote_on_draws
from mmqa_jax.prompting.backends import Decoding
from mmqa_jax.prompting.captions import (
    Captions,
    check_captions,
    check_no_tags,
    traced,
    with_captions,
)
from mmqa_jax.prompting.few_shot import Order
from mmqa_jax.prompting.heuristics import AnswerHeuristics, ShotSelection
from mmqa_jax.prompting.planner import Planned, ask_planners
from mmqa_jax.prompting.plans import ROLES, Plan, Role, every_plan
from mmqa_jax.prompting.shots import ExampleLibrary, Shot
from mmqa_jax.prompting.steps import Steps
from mmqa_jax.prompting.stream import answer_all
from mmqa_jax.prompting.tools import Outputs, Tools, answer_prompt, used_actions
from mmqa_jax.retrieval.knowledge import KnowledgeBase


def answer_mavl(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    heuristics: AnswerHeuristics,
    knowledge: KnowledgeBase | None = None,
    captions: Captions | None = None,
    *,
    agents: tuple[Role, ...] = tuple(ROLES),
    plans: Literal["planned", "all", "none", "oracle"] = "planned",
    votes: tuple[float, ...] = (2.0, 3.0, 4.0),
    weighting: Weighting = "level",
    shots: Count = 8,
    candidates: Count = 5,
    similarity: ShotSelection = "answer_aware",
    order: Order = "most_similar_first",
    task: Literal["prompt", "test_input"] = "prompt",
    chat: bool = False,
    plan_tokens: int = 24,
    passages: int = 1,
    knowledge_words: int = 40,
    knowledge_tokens: int = 64,
    max_new_tokens: int = 10,
    seed: Count = 0,
) -> list[Prediction]:
    """Algorithm 1, every line of it for all questions and agents at once.

    The language model reads the benchmark three times: plans, generated knowledge, answers.

    Args:
      knowledge: without it Tool_2 finds nothing.
      captions: shown, and searched for, in place of the questions' own.
      agents: the team, from the lowest level; `("manager",)` is table 3 without multi-agents.
      plans: by the planners; `all` that a level allows (without planners); `none` (without tools);
        or `oracle`, for every agent the plan whose answer scores best: a bound. A question whose
        answers do not count (A-OKVQA's difficult ones) has `all` there.
      votes: of each agent.
      weighting: votes as they are, or times the probability of the agent's answer.
      shots, candidates: in-context examples, and candidate answers of Tool_1 (figure 8).
      task: what a planner reads: P_0 with its examples, or the question's own block of it.
      chat: a planner's prompt is a user's message to a chat model.
      plan_tokens: that a planner may write.
      passages: of Tool_2; each, and what Tool_3 writes, is cut to `knowledge_words` words.
    """
    check_team(agents, votes)
    check_oracle(questions, plans)
    found = heuristics.select(questions, library, shots, similarity, seed=seed)
    questions, found = with_captions(questions, found, captions)
    shown = {question.id: own for question, own in zip(questions, found, strict=True)}
    steps: dict[str, Steps] = collections.defaultdict(Steps)
    # p_a = G_T(P_0)
    if plans == "planned":
        planned = ask_planners(questions, llm, shown, agents, task, chat, order, plan_tokens, steps)
    else:
        planned = {(q.id, role): _fixed(role, plans) for q in questions for role in agents}
    # T_1, T_2, T_3 of the questions whose plans name them, and of their shots
    tools = Tools(
        heuristics, knowledge, llm, candidates, passages, knowledge_words, knowledge_tokens, steps
    )
    outputs: Outputs = {
        action: tools.use(action, _planning(action, questions, planned, shown))
        for action in ROLES["manager"]
    }
    # A(G_T) = LLM(P_f): agents with the same prompt share its answer
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=("\n",), logprobs=True)
    prompts = {
        question.id: {
            used: answer_prompt(question, used, shown[question.id], outputs, llm, decoding, order)
            for used in dict.fromkeys(
                used_actions(outputs, question, plan.actions)
                for role in agents
                for plan in planned[question.id, role]
            )
        }
        for question in questions
    }
    asked = [prompt for own in prompts.values() for prompt in own.values()]
    answers = answer_all(llm, [prompt.query for prompt in asked if prompt.query is not None])
    # A_f = Voting(A_J, A_S, A_M)
    predictions = []
    for question in questions:
        case = Asked(question, prompts[question.id], answers, outputs, steps[question.id])
        team = [
            case.agent(role, planned[question.id, role], weight)
            for role, weight in zip(agents, votes, strict=True)
        ]
        predictions.append(elect(case, team, weighting, heuristics.best(question)))
    return traced(predictions, questions, captions)


def notes(setting: str, questions: Sequence[Question], options: Mapping[str, Any]) -> list[str]:
    """What a reader of the results has to know."""
    if setting == "mavl_revote":
        return ["another vote on the answers of a finished run, which is what they cost"]
    said = {
        "oracle": "plans are chosen by the reference answers: a bound, not a result",
        "none": "agents without tools share one prompt: their greedy answers are the same",
    }
    return [said[options["plans"]]] if options.get("plans") in said else []


def _fixed(role: Role, plans: str) -> Sequence[Plan]:
    """The plans of a team without planners."""
    every = every_plan(role)
    return {"all": every[-1:], "none": every[:1], "oracle": every}[plans]


def _planning(
    action: int,
    questions: Sequence[Question],
    planned: Planned,
    shown: Mapping[str, Sequence[Shot]],
) -> list[Question]:
    """The questions with an agent that plans an action, and their shots, each once."""
    asked = {name for (name, _), own in planned.items() if any(action in p.actions for p in own)}
    found = {q.id: q for q in questions if q.id in asked}
    for name in list(found):
        found |= {shot.question.id: shot.question for shot in shown[name]}
    return list(found.values())


def check_options(setting: str, options: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raises UserError for a row that contradicts itself; called before anything is opened."""
    check_no_tags(parts)
    if setting == "mavl":
        check_team(options["agents"], options["votes"])
        check_knowledge(parts.get("knowledge"), options["knowledge_words"])
    if setting == "mavl_revote":
        check_revote(options["votes"], options["weighting"], options["folds"])


def check_inputs(
    setting: str,
    questions: Sequence[Question],
    options: Mapping[str, Any],
    parts: Mapping[str, Any],
) -> None:
    """Raises UserError for questions that a setting cannot use; called before models load."""
    check_oracle(questions, options.get("plans", ""))
    check_captions(questions, parts.get("captions"))


SETTINGS: dict[str, Callable[..., Sequence[Prediction]]] = {
    "mavl": answer_mavl,
    "mavl_revote": revote,
    "mavl_draws": vote_on_draws,
}
PARTS = ("llm", "library", "heuristics", "knowledge", "captions", "finished")
# Settings whose answer to a question depends on the others: weights are fitted over them.
NEEDS_ALL = ("mavl_revote",)
