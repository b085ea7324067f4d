"""Accuracy on ScienceQA, MMBench and SEED-Bench, where a question has one correct choice.

    scienceqa/letter_or_random     `The answer is X.` once, else a random choice (run_gpt3.py)
    scienceqa/letter_or_expected   the same, with 1 / (number of choices) in place of the draw
    scienceqa/letter_or_wrong      LLaVA's rule, which also takes a bare letter; else wrong
    scienceqa/recorded_choice      the choices that the file itself gives (tools/evaluate_acc.py)
    mmbench/circular               every circular pass of a question is right (VLMEvalKit, 2025)
    mmbench/vanilla                the first pass is right
    mmbench/circular_2026          the same two by VLMEvalKit's rule since June 2026, which also
    mmbench/vanilla_2026           takes `answer is X` for X
    seed_bench/likelihood          the choice of least loss is right (eval.py)
    seed_bench/letter              the answer is the correct letter and nothing else (LLaVA)

A prediction that has a choice and no text, or no text but that choice's, counts by its choice under
every rule. Predictions that name none of the choices are counted as `unparsed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.mmbench import BASE, L2, PASS
from mmqa_jax.data.datasets.scienceqa import HAS_HINT, HAS_PICTURE
from mmqa_jax.data.datasets.seed_bench import DATA_TYPE, DIMENSION
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.data.table_files import whole_number
from mmqa_jax.evaluation import multiple_choice as rules
from mmqa_jax.evaluation.scores import (
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.evaluation.scoring import Evaluation

Given = Mapping[str, Prediction]
Rule = Callable[[str, Question], int | None]

_SUBJECTS = {"NAT": "natural science", "SOC": "social science", "LAN": "language science"}
_GRADES = {"G1-6": range(1, 7), "G7-12": range(7, 13)}
_SEED_SCORED = {  # why SEED-Bench's predictions are scored by this scorer
    "seed_bench/likelihood": (
        "the predictions are choices (`choice`, `losses`, or the first eval.py's lines with `q_id`)"
    ),
    "seed_bench/letter": (
        "the predictions are texts; one counts if it is the correct letter, whether a model wrote "
        "it or eval.py chose it by likelihood"
    ),
}


def has_answer(question: Question) -> bool:
    """Whether the correct choice is published."""
    return question.answer_index is not None


def score_scienceqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """ScienceQA's accuracy overall and in its nine columns, which overlap."""
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_answer, "a published answer")
    strict = chosen_by(scored, given, lambda text, q: rules.gpt3_choice(text, len(q.choices)))
    lenient = chosen_by(scored, given, lambda text, q: rules.llava_choice(text, len(q.choices)))
    failed = [q.id in given and choice is None for q, choice in zip(scored, strict, strict=True)]
    drawn = [
        rules.random_choice(q.id, len(q.choices)) if fails else choice
        for q, choice, fails in zip(scored, strict, failed, strict=True)
    ]
    chance = np.array([1 / len(question.choices) for question in scored])
    per_question = {
        "scienceqa/letter_or_random": right_choices(scored, drawn),
        "scienceqa/letter_or_expected": np.where(failed, chance, right_choices(scored, strict)),
        "scienceqa/letter_or_wrong": right_choices(scored, lenient),
    }
    unparsed = {
        "scienceqa/letter_or_random": sum(failed),
        "scienceqa/letter_or_expected": sum(failed),
        "scienceqa/letter_or_wrong": _unparsed(scored, given, lenient),
    }
    if any(prediction.choice is not None for prediction in predictions):
        recorded = [given[q.id].choice if q.id in given else None for q in scored]
        per_question["scienceqa/recorded_choice"] = right_choices(scored, recorded)
        unparsed["scienceqa/recorded_choice"] = _unparsed(scored, given, recorded)
    scores = scores_of(questions, scored, given, per_question, scienceqa_columns(scored))
    evaluation = Evaluation([scores], unparsed=unparsed, has_modalities=False)
    known = sum(bool(question.category) for question in scored)
    if known < len(scored):
        evaluation.notes.append(
            f"subject and grade of {known:,} of {len(scored):,} questions are known: NAT, SOC, "
            "LAN, G1-6 and G7-12 are over these alone; problems.json has all"
        )
    return evaluation


def scienceqa_columns(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """ScienceQA's columns but for the average (tools/evaluate_acc.py:33-68); they overlap.

    NAT, SOC, LAN by subject; TXT with a hint, IMG with a picture, NO with neither; G1-6, G7-12 by
    grade. A picture counts where the benchmark shows one, whether or not the file is there.
    """
    hint = np.array([bool(q.extra.get(HAS_HINT)) for q in questions])
    picture = np.array([bool(q.extra.get(HAS_PICTURE)) for q in questions])
    grades = [str(q.extra.get("grade") or "").removeprefix("grade") for q in questions]
    columns = {
        name: np.array([q.category == subject for q in questions])
        for name, subject in _SUBJECTS.items()
    }
    columns |= {"TXT": hint, "IMG": picture, "NO": ~hint & ~picture}
    return columns | {
        name: np.array([whole_number(grade) in grades_of for grade in grades])
        for name, grades_of in _GRADES.items()
    }


def score_mmbench(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """MMBench's accuracy overall, by L2 category and by category, as VLMEvalKit's report_acc.

    Letters are inferred as VLMEvalKit does without a judge model. A question counts once: circular
    if all passes among `questions` are right, one without a prediction being wrong. Passes whose
    first pass is not among `questions` are left out, as in VLMEvalKit.
    """
    given = predictions_by_question(questions, predictions)
    firsts = [question for question in questions if question.extra.get(PASS, 0) == 0]
    if not firsts:
        raise UserError(
            f"all {len(questions):,} questions are rotated passes (index 1,000,000 and above), but "
            "a question is scored with its first pass; give the first passes too."
        )
    scored = questions_that_count(firsts, has_answer, "a published answer")
    passes = [question for question in questions if has_answer(question)]
    rotated = any(q.extra.get(PASS, 0) > 0 and q.id in given for q in passes)
    per_question: dict[str, np.ndarray] = {}
    unparsed: dict[str, int] = {}
    for year, answer_is in (("", False), ("_2026", True)):
        rule = functools.partial(_vlmeval, answer_is=answer_is)
        chosen = chosen_by(passes, given, rule)
        hits = right_choices(passes, chosen)  # [pass]
        if rotated:
            per_question[f"mmbench/circular{year}"] = _circular(passes, hits, scored)
            unparsed[f"mmbench/circular{year}"] = _unparsed(passes, given, chosen)
        of_pass = dict(zip((question.id for question in passes), hits, strict=True))
        per_question[f"mmbench/vanilla{year}"] = np.array([of_pass[q.id] for q in scored])
        unparsed[f"mmbench/vanilla{year}"] = _unparsed(passes, given, chosen, firsts_alone=True)
    notes = []
    if not rotated:
        notes.append("no prediction for any rotated pass, so mmbench/circular is not scored")
    groups = {
        f"{key}: {name}": np.array([_ability(q, key) == name for q in scored])
        for key in (L2, "category")
        for name in sorted({_ability(q, key) for q in scored} - {""})
    }
    scores = scores_of(firsts, scored, given, per_question, groups)
    return Evaluation([scores], notes=notes, unparsed=unparsed, has_modalities=False)


def _vlmeval(text: str, question: Question, *, answer_is: bool) -> int | None:
    return rules.vlmeval_choice(text, question.choices, answer_is=answer_is)


def _circular(
    passes: Sequence[Question], hits: np.ndarray, scored: Sequence[Question]
) -> np.ndarray:
    """1.0 for each of `scored` whose passes are all right; `hits` is [pass]."""
    all_right: dict[str, float] = {}
    for question, hit in zip(passes, hits, strict=True):
        base = question.extra.get(BASE, question.id)
        all_right[base] = min(all_right.get(base, 1.0), float(hit))
    return np.array([all_right[q.extra.get(BASE, q.id)] for q in scored])


def score_seed_bench(
    questions: Sequence[Question], predictions: Sequence[Prediction]
) -> Evaluation:
    """SEED-Bench's accuracy overall, by dimension, on pictures (1-9) and on videos (10-12).

    Choices count as those of least loss, texts as letters; both are scored where a file has both,
    and the notes say which it has.
    """
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_answer, "a published answer")
    chosen = {}
    if any(prediction.choice is not None for prediction in predictions):
        chosen["seed_bench/likelihood"] = [
            given[q.id].choice if q.id in given else None for q in scored
        ]
    answered = [q for q in scored if q.id in given and given[q.id].answer]
    if not chosen or not all(by_choice(given[q.id], q) for q in answered):
        chosen["seed_bench/letter"] = [
            rules.exact_letter_choice(given[q.id].answer, len(q.choices)) if q.id in given else None
            for q in scored
        ]
    dimensions = {q.extra[DIMENSION]: q.category for q in scored}
    groups = {
        f"{number} {dimensions[number]}": np.array([q.extra[DIMENSION] == number for q in scored])
        for number in sorted(dimensions)
    }
    for name, kind in (("pictures, 1-9", "image"), ("videos, 10-12", "video")):
        groups[name] = np.array([q.extra[DATA_TYPE] == kind for q in scored])
    per_question = {name: right_choices(scored, choices) for name, choices in chosen.items()}
    unparsed = {name: _unparsed(scored, given, choices) for name, choices in chosen.items()}
    scores = scores_of(questions, scored, given, per_question, groups)
    notes = [f"{name}: {_SEED_SCORED[name]}" for name in per_question]
    return Evaluation([scores], notes=notes, unparsed=unparsed, has_modalities=False)


def chosen_by(questions: Sequence[Question], given: Given, rule: Rule) -> list[int | None]:
    """Each question's choice: by the rule from the answer's text, or as given where it has none."""
    choices: list[int | None] = []
    for question in questions:
        prediction = given.get(question.id)
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
    return prediction.answer in ("", text, f"{rules.LETTERS[prediction.choice]}. {text}")


def right_choices(questions: Sequence[Question], choices: Sequence[int | None]) -> np.ndarray:
    """1.0 where the choice is the correct one; [question]."""
    pairs = zip(questions, choices, strict=True)
    return np.array([float(choice == question.answer_index) for question, choice in pairs])


def _unparsed(
    questions: Sequence[Question],
    given: Given,
    choices: Sequence[int | None],
    *,
    firsts_alone: bool = False,
) -> int:
    """How many predictions name none of their question's choices."""
    return sum(
        question.id in given
        and choice is None
        and not (firsts_alone and question.extra.get(PASS, 0))
        for question, choice in zip(questions, choices, strict=True)
    )


def _ability(question: Question, key: str) -> str:
    return question.category if key == "category" else question.extra.get(key, "")
