"""MathVista's extraction rules, scores and result file (lupantech/MathVista, evaluation/).

    mathvista/official      answers are extractions (calculate_score.py): of a choice the letter, or
                            the option of least edit distance; numbers rounded; lists as they are
    mathvista/empty_wrong   the same with --ignore_empty_extractions: an empty one names no option

Extractions come from responses by rules, and by a language model where these find none
(extract_answer.py; papers/mathvista.py asks it). The file is {pid: problem with `extraction`}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.datasets.mathvista import ANSWER_TYPE, GROUPS, KIND, PRECISION
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.choice_scores import by_choice
from mmqa_jax.evaluation.multiple_choice import LETTERS
from mmqa_jax.evaluation.prediction_lines import read_answers
from mmqa_jax.evaluation.scores import (
    group_of,
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.evaluation.scoring import Evaluation

OFFICIAL, EMPTY_WRONG = "mathvista/official", "mathvista/empty_wrong"
_BRACKETED = re.compile(r"\(([a-zA-Z])\)")


def has_answer(question: Question) -> bool:
    """Whether a question's answer is published."""
    return bool(question.answers)


def extracted_by_rule(response: str, question: Question, *, quick: bool = False) -> str | None:
    """What extract_answer.py takes from a response without a language model; None: it asks one.

    Args:
      quick: its --quick_extract, the text in `The answer is "text".`
    """
    if response == "" or response in question.choices:
        return response
    kind = question.extra.get(ANSWER_TYPE)
    try:
        if kind == "integer":
            return str(int(response))
        if kind == "float":
            return str(float(response))
    except ValueError:
        pass
    # `The answer is "(.*)"\.` as the script searches it, in time linear in the response.
    for line in response.split("\n") if quick else ():
        rest = line.partition('The answer is "')[2]
        if '".' in rest:
            return rest.rpartition('".')[0]
    return None


def normalized(extraction: str, question: Question, *, ignore_empty: bool = False) -> str | None:
    """An extraction as the answer's type has it; None where it is no such number.

    Args:
      ignore_empty: an empty extraction is no option, and not the shortest one.
    """
    if question.choices:
        return _option(extraction.strip(), question.choices, ignore_empty=ignore_empty)
    try:
        if question.extra[ANSWER_TYPE] == "integer":
            return str(int(float(extraction)))
        if question.extra[ANSWER_TYPE] == "float":
            return str(round(float(extraction), question.extra[PRECISION]))
    except (ValueError, OverflowError):
        return None
    return extraction


def _option(said: str, choices: Sequence[str], *, ignore_empty: bool) -> str | None:
    if ignore_empty and not said:
        return None
    bracketed = _BRACKETED.search(said)
    if bracketed is not None:
        said = bracketed[1].upper()
    if len(said) == 1 and said in LETTERS[: len(choices)]:
        return choices[LETTERS.index(said)]
    return min(choices, key=lambda choice: edit_distance(said, choice))


def edit_distance(first: str, second: str) -> int:
    """Levenshtein's: insertions, deletions and substitutions that turn one text into the other."""
    shorter, longer = sorted((first, second), key=len)
    codes = np.array([*map(ord, longer)], np.int64)
    steps = np.arange(len(longer) + 1)
    row = steps.copy()  # of the shorter one's first characters, to each prefix of the longer one
    for character in shorter:
        best = row + 1
        best[1:] = np.minimum(best[1:], row[:-1] + (codes != ord(character)))
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])


def score_mathvista(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Accuracy overall and by each of the official script's keys; a missing prediction is wrong."""
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_answer, "a published answer")

    def right(*, ignore_empty: bool) -> np.ndarray:
        return np.array(
            [
                q.id in given
                and normalized(_said(given[q.id], q), q, ignore_empty=ignore_empty) == q.answers[0]
                for q in scored
            ],
            float,
        )

    per_question = {
        OFFICIAL: right(ignore_empty=False),
        EMPTY_WRONG: right(ignore_empty=True),
    }
    scores = scores_of(questions, scored, given, per_question, _groups(scored))
    none = sum(
        q.id in given and normalized(_said(given[q.id], q), q, ignore_empty=True) is None
        for q in scored
    )
    return Evaluation([scores], has_modalities=False, unparsed={OFFICIAL: none, EMPTY_WRONG: none})


def _said(prediction: Prediction, question: Question) -> str:
    """A prediction's extraction; of one that chose, the letter."""
    chosen = by_choice(prediction, question)
    return LETTERS[prediction.choice] if chosen else prediction.answer


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    def values(question: Question, key: str) -> Sequence[str]:
        value = question.extra.get(key, ())
        return (value,) if isinstance(value, str) else value

    return {
        f"{key}: {name}": group_of(questions, lambda q, key=key, name=name: name in values(q, key))
        for key in (KIND, ANSWER_TYPE, *GROUPS)
        for name in sorted({name for question in questions for name in values(question, key)})
    }


def read_mathvista_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads {pid: problem with `extraction`, or else `response`}, or predictions.jsonl.

    A response without an extraction stands for itself where the rules find none in it. An
    extraction that is no text is read as Python writes it, as calculate_score.py does.
    """
    if path.suffix != ".json":
        return read_answers(path, question_ids={question.id for question in questions})
    data = read_json(path, unique_keys=True)
    if not isinstance(data, dict):
        raise UserError(
            f"{path}: {{pid: problem}} was expected, with `extraction` in each; give MathVista's "
            "result file."
        )
    known = {question.id: question for question in questions}
    found = []
    for pid, problem in data.items():
        values = problem if isinstance(problem, dict) else {}
        said = values.get("extraction", values.get("response"))
        if isinstance(said, bool | dict) or not values.keys() & {"extraction", "response"}:
            raise UserError(
                f"{path}, problem {pid}: `extraction` or `response` was expected, as text, number "
                "or list; correct it."
            )
        said = "" if said is None and "extraction" not in values else str(said)
        if "extraction" not in values and pid in known:
            by_rule = extracted_by_rule(said, known[pid])
            said = said if by_rule is None else by_rule
        found.append(Prediction(pid, said))
    return found


def write_mathvista_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes what calculate_score.py reads, a problem with its extraction for each question."""
    given = predictions_by_question(questions, predictions)
    problems = {}
    for question in questions:
        problem = {
            "pid": question.id,
            "question": question.question,
            "choices": list(question.choices) or None,
            **{key: question.extra.get(key) for key in (KIND, ANSWER_TYPE, PRECISION)},
            "metadata": {key: question.extra[key] for key in GROUPS if key in question.extra},
            "extraction": _said(given[question.id], question) if question.id in given else "",
        }
        if question.answers:
            problem["answer"] = question.answers[0]
        problems[question.id] = problem
    write_json(path, problems)
