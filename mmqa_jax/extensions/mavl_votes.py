"""Other votes in place of MAVL's (ours): with fitted weights, or among draws of one prompt.

A vote on the answers of a finished run asks no model. Drawing one agent's answer as often as MAVL
asks the model is self-consistency (Wang et al., 2023) at the same budget.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import Count
from mmqa_jax.data.answers import prep_ans
from mmqa_jax.data.corpus import fold_of
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.vqa import answer_accuracy, answer_scorer
from mmqa_jax.extensions.mavl_planner import answer_with_one_plan
from mmqa_jax.papers import mavl
from mmqa_jax.papers.prophet import vote
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting.backends import Backend, Decoding
from mmqa_jax.prompting.examples.library import ExampleLibrary
from mmqa_jax.prompting.examples.side_files import AnswerHeuristics, ShotSelection
from mmqa_jax.prompting.few_shot import Order, outputs_record, prompts_record, replies_to

_OF_AN_AGENT = ("agent", "answer", "probability")  # what another vote needs of it
# Keys of trace.jsonl that belong to the finished run, not to its agents.
_OF_THE_RUN = ("question_id", "question", "answer", "choice", "references", "scores")
_LARGEST_WEIGHT = 4


def revote(
    questions: Sequence[Question],
    finished: Mapping[str, Mapping[str, Any]],
    *,
    votes: tuple[float, ...] = (2.0, 3.0, 4.0),
    weighting: mavl.Weighting | Literal["fitted"] = "fitted",
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
        trace = {k: v for k, v in finished[question.id].items() if k not in _OF_THE_RUN}
        counted = "level" if weighting == "fitted" else weighting
        of_its_fold = weights[fold_of(question.id, folds)]
        team = [
            {**agent, "votes": number}
            for agent, number in zip(teams[question.id], of_its_fold, strict=True)
        ]
        predictions.append(mavl.elect(question, team, counted, trace, trace["fallback"]))
    return predictions


def vote_on_draws(
    questions: Sequence[Question],
    llm: Backend,
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
    chosen = heuristics.select(questions, library, shots, similarity, seed=seed)
    decoding = Decoding(
        max_new_tokens=max_new_tokens, temperature=temperature, n=draws, seed=seed, stop=("\n",),
        logprobs=True,
    )  # fmt: skip
    listed = {
        question.id: heuristics.listed(question, candidates)
        for question in (*questions, *(shot.question for shots in chosen for shot in shots))
    }
    outputs: mavl.Outputs = {1: listed}
    prompts = [
        mavl.answer_prompt(
            q, mavl.used_actions(outputs, q, (1,)), examples, outputs, llm, decoding, order
        )
        for q, examples in zip(questions, chosen, strict=True)
    ]
    predictions = []
    for question, replies in zip(questions, replies_to([[p] for p in prompts], llm), strict=True):
        drawn = [draw for result in replies.results for draw in result.candidates]
        trace = prompts_record(replies.prompts, replies.failed)
        trace["outputs"] = outputs_record(drawn)
        ballots = [((c.text or "").strip(), 1.0) for c in drawn]
        predictions.append(mavl.elect_answer(question, ballots, trace, heuristics.best(question)))
    return predictions


def _teams(
    questions: Sequence[Question], finished: Mapping[str, Mapping[str, Any]], size: int
) -> dict[str, list[dict[str, Any]]]:
    """Question id -> its agents in a finished run, their answers scored by its references."""
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
        if finished[question.id].get("probability_of") != mavl.PROBABILITY_OF:
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


def fit_weights(
    answers: Sequence[Sequence[str]], scores: Sequence[Sequence[float]], start: Sequence[float]
) -> tuple[float, ...]:
    """Weights of voters that maximize the mean score of the answers that they elect.

    Whole numbers from 0 to 4 are tried, all combinations. Of equally good ones the nearest to
    `start` is taken, and of these the first.

    Args:
      answers: of every question, one per voter, in the order in which `vote` prefers them.
      scores: of these answers.
      start: one weight per voter.
    """
    voters = len(start)
    normalized = [[(prep_ans(answer), score) for answer, score in zip(a, s, strict=True)]
             for a, s in zip(answers, scores, strict=True)]  # fmt: skip
    # The same pattern of agreement and scores occurs in many questions.
    patterns: dict[tuple, int] = {}
    for row in normalized:
        texts = [text for text, _ in row]
        names = tuple(texts.index(text) if text else -1 for text in texts)
        key = (names, tuple(score for _, score in row))
        patterns[key] = patterns.get(key, 0) + 1

    def total(weights: tuple[float, ...]) -> float:
        value = 0.0
        for (names, score), count in patterns.items():
            ballots = [
                (str(name) if name >= 0 else "", w) for name, w in zip(names, weights, strict=True)
            ]
            winner, _ = vote(ballots)
            value += count * (score[int(winner)] if winner else 0.0)
        return value

    tried = [
        tuple(map(float, weights))
        for weights in itertools.product(range(_LARGEST_WEIGHT + 1), repeat=voters)
        if any(weights)
    ]
    tried.sort(key=lambda weights: float(np.abs(np.subtract(weights, start)).sum()))
    return max(tried, key=total)


def _fitted(
    teams: Mapping[str, Sequence[Mapping[str, Any]]], start: Sequence[float], fold: int, folds: int
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


def check_revote(votes: Sequence[float], weighting: str, folds: int) -> None:
    """Raises UserError for votes below 0, or weights that would be fitted on no questions."""
    if not votes or min(votes) < 0:
        raise UserError(
            f"config key options.votes={tuple(votes)}: one number of at least 0 for each agent of "
            "the finished run was expected; correct it."
        )
    if weighting == "fitted" and folds < 2:
        raise UserError(
            f"config key options.folds={folds}: weights are fitted to the questions of the other "
            "parts; give at least 2, or set options.weighting to level or probability."
        )


# The system `mavl`: the paper's setting, votes of this file on its agents' answers, and one plan
# for all questions.
SETTINGS = {
    **mavl.SETTINGS,
    "mavl_revote": Setting(
        revote,
        needs_all=True,  # weights are fitted over all questions
        rule_of_row=lambda options, parts: check_revote(
            options["votes"], options["weighting"], options["folds"]
        ),
        write_notes=lambda questions, options: [
            "another vote on the answers of a finished run, which is what they cost"
        ],
    ),
    "mavl_draws": Setting(vote_on_draws),
    "mavl_one_plan": Setting(
        answer_with_one_plan,
        rule_of_row=lambda options, parts: mavl.check_team(options["agents"], options["votes"]),
        write_notes=lambda questions, options: [
            "each agent's plan is the one that earned most on the other parts' questions; the "
            "answers are those of a finished run"
        ],
    ),
}
