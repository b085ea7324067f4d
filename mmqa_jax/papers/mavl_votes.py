"""MAVL's vote, and what replaces it beyond the paper: fitted weights, draws of one prompt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.sections import Count
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.data.splits import fold_of
from mmqa_jax.evaluation.answer_text import prep_ans
from mmqa_jax.evaluation.vqa import answer_accuracy, answer_scorer
from mmqa_jax.papers.mavl_checks import check_revote
from mmqa_jax.prompting.backends import Decoding
from mmqa_jax.prompting.few_shot import FewShot, Order, prompts_record
from mmqa_jax.prompting.heuristics import AnswerHeuristics, ShotSelection
from mmqa_jax.prompting.plans import Actions, Plan, Role
from mmqa_jax.prompting.shots import ExampleLibrary
from mmqa_jax.prompting.steps import Steps
from mmqa_jax.prompting.stream import Answers, answer_all
from mmqa_jax.prompting.tools import Outputs, answer_prompt, used_actions
from mmqa_jax.prompting.voting import fit_weights, vote

Weighting = Literal["level", "probability"]
# Older records hold the probability of an answer with the end token or line break after it.
_PROBABILITY_OF = "text"
_OF_AN_AGENT = ("agent", "answer", "probability")  # what another vote needs of it
# Keys of trace.jsonl that belong to the finished run, not to its agents.
_OF_THE_RUN = ("question_id", "question", "answer", "choice", "references", "scores")


@dataclasses.dataclass(frozen=True)
class Agent:
    """One agent's answer to one question.

    Attributes:
      plan: what it planned; `used` of these gave something.
      votes: by its level.
      answer: normalized by `prep_ans`; "" where it gave none.
      probability: of the answer's tokens.
      score: of the answer; None without references, or where it does not count.
    """

    role: Role
    plan: Plan
    used: Actions
    votes: float
    answer: str
    probability: float
    score: float | None


class Asked(NamedTuple):
    """All that was asked and answered for one question.

    Attributes:
      prompts: by the actions that they use; their queries' ids are (question id, used actions).
      answers, outputs: of the model and of the tools, for all questions.
      steps: those before the answers.
    """

    question: Question
    prompts: Mapping[Actions, FewShot]
    answers: Answers
    outputs: Outputs
    steps: Steps

    def agent(self, role: Role, plans: Sequence[Plan], votes: float) -> Agent:
        """An agent's answer; of several plans that with the best one, with fewer actions first.

        Where no answer has a score it is that of the last plan, with all actions.
        """
        found = []
        for plan in plans:
            used = used_actions(self.outputs, self.question, plan.actions)
            answer, probability = self.said(used)
            score = answer_accuracy(self.question, answer)
            found.append(Agent(role, plan, used, votes, answer, probability, score))
        if found[0].score is None:
            return found[-1]
        return max(found, key=lambda agent: agent.score)

    def said(self, used: Actions) -> tuple[str, float]:
        """The normalized answer to a prompt and its probability; ("", 0) where there is none."""
        result = self.answers.by_id.get((self.question.id, used))
        if result is None:
            return "", 0.0
        return prep_ans(result.text.strip()), math.exp(result.candidates[0].total)

    def record(self) -> dict[str, Any]:
        """Its steps, prompts, the answers to them, what tools gave, and failures, for the trace."""
        ids = [(self.question.id, used) for used in self.prompts]
        results = [self.answers.by_id.get(name) for name in ids]
        failed = [self.answers.failed[name] for name in ids if name in self.answers.failed]
        return {
            **self.steps.record(),
            "probability_of": _PROBABILITY_OF,
            **prompts_record(list(self.prompts.values()), [*self.steps.failed, *failed]),
            "outputs": [
                {"text": r.text, "logprob": r.candidates[0].total} for r in results if r is not None
            ],
            "tools": {
                str(action): texts[self.question.id]
                for action, texts in self.outputs.items()
                if self.question.id in texts
            },
            # By the actions that the prompts use, in the order of `prompts`.
            "by_actions": [self._by_actions(used) for used in self.prompts],
        }

    def _by_actions(self, used: Actions) -> dict[str, Any]:
        """The answer to a prompt, its score, and the model's words where they are others."""
        answer, _ = self.said(used)
        score = answer_accuracy(self.question, answer)
        result = self.answers.by_id.get((self.question.id, used))
        other = result is not None and result.text.strip() != answer
        return {
            "actions": list(used),
            "answer": answer,
            "score": score,
            **({"output": result.text} if other else {}),
        }


def elect(asked: Asked, team: Sequence[Agent], weighting: Weighting, fallback: str) -> Prediction:
    """Equation 8: the answer with most votes; of equal ones that of the higher level.

    Args:
      team: from the lowest level to the highest.
      fallback: the answer where no agent has one, a VQA model's first candidate.
    """
    agents = [_with_ballot(_agent_record(agent), weighting) for agent in team]
    return _elected_by(agents, asked.question, asked.record(), fallback)


def revote(
    questions: Sequence[Question],
    finished: Mapping[str, Mapping[str, Any]],
    *,
    votes: tuple[float, ...] = (2.0, 3.0, 4.0),
    weighting: Weighting | Literal["fitted"] = "fitted",
    folds: int = 2,
) -> list[Prediction]:
    """Another vote on the answers of a finished run of `mavl`; no model is asked (ours).

    Args:
      finished: question id -> its line in that run's trace.jsonl.
      votes: of each agent of that run; where weights are fitted, the start of the search.
      weighting: as `answer_mavl`; `fitted`: the votes of a question are those that do best on the
        questions of the other parts.
      folds: the questions are dealt into so many parts by the hash of their ids, as the library's.
    """
    check_revote(votes, weighting, folds)
    teams = _teams(questions, finished, len(votes))
    if weighting == "probability":
        _check_probabilities(questions, finished)
    weights = dict.fromkeys(range(folds), votes)
    if weighting == "fitted":
        _check_scored(questions)
        weights = {fold: _fitted(teams, votes, fold, folds) for fold in range(folds)}
    predictions = []
    for question in questions:
        own = weights[fold_of(question.id, folds)]
        trace = {k: v for k, v in finished[question.id].items() if k not in _OF_THE_RUN}
        counted = "level" if weighting == "fitted" else weighting
        agents = [
            _with_ballot({**agent, "votes": number}, counted)
            for agent, number in zip(teams[question.id], own, strict=True)
        ]
        predictions.append(_elected_by(agents, question, trace, trace["fallback"]))
    return predictions


def vote_on_draws(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    heuristics: AnswerHeuristics,
    *,
    draws: int = 7,
    temperature: float = 0.7,
    shots: Count = 8,
    candidates: Count = 5,
    similarity: ShotSelection = "answer_aware",
    order: Order = "most_similar_first",
    max_new_tokens: int = 10,
    seed: Count = 0,
) -> list[Prediction]:
    """Self-consistency (Wang et al., 2023): the most frequent of several drawn answers (ours).

    Its prompt is that of an agent with Tool_1. As many draws as MAVL has calls of the language
    model make it the baseline with the same budget: three plans, knowledge, three answers. Of
    equally frequent answers that of the most probable draw wins.
    """
    found = heuristics.select(questions, library, shots, similarity, seed=seed)
    decoding = Decoding(
        max_new_tokens=max_new_tokens, temperature=temperature, n=draws, seed=seed, stop=("\n",),
        logprobs=True,
    )  # fmt: skip
    known = {q.id: q for own in found for q in (shot.question for shot in own)}
    known |= {question.id: question for question in questions}
    outputs: Outputs = {1: {n: heuristics.listed(q, candidates) for n, q in known.items()}}
    prompts = {
        q.id: answer_prompt(q, used_actions(outputs, q, (1,)), own, outputs, llm, decoding, order)
        for q, own in zip(questions, found, strict=True)
    }
    answers = answer_all(llm, [p.query for p in prompts.values() if p.query is not None])
    predictions = []
    for question in questions:
        prompt, trace = prompts[question.id], prompts_record([prompts[question.id]])
        drawn = ()
        if prompt.query is not None and prompt.query.id in answers.by_id:
            drawn = answers.by_id[prompt.query.id].candidates
        elif prompt.query is not None:
            trace["failed"] = [answers.failed[prompt.query.id]]
        trace["outputs"] = [{"text": c.text, "logprob": c.total} for c in drawn]
        ballots = [((c.text or "").strip(), 1.0) for c in drawn]
        predictions.append(_elected(question, ballots, trace, heuristics.best(question)))
    return predictions


def _elected(
    question: Question,
    ballots: Sequence[tuple[str, float]],
    trace: Mapping[str, Any],
    fallback: str,
) -> Prediction:
    answer, sums = vote(ballots)
    fallback = prep_ans(fallback)
    record = {**trace, "vote": sums, "fallback": fallback}
    return Prediction(question.id, answer or fallback, trace=record)


def _agent_record(agent: Agent) -> dict[str, Any]:
    return {
        "agent": agent.role,
        "plan": list(agent.plan.actions),
        "refused": list(agent.plan.refused),
        "said": agent.plan.said,
        "used": list(agent.used),
        "votes": agent.votes,
        "answer": agent.answer,
        "probability": round(agent.probability, 6),
        "score": agent.score,
    }


def _with_ballot(agent: dict[str, Any], weighting: Weighting) -> dict[str, Any]:
    sure = agent["probability"] if weighting == "probability" else 1.0
    return {**agent, "ballot": agent["votes"] * sure}


def _elected_by(
    agents: Sequence[Mapping[str, Any]],
    question: Question,
    trace: Mapping[str, Any],
    fallback: str,
) -> Prediction:
    ballots = [(agent["answer"], agent["ballot"]) for agent in reversed(agents)]
    known = {**trace, "agents": agents, "scored_by": answer_scorer(question)}
    return _elected(question, ballots, known, fallback)


def _teams(
    questions: Sequence[Question], finished: Mapping[str, Mapping[str, Any]], size: int
) -> dict[str, list[dict[str, Any]]]:
    """Question id -> its agents in a finished run, their answers scored by its references.

    Raises:
      UserError: some questions have none, or a damaged record, or not `size` many.
    """
    rows = {question.id: finished.get(question.id, {}) for question in questions}
    if lost := [name for name, row in rows.items() if not row.get("agents")]:
        raise UserError(
            f"config key parts.finished.run: no agents' answers to {len(lost):,} of "
            f"{len(questions):,} questions there, the first is {lost[0]}; name a finished run of a "
            "row of setting mavl on the same questions."
        )
    if damaged := [name for name, row in rows.items() if not _whole(row)]:
        raise UserError(
            f"config key parts.finished.run: the record of {damaged[0]} in its trace.jsonl lacks "
            f"the fallback, or of an agent {', '.join(_OF_AN_AGENT)}; run that row again."
        )
    counts = sorted({len(row["agents"]) for row in rows.values()})
    if counts and counts != [size]:
        raise UserError(
            f"config key options.votes: {size} numbers, and the finished run has "
            f"{' or '.join(map(str, counts))} agents; give one for each of them."
        )
    return {
        question.id: [
            {**agent, "score": answer_accuracy(question, agent["answer"])}
            for agent in rows[question.id]["agents"]
        ]
        for question in questions
    }


def _check_probabilities(
    questions: Sequence[Question], finished: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raises UserError if a finished run's probabilities are not of the answers' texts alone."""
    for question in questions:
        if finished[question.id].get("probability_of") != _PROBABILITY_OF:
            raise UserError(
                "config key options.weighting=probability: the finished run's probabilities hold "
                f"the end of each answer as well ({question.id} in its trace.jsonl); run that row "
                "again, or set it to level or fitted."
            )


def _check_scored(questions: Sequence[Question]) -> None:
    """Raises UserError if no question's answers can be scored: there is nothing to fit to."""
    if questions and not any(map(answer_scorer, questions)):
        raise UserError(
            "config key options.weighting=fitted: no question of this split has reference answers "
            "that count; set it to level or probability."
        )


def _whole(row: Mapping[str, Any]) -> bool:
    """Whether a line of a finished run's trace.jsonl has all that another vote needs."""
    agents = row["agents"]
    return "fallback" in row and all(set(_OF_AN_AGENT) <= set(agent) for agent in agents)


def _fitted(
    teams: Mapping[str, Sequence[Mapping[str, Any]]],
    start: Sequence[float],
    fold: int,
    folds: int,
) -> tuple[float, ...]:
    """The weights that do best on the questions outside a part, as far as their answers count."""
    others = [
        team[::-1]
        for name, team in teams.items()
        if fold_of(name, folds) != fold and team[0]["score"] is not None
    ]
    answers = [[agent["answer"] for agent in team] for team in others]
    scores = [[agent["score"] for agent in team] for team in others]
    return fit_weights(answers, scores, start[::-1])[::-1]
