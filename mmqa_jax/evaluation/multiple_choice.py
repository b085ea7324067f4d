"""Official rules that read answers, as functions of texts: every benchmark's own.

A rule for choices returns the index of the choice, or None where the text names none of the
question's choices: an empty answer, a refusal, a letter out of range, two letters. The scores count
None as wrong (scienceqa/letter_or_random and letter_or_expected excepted) and report how many there
were. Rules for answers in words stand below them; VQA's accuracies are in vqa.py.
"""

import math
import random
import re
import string
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from word2number import w2n

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.scores import NO_OPTION, OTHERS, Row, answers_of, id_of, json_rows

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
    letters = _THE_ANSWER_IS.findall(text.strip())
    return letter_index(letters[0], choices) if len(letters) == 1 else None


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
    letters = _THE_ANSWER_IS.findall(text)
    return letter_index(letters[0], choices) if len(letters) == 1 else None


def vlmeval_choice(text: str, choices: Sequence[str], *, answer_is: bool = False) -> int | None:
    """VLMEvalKit's inference without a judge (vlmeval/utils/matching_util.py, can_infer).

    One option letter among the words, in one of the last four; else one choice whose text the
    answer contains, if the answer is at most twice as long as all choices. A refusal, or the word
    `Z` without an option letter, names none.

    This is the rule of August 2025 (commit c3371551). Before, the letter could stand anywhere and
    the answer be of any length.

    `answer_is`: the rule since June 2026 (a67ace50): where the letters do not tell, the first
    `answer is X` does, of whatever case and whatever follows, before the choices' texts. So `The
    answer is a dog` is A, and `the answer is blue` B.
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
    """MMMU's rule for so many choices, without its random choice (mmmu/utils/eval_utils.py).

    The option whose letter stands in brackets, else between spaces; else, in an answer of more than
    five words, whose content it holds. Of several the one that is named last. `contents` are the
    choices' texts; () where they are not looked for, as by MRAG-Bench.
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
    places = {n: lowered.rfind(content.lower()) for n, content in enumerate(contents)}
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


# Answers that are one of a question's choices: read from JSON lines, chosen by a rule, counted.
#
# A prediction that has a choice and no text, or no text but that choice's, counts by its choice
# under every rule. Lines are {"question_id", "text"} (LLaVA), {"question_id", "prediction"} or
# {"question_id", "losses"}; they may end in a comma, as in SEED-Bench's evaluate_result/, or be a
# JSON list. The first line says of which kind all of a file are. Null, a choice out of range and
# losses that are not numbers are answers that name no choice.


Given = Mapping[str, Prediction]
Rule = Callable[[str, Question], int | None]


def has_answer(question: Question) -> bool:
    """Whether the correct choice is published."""
    return question.answer_index is not None


def chosen_by(questions: Sequence[Question], predictions: Given, rule: Rule) -> list[int | None]:
    """Each question's choice: by the rule from the answer's text, or as given where it has none."""
    choices: list[int | None] = []
    for question in questions:
        prediction = predictions.get(question.id)
        if prediction is None:
            choices.append(None)
        elif by_choice(prediction, question):
            choices.append(prediction.choice)
        else:
            choices.append(rule(prediction.answer, question))
    return choices


def by_choice(prediction: Prediction, question: Question) -> bool:
    """Whether a prediction is a choice, and no text that a rule could read otherwise."""
    if prediction.choice is None:
        return False
    text = question.choices[prediction.choice]
    return prediction.answer in ("", text, f"{LETTERS[prediction.choice]}. {text}")


def right_choices(questions: Sequence[Question], choices: Sequence[int | None]) -> np.ndarray:
    """1.0 where the choice is the correct one; [question]."""
    pairs = zip(questions, choices, strict=True)
    return np.array([float(choice == question.answer_index) for question, choice in pairs])


def unparsed_choices(
    questions: Sequence[Question], predictions: Given, choices: Sequence[int | None]
) -> int:
    """How many predictions name none of their question's choices."""
    pairs = zip(questions, choices, strict=True)
    return sum(question.id in predictions and choice is None for question, choice in pairs)


def read_choice_lines(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads JSON lines with a text, a letter or losses; or predictions.jsonl."""
    return choices_of(path, list(json_rows(path)), questions)


def choices_of(
    path: Path, rows: Sequence[tuple[str, Row]], questions: Sequence[Question]
) -> list[Prediction]:
    """The predictions of a file's rows, which are all of the first one's kind."""
    first = rows[0][1] if rows else {}
    kind = next((key for key in OTHERS if key in first), None)
    counts = {question.id: len(question.choices) for question in questions}
    if kind is None:
        return answers_of(path, rows, question_ids=counts)
    predictions = []
    for where, row in rows:
        if kind not in row or ("q_id" in row) != ("q_id" in first):
            raise UserError(
                f"{where}: its keys are {', '.join(row)}, but those of the first line are "
                f"{', '.join(first)}; write all lines alike."
            )
        predictions.append(_line(where, row, kind, counts))
    return predictions


def _line(where: str, row: Row, kind: str, counts: Mapping[str, int]) -> Prediction:
    """The prediction of a row; `counts` is question id -> number of choices."""
    id_key = "q_id" if "q_id" in row else "question_id"
    name, value = id_of(row.get(id_key), where, counts, id_key), row[kind]
    if kind == "losses":
        return Prediction(name, choice=_likeliest(where, value, counts.get(name)))
    if not isinstance(value, str | None):
        raise UserError(f"{where}: {kind} is {value!r:.60}; text was expected.")
    if id_key == "q_id" and value:  # the first official eval.py, which ranks by loss
        index = letter_index(value, counts.get(name, 0))
        return Prediction(name, choice=NO_OPTION if index is None else index)
    return Prediction(name, value or "")


def _likeliest(where: str, losses: Any, count: int | None) -> int | None:
    """The choice of least loss; NO_OPTION where one is NaN or null, None for null alone."""
    if losses is None:
        return None
    if (
        not isinstance(losses, list)
        or not all(x is None or real_number(x, finite=False) is not None for x in losses)
        or not 0 < len(losses) == (count or len(losses))
    ):
        raise UserError(
            f"{where}: losses is {losses!r:.60}; a number for each choice was expected."
        )
    if any(loss is None or math.isnan(loss) for loss in losses):
        return NO_OPTION
    return likeliest_choice(losses)


def read_choice_object(path: Path, known: Container[str]) -> list[Prediction]:
    """Reads {"results": {pid: index}, "outputs": {pid: text}}, as ScienceQA and LLaVA write it.

    An index that is none of the question's choices is no choice, such as -1, LLaVA's mark of an
    answer without a letter.
    """
    data = read_json(path, unique_keys=True)
    parts = ("results", "outputs")
    if not isinstance(data, dict) or not any(isinstance(data.get(p), dict) for p in parts):
        raise UserError(
            f'{path}: {{"results": {{pid: index}}}} was expected, or "outputs": {{pid: text}}; '
            "give ScienceQA's or LLaVA's results file, or predictions.jsonl."
        )
    results, outputs = (_by_pid(f"{path}, {part}", data.get(part) or {}, known) for part in parts)
    for pid, value in outputs.items():
        if not isinstance(value, str | None):
            raise UserError(
                f"{path}, outputs, problem {pid}: {value!r} was found and text expected; correct "
                "it."
            )
    choices = {pid: _index(f"{path}, results, problem {pid}", x) for pid, x in results.items()}
    return [
        Prediction(pid, outputs.get(pid) or "", choice=choices.get(pid))
        for pid in dict.fromkeys((*results, *outputs))
    ]


def _by_pid(where: str, part: Any, known: Container[str]) -> dict[str, Any]:
    """pid -> value; UserError where `11` and `11.0` name one problem twice."""
    if not isinstance(part, dict):
        raise UserError(f"{where}: an object {{pid: ...}} was expected; correct it.")
    by_pid: dict[str, Any] = {}
    for written, value in part.items():
        pid = id_of(written, where, known, "pid")
        if pid in by_pid:
            raise UserError(f"{where}: problem {pid} is there twice; keep one.")
        by_pid[pid] = value
    return by_pid


def _index(where: str, value: Any) -> int | None:
    """A choice's number, by `int` as in tools/evaluate_acc.py; null is None, NaN no option."""
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return NO_OPTION
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:  # no number, or a text of too many digits
            pass
    raise UserError(
        f"{where}: {value!r} was found and a choice's number from 0 expected; correct it."
    )


def shown_answer(prediction: Prediction) -> str:
    """The answer as a file shows it: its text, or the letter of its choice."""
    if prediction.answer or prediction.choice is None:
        return prediction.answer
    return LETTERS[prediction.choice]


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
_STRIPPED = str.maketrans("", "", string.punctuation)


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
        word = word.translate(_STRIPPED)
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
