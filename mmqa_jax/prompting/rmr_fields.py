"""What RMR's templates say of a question: its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
