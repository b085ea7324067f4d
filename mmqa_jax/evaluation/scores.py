"""Scores as every scorer returns them, and the pairing of predictions with questions.

Files of one prediction a line are our predictions.jsonl and others' lines. Odd answers are no
mistakes of the file: null is an empty answer, and is counted as one.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import ONE_A_LINE, parse_json, read_json, read_text
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.schema import Prediction, Question, prediction_of

# Keys by which lines give an answer: ours, of which there may be several, and others'.
OURS = ("answer", "choice", "sources")
OTHERS = ("text", "prediction", "losses")
_LIST = re.compile(r"\s*\[\s*[{\]]")  # a JSON list of objects, or an empty one

Row = dict[str, Any]


def json_rows(path: str | os.PathLike) -> Iterator[tuple[str, Row]]:
    """(place for messages, object) of every line, or of every entry of a JSON list.

    A comma may end a line, as in SEED-Bench's published results.
    """
    text = read_text(path)
    if _LIST.match(text):
        rows = ((f"{path}, entry {n}", row) for n, row in enumerate(read_json(path), start=1))
    else:
        lines = enumerate(text.split("\n"), start=1)
        places = ((f"{path}, line {n}", line) for n, line in lines if line.strip())
        rows = ((place, _parsed(place, line)) for place, line in places)
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object; correct it.")
        yield where, row


def holds_lines(path: Path) -> bool:
    """Whether a file holds lines with a question each, whatever its name."""
    if path.suffix == ".jsonl":
        return True
    first = read_text(path).lstrip().partition("\n")[0]
    try:
        row = parse_json(first.rstrip().removesuffix(","), str(path))
    except UserError:  # an object of many lines, or damage that its reader names
        return False
    return isinstance(row, dict) and "question_id" in row


def read_answers(
    path: str | os.PathLike,
    source_ids: Container[str] | None = None,
    question_ids: Container[str] = (),
) -> list[Prediction]:
    """Reads predictions.jsonl; see `answers_of`."""
    return answers_of(path, json_rows(path), source_ids, question_ids)


def read_own_lines(path: Path, questions: Iterable[Question] = ()) -> list[Prediction]:
    """Reads predictions.jsonl of these questions."""
    return read_answers(path, question_ids={question.id for question in questions})


def read_lines(
    path: Path, questions: Iterable[Question] = (), *, id_key: str, text_key: str
) -> list[Prediction]:
    """Reads a benchmark's lines {id_key: text, text_key: text or null}, or predictions.jsonl."""
    question_ids = {question.id for question in questions}
    rows = list(json_rows(path))
    if not any(id_key in row and text_key in row for _, row in rows):
        return answers_of(path, rows, question_ids=question_ids)
    predictions = []
    for where, row in rows:
        name, text = row.get(id_key), row.get(text_key)
        if not isinstance(name, str) or not isinstance(text, str | None):
            raise UserError(
                f'{where}: {{"{id_key}": text, "{text_key}": text}} was expected; correct it.'
            )
        predictions.append(Prediction(name, text or ""))
    return predictions


def answers_of(
    path: str | os.PathLike,
    rows: Iterable[tuple[str, Row]],
    source_ids: Container[str] | None = None,
    question_ids: Container[str] = (),
) -> list[Prediction]:
    """The predictions of predictions.jsonl's rows, as `json_rows` gives them.

    Cited sources are checked where the corpus's `source_ids` are given; for `question_ids` see
    `id_of`.
    """
    rows = list(rows)
    if rows and not any(key in row for _, row in rows for key in OURS):
        keys = ", ".join(rows[0][1]) or "none"
        raise UserError(
            f"{path}: no line has `answer`, `choice` or `sources` (the keys of the first are "
            f"{keys}); put the text under `answer`, or the option's number under `choice`."
        )
    predictions = []
    for where, row in rows:
        _check(where, row)
        name = row.get("question_id", row.get("id"))  # `id` is that of `mmqa prompt`
        row["question_id"] = id_of(name, where, question_ids)
        for name in row.get("sources", ()):
            if source_ids is not None and name not in source_ids:
                raise UserError(
                    f"{where}: source {name!r} is not in the corpus; the file belongs to another "
                    "corpus."
                )
        answer = row.get("answer")
        predictions.append(prediction_of({**row, "answer": answer or "", "trace": {}}))
    return predictions


def _check(where: str, row: Row) -> None:
    """UserError for a row that has not the types of predictions.jsonl, or other keys."""
    other = [key for key in OTHERS if key in row]
    if other and not any(key in row for key in OURS):
        raise UserError(
            f"{where}: has `{other[0]}`, but other lines have `answer`, `choice` or `sources`; "
            "write all lines alike."
        )
    if not isinstance(row.get("answer"), str | None):
        raise UserError(f'{where}: "answer" must be text or null; correct it.')
    if row.get("choice") is not None and type(row["choice"]) is not int:
        raise UserError(
            f'{where}: "choice" must be the number of an option, counted from 0, or null; correct '
            "it."
        )
    sources = row.get("sources", [])
    if not isinstance(sources, list) or not all(isinstance(name, str) for name in sources):
        raise UserError(f'{where}: "sources" must be a list of id strings; correct it.')


def _parsed(where: str, line: str) -> Any:
    return parse_json(line.rstrip().removesuffix(","), where, remedy=ONE_A_LINE)


def read_object(path: Path, expected: str) -> dict[str, Any]:
    """Reads a prediction file that is one JSON object, id of a question -> what was predicted."""
    rows = read_json(path, unique_keys=True)
    if not isinstance(rows, dict):
        raise UserError(f"{path}: {expected}.")
    return rows


# Ids of questions as prediction files write them: text, a number, or 11.0, as pandas writes it.


_WHOLE = re.compile(r"\d+\.0+")


def id_of(value: Any, where: str, known: Container[str] = (), key: str = "question_id") -> str:
    """The question's id as text; errors begin with `where` and name the value `key`.

    The official vqa.py compares sets of numbers, in which 11.0 is 11, and VLMEvalKit calls int. Of
    the `known` ids of questions the text `11.0` is `11` only where that is one of them and `11.0`
    is not, since a corpus of one's own may have any ids.
    """
    if isinstance(value, str) and value:
        if value not in known and _WHOLE.fullmatch(value):
            digits = str(whole_number(value))
            return digits if digits in known else value
        return value
    number = whole_number(value)
    if number is None:
        raise UserError(
            f"{where}: {key} is {value!r:.60}; text or a whole number was expected; correct it."
        )
    return str(number)


# Prediction.choice where a prediction file gives one that is none of the question's options.
NO_OPTION = -1


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of one system on one set of questions."""

    question_ids: tuple[str, ...]  # the scored questions, in the given order
    categories: tuple[str, ...]  # the category of each of them
    # Scorer -> float64 array aligned with `question_ids`, values in 0..1.
    per_question: Mapping[str, np.ndarray]
    missing: int = 0  # number of scored questions without a prediction; they score 0
    unscored: int = 0  # number of questions left out because their reference is hidden or empty
    # Group -> bool array aligned with `question_ids`, whether a question belongs to it; groups may
    # overlap and stand in for the categories. None: the categories are the groups.
    groups: Mapping[str, np.ndarray] | None = None

    @property
    def n(self) -> int:
        """How many questions were scored."""
        return len(self.question_ids)

    @property
    def scores(self) -> dict[str, float]:
        """Scorer -> mean over the questions."""
        return {scorer: float(values.mean()) for scorer, values in self.per_question.items()}

    @property
    def counts(self) -> dict[str, int]:
        """Category -> number of questions, in order of first appearance.

        Of groups those that have questions, in their order.
        """
        if self.groups is not None:
            return {name: n for name, rows in self.groups.items() if (n := int(rows.sum()))}
        counts: dict[str, int] = {}
        for category in self.categories:
            counts[category] = counts.get(category, 0) + 1
        return counts

    @property
    def by_category(self) -> dict[str, dict[str, float]]:
        """Category -> scorer -> mean over the questions of that category."""
        return {
            category: {
                scorer: float(self.of_category(scorer, category).mean())
                for scorer in self.per_question
            }
            for category in self.counts
        }

    def of_category(self, scorer: str, category: str) -> np.ndarray:
        """The per-question values [n_category] of one scorer on one category."""
        if self.groups is not None:
            rows = self.groups[category]
        else:
            rows = np.array([c == category for c in self.categories], dtype=bool)
        return self.per_question[scorer][rows]


def merged_scores(scores: Iterable[Scores]) -> list[Scores]:
    """Merges scores of the same questions, so that they share one table."""
    merged: dict[tuple[str, ...], Scores] = {}
    for new in scores:
        same = merged.get(new.question_ids)
        if same is not None:
            new = dataclasses.replace(same, per_question={**same.per_question, **new.per_question})
        merged[new.question_ids] = new
    return list(merged.values())


def predictions_by_question(
    questions: Iterable[Question],
    predictions: Sequence[Prediction],
    path: str | os.PathLike | None = None,
) -> dict[str, Prediction]:
    """Question id -> prediction; a choice that is none of the question's options becomes None.

    Messages name the `path` of the predictions.
    """
    known = {question.id: question for question in questions}
    by_question: dict[str, Prediction] = {}
    for number, prediction in enumerate(predictions, start=1):
        name = prediction.question_id
        where = f"prediction {number}" if path is None else f"{path}, prediction {number}"
        if name not in known:
            raise UserError(
                f"{where}: no question has the id {name!r} among the {len(known)} "
                "to be scored; check that predictions and references are of the same split."
            )
        if name in by_question:
            raise UserError(
                f"{where}: question {name!r} is answered twice; keep one prediction per question."
            )
        choices = known[name].choices
        if prediction.choice is not None and not 0 <= prediction.choice < len(choices):
            prediction = dataclasses.replace(prediction, choice=None)
        by_question[name] = prediction
    return by_question


def paired(
    questions: Sequence[Question], predictions: Sequence[Prediction]
) -> list[tuple[Question, Prediction]]:
    """Each question with its prediction, an empty one where there is none."""
    by_id = predictions_by_question(questions, predictions)
    return [(question, by_id.get(question.id, Prediction(question.id))) for question in questions]


def count_empty(predictions: Iterable[Prediction]) -> int:
    """How many predictions have neither a text nor a choice.

    Where a reference normalizes to nothing, as some soft labels of OK-VQA do, an empty answer may
    still score.
    """
    return sum(not p.answer.strip() and p.choice is None for p in predictions)


def questions_that_count(
    questions: Sequence[Question], counts: Callable[[Question], bool], what: str
) -> list[Question]:
    """The questions that `counts` accepts; UserError that none has `what` if it accepts none."""
    scored = [question for question in questions if counts(question)]
    if not scored:
        raise UserError(
            f"none of the {len(questions)} questions has {what}; score a split that has them."
        )
    return scored


def group_of(questions: Sequence[Question], belongs: Callable[[Question], bool]) -> np.ndarray:
    """Marks the questions that belong to a group; bool[question], as `Scores.groups` has them."""
    return np.array([belongs(question) for question in questions], bool)


def groups_by(
    questions: Sequence[Question],
    value_of: Callable[[Question], str | Sequence[str]],
    names: Iterable[str] | None = None,
    title: str = "{}",
) -> dict[str, np.ndarray]:
    """Groups questions by a value that they have, as `Scores.groups`: name -> bool [question].

    Args:
      value_of: a question's value, or all of several.
      names: the values that make groups, in this order. None: all but "", sorted.
      title: the name of a value's group, `{}` being the value.
    """
    values = [value_of(question) for question in questions]
    sets = [{value} if isinstance(value, str) else set(value) for value in values]
    if names is None:
        names = sorted({name for of_question in sets for name in of_question} - {""})
    return {
        title.format(name): np.array([name in of_question for of_question in sets], bool)
        for name in names
    }


def hop_groups(questions: Sequence[Question]) -> dict[str, np.ndarray] | None:
    """The categories with `text` also by the hops that its questions have (Atlas's); None where no
    question says how many, as `Scores.groups`."""
    if not any(q.category == "text" and "hops" in q.extra for q in questions):
        return None
    names = dict.fromkeys(question.category for question in questions)
    groups = groups_by(questions, lambda question: question.category, names)
    for name, is_two in (("text, one-hop", False), ("text, two-hop", True)):
        groups[name] = group_of(
            questions,
            lambda q, is_two=is_two: q.category == "text" and (q.extra.get("hops") == 2) is is_two,
        )
    return groups


def scores_of(
    questions: Sequence[Question],
    scored: Sequence[Question],
    predictions: Mapping[str, Prediction],
    per_question: Mapping[str, np.ndarray],
    groups: Mapping[str, np.ndarray] | None = None,
) -> Scores:
    """Scores of the `scored` questions; `predictions` is question id -> prediction."""
    return Scores(
        question_ids=tuple(question.id for question in scored),
        categories=tuple(question.category for question in scored),
        per_question=per_question,
        missing=sum(question.id not in predictions for question in scored),
        unscored=len(questions) - len(scored),
        groups=hop_groups(scored) if groups is None else groups,
    )
