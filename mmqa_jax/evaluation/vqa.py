"""Accuracy of short answers on pictures, as of VQA and OK-VQA.

A score is named by its benchmark and its rule.

    vqa_accuracy/official   leave-one-out over the annotators (GT-Vision-Lab/VQA, vqaEval.py)
    vqa_accuracy/paper      min(1, n / 3), n annotators of the same answer (VQA, section 5)
    vqa_accuracy/prophet    as official by the older script that Prophet's authors score with
    vqa_accuracy/kat        min(1, n / 3), normalized as SQuAD does (guilk/KAT, src/evaluation.py)
    vqa_accuracy/soft_labels                the weights of published soft labels
    vqa_accuracy/official_from_soft_labels  official accuracy of a weight, where counts are even
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmqa_jax.core.errors import check_several
from mmqa_jax.data import answers
from mmqa_jax.data.formats.official import DIFFICULT, SOFT_LABELS
from mmqa_jax.data.formats.webqa import has_keywords
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.webqa import keyword_accuracy


def has_answers(question: Question) -> bool:
    """Whether a question's answer is published, as reference answers or as a correct option."""
    return bool(question.answers) or question.answer_index is not None


def official_accuracy(answer: str, references: Sequence[str]) -> float:
    """VQA's official accuracy of one answer, by one reference per annotator (ten in VQA and
    OK-VQA).

    Every annotator is left out once; min(1, n / 3) for n of the others with the same answer; the
    mean of that. Both sides are normalized, unless all annotators gave the same answer.
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
        references = [answers.process_punctuation(reference) for reference in references]
    return _leaving_one_out(references.count(answers.normalize_answer(answer)), len(references))


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
    normalized = answers.normalize_answer(answer)
    weights = [
        weight for label, weight in labels.items() if answers.normalize_answer(label) == normalized
    ]
    return min(1.0, float(sum(weights)))


def direct_answer_accuracy(answer: str, references: Sequence[str]) -> float:
    """A-OKVQA's: exact string match, min(1, n / 3); nothing is normalized."""
    return min(1.0, sum(answer == reference for reference in references) / 3)


# Scorer of single answers -> its rule.
_ANSWER_RULES: dict[str, Callable[[str, Question], float]] = {
    "vqa_accuracy/soft_labels": lambda answer, q: soft_label_accuracy(answer, q.extra[SOFT_LABELS]),
    "webqa_acc/no_lemma": keyword_accuracy,
    "a_okvqa_da/official": lambda answer, q: direct_answer_accuracy(answer, q.answers),
    "vqa_accuracy/official": lambda answer, q: official_accuracy(answer, q.answers),
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


def _leaving_one_out(same: int, total: int) -> float:
    """The mean over `total` annotators of min(1, n / 3), n of the others with the same answer."""
    left_out_same = min(1.0, (same - 1) / 3) if same else 0.0
    return (same * left_out_same + (total - same) * min(1.0, same / 3)) / total


def _matches(answer: str, references: Sequence[str]) -> tuple[int, int]:
    """How many references equal the answer by the official rules, and how many there are."""
    check_several(references, "the accuracy of an answer", "reference answers")
    normalized = answers.strip_whitespace(answer)
    expected = [answers.strip_whitespace(reference) for reference in references]
    if len(set(expected)) > 1:
        normalized = answers.normalize_answer(normalized)
        expected = [answers.normalize_answer(reference) for reference in expected]
    return expected.count(normalized), len(expected)


# Exact match as SQuAD and open-domain question answering count it.


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_squad(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, single spaces (SQuAD's evaluate-v1.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def squad_exact_match(answer: str, references: Sequence[str]) -> float:
    """1.0 if an answer equals any of the references once normalized (FiD's `ems`).

    Word boundaries are Python's, as in SQuAD's script. FiD's are those of the package regex, where
    `a` before a combining accent is no article.
    """
    return float(normalize_squad(answer) in map(normalize_squad, references))


def squad_contained(answer: str, references: Sequence[str]) -> float:
    """1.0 if one of the references stands in an answer, both normalized."""
    normalized = normalize_squad(answer)
    return float(any(normalize_squad(reference) in normalized for reference in references))


def squad_f1(answer: str, references: Sequence[str]) -> float:
    """The F1 of an answer's words and those of the nearest reference, once normalized (SQuAD).

    Without words an answer agrees only with a reference without words.
    """
    return max(_squad_f1(answer, reference) for reference in references)


def _squad_f1(answer: str, reference: str) -> float:
    predicted, wanted = (Counter(normalize_squad(text).split()) for text in (answer, reference))
    if not predicted or not wanted:
        return float(predicted == wanted)
    same = (predicted & wanted).total()
    precision, recall = same / predicted.total(), same / wanted.total()
    return 2 * precision * recall / (precision + recall) if same else 0.0


# How good a VQA model's answer candidates are.


RECALL_AT = (1, 3, 5, 10)


def score_candidates(
    questions: Sequence[Question], candidates: Mapping[str, Sequence[tuple[str, float]]]
) -> dict[str, float]:
    """Scores of candidates, question_id -> (answer, confidence), best first; none counts 0.

    - accuracy: VQA accuracy of the first candidate: official, from annotators' answers, or from
      soft labels where those stand for them; WebQA's without lemmas, from keywords
    - recall@k: share of questions with an answer of any annotator among the first k
    - oracle@k: accuracy of the best of the first k
    """
    worth = np.zeros((len(questions), max(RECALL_AT)))
    for row, question in enumerate(questions):
        for column, (answer, _) in enumerate(candidates.get(question.id, ())[: max(RECALL_AT)]):
            worth[row, column] = _accuracy(answer, question)
    scores = {"accuracy": float(worth[:, 0].mean())}
    for k in RECALL_AT:
        best = worth[:, :k].max(axis=1)
        scores[f"recall@{k}"] = float((best > 0).mean())
        scores[f"oracle@{k}"] = float(best.mean())
    return scores


def _accuracy(answer: str, question: Question) -> float:
    if has_keywords(question):
        return keyword_accuracy(answer, question)
    labels = question.extra.get(SOFT_LABELS)
    if labels is None:
        return official_accuracy(answer, question.answers)
    return answers.official_of_weight(soft_label_accuracy(answer, labels))
