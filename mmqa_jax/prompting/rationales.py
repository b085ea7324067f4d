"""Solved questions with their rationales in words, for prompts and for training.

RMR's templates take the fields of a question; Multimodal-CoT's T5 reads and learns whole texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats.official import CAPTION
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.multiple_choice import LETTERS
from mmqa_jax.prompting.few_shot import NO_CONTEXT, majority_answer

Rationale = Literal["solution", "lecture_solution"]


def fields(question: Question, rationale: Rationale = "solution") -> Mapping[str, str]:
    r"""The fields of RMR's templates; the context is the hint, then the picture's caption.

    A triplet's rationale is its solution, or its lecture and then its solution, as in ScienceQA's
    format QCM-LEA. Its line breaks are the two characters `\n` in `solution`, as in ScienceQA's
    prompts, and blanks in `rationale`. The answer of a question without options is its short one.
    """
    hint, caption = (str(question.extra.get(key, "")) for key in ("hint", "caption"))
    listed = (f"({LETTERS[i]}) {choice}" for i, choice in enumerate(question.choices))
    known = question.answer_index is not None
    lecture = str(question.extra.get("lecture", "")) if rationale == "lecture_solution" else ""
    reasons = " ".join(filter(None, (lecture, question.rationale)))
    return {
        "question": question.question.strip(),
        "context": f"{hint} {caption}".strip() or NO_CONTEXT,
        "options": " ".join(listed),
        "solution": reasons.replace("\n", "\\n"),
        "rationale": " ".join(reasons.split()),
        "answer": question.choices[question.answer_index] if known else majority_answer(question),
        "letter": LETTERS[question.answer_index] if known else "",
    }


# Multimodal-CoT's texts: what its T5 reads of a ScienceQA question, and what it learns to write.
#
# Formats are those of amazon-science/mm-cot utils_prompt.py: `QCM` reads question, context and
# options, `QCMG` a rationale too; written are lecture `L`, explanation `E` and answer `A` in the
# order of the letters. Runs of white space become one blank, as utils_data.py has it.


Format = Literal["QCM-LE", "QCM-E", "QCM-A", "QCM-LEA", "QCM-ALE", "QCMG-A"]
_OPTIONS = LETTERS[:5]  # that the authors' code knows


def source_text(
    question: Question, format: Format, rationale: str | None = None, *, captions: bool = False
) -> str:
    """Writes what is read: with the rationale that was written for the question, or its own (None),
    in formats with `G`; the picture's caption follows the hint where `captions` says so
    (`--use_caption`)."""
    hint = str(question.extra.get("hint", ""))
    caption = str(question.extra.get(CAPTION, "")) if captions else ""
    options = (f"({_letter(n, question)}) {choice}" for n, choice in enumerate(question.choices))
    text = (
        f"Question: {question.question}\nContext: {f'{hint} {caption}'.strip() or NO_CONTEXT}\n"
        f"Options: {' '.join(options)}\n"
    )
    read, written = format.split("-")
    if read == "QCMG":
        solution = f"Solution: {_lecture(question)} {_explanation(question)}"
        text += f"{solution if rationale is None else rationale}\n"
    return _spaced(text + ("Answer:" if written == "A" else "Solution:"))


def target_text(question: Question, format: Format) -> str:
    """What is learned; of a question whose answer is known."""
    assert question.answer_index is not None
    answer = f"The answer is ({_letter(question.answer_index, question)})."
    lecture, explanation = _lecture(question), _explanation(question)
    text = {
        "A": answer,
        "E": f"Solution: {explanation}",
        "LE": f"Solution: {lecture} {explanation}.",
        "LEA": f"{lecture} {explanation} {answer}",
        "ALE": f"{answer} BECAUSE: {lecture} {explanation}",
    }[format.split("-")[1]]
    # As the authors' code does it to the whole text, wherever the word stands.
    return _spaced(text.replace("Answer:", ""))


def is_rationale(format: Format) -> bool:
    """Whether a rationale alone is written, and no answer."""
    return "A" not in format.split("-")[1]


def _lecture(question: Question) -> str:
    return str(question.extra.get("lecture", "")).replace("\n", "\\n")


def _explanation(question: Question) -> str:
    return question.rationale.replace("\n", "\\n")


def _letter(number: int, question: Question) -> str:
    if number >= len(_OPTIONS):
        raise UserError(
            f"question {question.id}: has {len(question.choices)} options, Multimodal-CoT knows "
            f"{len(_OPTIONS)}; leave it out of the data (in a row, with config key data.where)."
        )
    return _OPTIONS[number]


def _spaced(text: str) -> str:
    return " ".join(text.split())
