"""Multiple choice by likelihood: the option that a language model finds most probable."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.decoding.requests import Scores, Unanswerable
from mmqa_jax.prompting import few_shot
from mmqa_jax.prompting.backends import Backend, Choices
from mmqa_jax.prompting.backends.cache import Answers, answer_all
from mmqa_jax.prompting.examples.library import Shot
from mmqa_jax.retrieval.knowledge import KnowledgeBase

Normalization = Literal["sum", "mean"]
Prior = Mapping[str, np.ndarray]

_PRIOR_OPTIONS = 32  # options in a request for their prior


def check_choices(setting: str, questions: Sequence[Question]) -> None:
    """Raises UserError unless every question has the choices that a setting chooses from."""
    without = sum(not question.choices for question in questions)
    if without:
        raise UserError(
            f"setting {setting}: {without:,} of {len(questions):,} questions have no choices; "
            "leave them out with config key data.where, or use a setting that writes answers."
        )


def choose_options(
    questions: Sequence[Question],
    shots: Sequence[Sequence[Shot]],
    options: Mapping[str, Sequence[str]],
    llm: Backend,
    template: few_shot.PromptTemplate,
    fields: few_shot.Fields,
    *,
    order: few_shot.Order = "most_similar_first",
    knowledge: KnowledgeBase | None = None,
    score: Normalization = "sum",
    blank: Mapping[str, str] | None = None,
) -> list[Prediction]:
    """Chooses each question's most probable option, of those that continue its few-shot prompt,
    summed over its tokens or per token. `blank` are the fields of a prompt without question and
    shots, after which the options are scored for calibration; None: not calibrated."""
    prompts = few_shot.few_shot_prompts(
        questions, few_shot.one_prompt(questions, shots), llm, template, fields,
        lambda key, question, text: Choices(key, text, tuple(options[question.id])),
        order, knowledge,
    )  # fmt: skip
    queries = [p.query for (p,) in prompts if p.query is not None]
    answers = answer_all(llm, queries, checked=True)
    prior = None
    if blank is not None:
        prior = option_prior(llm, options, template.render([], blank), score)
    return [
        few_shot.citing_passages(
            choose_option(
                question, answers, prior, score=score, trace=few_shot.prompts_record(prompt)
            ),
            prompt,
        )
        for question, prompt in zip(questions, prompts, strict=True)
    ]


def option_prior(
    llm: Backend, options: Mapping[str, Sequence[str]], prompt: str, score: Normalization = "sum"
) -> Prior:
    """Question id -> log-probability of each of its options after a prompt without the question.

    Subtracting it removes the model's preference for frequent words or for a letter (contextual
    calibration, Zhao et al. 2021; domain-conditional PMI, Holtzman et al. 2021). Questions with
    an option whose score the model does not give are left out.
    """
    distinct = []
    for option in sorted({option for spelled in options.values() for option in spelled}):
        with contextlib.suppress(Unanswerable):
            llm.check(Choices(option, prompt, (option,)))
            distinct.append(option)
    queries = [
        Choices(f"prior {n}", prompt, tuple(distinct[n : n + _PRIOR_OPTIONS]))
        for n in range(0, len(distinct), _PRIOR_OPTIONS)
    ]
    answers = answer_all(llm, queries, "Calibrating", checked=True)
    prior: dict[str, float] = {}
    for query in queries:
        if query.id in answers.by_id:
            values = option_scores(answers.by_id[query.id], score)
            prior |= zip(query.continuations, values.tolist(), strict=True)
    return {
        name: np.array([prior[option] for option in spelled])
        for name, spelled in options.items()
        if prior.keys() >= set(spelled)
    }


def option_scores(scores: Scores, normalization: Normalization) -> np.ndarray:
    """Log-probability of every continuation, summed over its tokens or per token, float64."""
    return np.array([s.total if normalization == "sum" else s.mean for s in scores.scores])


def choose_option(
    question: Question,
    answers: Answers,
    prior: Prior | None = None,
    *,
    score: Normalization = "sum",
    trace: Mapping[str, Any] | None = None,
) -> Prediction:
    """Chooses the most probable option, less its prior; of equal ones the first. Without scores, or
    where the prior leaves the question out, nothing is chosen, and the trace of its prompt gets the
    reason."""
    trace = dict(trace or {})
    if question.id not in answers.by_id or (prior is not None and question.id not in prior):
        unscored = "the score of an option without the question is missing"
        reason = answers.failed.get(question.id, unscored)
        if question.id in answers.by_id or question.id in answers.failed:
            trace["failed"] = [*trace.get("failed", ()), reason]
        return Prediction(question.id, trace=trace)
    values = option_scores(answers.by_id[question.id], score)
    trace["option_scores"] = [round(value, 6) for value in values.tolist()]
    if prior is not None:
        values = values - prior[question.id]
        trace["calibrated_scores"] = [round(value, 6) for value in values.tolist()]
    best = int(values.argmax())
    return Prediction(question.id, question.choices[best], choice=best, trace=trace)
