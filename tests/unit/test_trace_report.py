"""The report's questions of a prompted system: every text is data, whatever it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from report_pages import card_data, cards_of

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.report import Card, CardAnswer, ReportData, render_report
from mmqa_jax.evaluation.scores import Scores
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.runs.reports.row import RowRun, row_cards
from mmqa_jax.runs.traces import trace_counts, trace_rows

EVIL = "</script><script>alert('x')</script> & <b>bold</b>"
TRACE = {
    "prompts": ["Q: one", "Q: two"],
    "shots": [[{"id": "s1", "similarity": 0.5}], [{"id": "s2"}]],
    "dropped_shots": 1,
    "too_long": [],
    "outputs": [{"text": " said", "logprob": -1.5}],
}
QUESTIONS = [
    Question("q1", "val", EVIL, category="odd", answers=("red", "red", "blue")),
    Question(
        "q2", "val", "which ?", choices=("a", "b"), answer_index=1, extra={"caption": "A map."}
    ),
]
PREDICTIONS = [
    Prediction("q1", "red", trace=TRACE),
    Prediction("q2", "", choice=None, trace={"prompts": [], "shots": [], "failed": ["timed out"]}),
]
SCORES = {"q1": {"vqa_accuracy/paper": 2 / 3}}
SCORED = Scores(("q1",), ("",), {"vqa_accuracy/paper": np.array([2 / 3])})


def page_of(predictions):
    run = RowRun(Corpus([], QUESTIONS), QUESTIONS, predictions, {}, Evaluation([SCORED]))
    cards = row_cards(run, "vqa_accuracy/paper")
    return render_report(ReportData("run", cards=cards))


def test_traces_are_data():
    page = page_of(PREDICTIONS)
    assert page.count("<script") == page.count("</script>") == 3
    one, two = cards_of(page)
    assert one["question"] == EVIL
    (answer,) = one["answers"]
    assert answer["answer"] == "red"
    assert answer["score"] == pytest.approx(2 / 3)
    assert answer["verdict"] == "partly"
    assert answer["scores"] == [["VQA accuracy (formula of papers)", "vqa_accuracy/paper", 0.6667]]
    assert two["answers"][0]["score"] is None
    assert ["reference", "red · blue"] in one["rows"]
    assert ["dropped", "1 shots that did not fit"] in one["rows"]
    assert ["shots of prompt 1 and their similarity", "s1  0.500"] in one["details"]
    assert ["prompt 2", "Q: two"] in one["details"]
    assert ["reference", "b"] in two["rows"]
    assert ["failed", "timed out"] in two["rows"]
    assert ["caption", "A map."] in two["rows"]


def test_reports_without_questions_have_no_cards():
    assert "card-data" not in render_report(ReportData("run"))


def test_rows_and_counts():
    one, two = trace_rows(QUESTIONS, PREDICTIONS, SCORES)
    assert (one["question_id"], one["answer"], one["scores"]) == ("q1", "red", SCORES["q1"])
    assert one["prompts"] == TRACE["prompts"]
    assert two["failed"] == ["timed out"]
    assert trace_counts(QUESTIONS, PREDICTIONS, 1) == {
        "without_caption": 1,
        "without_picture": 2,
        "repeated_choices": 0,
        "too_few_examples": 0,
        "questions_with_dropped_shots": 1,
        "dropped_shots": 1,
        "shots_without_caption": 0,
        "too_long": 0,
        "failed": 1,
        "empty_answers": 1,
    }
    # Two prompts with one example each, and one that did not fit: less than 2 each.
    assert trace_counts(QUESTIONS, PREDICTIONS, 2)["too_few_examples"] == 1


def test_pictures_are_thumbnails():
    png = next(Path(__file__).parents[2].glob("configs/atlas/*.png")).read_bytes()
    cards = [Card(f"{n} ?", [CardAnswer("", "")], picture=png) for n in range(400)]
    data = card_data(render_report(ReportData("run", cards=cards)))
    (uri,) = data["pictures"]  # of all cards, once
    assert uri.startswith("data:image/")
    assert len(uri) < 100_000
