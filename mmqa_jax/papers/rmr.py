"""RMR (Tan et al., 2024): question-rationale-answer triplets, retrieved as in-context examples.

A query and every triplet of the library are embedded in text and picture (equation 2); the k
nearest by cosine (equation 4) are concatenated, question, rationale and answer each (equation 6),
in front of the query (equation 5); the model continues with rationale and answer (equation 8).

  library.select(questions, count, similarity) -> triplets of every question, most similar first
  knowledge.of_questions(questions)            -> passages for the context (ours, optional)
  llm.answer(queries)                          -> a continuation, or the likelihood of each option
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from mmqa_jax.core.sections import Count
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import LETTERS, letter_index, llava_choice
from mmqa_jax.prompting.backends import (
    Chat,
    Choices,
    Completion,
    Decoding,
    Message,
    Picture,
    Query,
)
from mmqa_jax.prompting.few_shot import (
    NO_CONTEXT,
    FewShot,
    Order,
    few_shot,
    output_record,
    prompts_record,
)
from mmqa_jax.prompting.multiple_choice import (
    Normalization,
    check_choices,
    choose_options,
)
from mmqa_jax.prompting.rmr_fields import fields
from mmqa_jax.prompting.shots import ExampleLibrary, Similarity
from mmqa_jax.prompting.stream import Answers, answer_all
from mmqa_jax.prompting.templates import load_template
from mmqa_jax.retrieval.knowledge import KnowledgeBase, passages_of


def answer_rmr(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Any,
    library: ExampleLibrary,
    knowledge: KnowledgeBase | None = None,
    *,
    shots: Count = 3,
    similarity: Similarity = "bimodal",
    order: Order = "most_similar_first",
    template: str = "rmr.rationale",
    chat: bool = False,
    pictures: bool = False,
    read: Literal["choice", "letter", "short"] = "choice",
    max_new_tokens: int = 256,
    seed: Count = 0,
) -> list[Prediction]:
    """Tables 1 to 4: the model writes rationale and answer, from `shots` triplets (k).

    Args:
      shots: k; 0 is the model without retrieval.
      template: `rmr.rationale`, `rmr.answer` for the letter alone, or `rmr.direct` for questions
        without options.
      chat: the prompt is a user's message to a chat model.
      pictures: the model sees the query's picture; triplets are shown as text (reference.md 7).
      read: what of an output is the answer: `choice` keeps the output, and the option that it
        names; `letter` and `short` are `letter_alone` and `short_answer`, without an option.
    """
    prompt = load_template(template)
    # A base model goes on with another example. A chat model ends its message by itself, and may
    # write paragraphs.
    stop = () if chat else ("\n\n", "\nQuestion:")
    # Few servers of chat models give log-probabilities, some refuse requests that ask for them.
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=stop, logprobs=not chat)

    def asking(question: Question) -> Callable[[str], Query]:
        data = corpus.question_picture(question) if pictures else None
        shown = () if data is None else (Picture(data, question.image or ""),)
        if chat:
            return lambda text: Chat(question.id, (Message("user", (*shown, text)),), decoding)
        return lambda text: Completion(question.id, text, decoding, shown)

    chosen = library.select(questions, shots, similarity, seed=seed)
    prompts = [
        few_shot(prompt, question, found, fields, asking(question), llm.check, order, passages)
        for question, found, passages in zip(
            questions, chosen, passages_of(knowledge, questions), strict=True
        )
    ]
    answers = answer_all(llm, [p.query for p in prompts if p.query is not None])
    found = [_read(question, p, answers) for question, p in zip(questions, prompts, strict=True)]
    if read == "choice":
        return found
    said = [
        letter_alone(p, len(question.choices)) if read == "letter" else short_answer(p.answer)
        for question, p in zip(questions, found, strict=True)
    ]
    return [
        dataclasses.replace(p, answer=answer, choice=None)
        for p, answer in zip(found, said, strict=True)
    ]


def choose_rmr(
    questions: Sequence[Question],
    llm: Any,
    library: ExampleLibrary,
    knowledge: KnowledgeBase | None = None,
    *,
    shots: Count = 3,
    similarity: Similarity = "bimodal",
    order: Order = "most_similar_first",
    template: str = "rmr.text",
    options: Literal["text", "letter"] = "text",
    score: Normalization = "sum",
    calibrated: bool = False,
    seed: Count = 0,
) -> list[Prediction]:
    """The option with the largest likelihood, its text or its letter (equation 8 over options).

    Args:
      calibrated: less the likelihood after a prompt whose question and context are `N/A`.
    """
    prompt = load_template(template)
    chosen = library.select(questions, shots, similarity, seed=seed)
    spelled = {
        question.id: tuple(
            f" {LETTERS[i]}" if options == "letter" else prompt.spaced(f" {choice}")
            for i, choice in enumerate(question.choices)
        )
        for question in questions
    }

    def scoring(question: Question) -> Callable[[str], Choices]:
        return lambda text: Choices(question.id, text, spelled[question.id])

    prompts = [
        few_shot(prompt, question, found, fields, scoring(question), llm.check, order, passages)
        for question, found, passages in zip(
            questions, chosen, passages_of(knowledge, questions), strict=True
        )
    ]
    blank = prompt.render([], dict.fromkeys(("question", "context", "options"), NO_CONTEXT))
    predictions = choose_options(
        questions, prompts, spelled, llm, score=score, blank=blank if calibrated else None
    )
    return [_lettered(q, chosen) for q, chosen in zip(questions, predictions, strict=True)]


def letter_alone(found: Prediction, choices: int) -> str:
    """The letter that an output names, which MMBench's and SEED-Bench's scorers read.

    `The answer is B.`, `B. because` and `(B)` become `B`; an output that names none stays as it
    is, for the scorers' own rules.
    """
    index = found.choice
    if index is None:
        index = letter_index(found.answer.strip(" .()"), choices)
    return found.answer if index is None else LETTERS[index]


def short_answer(text: str) -> str:
    """What follows the last `The answer is` of an output, or else its first line.

    In lower case and without the final period: A-OKVQA's scorer compares strings.
    """
    _, said, rest = text.rpartition("The answer is")
    line = (rest if said else text).strip().partition("\n")[0]
    return line.strip().rstrip(".").strip().lower()


SETTINGS: dict[str, Callable[..., Sequence[Prediction]]] = {
    "rmr": answer_rmr,
    "rmr_letter": functools.partial(answer_rmr, read="letter"),
    "rmr_direct": functools.partial(
        answer_rmr, template="rmr.direct", read="short", max_new_tokens=128
    ),
    "rmr_choice": choose_rmr,
}
PARTS = ("llm", "library", "knowledge")


def check_questions(setting: str, questions: Sequence[Question]) -> None:
    """Raises UserError for questions that a setting cannot answer; called before parts open."""
    if setting in ("rmr_choice", "rmr_letter"):
        check_choices(setting, questions)


def _lettered(question: Question, chosen: Prediction) -> Prediction:
    """The chosen option as `B. its text`, which every benchmark's rule reads as B."""
    if chosen.choice is None:
        return chosen
    letter, text = LETTERS[chosen.choice], question.choices[chosen.choice]
    return dataclasses.replace(chosen, answer=f"{letter}. {text}")


def _read(question: Question, prompt: FewShot, answers: Answers) -> Prediction:
    """A question's output, and the choice that it names."""
    failed = answers.failed.get(question.id)
    trace = prompts_record([prompt], [] if failed is None else [failed])
    if question.id not in answers.by_id:
        return Prediction(question.id, trace=trace)
    candidate = answers.by_id[question.id].candidates[0]
    text = (candidate.text or "").strip()
    trace["outputs"] = [output_record(text, candidate.total)]
    return Prediction(
        question.id, text, choice=llava_choice(text, len(question.choices)), trace=trace
    )
