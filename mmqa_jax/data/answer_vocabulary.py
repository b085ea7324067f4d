"""The answers that a VQA model chooses among, and its training targets.

Prophet (prophet/stage1/utils/load_data.py:22-29) and openvqa (vqa_loader.py, `proc_ans`) score an
answer by how many annotators gave it: 0.3 each, at most 1.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.answer_text import official_of_weight, prep_ans
from mmqa_jax.data.datasets.benchmark import SOFT_LABELS
from mmqa_jax.data.datasets.webqa import has_keywords
from mmqa_jax.data.schema import Question
from mmqa_jax.data.table_files import whole_number

FILE = "answers.json"  # in a run's workdir

_AN_ANNOTATOR = np.float32(0.3)


class AnswerVocabulary:
    """Answers by class number.

    Args:
      answers: by class; they are normalized (prep_ans) already.
    """

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

    Args:
      base: of the pretraining, whose classes keep their numbers.
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
    """Reads a vocabulary: ours or Prophet's (a list), openvqa's answer_dict.json, or a run's.

    Args:
      path: of the file, or of the workdir of a training run.
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
