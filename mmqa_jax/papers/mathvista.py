"""MathVista (Lu et al., ICLR 2024): a model answers freely, then its answer is extracted.

One question with its picture and a hint at the form of the answer, no examples. The response is
taken as it is where it has that form; of others a language model extracts the answer, by the
authors' prompt of five examples (templates/mathvista.toml).

  llm.answer(queries)     -> a response for every question
  llm.answer(extractions) -> the answer in every response of which the rules find none
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

from mmqa_jax.benchmarks.mathvista import UNIT
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import ANSWER_TYPE, LETTERS, PRECISION, extracted_by_rule
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting.backends import Backend, Chat, Decoding, Message
from mmqa_jax.prompting.few_shot import ask, load_template, pictures_of, read_one

Template = Literal["query", "built"]
Extract = Literal["rules", "quick", "llm"]

# Type of an answer, and its decimals -> what is asked for, and the final thing to be given.
_FORMS = {
    ("integer", None): ("an integer answer", "value, e.g., 1, 2, 3"),
    ("float", 1): ("a floating-point number with one decimal place", "value, e.g., 1.2, 1.3, 1.4"),
    ("float", 2): (
        "a floating-point number with two decimal places",
        "value, e.g., 1.23, 1.34, 1.45",
    ),
    ("list", None): ("a Python list as an answer", "list, e.g., [1, 2, 3], [1.2, 1.3, 1.4]"),
}


def answer_mathvista(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    *,
    template: Template = "query",
    picture: bool = True,
    extract: Extract = "rules",
    max_new_tokens: int = 512,
    extraction_tokens: int = 64,
) -> list[Prediction]:
    """The answer is the extraction; the trace has the response.

    Args:
      template: the question as in the authors' query.json, the hint first; or as their
        build_query.py puts it today, the hint behind and `Solution:`.
      picture: whether it is shown.
      extract: by `rules` alone, where they find none the response itself; `quick` as well the text
        in `The answer is "text".`; `llm` by the same model where the rules find none.
    """
    pictures = {q.id: pictures_of(corpus, q) if picture else () for q in questions}
    decoding = Decoding(max_new_tokens=max_new_tokens)

    def show(key: Hashable, question: Question, text: str) -> Chat:
        return Chat(key, (Message("user", (*pictures[question.id], text.strip())),), decoding)

    asked = load_template(f"mathvista.{template}")
    replies = ask(questions, None, llm, asked, fields, show)
    responses = list(map(read_one, questions, replies))
    if extract == "llm":
        return _by_model(questions, responses, llm, template, extraction_tokens)
    return _by_rules(questions, responses, quick=extract == "quick")


def extract_finished(
    questions: Sequence[Question],
    finished: Mapping[str, Mapping[str, Any]],
    llm: Backend,
    *,
    template: Template = "query",
    extraction_tokens: int = 64,
) -> list[Prediction]:
    """Another model extracts the answers of a finished run of `mathvista`, of whose trace.jsonl
    each question has a line; the extraction's prompt holds the question again, by that run's
    template."""
    responses = [Prediction(q.id, _response(finished, q.id), trace={}) for q in questions]
    return _by_model(questions, responses, llm, template, extraction_tokens)


def fields(question: Question) -> Mapping[str, str]:
    """The fields of the templates of questions."""
    unit = question.extra.get(UNIT, "")
    listed = (f"\n({LETTERS[n]}) {choice}" for n, choice in enumerate(question.choices))
    return {
        "hint": f"Hint: Please answer the question {_hint(question)} at the end.",
        "question": question.question + (f" (Unit: {unit})" if unit else ""),
        "choices": "".join(("\nChoices:", *listed)) if question.choices else "",
    }


def _hint(question: Question) -> str:
    if question.choices:
        return "and provide the correct option letter, e.g., A, B, C, D,"
    kind, decimals = question.extra.get(ANSWER_TYPE), question.extra.get(PRECISION)
    form = _FORMS.get((kind, decimals if kind == "float" else None))
    if form is None:
        named = f"{kind} with {decimals} decimals" if kind == "float" else kind
        raise UserError(
            f"question {question.id}: MathVista has no hint at an answer of type {named}; leave it "
            "out with config key data.where."
        )
    return f"requiring {form[0]} and provide the final {form[1]},"


def _by_rules(
    questions: Sequence[Question], responses: Sequence[Prediction], *, quick: bool
) -> list[Prediction]:
    predictions = []
    for question, response in zip(questions, responses, strict=True):
        extraction = extracted_by_rule(response.answer, question, quick=quick)
        answer = response.answer if extraction is None else extraction
        predictions.append(dataclasses.replace(response, answer=answer))
    return predictions


def _by_model(
    questions: Sequence[Question],
    responses: Sequence[Prediction],
    llm: Backend,
    template: Template,
    max_new_tokens: int,
) -> list[Prediction]:
    """Rules first; where the model gives no extraction the answer is empty, as the authors'."""
    decoding = Decoding(max_new_tokens=max_new_tokens)
    response_to = {response.question_id: response for response in responses}
    answers = {q.id: extracted_by_rule(response_to[q.id].answer, q) for q in questions}
    left = [question for question in questions if answers[question.id] is None]
    query = load_template(f"mathvista.{template}")

    def show(key: Hashable, question: Question, text: str) -> Chat:
        return Chat(key, (Message("user", (text,)),), decoding)

    def of_extraction(question: Question) -> Mapping[str, str]:
        asked = query.render([], fields(question)).strip()
        return {"query": asked, "response": response_to[question.id].answer}

    replies = ask(left, None, llm, load_template("mathvista.extract"), of_extraction, show)
    extracted = dict(zip((q.id for q in left), map(read_one, left, replies), strict=True))
    predictions = []
    for question in questions:
        response, new = response_to[question.id], extracted.get(question.id)
        answer = answers[question.id]
        trace = {**response.trace, "outputs": [{"text": response.answer}]}
        if new is not None:
            answer = new.answer
            for key in ("prompts", "outputs", "failed", "too_long"):
                joined = [*trace.get(key, ()), *new.trace.get(key, ())]
                trace |= {key: joined} if joined else {}
        predictions.append(Prediction(question.id, answer or "", trace=trace))
    return predictions


def _response(finished: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """The response in a finished run's trace."""
    outputs = finished.get(name, {}).get("outputs", [])
    if name not in finished or not isinstance(outputs, list):
        raise UserError(
            f"config key parts.finished.run: has no responses to question {name}; name a finished "
            "run of setting mathvista on the same questions."
        )
    return str(outputs[0]["text"]) if outputs else ""


def _check_hints(questions: Sequence[Question], options: Mapping[str, Any]) -> None:
    for question in questions:
        _hint(question)


SETTINGS = {
    "mathvista": Setting(answer_mathvista, rule_of_inputs=_check_hints),
    "extracted": Setting(extract_finished, rule_of_inputs=_check_hints),
}
