"""Prophet (Shao et al., CVPR 2023), stage 2: answer heuristics in a language model's prompt.

Stage 1, a VQA model, gives candidate answers with confidences and, by the similarity of its latent
answers, the examples of each prompt. Several prompts with different examples vote.

  heuristics.select(questions, library, count, selection) -> shots of every question
  llm.answer(queries)                                     -> a continuation of every prompt
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmqa_jax.core.sections import Count
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.answer_text import prep_ans
from mmqa_jax.prompting.backends import Choices, Completion, Decoding
from mmqa_jax.prompting.captions import (
    Captions,
    check_captions,
    check_no_tags,
    traced,
    with_captions,
)
from mmqa_jax.prompting.few_shot import (
    NO_CONTEXT,
    FewShot,
    few_shot,
    majority_answer,
    prompts_record,
)
from mmqa_jax.prompting.heuristics import AnswerHeuristics, ShotSelection
from mmqa_jax.prompting.multiple_choice import Normalization, check_choices, choose_options
from mmqa_jax.prompting.shots import ExampleLibrary, Shot, seeded
from mmqa_jax.prompting.stream import Answers, answer_all
from mmqa_jax.prompting.templates import load_template
from mmqa_jax.prompting.tools import context
from mmqa_jax.prompting.voting import vote

_TEMPLATE = "prophet.okvqa"


def answer_prophet(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    heuristics: AnswerHeuristics,
    captions: Captions | None = None,
    *,
    shots: Count = 20,
    candidates: Count = 10,
    ensemble: int = 5,
    similarity: ShotSelection = "answer_aware",
    max_new_tokens: int = 8,
    seed: Count = 0,
) -> list[Prediction]:
    """Direct answers: prophet/stage2/prompt.py of the authors.

    The shots * ensemble nearest examples of a question are shuffled and dealt to its prompts; the
    probabilities of equal answers add up. Where all answers are empty it is the first candidate.

    Args:
      captions: shown in place of the questions' own: PromptCap's in MAVL's tables.
      shots, candidates, ensemble: N, K and T of the paper.
      seed: of the shuffle, which depends on the question as well.
    """
    template, fields = load_template(_TEMPLATE), _fields_of(heuristics, candidates)
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=("\n",), logprobs=True)
    chosen = heuristics.select(questions, library, shots * ensemble, similarity, seed=seed)
    shown, chosen = with_captions(questions, chosen, captions)
    prompts: list[list[FewShot]] = []  # of every question
    for question, found in zip(shown, chosen, strict=True):
        found = _shuffled(found, question, seed)
        prompts.append([])
        for t in range(ensemble):
            own = found[t * shots : (t + 1) * shots]
            make = _completion((question.id, t), decoding)
            prompts[-1].append(few_shot(template, question, own, fields, make, llm.check))
    answers = answer_all(llm, [p.query for own in prompts for p in own if p.query is not None])
    predictions = [
        _elected(question, own, answers, heuristics)
        for question, own in zip(questions, prompts, strict=True)
    ]
    return traced(predictions, questions, captions)


def choose_prophet(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    heuristics: AnswerHeuristics,
    captions: Captions | None = None,
    *,
    shots: Count = 20,
    candidates: Count = 10,
    similarity: ShotSelection = "answer_aware",
    score: Normalization = "sum",
    calibrated: bool = False,
    seed: Count = 0,
) -> list[Prediction]:
    """Multiple choice (A-OKVQA): the option that is the most probable answer to one prompt (ours).

    Args:
      captions: shown in place of the questions' own.
      score: log-probability of an option's text, summed or per token.
      calibrated: less the option's log-probability after a prompt without question and context.
    """
    template, fields = load_template(_TEMPLATE), _fields_of(heuristics, candidates)
    chosen = heuristics.select(questions, library, shots, similarity, seed=seed)
    shown, chosen = with_captions(questions, chosen, captions)
    options = {q.id: tuple(f" {choice}" for choice in q.choices) for q in questions}
    prompts = [
        few_shot(
            template, question, _shuffled(found, question, seed), fields,
            _scoring(question.id, options[question.id]), llm.check,
        )
        for question, found in zip(shown, chosen, strict=True)
    ]  # fmt: skip
    blank = template.render([], {"context": NO_CONTEXT, "question": NO_CONTEXT, "candidates": ""})
    predictions = choose_options(
        questions, prompts, options, llm, score=score, blank=blank if calibrated else None
    )
    return traced(predictions, questions, captions)


def answer_first_candidate(
    questions: Sequence[Question], heuristics: AnswerHeuristics
) -> list[Prediction]:
    """The VQA model alone: its first candidate."""
    heuristics.check(questions)
    return [Prediction(q.id, prep_ans(heuristics.best(q))) for q in questions]


SETTINGS: dict[str, Callable[..., Sequence[Prediction]]] = {
    "prophet": answer_prophet,
    "prophet_choice": choose_prophet,
    "prophet_candidate": answer_first_candidate,
}
PARTS = ("llm", "library", "heuristics", "captions")


def check_questions(setting: str, questions: Sequence[Question]) -> None:
    """Raises UserError for questions that a setting cannot answer; called before parts open."""
    if setting == "prophet_choice":
        check_choices(setting, questions)


def check_options(setting: str, options: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raises UserError for options and parts without effect; called before anything is opened."""
    check_no_tags(parts)


def check_inputs(
    setting: str,
    questions: Sequence[Question],
    options: Mapping[str, Any],
    parts: Mapping[str, Any],
) -> None:
    """Raises UserError for files that are not the questions'; called before a model is loaded."""
    check_captions(questions, parts.get("captions"))


def _fields_of(heuristics: AnswerHeuristics, count: int) -> Callable[[Question], Mapping[str, str]]:
    def fields(question: Question) -> Mapping[str, str]:
        listed = heuristics.listed(question, count)
        return {
            "context": context(question),
            "question": question.question,
            "candidates": f"===\nCandidates: {listed}\n" if listed else "",
            "answer": majority_answer(question),
        }

    return fields


def _shuffled(shots: Sequence[Shot], question: Question, seed: int) -> list[Shot]:
    return [shots[i] for i in seeded(question.id, seed).permutation(len(shots))]


def _completion(key: Any, decoding: Decoding) -> Callable[[str], Completion]:
    return lambda text: Completion(key, text, decoding)


def _scoring(key: Any, options: tuple[str, ...]) -> Callable[[str], Choices]:
    return lambda text: Choices(key, text, options)


def _elected(
    question: Question,
    prompts: Sequence[FewShot],
    answers: Answers,
    heuristics: AnswerHeuristics,
) -> Prediction:
    """The answer with the largest sum of probabilities, normalized; else the first candidate."""
    trace = prompts_record(prompts)
    ids = [p.query.id for p in prompts if p.query is not None]
    found = [answers.by_id[key].candidates[0] for key in ids if key in answers.by_id]
    trace["outputs"] = [{"text": c.text, "logprob": c.total} for c in found]
    if failed := [answers.failed[key] for key in ids if key in answers.failed]:
        trace["failed"] = failed
    answer, trace["vote"] = vote([(c.text.strip(), math.exp(c.total)) for c in found])
    trace["fallback"] = prep_ans(heuristics.best(question))
    return Prediction(question.id, answer or trace["fallback"], trace=trace)
