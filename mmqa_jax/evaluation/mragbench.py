"""MRAG-Bench's score and prediction file (mragbench/MRAG-Bench, eval/score.py).

    mragbench/rule   MMMU's rule for letters, without its random choice and without contents

Where the rule finds no letter the script asks GPT-3.5; here that is wrong and counted as unparsed.
The file has a line {"qs_id", "output", "gt_choice", "scenario", ...} for each question, which the
script scores by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.core.files import write_jsonl
from mmqa_jax.data.datasets.mragbench import ASPECT, SCENARIOS
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.choice_scores import chosen_by, has_answer, right_choices
from mmqa_jax.evaluation.multiple_choice import LETTERS, mmmu_choice
from mmqa_jax.evaluation.prediction_lines import read_answers_by
from mmqa_jax.evaluation.scores import (
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.evaluation.scoring import Evaluation

SCORER = "mragbench/rule"


def score_mragbench(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Accuracy overall, by scenario and by aspect; a missing prediction is wrong."""
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_answer, "a published answer")
    chosen = chosen_by(scored, given, lambda text, q: mmmu_choice(text.strip(), len(q.choices)))
    unparsed = sum(q.id in given and one is None for q, one in zip(scored, chosen, strict=True))
    scores = scores_of(
        questions, scored, given, {SCORER: right_choices(scored, chosen)}, _groups(scored)
    )
    return Evaluation([scores], has_modalities=False, unparsed={SCORER: unparsed})


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    scenarios = np.array([question.category for question in questions])
    aspects = np.array([str(question.extra.get(ASPECT, "")) for question in questions])
    found = dict.fromkeys(scenarios.tolist())
    ordered = [name for name in dict.fromkeys((*SCENARIOS, *found)) if name in found]
    return {
        **{name: scenarios == name for name in ordered},
        **{f"aspect: {name}": aspects == name for name in sorted({*aspects.tolist()} - {""})},
    }


def read_mragbench_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads the official lines or their list, or predictions.jsonl."""
    return read_answers_by(path, "qs_id", "output", {question.id for question in questions})


def write_mragbench_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the lines that score.py reads, one for every question."""
    given = predictions_by_question(questions, predictions)
    write_jsonl(
        path,
        (
            {
                "qs_id": question.id,
                "output": given[question.id].answer if question.id in given else "",
                "gt_answer": question.choices[question.answer_index],
                "gt_choice": LETTERS[question.answer_index],
                "scenario": question.category,
                ASPECT: question.extra.get(ASPECT, ""),
            }
            for question in questions
            if question.answer_index is not None
        ),
    )
