"""Official rules that read answers in words: every benchmark's own, as functions of texts.

The rules that read choices from answers are in multiple_choice.py, VQA's accuracies in vqa.py.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

import numpy as np
from word2number import w2n

from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.multiple_choice import LETTERS

_ANSWER, _ANSWER_END = "<answer>", "</answer>"

# MMMU's open questions (MMMU-Benchmark/MMMU, mmmu/utils/eval_utils.py).

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


def open_answers(response: str) -> list[str | float]:
    """Returns what an open question's response may mean: numbers, and phrases in lower case."""
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
    numbers = [
        numeral for phrase in phrases for form in _NUMBERS for numeral in form.findall(phrase)
    ]
    return [form for text in (*phrases, *numbers) for form in _forms(text)]


def is_open_answer(response: str, answers: Sequence[str]) -> bool:
    """Whether a response holds one of an open question's answers."""
    wanted = [form for answer in answers for form in _forms(answer)]
    words = [gold for gold in wanted if isinstance(gold, str)]
    return any(
        any(word in candidate for word in words)
        if isinstance(candidate, str)
        else candidate in wanted
        for candidate in open_answers(response)
    )


def _forms(text: str) -> list[str | float]:
    """A number with two decimals; or the text in lower case, one character with a space beside."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), _DECIMALS)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


# MathVista's extractions (lupantech/MathVista, evaluation/extract_answer.py, calculate_score.py).

# Keys of Question.extra that decide how an answer is normalized.
ANSWER_TYPE, PRECISION = "answer_type", "precision"
_BRACKETED = re.compile(r"\(([a-zA-Z])\)")


def extracted_by_rule(response: str, question: Question, *, quick: bool = False) -> str | None:
    """Extracts as extract_answer.py does without a language model; None: the script asks one.

    `quick` is its --quick_extract, the text in `The answer is "text".`
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

    `ignore_empty` makes an empty extraction no option, and not the shortest one.
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


def _option(answer: str, choices: Sequence[str], *, ignore_empty: bool) -> str | None:
    if ignore_empty and not answer:
        return None
    bracketed = _BRACKETED.search(answer)
    if bracketed is not None:
        answer = bracketed[1].upper()
    if len(answer) == 1 and answer in LETTERS[: len(choices)]:
        return choices[LETTERS.index(answer)]
    return min(choices, key=lambda choice: edit_distance(answer, choice))


def tagged_answer(response: str) -> str | None:
    """Returns the text in a response's last `<answer>...</answer>`; None: it has no whole one.

    As MMSearch-R1's `extract_solution`: tags pair up from the left, each with the next end.
    """
    answer, start = None, 0
    while (begin := response.find(_ANSWER, start)) >= 0:
        end = response.find(_ANSWER_END, begin)
        if end < 0:
            break
        answer, start = response[begin + len(_ANSWER) : end], end + len(_ANSWER_END)
    return None if answer is None else answer.strip()


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


# MultimodalQA's lists of answers (allenai/multimodalqa, baselines/evaluate.py).

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_TOKENS = re.compile(" |-")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def list_em(predicted: Sequence[str], gold: Sequence[str]) -> float:
    """1 where the normalized items are the same, in any order."""
    ours, theirs = list(map(_plain, predicted)), list(map(_plain, gold))
    return float(set(ours) == set(theirs) and len(ours) == len(theirs))


def list_f1(predicted: Sequence[str], gold: Sequence[str]) -> float:
    """F1 of words in the best pairing of items, divided by the longer list; two decimals."""
    from scipy.optimize import linear_sum_assignment

    ours = [set(_plain(item).split()) for item in predicted]
    theirs = [set(_plain(item).split()) for item in gold]
    scores = np.array(
        [[_f1(ours_item, item) for ours_item in ours] for item in theirs]
    )  # [gold, predicted]
    rows, columns = linear_sum_assignment(-scores)
    paired = np.zeros(max(len(ours), len(theirs)))
    paired[rows] = scores[rows, columns]
    return float(round(paired.mean(), 2))


def _f1(predicted: set[str], gold: set[str]) -> float:
    """F1 of two bags of words; 0 if the gold bag has numbers and the other one none of them."""
    numbers = {word for word in gold if _is_number(word)}
    if numbers and not numbers & predicted:
        return 0.0
    common = len(gold & predicted)
    precision = common / len(predicted) if predicted else 1.0
    recall = common / len(gold) if gold else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _plain(text: str) -> str:
    """Lower case, without punctuation and articles; numbers in digits or words as Python floats."""
    words = (_plain_word(word.lower()) for word in _TOKENS.split(text))
    return " ".join(word for word in words if word)


def _plain_word(word: str) -> str:
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
