"""Which choice an answer names: every benchmark's own rule, as a function of the answer's text.

A rule returns the index of the choice, or None where the text names none of the question's
choices: an empty answer, a refusal, a letter out of range, two letters. The scores count None as
wrong (scienceqa/letter_or_random and letter_or_expected excepted) and report how many there were.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

import numpy as np

LETTERS = string.ascii_uppercase

_THE_ANSWER_IS = re.compile(r"The answer is ([A-Z]).")
_ANSWER_IS = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_SCIENCEQA_LETTERS = "ABCDE"
_PUNCTUATION = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_STRIPPED_BY_MMMU = ",.!?;:'"
_WORDS_WITHOUT_CONTENT = 5
_API_FAILURE = "Failed to obtain answer via API"
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)


def letter_index(letter: str, choices: int) -> int | None:
    """0 for `A`, 1 for `B`, ...; None for anything but the letter of one of this many choices."""
    index = LETTERS.find(letter) if len(letter) == 1 else -1
    return index if 0 <= index < choices else None


def gpt3_choice(text: str, choices: int) -> int | None:
    """ScienceQA's rule (models/run_gpt3.py:48-57): `The answer is X.`, exactly once.

    The original's period is a regex's: any character may follow the letter, but one has to.
    """
    found = _THE_ANSWER_IS.findall(text.strip())
    return letter_index(found[0], choices) if len(found) == 1 else None


def random_choice(question_id: str, choices: int, seed: int = 10) -> int:
    """The choice drawn where ScienceQA's rule finds none (get_pred_idx of run_gpt3.py).

    Drawn by seed and question, so that it does not depend on the order of the questions; 10 is the
    original's seed.
    """
    return random.Random(f"{seed}:{question_id}").randrange(choices)


def llava_choice(text: str, choices: int) -> int | None:
    """LLaVA's rule for ScienceQA (llava/eval/eval_science_qa.py:64-74).

    The whole text is a letter; or begins with a letter and `. `; or ScienceQA's own rule, without
    the strip.
    """
    if text in tuple(_SCIENCEQA_LETTERS):
        return letter_index(text, choices)
    if text[:1] in tuple(_SCIENCEQA_LETTERS) and text[1:3] == ". ":
        return letter_index(text[0], choices)
    found = _THE_ANSWER_IS.findall(text)
    return letter_index(found[0], choices) if len(found) == 1 else None


def vlmeval_choice(text: str, choices: Sequence[str], *, answer_is: bool = False) -> int | None:
    """VLMEvalKit's inference without a judge (vlmeval/utils/matching_util.py, can_infer).

    One option letter among the words, in one of the last four; else one choice whose text the
    answer contains, if the answer is at most twice as long as all choices. A refusal, or the word
    `Z` without an option letter, names none.

    This is the rule of August 2025 (commit c3371551). Before, the letter could stand anywhere and
    the answer be of any length.

    Args:
      answer_is: the rule since June 2026 (a67ace50): where the letters do not tell, the first
        `answer is X` does, of whatever case and whatever follows, before the choices' texts. So
        `The answer is a dog` is A, and `the answer is blue` B.
    """
    if _API_FAILURE not in text:
        if any(refusal in text for refusal in _REFUSALS):
            return None
        words = text.translate(_PUNCTUATION).split()
        named = [letter for letter in LETTERS[: len(choices)] if letter in words]
        if not named and "Z" in words:
            return None
        if len(named) == 1 and words.index(named[0]) > len(words) - 5:
            return LETTERS.index(named[0])
        if answer_is and (stated := _ANSWER_IS.search(text)):
            index = LETTERS.index(stated[1].upper())
            if index < len(choices):
                return index
    lowered = text.lower()
    if len(lowered) > 2 * sum(map(len, choices)):
        return None
    contained = [index for index, choice in enumerate(choices) if choice.lower() in lowered]
    return contained[0] if len(contained) == 1 else None


def mmmu_choice(text: str, choices: int, contents: Sequence[str] = ()) -> int | None:
    """MMMU's rule, without its random choice (mmmu/utils/eval_utils.py).

    The option whose letter stands in brackets, else between spaces; else, in an answer of more
    than five words, whose content it holds. Of several the one that is named last.

    Args:
      choices: their number.
      contents: the choices' texts; () where they are not looked for, as by MRAG-Bench.
    """
    for mark in _STRIPPED_BY_MMMU:
        text = text.strip(mark)
    text = f" {text} "
    for around in ("({})", " {} "):
        marks = {n: around.format(LETTERS[n]) for n in range(choices)}
        places = {n: text.rfind(mark) for n, mark in marks.items() if mark in text}
        if places:
            return max(places, key=places.__getitem__)
    if len(text.split()) <= _WORDS_WITHOUT_CONTENT:
        return None
    lowered = text.lower()
    places = {n: lowered.rfind(one.lower()) for n, one in enumerate(contents)}
    places = {n: place for n, place in places.items() if place >= 0}
    return max(places, key=places.__getitem__) if places else None


def exact_letter_choice(text: str, choices: int) -> int | None:
    """SEED-Bench's comparison: the answer is the letter and nothing else (eval.py:92-97).

    LLaVA's scripts/convert_seed_for_submission.py compares likewise.
    """
    return letter_index(text, choices)


def likeliest_choice(losses: Sequence[float]) -> int:
    """The choice of least loss [choice], the first of equals (SEED-Bench eval.py:70-73)."""
    return int(np.argmin(losses))
