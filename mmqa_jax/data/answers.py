"""How visual question answering normalizes short answers: VQA's official rules, Prophet's, PICa's.

The official rules are those of github.com/GT-Vision-Lab/VQA,
PythonEvaluationTools/vqaEvaluation/vqaEval.py, run by Python 3.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.formats.official import SOFT_LABELS
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.formats.webqa import has_keywords
from mmqa_jax.data.schema import Question

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_DIGIT_COMMA_DIGIT = re.compile(r"\d,\d")
# The official pattern is `(?!<=\d)(\.)(?!\d)`: its first group, meant to look behind, is always
# true. And it passes re.UNICODE where `sub` expects the number of replacements, which is 32.
_PERIOD = re.compile(r"\.(?!\d)")
_MOST_PERIODS = 32
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {"none": "0", **{word: str(number) for number, word in enumerate(_NUMBERS)}}
_ARTICLES = frozenset({"a", "an", "the"})
_PICA_REMOVED = frozenset({"a", "an", "the", "to", ""})


# Weights are rounded to three decimals in the published files: 0.333, 0.667, 1.
_OFFICIAL_OF_COUNT = (0.0, 0.3, 0.6, 0.9)


def strip_whitespace(text: str) -> str:
    """Line breaks and tabs become spaces, the ends are stripped (vqaEval.py, `evaluate`)."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def process_punctuation(text: str) -> str:
    """Punctuation is deleted or becomes a space; periods go unless a digit follows.

    A mark is deleted where the text has it beside a space, or has a comma between digits anywhere;
    otherwise it becomes a space (vqaEval.py, `processPunctuation`).
    """
    delete_all = _DIGIT_COMMA_DIGIT.search(text) is not None
    result = text
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if delete_all or beside_space else " ")
    return _PERIOD.sub("", result, count=_MOST_PERIODS)


def process_digit_article(text: str) -> str:
    """Lower case, number words to ten as digits, no articles, contractions with apostrophes.

    As vqaEval.py's `processDigitArticle`.
    """
    words = (_DIGITS.get(word, word) for word in text.lower().split())
    table = vqa_contractions()
    return " ".join(table.get(word, word) for word in words if word not in _ARTICLES)


@functools.lru_cache(maxsize=1 << 16)
def normalize_answer(text: str) -> str:
    """VQA's official normalization: whitespace, punctuation, then digits and articles."""
    return process_digit_article(process_punctuation(strip_whitespace(text)))


@functools.lru_cache(maxsize=1 << 16)
def prep_ans(text: str) -> str:
    """Prophet's normalization of answers (prophet evaluation/ans_punct.py, `prep_ans`).

    The official one of punctuation, digits and articles, and then no commas.
    """
    return process_digit_article(process_punctuation(text)).replace(",", "")


def pica_answer(text: str) -> str:
    """PICa's post-processing of a generated answer (gpt3_api_okvqa.py:15-20).

    No periods and commas, lower case, without the words a, an, the and to.
    """
    words = text.replace(".", "").replace(",", "").lower().split(" ")
    return " ".join(word for word in words if word not in _PICA_REMOVED)


@functools.cache
def vqa_contractions() -> dict[str, str]:
    """The official table, such as `dont` -> `don't`."""
    lines = Path(__file__).with_name("vqa_contractions.txt").read_text("utf-8").splitlines()
    return dict(line.split(" ") for line in lines if not line.startswith("#"))


def official_of_weight(weight: float) -> float:
    """The official accuracy behind a soft label's weight min(1, n / 3).

    A weight of 1 is read as four annotators or more. In OK-VQA n is even, since each of five
    annotators counts twice, so that three do not occur.
    """
    if weight >= 1.0:
        return 1.0
    return _OFFICIAL_OF_COUNT[round(3 * weight)]


# The answers that a VQA model chooses among, and its training targets.
#
# Prophet (prophet/stage1/utils/load_data.py:22-29) and openvqa (vqa_loader.py, `proc_ans`) score
# an answer by how many annotators gave it: 0.3 each, at most 1.


FILE = "answers.json"  # in a run's workdir

_AN_ANNOTATOR = np.float32(0.3)


class AnswerVocabulary:
    """Answers by class number, which are normalized (prep_ans) already."""

    def __init__(self, answers: Sequence[str]):
        self.answers = tuple(answers)
        self._number = {answer: number for number, answer in enumerate(self.answers)}

    def __len__(self) -> int:
        return len(self.answers)

    def targets(self, question: Question) -> dict[int, float]:
        """Class -> target in 0..1 of the question's answers; others are 0 or not in the list."""
        return {
            self._number[answer]: score
            for answer, score in answer_scores(question).items()
            if answer in self._number
        }

    def dense(self, targets: Sequence[Mapping[int, float]]) -> Float32[np.ndarray, "n V"]:
        """The targets of n questions, one column a class."""
        made = np.zeros((len(targets), len(self)), np.float32)
        for row, some in enumerate(targets):
            made[row, list(some)] = list(some.values())
        return made

    def save(self, path: str | os.PathLike) -> None:
        """Writes a list by class, as Prophet's answer_dict_okvqa.json."""
        write_json(path, list(self.answers))


def answer_scores(question: Question) -> dict[str, float]:
    """Normalized answer -> target: 0.3 an annotator, at most 1, summed in float32.

    Soft labels stand for the annotators where those are absent: a weight min(n / 3, 1) gives the
    score of n annotators, and 1 that of four (OK-VQA's counts are even). Where answers are
    sentences (WebQA, Atlas), their keywords are the one answer.
    """
    if has_keywords(question):
        return {prep_ans(question.keywords): 1.0}
    scores: dict[str, np.float32] = {}
    labels = question.extra.get(SOFT_LABELS)
    if labels is not None:
        for answer, weight in labels.items():
            answer, score = prep_ans(answer), np.float32(official_of_weight(weight))
            scores[answer] = min(np.float32(1), scores.get(answer, np.float32(0)) + score)
    else:
        for answer in map(prep_ans, question.answers):
            had = scores.get(answer, np.float32(0))
            scores[answer] = min(np.float32(1), had + _AN_ANNOTATOR)
    return {answer: float(score) for answer, score in scores.items()}


def make_vocabulary(
    questions: Iterable[Question], min_questions: int, base: Sequence[str] = ()
) -> AnswerVocabulary:
    """The answers of `base`, then those of at least `min_questions` questions, most frequent first.

    The classes of `base`, which is of the pretraining, keep their numbers.
    """
    counts = Counter(
        answer for question in questions for answer in answer_scores(question) if answer
    )
    frequent = [answer for answer, count in counts.most_common() if count >= min_questions]
    known = set(base)
    answers = [*base, *(answer for answer in frequent if answer not in known)]
    if not answers:
        raise UserError(
            f"config key answers.min_questions={min_questions}: no answer of the training "
            "questions is so frequent; lower it, or choose a split with answers."
        )
    return AnswerVocabulary(answers)


def read_vocabulary(path: str | os.PathLike) -> AnswerVocabulary:
    """Reads a vocabulary: ours or Prophet's (a list), openvqa's answer_dict.json, or a run's, whose
    workdir `path` may be.
    """
    path = as_path(path)
    file = path / FILE if path.is_dir() else path
    data = read_json(file)
    # openvqa: [{answer: number}, {number: answer}].
    if isinstance(data, list) and len(data) == 2 and all(isinstance(x, dict) for x in data):
        numbered = {whole_number(number): answer for answer, number in data[0].items()}
        data = [numbered.get(number) for number in range(len(numbered))]
    if not isinstance(data, list) or not data or not all(isinstance(x, str) for x in data):
        raise UserError(
            f"{file}: a list of answers by class, or openvqa's answer_dict.json, was expected; "
            "give another file."
        )
    repeated = [answer for answer, count in Counter(data).items() if count > 1]
    if repeated:
        raise UserError(f"{file}: the answer {repeated[0]!r} appears twice; remove one.")
    return AnswerVocabulary(data)
