"""Accuracy of short answers on pictures: OK-VQA's, and A-OKVQA's two.

A score is named by its benchmark and its rule.

    vqa_accuracy/official   leave-one-out over the annotators (GT-Vision-Lab/VQA, vqaEval.py)
    vqa_accuracy/paper      min(1, n / 3), n annotators of the same answer (VQA, section 5)
    vqa_accuracy/prophet    as official by the older script that Prophet's authors score with
    vqa_accuracy/kat        min(1, n / 3), normalized as SQuAD does (guilk/KAT, src/evaluation.py)
    vqa_accuracy/soft_labels                the weights of published soft labels
    vqa_accuracy/official_from_soft_labels  official accuracy of a weight, where counts are even
    a_okvqa_da/official     exact match with n of the ten answers, min(1, n / 3), without the
                            questions marked difficult (allenai/aokvqa, eval_predictions.py)
    a_okvqa_mc/official     the text of the chosen option is that of the correct one (the same)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmqa_jax.core.arguments import check_several
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.aokvqa import DIFFICULT
from mmqa_jax.data.datasets.okvqa import SOFT_LABELS
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.answer_text import (
    normalize_answer,
    process_punctuation,
    strip_whitespace,
)
from mmqa_jax.evaluation.scores import (
    Scores,
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.evaluation.squad import normalize_squad
from mmqa_jax.evaluation.webqa import has_keywords, keyword_accuracy

# Weights are rounded to three decimals in the published files: 0.333, 0.667, 1.
_OFFICIAL_OF_COUNT = (0.0, 0.3, 0.6, 0.9)


def has_answers(question: Question) -> bool:
    """Whether a question's answer is published, as reference answers or as a correct option."""
    return bool(question.answers) or question.answer_index is not None


def official_accuracy(answer: str, references: Sequence[str]) -> float:
    """VQA's official accuracy of one answer.

    Every annotator is left out once; min(1, n / 3) for n of the others with the same answer; the
    mean of that. Both sides are normalized, unless all annotators gave the same answer.

    Args:
      references: one answer per annotator, ten in VQA and OK-VQA.
    """
    return _leaving_one_out(*_matches(answer, references))


def paper_accuracy(answer: str, references: Sequence[str]) -> float:
    """min(1, n / 3) for n annotators with the same answer, normalized as in the official one."""
    same, _ = _matches(answer, references)
    return min(1.0, same / 3)


def prophet_accuracy(answer: str, references: Sequence[str]) -> float:
    """The official accuracy by Prophet's copy of an older script (evaluation/vqa_utils/vqaEval.py).

    The answer is always normalized; the annotators' only lose their punctuation, and keep case,
    articles and number words.
    """
    check_several(references, "the accuracy of an answer", "reference answers")
    if len(set(references)) > 1:
        references = [process_punctuation(reference) for reference in references]
    return _leaving_one_out(references.count(normalize_answer(answer)), len(references))


def kat_accuracy(answer: str, references: Sequence[str]) -> float:
    """KAT's accuracy (okvqa_ems): min(1, n / 3) for n annotators with the same answer.

    Both sides are always normalized as SQuAD does: number words and contractions stay as they are.
    """
    check_several(references, "the accuracy of an answer", "reference answers")
    return min(1.0, [*map(normalize_squad, references)].count(normalize_squad(answer)) / 3)


def soft_label_accuracy(answer: str, labels: Mapping[str, float]) -> float:
    """The weight of an answer among soft labels, where no single annotators are known.

    Answer and labels are normalized by the official rules and compared as strings; labels that
    become the same string add up, to at most 1.
    """
    said = normalize_answer(answer)
    weights = [weight for label, weight in labels.items() if normalize_answer(label) == said]
    return min(1.0, float(sum(weights)))


def official_of_weight(weight: float) -> float:
    """The official accuracy behind a soft label's weight min(1, n / 3).

    A weight of 1 is read as four annotators or more. In OK-VQA n is even, since each of five
    annotators counts twice, so that three do not occur.
    """
    if weight >= 1.0:
        return 1.0
    return _OFFICIAL_OF_COUNT[round(3 * weight)]


def score_okvqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """VQA accuracy by category, from annotators' answers or from soft labels."""
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_answers, "reference answers")
    soft = [SOFT_LABELS in question.extra for question in scored]
    if any(soft) and not all(soft):
        raise UserError(
            "some questions have annotators' answers and some soft labels; score a split whose "
            "references are of one kind."
        )
    if not any(soft):
        scorers: dict[str, Callable[[str, Question], float]] = {
            "vqa_accuracy/official": lambda said, q: official_accuracy(said, q.answers),
            "vqa_accuracy/paper": lambda said, q: paper_accuracy(said, q.answers),
            "vqa_accuracy/prophet": lambda said, q: prophet_accuracy(said, q.answers),
            "vqa_accuracy/kat": lambda said, q: kat_accuracy(said, q.answers),
        }
        return Evaluation([_scores(questions, scored, given, scorers)], has_modalities=False)

    def weight(said: str, question: Question) -> float:
        return soft_label_accuracy(said, question.extra[SOFT_LABELS])

    scorers = {
        "vqa_accuracy/soft_labels": weight,
        "vqa_accuracy/official_from_soft_labels": lambda said, q: official_of_weight(
            weight(said, q)
        ),
    }
    note = (
        "references are soft labels, not the annotators' ten answers: vqa_accuracy/official needs "
        "the official annotations"
    )
    evaluation = Evaluation([_scores(questions, scored, given, scorers)], has_modalities=False)
    evaluation.notes.append(note)
    return evaluation


def direct_answer_accuracy(answer: str, references: Sequence[str]) -> float:
    """A-OKVQA's: exact string match, min(1, n / 3); nothing is normalized."""
    return min(1.0, sum(answer == reference for reference in references) / 3)


# Scorer of single answers -> its rule.
_ANSWER_RULES: dict[str, Callable[[str, Question], float]] = {
    "vqa_accuracy/soft_labels": lambda said, q: soft_label_accuracy(said, q.extra[SOFT_LABELS]),
    "webqa_acc/no_lemma": keyword_accuracy,
    "a_okvqa_da/official": lambda said, q: direct_answer_accuracy(said, q.answers),
    "vqa_accuracy/official": lambda said, q: official_accuracy(said, q.answers),
}


def answer_scorer(question: Question) -> str | None:
    """The scorer that `answer_accuracy` applies to a question; None where its answers do not count.

    Soft labels where a question has them, WebQA's accuracy where it has keywords, A-OKVQA's for a
    question with options, else VQA's. A-OKVQA's difficult questions do not count.
    """
    if SOFT_LABELS in question.extra:
        return "vqa_accuracy/soft_labels"
    if has_keywords(question):
        return "webqa_acc/no_lemma"
    if not question.answers or question.extra.get(DIFFICULT, False):
        return None
    return "a_okvqa_da/official" if question.choices else "vqa_accuracy/official"


def answer_accuracy(question: Question, answer: str) -> float | None:
    """The accuracy of one direct answer by the benchmark's own rule, `answer_scorer`.

    None without references, and for questions whose answers do not count.
    """
    scorer = answer_scorer(question)
    return None if scorer is None else _ANSWER_RULES[scorer](answer, question)


def score_aokvqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Direct answers and multiple choice, whichever of the two the predictions hold."""
    given = predictions_by_question(questions, predictions)
    evaluation = Evaluation(has_modalities=False)
    chosen = any(prediction.choice is not None for prediction in predictions)
    if not chosen or any(prediction.answer for prediction in predictions):
        evaluation.scored.append(_score_direct(questions, given))
    if chosen:
        evaluation.scored.append(_score_choices(questions, given))
        without = sum(prediction.choice is None for prediction in given.values())
        evaluation.unparsed["a_okvqa_mc/official"] = without
    return evaluation


def _score_direct(questions: Sequence[Question], given: Mapping[str, Prediction]) -> Scores:
    scored = questions_that_count(
        questions,
        lambda question: bool(question.answers) and not question.extra.get(DIFFICULT, False),
        "published direct answers (difficult questions do not count)",
    )
    scorer = {"a_okvqa_da/official": lambda said, q: direct_answer_accuracy(said, q.answers)}
    return _scores(questions, scored, given, scorer, groups={})


def _score_choices(questions: Sequence[Question], given: Mapping[str, Prediction]) -> Scores:
    scored = questions_that_count(
        questions, lambda question: question.answer_index is not None, "a published correct option"
    )
    right = np.array([_is_right(q, given[q.id]) if q.id in given else 0.0 for q in scored])
    return scores_of(questions, scored, given, {"a_okvqa_mc/official": right}, groups={})


def _is_right(question: Question, prediction: Prediction) -> float:
    """1.0 for the text of the correct option: two options may read the same."""
    if prediction.choice is None:
        return 0.0
    return float(
        question.choices[prediction.choice] == question.choices[question.answer_index or 0]
    )


def _leaving_one_out(same: int, total: int) -> float:
    """The mean over `total` annotators of min(1, n / 3), n of the others with the same answer."""
    left_out_same = min(1.0, (same - 1) / 3) if same else 0.0
    return (same * left_out_same + (total - same) * min(1.0, same / 3)) / total


def _matches(answer: str, references: Sequence[str]) -> tuple[int, int]:
    """How many references equal the answer by the official rules, and how many there are."""
    check_several(references, "the accuracy of an answer", "reference answers")
    said = strip_whitespace(answer)
    expected = [strip_whitespace(reference) for reference in references]
    if len(set(expected)) > 1:
        said = normalize_answer(said)
        expected = [normalize_answer(reference) for reference in expected]
    return expected.count(said), len(expected)


def _scores(
    questions: Sequence[Question],
    scored: Sequence[Question],
    given: Mapping[str, Prediction],
    scorers: Mapping[str, Callable[[str, Question], float]],
    groups: Mapping[str, np.ndarray] | None = None,
) -> Scores:
    """Scores the answers of the `scored` questions by each scorer; missing ones count 0."""
    per_question = {
        name: np.array([score(given[q.id].answer, q) if q.id in given else 0.0 for q in scored])
        for name, score in scorers.items()
    }
    return scores_of(questions, scored, given, per_question, groups)
