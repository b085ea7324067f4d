"""How much each solved example helps a language model: the signal that trains RMR's retriever.

For every question the model scores the options behind each of its m most similar triplets, one at
a time (EPR, Rubin et al. 2022, section 3.1; REPLUG LSR, Shi et al. 2023, section 4.1). A triplet's
score is log p(right option) - log sum over the options of p(option).

  library.select(questions, m, similarity) -> candidates
  llm.answer(queries)                      -> likelihoods of the options
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from mmqa_jax.data.batches.retriever import ExampleScores
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.backends import Backend, Choices
from mmqa_jax.prompting.backends.cache import Answers, answer_all
from mmqa_jax.prompting.examples.library import ExampleLibrary, Shot, Similarity
from mmqa_jax.prompting.few_shot import FewShot, few_shot, load_template
from mmqa_jax.prompting.multiple_choice import Normalization, option_scores
from mmqa_jax.prompting.rationales import fields


@dataclasses.dataclass(frozen=True)
class JudgeOptions:
    """The section `judge` of a config."""

    candidates: int = 8  # m
    similarity: Similarity = "bimodal"  # by which they are chosen
    template: str = "rmr.text"  # of the prompts, after which the options' texts are scored
    # Log-probability of an option, summed over its tokens or per token.
    score: Normalization = "sum"
    questions: int = 0  # how many of each split, evenly; 0: all


@dataclasses.dataclass(frozen=True)
class Judged:
    """The rows of all questions with a scored candidate, and how many candidates have no score:
    their prompt was too long, or the model failed."""

    rows: Sequence[ExampleScores]
    left_out: int


def judge_examples(
    questions: Sequence[Question], llm: Backend, library: ExampleLibrary, options: JudgeOptions
) -> Judged:
    """Scores the candidates of all questions, as one stream to the model."""
    template = load_template(options.template)
    chosen = library.select(questions, options.candidates, options.similarity)

    def prompt(question: Question, shot: Shot | None) -> FewShot:
        name = (question.id, "" if shot is None else shot.question.id)
        spelled = tuple(f" {choice}" for choice in question.choices)

        def make(text: str) -> Choices:
            return Choices("\t".join(name), text, spelled)

        shots = () if shot is None else (shot,)
        return few_shot(template, question, shots, fields, make, llm.check)

    prompts = {
        (question.id, "" if shot is None else shot.question.id): prompt(question, shot)
        for question, candidates in zip(questions, chosen, strict=True)
        for shot in (None, *candidates)
    }
    queries = [p.query for p in prompts.values() if p.query is not None and not p.dropped]
    answers = answer_all(llm, queries, "Judging examples", checked=True)

    def score(question: Question, name: str) -> float | None:
        asked = prompts[question.id, name]
        if asked.query is None or asked.dropped or asked.query.id not in answers.by_id:
            return None
        return right_option_score(question, answers, asked.query.id, options.score)

    rows, left_out = [], 0
    for question, candidates in zip(questions, chosen, strict=True):
        scored = [(shot, score(question, shot.question.id)) for shot in candidates]
        scored_shots = [(shot, value) for shot, value in scored if value is not None]
        left_out += len(scored) - len(scored_shots)
        if scored_shots:
            rows.append(
                ExampleScores(
                    question.id,
                    score(question, ""),
                    tuple(shot.question.id for shot, _ in scored_shots),
                    tuple(shot.similarity for shot, _ in scored_shots),
                    tuple(value for _, value in scored_shots),
                )
            )
    return Judged(rows, left_out)


def right_option_score(
    question: Question, answers: Answers, name: str, score: Normalization
) -> float:
    """log p(right option) - log sum over the options of p(option)."""
    values = option_scores(answers.by_id[name], score)
    assert question.answer_index is not None
    return float(values[question.answer_index] - np.logaddexp.reduce(values))


def mean_scores(rows: Sequence[ExampleScores]) -> dict[str, float]:
    """The mean score with no example, the most similar, any, and the most helpful candidate."""
    kinds: dict[str, Callable[[ExampleScores], float]] = {
        "alone": lambda row: math.nan if row.alone is None else row.alone,
        "most_similar": lambda row: row.scores[0],
        "any": lambda row: float(np.mean(row.scores)),
        "most_helpful": lambda row: max(row.scores),
    }
    if not rows:
        return {}
    return {
        name: round(float(np.nanmean([of(row) for row in rows])), 6) for name, of in kinds.items()
    }
