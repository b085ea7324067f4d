"""Encyclopedic-VQA's score (google-research, encyclopedic_vqa/evaluation_utils.py).

    evqa/exact_match   the answer equals an alternative once both are normalized; of a multi_answer
                       question the two sets of items have at least half of their union in common
    evqa/bem           or else BEM, a BERT that judges answers, says that it is equivalent

The benchmark's accuracy is `evqa/bem`. It needs the weights (bem.py); without them exact match is
what there is, which is stricter.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.data.datasets.evqa import ITEMS, TYPES, UNSEEN
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.answer_text import strip_whitespace, vqa_contractions
from mmqa_jax.evaluation.prediction_lines import read_answers
from mmqa_jax.evaluation.scores import predictions_by_question, questions_that_count, scores_of
from mmqa_jax.evaluation.scoring import Evaluation

EXACT, BEM = "evqa/exact_match", "evqa/bem"
_LEAST_OVERLAP = 0.5
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + "‘’´`")
_ARTICLES = re.compile(r"\b(the answer is|a|an|the)\b")
_SPAN = "<extra_id_0> "  # what T5 writes before an answer
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORDS = {
    **dict.fromkeys(("none", "zero"), "0"),
    **{word: str(number) for number, word in enumerate(_NUMBERS, start=1)},
    **dict.fromkeys(("entailment", "true"), "yes"),
    **dict.fromkeys(("contradiction", "false"), "no"),
}

# (question, alternative, answer) of pairs -> whether BEM calls them equivalent; see bem.py.
Judge = Callable[[Sequence[tuple[str, str, str]]], Sequence[bool]]


def has_answers(question: Question) -> bool:
    """Whether a question's answer is published."""
    return any(question.answers)


def normalize_evqa(text: str) -> str:
    """Lower case, no punctuation, no articles, numbers to ten as digits, contractions spelled."""
    text = strip_whitespace(text.lower())
    if text.startswith(_SPAN):
        text = text.replace(_SPAN, "")
    words = _ARTICLES.sub(" ", text.translate(_NO_PUNCTUATION)).split()
    spelled = (_WORDS.get(word, word) for word in words)
    contractions = vqa_contractions()
    return " ".join(contractions.get(word, word) for word in spelled)


def matches(said: str, alternative: str, kind: str) -> bool:
    """The official exact match of an answer with one alternative of a question of type `kind`.

    At an alternative that normalizes to nothing the script stops; here none matches it.
    """
    if kind == "multi_answer":
        wanted = _items(alternative.split(ITEMS))
        given = _items(said.replace(" and ", ",").replace(" & ", ",").split(","))
        return bool(wanted) and len(wanted & given) / len(wanted | given) >= _LEAST_OVERLAP
    wanted = normalize_evqa(alternative)
    return bool(wanted) and normalize_evqa(said) == wanted


def is_exact(said: str, question: Question) -> bool:
    """Whether an answer matches any alternative."""
    return any(matches(said, one, question.category) for one in question.answers)


def score_evqa(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    judge: Judge | None = None,
) -> Evaluation:
    """The scores, by type, of single-hop questions and of entities that train has not.

    Args:
      judge: BEM; None: exact match alone.
    """
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_answers, "an answer")
    said = [given[q.id].answer if q.id in given else "" for q in scored]
    exact = [is_exact(answer, q) for answer, q in zip(said, scored, strict=True)]
    right = {EXACT: np.array(exact, float)}
    if judge is not None:
        right[BEM] = np.array(_judged(scored, said, exact, judge), float)
    scores = scores_of(questions, scored, given, right, _groups(scored))
    evaluation = Evaluation([scores], has_modalities=False)
    if judge is None:
        evaluation.notes.append(
            "the benchmark's accuracy is BEM's, which was not given: exact match is stricter"
        )
    return evaluation


def _judged(
    questions: Sequence[Question], said: Sequence[str], exact: Sequence[bool], judge: Judge
) -> list[bool]:
    """Exact matches, and what BEM calls equivalent of the rest, an empty answer among them."""
    asked = [
        (row, (question.question, alternative.replace(ITEMS, ","), answer))
        if question.category == "multi_answer"
        else (row, (question.question, alternative, answer))
        for row, (question, answer) in enumerate(zip(questions, said, strict=True))
        if not exact[row]
        for alternative in filter(None, question.answers)
    ]
    right = list(exact)
    for (row, _), equivalent in zip(asked, judge([pair for _, pair in asked]), strict=True):
        right[row] |= bool(equivalent)
    return right


def read_evqa_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads predictions.jsonl; the benchmark has no format of its own."""
    return read_answers(path, question_ids={question.id for question in questions})


def _items(texts: Sequence[str]) -> set[str]:
    return {item for item in map(normalize_evqa, texts) if item}


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    def among(accepts: Callable[[Question], bool]) -> np.ndarray:
        return np.array([accepts(question) for question in questions], bool)

    return {
        **{kind: among(lambda q, kind=kind: q.category == kind) for kind in TYPES},
        "single hop": among(lambda q: q.category != "2_hop"),
        "unseen entity": among(lambda q: bool(q.extra.get(UNSEEN))),
    }
