"""Multimodal-CoT (Zhang et al., 2023; TMLR 2024): a rationale is written, then the answer with it.

Two T5s that see the picture's vectors: the first writes lecture and explanation, the second reads
them behind the question (original: amazon-science/mm-cot).

  rationale_model.write(questions, texts, max_new_tokens) -> a rationale for every question
  answer_model.write(questions, texts, max_new_tokens)    -> `The answer is (X).`
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import letter_index
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting.rationales import Format, is_rationale, source_text, target_text

Decoding = Literal["written", "forced"]
_ANSWER = re.compile(r"The answer is \(([A-Z])\)")


class Writer(Protocol):
    """Writes a text about a question with its picture."""

    def write(
        self, questions: Sequence[Question], texts: Sequence[str], max_new_tokens: int
    ) -> list[str]:
        """A text for every question."""

    def forced(
        self,
        questions: Sequence[Question],
        texts: Sequence[str],
        targets: Sequence[str],
        max_new_tokens: int,
    ) -> list[str]:
        """The likeliest token in each place of every question's right text."""


def answer_mmcot(
    questions: Sequence[Question],
    rationale_model: Writer,
    answer_model: Writer,
    *,
    rationale_format: Format = "QCM-LE",
    answer_format: Format = "QCMG-A",
    captions: bool = False,
    decoding: Decoding = "written",
    rationale_tokens: int = 511,
    answer_tokens: int = 63,
) -> list[Prediction]:
    """Section 3: rationale generation, then answer inference.

    An answer that names no option, or names two, is wrong; the authors' code draws one of five at
    random.

    Args:
      rationale_format, answer_format: see prompting.rationales.
      captions: whether the picture's caption is read.
      decoding: `written` generates both texts (the authors' --use_generate). `forced` takes the
        likeliest token in each place behind the right text, as the commands of the authors' first
        version do, of which the published figures are: the rationale that the second stage reads is
        then close to the right one.
      rationale_tokens, answer_tokens: new tokens at most (the authors' --output_len, which counts
        the decoder's first input).
    """

    def say(model: Writer, texts: Sequence[str], format: Format, most: int) -> list[str]:
        if decoding == "written":
            return model.write(questions, texts, most)
        return model.forced(questions, texts, [target_text(q, format) for q in questions], most)

    asked = [source_text(q, rationale_format, captions=captions) for q in questions]
    rationales = say(rationale_model, asked, rationale_format, rationale_tokens)
    asked = [
        source_text(question, answer_format, rationale, captions=captions)
        for question, rationale in zip(questions, rationales, strict=True)
    ]
    answers = say(answer_model, asked, answer_format, answer_tokens)
    return [
        Prediction(
            question.id,
            answer,
            choice=chosen_option(answer, len(question.choices)),
            trace={"prompts": [text], "outputs": [{"text": rationale}, {"text": answer}]},
        )
        for question, text, rationale, answer in zip(
            questions, asked, rationales, answers, strict=True
        )
    ]


def chosen_option(text: str, choices: int) -> int | None:
    """The option of `The answer is (X)`, exactly once (extract_ans of main.py)."""
    letters = _ANSWER.findall(text)
    return letter_index(letters[0], choices) if len(letters) == 1 else None


def _check_formats(options: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Refuses a first stage that answers, and a second one that reads or writes none."""
    if not is_rationale(options["rationale_format"]):
        raise UserError(
            f"config key options.rationale_format={options['rationale_format']}: writes an answer; "
            "use QCM-LE or QCM-E."
        )
    if options["answer_format"] != "QCMG-A":
        raise UserError(
            f"config key options.answer_format={options['answer_format']}: does not answer with a "
            "rationale; use QCMG-A."
        )


def _check_answers(questions: Sequence[Question], options: Mapping[str, Any]) -> None:
    """Refuses questions without the right text where it is shown."""
    hidden = sum(question.answer_index is None for question in questions)
    if options["decoding"] == "forced" and hidden:
        raise UserError(
            f"config key options.decoding=forced: shows the right text, which {hidden:,} of "
            f"{len(questions):,} questions hide; set it to written."
        )


def _note_forced(questions: Sequence[Question], options: Mapping[str, Any]) -> list[str]:
    if options["decoding"] == "written":
        return []
    return [
        "decoding=forced: each token of a rationale was chosen behind the right ones, as for the "
        "published figures; options.decoding=written generates"
    ]


SETTINGS = {
    "mmcot": Setting(
        answer_mmcot,
        of_choices=True,
        rule_of_row=_check_formats,
        rule_of_inputs=_check_answers,
        write_notes=_note_forced,
    )
}
