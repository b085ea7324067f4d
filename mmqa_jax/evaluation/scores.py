"""Scores as every scorer returns them, and the pairing of predictions with questions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Prediction, Question

# Prediction.choice where a prediction file gives one that is none of the question's options.
NO_OPTION = -1


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of one system on one set of questions.

    Attributes:
      question_ids: the scored questions, in the given order.
      categories: the category of each of them.
      groups: group -> bool array aligned with `question_ids`, whether a question belongs to it;
        groups may overlap and stand in for the categories. None: the categories are the groups.
      per_question: scorer -> float64 array aligned with `question_ids`, values in 0..1.
      missing: number of scored questions without a prediction; they score 0.
      unscored: number of questions left out because their reference is hidden or empty.
    """

    question_ids: tuple[str, ...]
    categories: tuple[str, ...]
    per_question: Mapping[str, np.ndarray]
    missing: int = 0
    unscored: int = 0
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
