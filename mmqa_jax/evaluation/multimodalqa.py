"""MultimodalQA's scores and its prediction file (allenai/multimodalqa, baselines/evaluate.py).

    multimodalqa/list_em   the predicted items are the answer's, in any order, after normalization
    multimodalqa/list_f1   F1 of the items' words, items paired one to one for the best sum; an item
                           with numbers must share one; rounded to two decimals, a question each

The file is {qid: text, or a list of texts}, whose texts are kept whole in the traces. Our
predictions give a list as one text, with data.datasets.multimodalqa.SEPARATOR between its items.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from word2number import w2n

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.datasets.multimodalqa import (
    ANSWER_LIST,
    ANSWER_MODALITY,
    SEPARATOR,
    SINGLE_MODAL,
)
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.prediction_lines import read_answers
from mmqa_jax.evaluation.scores import predictions_by_question, questions_that_count, scores_of
from mmqa_jax.evaluation.scoring import Evaluation

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_TOKENS = re.compile(" |-")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def has_answer_list(question: Question) -> bool:
    """Whether a question's answer is published."""
    return ANSWER_LIST in question.extra


def answer_items(prediction: Prediction) -> Sequence[str]:
    """The items that an official file gave, else those of the text; an empty text is one item."""
    return prediction.trace.get(ANSWER_LIST, prediction.answer.split(SEPARATOR))


def list_em(predicted: Sequence[str], gold: Sequence[str]) -> float:
    """1 where the normalized items are the same, in any order."""
    ours, theirs = list(map(_normalized, predicted)), list(map(_normalized, gold))
    return float(set(ours) == set(theirs) and len(ours) == len(theirs))


def list_f1(predicted: Sequence[str], gold: Sequence[str]) -> float:
    """F1 of words in the best pairing of items, divided by the longer list; two decimals."""
    from scipy.optimize import linear_sum_assignment

    ours = [set(_normalized(item).split()) for item in predicted]
    theirs = [set(_normalized(item).split()) for item in gold]
    scores = np.array([[_f1(said, item) for said in ours] for item in theirs])  # [gold, predicted]
    rows, columns = linear_sum_assignment(-scores)
    paired = np.zeros(max(len(ours), len(theirs)))
    paired[rows] = scores[rows, columns]
    return float(round(paired.mean(), 2))


def score_multimodalqa(
    questions: Sequence[Question], predictions: Sequence[Prediction]
) -> Evaluation:
    """Both scores by type of question, by number of modalities, and by where the answer is."""
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_answer_list, "an answer")
    scorers: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
        "multimodalqa/list_em": list_em,
        "multimodalqa/list_f1": list_f1,
    }

    def score(scorer: Callable[[Sequence[str], Sequence[str]], float], question: Question) -> float:
        prediction = given.get(question.id)
        if prediction is None:
            return 0.0
        return scorer(answer_items(prediction), question.extra[ANSWER_LIST])

    per_question = {
        name: np.array([score(scorer, question) for question in scored])
        for name, scorer in scorers.items()
    }
    return Evaluation(
        [scores_of(questions, scored, given, per_question, _groups(scored))], has_modalities=False
    )


def read_multimodalqa_predictions(
    path: Path, questions: Sequence[Question] = ()
) -> list[Prediction]:
    """Reads the official file, or predictions.jsonl."""
    if path.suffix == ".jsonl":
        return read_answers(path, question_ids={question.id for question in questions})
    rows = read_json(path, unique_keys=True)
    if not isinstance(rows, dict):
        raise UserError(
            f"{path}: one object of qid -> answer was expected; give MultimodalQA's format or "
            "predictions.jsonl."
        )
    found = []
    for name, answer in rows.items():
        items = answer if isinstance(answer, list) else ["" if answer is None else answer]
        if not all(isinstance(item, str | int | float) for item in items):
            raise UserError(
                f"{path}, {name}: the answer must be a text or a list of texts; correct it."
            )
        texts = list(map(str, items))
        found.append(Prediction(name, SEPARATOR.join(texts), trace={ANSWER_LIST: texts}))
    return found


def write_multimodalqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the official file: every question, a list where the answer has several items."""
    given = predictions_by_question(questions, predictions)
    rows: dict[str, str | list[str]] = {}
    for question in questions:
        prediction = given.get(question.id)
        items = [""] if prediction is None else answer_items(prediction)
        rows[question.id] = items[0] if len(items) == 1 else items
    write_json(path, rows)


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """The groups that the official script prints: modalities, types, places of the answer."""

    def among(accepts: Callable[[Question], bool]) -> np.ndarray:
        return np.array([accepts(question) for question in questions], bool)

    kinds = sorted({question.category for question in questions})
    places = sorted({question.extra[ANSWER_MODALITY] for question in questions})
    return {
        "single-modal": among(lambda q: q.category in SINGLE_MODAL),
        "multi-modal": among(lambda q: q.category not in SINGLE_MODAL),
        **{kind: among(lambda q, kind=kind: q.category == kind) for kind in kinds},
        **{
            f"answer in {place}": among(lambda q, place=place: q.extra[ANSWER_MODALITY] == place)
            for place in places
        },
    }


def _f1(said: set[str], gold: set[str]) -> float:
    """F1 of two bags of words; 0 where the gold one has numbers and the other none of them."""
    numbers = {word for word in gold if _is_number(word)}
    if numbers and not numbers & said:
        return 0.0
    common = len(gold & said)
    precision = common / len(said) if said else 1.0
    recall = common / len(gold) if gold else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _normalized(text: str) -> str:
    """Lower case, without punctuation and articles; numbers in digits or words as Python floats."""
    words = (_normalized_word(word.lower()) for word in _TOKENS.split(text))
    return " ".join(word for word in words if word)


def _normalized_word(word: str) -> str:
    if not _is_number(word):
        word = word.translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", _as_number(word)).split())


def _as_number(word: str) -> str:
    if _is_number(word):
        return str(float(word))
    try:
        return str(float(w2n.word_to_num(word)))
    except Exception:  # no number; word2number fails in several ways, at which the original stops
        return word


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
