"""Scores by groups that overlap, as ScienceQA's columns do."""

import dataclasses

import numpy as np
import pytest

from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.scores import Scores, merged_scores, scores_of
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.evaluation.tables import answer_table

GROUPS = {
    "TXT": np.array([True, True, False, False]),
    "IMG": np.array([True, False, True, False]),
    "none": np.zeros(4, dtype=bool),
}


def scored(groups) -> Scores:
    questions = [Question(name, "test", "?", category="subject") for name in "abcd"]
    given = {name: Prediction(name) for name in "abc"}
    values = {"accuracy/x": np.array([1.0, 0.0, 1.0, 0.0])}
    return scores_of(questions, questions, given, values, groups)


def test_a_question_counts_in_every_group_it_belongs_to():
    scores = scored(GROUPS)
    assert scores.counts == {"TXT": 2, "IMG": 2}  # groups without questions are left out
    assert scores.by_category == {"TXT": {"accuracy/x": 0.5}, "IMG": {"accuracy/x": 1.0}}
    assert scores.scores == {"accuracy/x": 0.5}
    assert scores.missing == 1
    table = answer_table("t", scores)
    assert [row[:2] for row in table.rows] == [["TXT", 2], ["IMG", 2], ["all", 4]]


def test_without_groups_the_categories_are_the_groups():
    assert scored(None).by_category == {"subject": {"accuracy/x": 0.5}}
    assert scored({}).by_category == {}


def test_groups_survive_merging_and_have_no_modalities():
    other = dataclasses.replace(scored(GROUPS), per_question={"accuracy/y": np.ones(4)})
    (merged,) = merged_scores([scored(GROUPS), other])
    assert merged.by_category["TXT"] == {"accuracy/x": 0.5, "accuracy/y": 1.0}
    evaluation = Evaluation([merged], has_modalities=False)
    assert evaluation.summary()["by_modality"] == {}
    assert len(evaluation.tables("t")) == 1
    with_modalities = Evaluation([merged]).summary()["by_modality"]
    assert with_modalities == {"image": pytest.approx({"accuracy/x": 0.5, "accuracy/y": 1.0})}
