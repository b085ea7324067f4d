"""PICa (Yang et al., AAAI 2022): a language model answers from captions, with in-context examples.

The picture becomes a caption, perhaps with tags; solved questions that resemble the query in text
and picture precede it; of several prompts with different examples the most probable answer wins.
PromptCap's rows are the same with its own captions, one prompt, and the most similar example last.

  library.select(questions, count, similarity) -> shots of every question, most similar first
  llm.answer(queries)                          -> a continuation of every prompt
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.answer_text import pica_answer
from mmqa_jax.prompting.backends import Choices, Completion, Decoding
from mmqa_jax.prompting.few_shot import FewShot, Order, few_shot, majority_answer, prompts_record
from mmqa_jax.prompting.multiple_choice import Normalization, choose_option, option_prior
from mmqa_jax.prompting.shots import ExampleLibrary, Similarity
from mmqa_jax.prompting.stream import Answers, answer_all
from mmqa_jax.prompting.templates import load_template

ShotAnswer = Literal["first", "majority"]


def answer_pica(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    *,
    shots: int = 16,
    ensemble: int = 1,
    similarity: Similarity = "question_and_image",
    tags: bool = False,
    order: Order = "most_similar_first",
    shot_answer: ShotAnswer = "first",
    template: str = "pica.okvqa",
    max_new_tokens: int = 5,
    seed: int = 0,
) -> list[Prediction]:
    """PICa-Full; PICa-Base is `similarity="random"` with one prompt per question.

    Args:
      shots: examples in a prompt, fewer where the context is short.
      ensemble: prompts per question; the r-th shows the examples r * shots to (r + 1) * shots.
      tags: the picture's tags follow its caption (C+T).
      shot_answer: the first annotator's answer, or the one that most gave (PromptCap).
    """
    prompt, decoding = load_template(template), _decoding(max_new_tokens)
    fields = _fields_of(tags, shot_answer)
    chosen = library.select(questions, shots * ensemble, similarity, seed=seed)
    prompts: list[dict[tuple[str, int], FewShot]] = []  # of every question
    for question, found in zip(questions, chosen, strict=True):
        prompts.append({})
        for r in range(ensemble):
            key, own = (question.id, r), found[r * shots : (r + 1) * shots]
            make = _completion(key, decoding)
            prompts[-1][key] = few_shot(prompt, question, own, fields, make, llm.check, order)
    queries = [p.query for own in prompts for p in own.values() if p.query is not None]
    answers = answer_all(llm, queries)
    return [
        _most_probable(question, own, answers)
        for question, own in zip(questions, prompts, strict=True)
    ]


def choose_pica(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    *,
    shots: int = 8,
    similarity: Similarity = "question",
    tags: bool = False,
    order: Order = "most_similar_first",
    shot_answer: ShotAnswer = "first",
    template: str = "pica.okvqa",
    score: Normalization = "sum",
    calibrated: bool = False,
    seed: int = 0,
) -> list[Prediction]:
    """Multiple choice: the option that is the most probable answer to PICa's prompt.

    Args:
      score: log-probability of an option's text, summed or per token.
      calibrated: less the option's log-probability after a prompt without question and context.
    """
    prompt, fields = load_template(template), _fields_of(tags, shot_answer)
    chosen = library.select(questions, shots, similarity, seed=seed)
    options = {q.id: tuple(f" {choice}" for choice in q.choices) for q in questions}
    prompts = [
        few_shot(prompt, q, found, fields, _scoring(q.id, options[q.id]), llm.check, order)
        for q, found in zip(questions, chosen, strict=True)
    ]
    answers = answer_all(llm, [p.query for p in prompts if p.query is not None])
    prior = None
    if calibrated:
        blank = prompt.render([], {"context": "N/A", "question": "N/A"})
        prior = option_prior(llm, options, blank, score)
    return [
        choose_option(q, answers, prior, score=score, trace=prompts_record([p]))
        for q, p in zip(questions, prompts, strict=True)
    ]


def copy_nearest_answer(
    questions: Sequence[Question], library: ExampleLibrary, *, similarity: Similarity = "question"
) -> list[Prediction]:
    """A baseline without a model: the answer of the most similar example."""
    return [
        Prediction(question.id, majority_answer(shots[0].question) if shots else "")
        for question, shots in zip(questions, library.select(questions, 1, similarity), strict=True)
    ]


def vote_of_nearest_answers(
    questions: Sequence[Question],
    library: ExampleLibrary,
    *,
    shots: int = 16,
    similarity: Similarity = "question",
) -> list[Prediction]:
    """A baseline without a model: the most frequent answer of the most similar examples.

    Of equally frequent answers the one of the more similar example wins.
    """
    predictions = []
    for question, found in zip(
        questions, library.select(questions, shots, similarity), strict=True
    ):
        votes = collections.Counter(majority_answer(shot.question) for shot in found)
        predictions.append(Prediction(question.id, votes.most_common(1)[0][0] if votes else ""))
    return predictions


SETTINGS: dict[str, Callable[..., Sequence[Prediction]]] = {
    "pica": answer_pica,
    "pica_choice": choose_pica,
    "copy_nearest": copy_nearest_answer,
    "vote_of_nearest": vote_of_nearest_answers,
}
PARTS = ("llm", "library")


def context(question: Question, tags: bool) -> str:
    """A picture in words: `caption`, or `caption. tag, tag` (gpt3_api_okvqa.py l.184-201)."""
    caption = str(question.extra.get("caption", ""))
    names = question.extra.get("tags", ()) if tags else ()
    return f"{caption.rstrip('.')}. {', '.join(names)}" if names else caption


def _fields_of(tags: bool, shot_answer: ShotAnswer) -> Callable[[Question], Mapping[str, str]]:
    def fields(question: Question) -> Mapping[str, str]:
        first = question.answers[0] if question.answers else ""
        answer = first if shot_answer == "first" and first else majority_answer(question)
        return {
            "context": context(question, tags),
            "question": question.question,
            "answer": answer,
        }

    return fields


def _decoding(max_new_tokens: int) -> Decoding:
    return Decoding(max_new_tokens=max_new_tokens, stop=("\n",), logprobs=True)


def _completion(key: Any, decoding: Decoding) -> Callable[[str], Completion]:
    return lambda text: Completion(key, text, decoding)


def _scoring(key: Any, options: tuple[str, ...]) -> Callable[[str], Choices]:
    return lambda text: Choices(key, text, options)


def _most_probable(
    question: Question, prompts: Mapping[tuple[str, int], FewShot], answers: Answers
) -> Prediction:
    """Of a question's prompts the answer with the largest summed log-probability."""
    found = [answers.by_id[key].candidates[0] for key in prompts if key in answers.by_id]
    failed = [answers.failed[key] for key in prompts if key in answers.failed]
    trace = prompts_record(list(prompts.values()), failed)
    trace["outputs"] = [{"text": c.text, "logprob": c.total} for c in found]
    if not found:
        return Prediction(question.id, trace=trace)
    best = max(found, key=lambda candidate: candidate.total)
    return Prediction(question.id, pica_answer(best.text or ""), trace=trace)
