"""How visual question answering normalizes short answers: VQA's official rules, Prophet's, PICa's.

The official rules are those of github.com/GT-Vision-Lab/VQA,
PythonEvaluationTools/vqaEvaluation/vqaEval.py, run by Python 3.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

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
