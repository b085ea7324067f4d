"""Parses choices from answers: every benchmark's own rule, as a function of the answer's text.

A rule returns the index of the choice, or None where the text names none of the question's
choices: an empty answer, a refusal, a letter out of range, two letters. The scores count None as
wrong (scienceqa/letter_or_random and letter_or_expected excepted) and report how many there were.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.prediction_lines import OTHERS, Row, answers_of, id_of, json_rows
from mmqa_jax.evaluation.scores import NO_OPTION

LETTERS = string.ascii_uppercase

_THE_ANSWER_IS = re.compile(r"The answer is ([A-Z]).")
_ANSWER_IS = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_SCIENCEQA_LETTERS = "ABCDE"
_PUNCTUATION = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_STRIPPED_BY_MMMU = ",.!?;:'"
_WORDS_WITHOUT_CONTENT = 5
_API_FAILURE = "Failed to obtain answer via API"
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)


def letter_index(letter: str, choices: int) -> int | None:
    """0 for `A`, 1 for `B`, ...; None for anything but the letter of one of this many choices."""
    index = LETTERS.find(letter) if len(letter) == 1 else -1
    return index if 0 <= index < choices else None


def gpt3_choice(text: str, choices: int) -> int | None:
    """ScienceQA's rule (models/run_gpt3.py:48-57): `The answer is X.`, exactly once.

    The original's period is a regex's: any character may follow the letter, but one has to.
    """
    letters = _THE_ANSWER_IS.findall(text.strip())
    return letter_index(letters[0], choices) if len(letters) == 1 else None


def random_choice(question_id: str, choices: int, seed: int = 10) -> int:
    """The choice drawn where ScienceQA's rule finds none (get_pred_idx of run_gpt3.py).

    Drawn by seed and question, so that it does not depend on the order of the questions; 10 is the
    original's seed.
    """
    return random.Random(f"{seed}:{question_id}").randrange(choices)


def llava_choice(text: str, choices: int) -> int | None:
    """LLaVA's rule for ScienceQA (llava/eval/eval_science_qa.py:64-74).

    The whole text is a letter; or begins with a letter and `. `; or ScienceQA's own rule, without
    the strip.
    """
    if text in tuple(_SCIENCEQA_LETTERS):
        return letter_index(text, choices)
    if text[:1] in tuple(_SCIENCEQA_LETTERS) and text[1:3] == ". ":
        return letter_index(text[0], choices)
    letters = _THE_ANSWER_IS.findall(text)
    return letter_index(letters[0], choices) if len(letters) == 1 else None


def vlmeval_choice(text: str, choices: Sequence[str], *, answer_is: bool = False) -> int | None:
    """VLMEvalKit's inference without a judge (vlmeval/utils/matching_util.py, can_infer).

    One option letter among the words, in one of the last four; else one choice whose text the
    answer contains, if the answer is at most twice as long as all choices. A refusal, or the word
    `Z` without an option letter, names none.

    This is the rule of August 2025 (commit c3371551). Before, the letter could stand anywhere and
    the answer be of any length.

    Args:
      answer_is: the rule since June 2026 (a67ace50): where the letters do not tell, the first
        `answer is X` does, of whatever case and whatever follows, before the choices' texts. So
        `The answer is a dog` is A, and `the answer is blue` B.
    """
    if _API_FAILURE not in text:
        if any(refusal in text for refusal in _REFUSALS):
            return None
        words = text.translate(_PUNCTUATION).split()
        named = [letter for letter in LETTERS[: len(choices)] if letter in words]
        if not named and "Z" in words:
            return None
        if len(named) == 1 and words.index(named[0]) > len(words) - 5:
            return LETTERS.index(named[0])
        if answer_is and (stated := _ANSWER_IS.search(text)):
            index = LETTERS.index(stated[1].upper())
            if index < len(choices):
                return index
    lowered = text.lower()
    if len(lowered) > 2 * sum(map(len, choices)):
        return None
    contained = [index for index, choice in enumerate(choices) if choice.lower() in lowered]
    return contained[0] if len(contained) == 1 else None


def mmmu_choice(text: str, choices: int, contents: Sequence[str] = ()) -> int | None:
    """MMMU's rule for so many choices, without its random choice (mmmu/utils/eval_utils.py).

    The option whose letter stands in brackets, else between spaces; else, in an answer of more than
    five words, whose content it holds. Of several the one that is named last. `contents` are the
    choices' texts; () where they are not looked for, as by MRAG-Bench.
    """
    for mark in _STRIPPED_BY_MMMU:
        text = text.strip(mark)
    text = f" {text} "
    for around in ("({})", " {} "):
        marks = {n: around.format(LETTERS[n]) for n in range(choices)}
        places = {n: text.rfind(mark) for n, mark in marks.items() if mark in text}
        if places:
            return max(places, key=places.__getitem__)
    if len(text.split()) <= _WORDS_WITHOUT_CONTENT:
        return None
    lowered = text.lower()
    places = {n: lowered.rfind(content.lower()) for n, content in enumerate(contents)}
    places = {n: place for n, place in places.items() if place >= 0}
    return max(places, key=places.__getitem__) if places else None


def exact_letter_choice(text: str, choices: int) -> int | None:
    """SEED-Bench's comparison: the answer is the letter and nothing else (eval.py:92-97).

    LLaVA's scripts/convert_seed_for_submission.py compares likewise.
    """
    return letter_index(text, choices)


def likeliest_choice(losses: Sequence[float]) -> int:
    """The choice of least loss [choice], the first of equals (SEED-Bench eval.py:70-73)."""
    return int(np.argmin(losses))


# Answers that are one of a question's choices: read from JSON lines, chosen by a rule, counted.
#
# A prediction that has a choice and no text, or no text but that choice's, counts by its choice
# under every rule. Lines are {"question_id", "text"} (LLaVA), {"question_id", "prediction"} or
# {"question_id", "losses"}; they may end in a comma, as in SEED-Bench's evaluate_result/, or be a
# JSON list. The first line says of which kind all of a file are. Null, a choice out of range and
# losses that are not numbers are answers that name no choice.


Given = Mapping[str, Prediction]
Rule = Callable[[str, Question], int | None]


def has_answer(question: Question) -> bool:
    """Whether the correct choice is published."""
    return question.answer_index is not None


def chosen_by(questions: Sequence[Question], predictions: Given, rule: Rule) -> list[int | None]:
    """Each question's choice: by the rule from the answer's text, or as given where it has none."""
    choices: list[int | None] = []
    for question in questions:
        prediction = predictions.get(question.id)
        if prediction is None:
            choices.append(None)
        elif by_choice(prediction, question):
            choices.append(prediction.choice)
        else:
            choices.append(rule(prediction.answer, question))
    return choices


def by_choice(prediction: Prediction, question: Question) -> bool:
    """Whether a prediction is a choice, and no text that a rule could read otherwise."""
    if prediction.choice is None:
        return False
    text = question.choices[prediction.choice]
    return prediction.answer in ("", text, f"{LETTERS[prediction.choice]}. {text}")


def right_choices(questions: Sequence[Question], choices: Sequence[int | None]) -> np.ndarray:
    """1.0 where the choice is the correct one; [question]."""
    pairs = zip(questions, choices, strict=True)
    return np.array([float(choice == question.answer_index) for question, choice in pairs])


def unparsed_choices(
    questions: Sequence[Question], predictions: Given, choices: Sequence[int | None]
) -> int:
    """How many predictions name none of their question's choices."""
    pairs = zip(questions, choices, strict=True)
    return sum(question.id in predictions and choice is None for question, choice in pairs)


def read_choice_lines(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads JSON lines with a text, a letter or losses; or predictions.jsonl."""
    return choices_of(path, list(json_rows(path)), questions)


def choices_of(
    path: Path, rows: Sequence[tuple[str, Row]], questions: Sequence[Question]
) -> list[Prediction]:
    """The predictions of a file's rows, which are all of the first one's kind."""
    first = rows[0][1] if rows else {}
    kind = next((key for key in OTHERS if key in first), None)
    counts = {question.id: len(question.choices) for question in questions}
    if kind is None:
        return answers_of(path, rows, question_ids=counts)
    predictions = []
    for where, row in rows:
        if kind not in row or ("q_id" in row) != ("q_id" in first):
            raise UserError(
                f"{where}: its keys are {', '.join(row)}, but those of the first line are "
                f"{', '.join(first)}; write all lines alike."
            )
        predictions.append(_line(where, row, kind, counts))
    return predictions


def _line(where: str, row: Row, kind: str, counts: Mapping[str, int]) -> Prediction:
    """The prediction of a row; `counts` is question id -> number of choices."""
    id_key = "q_id" if "q_id" in row else "question_id"
    name, value = id_of(row.get(id_key), where, counts, id_key), row[kind]
    if kind == "losses":
        return Prediction(name, choice=_likeliest(where, value, counts.get(name)))
    if not isinstance(value, str | None):
        raise UserError(f"{where}: {kind} is {value!r:.60}; text was expected.")
    if id_key == "q_id" and value:  # the first official eval.py, which ranks by loss
        index = letter_index(value, counts.get(name, 0))
        return Prediction(name, choice=NO_OPTION if index is None else index)
    return Prediction(name, value or "")


def _likeliest(where: str, losses: Any, count: int | None) -> int | None:
    """The choice of least loss; NO_OPTION where one is NaN or null, None for null alone."""
    if losses is None:
        return None
    if (
        not isinstance(losses, list)
        or not all(x is None or real_number(x, finite=False) is not None for x in losses)
        or not 0 < len(losses) == (count or len(losses))
    ):
        raise UserError(
            f"{where}: losses is {losses!r:.60}; a number for each choice was expected."
        )
    if any(loss is None or math.isnan(loss) for loss in losses):
        return NO_OPTION
    return likeliest_choice(losses)


def read_choice_object(path: Path, known: Container[str]) -> list[Prediction]:
    """Reads {"results": {pid: index}, "outputs": {pid: text}}, as ScienceQA and LLaVA write it.

    An index that is none of the question's choices is no choice, such as -1, LLaVA's mark of an
    answer without a letter.
    """
    data = read_json(path, unique_keys=True)
    parts = ("results", "outputs")
    if not isinstance(data, dict) or not any(isinstance(data.get(p), dict) for p in parts):
        raise UserError(
            f'{path}: {{"results": {{pid: index}}}} was expected, or "outputs": {{pid: text}}; '
            "give ScienceQA's or LLaVA's results file, or predictions.jsonl."
        )
    results, outputs = (_by_pid(f"{path}, {part}", data.get(part) or {}, known) for part in parts)
    for pid, value in outputs.items():
        if not isinstance(value, str | None):
            raise UserError(
                f"{path}, outputs, problem {pid}: {value!r} was found and text expected; correct "
                "it."
            )
    choices = {pid: _index(f"{path}, results, problem {pid}", x) for pid, x in results.items()}
    return [
        Prediction(pid, outputs.get(pid) or "", choice=choices.get(pid))
        for pid in dict.fromkeys((*results, *outputs))
    ]


def _by_pid(where: str, part: Any, known: Container[str]) -> dict[str, Any]:
    """pid -> value; UserError where `11` and `11.0` name one problem twice."""
    if not isinstance(part, dict):
        raise UserError(f"{where}: an object {{pid: ...}} was expected; correct it.")
    by_pid: dict[str, Any] = {}
    for written, value in part.items():
        pid = id_of(written, where, known, "pid")
        if pid in by_pid:
            raise UserError(f"{where}: problem {pid} is there twice; keep one.")
        by_pid[pid] = value
    return by_pid


def _index(where: str, value: Any) -> int | None:
    """A choice's number, by `int` as in tools/evaluate_acc.py; null is None, NaN no option."""
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return NO_OPTION
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:  # no number, or a text of too many digits
            pass
    raise UserError(
        f"{where}: {value!r} was found and a choice's number from 0 expected; correct it."
    )


def shown_answer(prediction: Prediction) -> str:
    """The answer as a file shows it: its text, or the letter of its choice."""
    if prediction.answer or prediction.choice is None:
        return prediction.answer
    return LETTERS[prediction.choice]
