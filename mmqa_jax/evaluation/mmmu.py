"""MMMU's scores and prediction files (MMMU-Benchmark/MMMU, mmmu/utils/eval_utils.py).

    mmmu/official         responses are parsed; where no letter is found one is drawn, with the
                          script's seed (main_parse_and_eval.py)
    mmmu/unparsed_wrong   the same without the draw
    mmmu/letter           answers are parsed already: of a choice the letter alone counts
                          (main_eval_only.py)

An open question is right if one of the numbers and phrases in the response is an answer. Files are
{id: letter or text}, which the leaderboard takes, or a subject's output.json, a list of
{"id", "response"}.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.datasets.mmmu import DIFFICULTY, DISCIPLINES, place_of
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.choice_scores import Given, Rule, chosen_by
from mmqa_jax.evaluation.multiple_choice import LETTERS, exact_letter_choice, mmmu_choice
from mmqa_jax.evaluation.prediction_lines import read_answers_by
from mmqa_jax.evaluation.scores import (
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.evaluation.scoring import Evaluation

OFFICIAL, STRICT, LETTER = "mmmu/official", "mmmu/unparsed_wrong", "mmmu/letter"
SEED = 42  # of the script's random choices
_DECIMALS = 2
# Before what may be an answer; `=` only on a response's last line.
_BEFORE_ANSWERS = (
    *("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result "),
)
_TRIVIAL = (":", ",", ".", "!", "?", ";", "'")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?(?<!\d)\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:(?<!\d)\d+\.\d+|\.\d+|(?<!\d)\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


def has_answer(question: Question) -> bool:
    """Whether a question's answer is published."""
    return bool(question.answers)


def open_answers(response: str) -> list[str | float]:
    """What an open question's response may mean: numbers, and phrases in lower case."""
    lines = response.strip().strip(".").lower().split("\n")
    phrases = []
    for number, line in enumerate(lines, start=1):
        marks = (*_BEFORE_ANSWERS, *(("=",) if number == len(lines) else ()))
        tails = [line.split(mark)[-1].strip() for mark in marks if mark in line]
        shortest = ""
        for tail in tails:
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest and shortest not in _TRIVIAL:
            phrases.append(shortest)
    phrases = phrases or ["\n".join(lines)]
    numbers = [one for phrase in phrases for form in _NUMBERS for one in form.findall(phrase)]
    return [form for text in (*phrases, *numbers) for form in _normalized(text)]


def is_open_answer(response: str, answers: Sequence[str]) -> bool:
    """Whether a response holds one of an open question's answers."""
    wanted = [form for answer in answers for form in _normalized(answer)]
    words = [one for one in wanted if isinstance(one, str)]
    return any(
        any(word in said for word in words) if isinstance(said, str) else said in wanted
        for said in open_answers(response)
    )


def _normalized(text: str) -> list[str | float]:
    """A number with two decimals; or the text in lower case, one character with a space beside."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), _DECIMALS)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def score_mmmu(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Accuracy overall, by discipline and subject, by kind of question and by difficulty.

    A missing prediction is wrong; the scripts leave it out.
    """
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_answer, "a published answer")
    found = _choices(scored, given, _by_script)
    letters = _choices(scored, given, _by_letter)
    drawn = found | _drawn(questions, given)
    unparsed = sum(q.id in given and q.id not in found for q in scored if q.choices)
    without = sum(q.id in given and q.id not in letters for q in scored if q.choices)
    per_question = {
        OFFICIAL: _right(scored, given, drawn),
        STRICT: _right(scored, given, found),
        LETTER: _right(scored, given, letters),
    }
    scores = scores_of(questions, scored, given, per_question, _groups(scored))
    return Evaluation(
        [scores],
        has_modalities=False,
        unparsed={OFFICIAL: unparsed, STRICT: unparsed, LETTER: without},
    )


def _by_script(text: str, question: Question) -> int | None:
    return mmmu_choice(text, len(question.choices), question.choices)


def _by_letter(text: str, question: Question) -> int | None:
    return exact_letter_choice(text, len(question.choices))


def _choices(questions: Sequence[Question], given: Given, rule: Rule) -> dict[str, int]:
    """Question id -> the choice that its prediction names, where it names one."""
    asked = [question for question in questions if question.choices]
    found = zip(asked, chosen_by(asked, given, rule), strict=True)
    return {question.id: choice for question, choice in found if choice is not None}


def _drawn(questions: Sequence[Question], given: Given) -> dict[str, int]:
    """The choices that the script draws where it finds none, subject by subject."""
    draw = random.Random(SEED)
    failed = [q for q in questions if q.choices and q.id in given]
    found = _choices(failed, given, _by_script)
    return {
        question.id: LETTERS.index(draw.choice(LETTERS[: len(question.choices)]))
        for question in sorted(failed, key=place_of)
        if question.id not in found
    }


def _right(
    questions: Sequence[Question], given: Given, chosen: Mapping[str, int]
) -> np.ndarray:  # float64[question]
    return np.array(
        [
            chosen.get(q.id) == q.answer_index
            if q.choices
            else q.id in given and is_open_answer(given[q.id].answer, q.answers)
            for q in questions
        ],
        float,
    )


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    subjects = np.array([question.category for question in questions])
    levels = np.array([str(question.extra.get(DIFFICULTY, "")) for question in questions])
    has_choices = np.array([bool(question.choices) for question in questions])
    groups = {}
    for discipline, own in DISCIPLINES.items():
        groups[f"Overall-{discipline}"] = np.isin(subjects, own)
        groups |= {name: subjects == name for name in own}
    groups |= {"multiple-choice": has_choices, "open": ~has_choices}
    known = filter(None, dict.fromkeys(levels.tolist()))
    return groups | {f"difficulty: {name}": levels == name for name in known}


def read_mmmu_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads {id: answer}, a list of {"id", "response"}, or predictions.jsonl."""
    data = read_json(path, unique_keys=True) if path.suffix == ".json" else None
    if not isinstance(data, dict):
        return read_answers_by(path, "id", "response", {question.id for question in questions})
    for name, said in data.items():
        if not isinstance(said, str | None):
            raise UserError(f"{path}, {name}: a letter or a text was expected; correct it.")
    return [Prediction(name, said or "") for name, said in data.items()]


def write_mmmu_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes {id: letter, or text of an open question} of every question.

    Where no letter is found it is the one that the script draws; "" where there is no prediction.
    """
    given = predictions_by_question(questions, predictions)
    chosen = _choices(questions, given, _by_script) | _drawn(questions, given)
    texts = {q.id: given[q.id].answer for q in questions if q.id in given and not q.choices}
    letters = {name: LETTERS[index] for name, index in chosen.items()}
    write_json(path, {q.id: (texts | letters).get(q.id, "") for q in questions})
