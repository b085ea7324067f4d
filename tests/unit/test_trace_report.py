"""The report's questions of a prompted system: every text is data, whatever it says."""

from pathlib import Path

import numpy as np
import pytest
from report_pages import card_data, cards_of

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation import report
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
    return report.render_report(report.ReportData("run", cards=cards))


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


def row_of(count, wrong):
    """A row over so many questions of two categories, right but for those in `wrong`."""
    questions = [
        Question(f"q{n}", "val", f"question {n} ?", category="ab"[n % 2], answers=("red",))
        for n in range(count)
    ]
    predictions = [Prediction(question.id, f"answer {n}", trace={"prompts": ["Q"]})
                   for n, question in enumerate(questions)]  # fmt: skip
    values = np.array([float(n not in wrong) for n in range(count)])
    ids, categories = zip(
        *((question.id, question.category) for question in questions), strict=True
    )
    scored = Scores(ids, categories, {"exact": values})
    return RowRun(Corpus([], questions), questions, predictions, {}, Evaluation([scored]))


def test_every_question_of_20000_is_on_the_page():
    """Rare wrong answers in full; of many the others come first in brief."""
    cards = row_cards(row_of(20_000, {19_998}), "exact")
    assert len(cards) == len({card.id for card in cards}) == 20_000
    (wrong,) = [card for card in cards if card.answers[0].score == 0]
    assert (wrong.id, wrong.is_brief, bool(wrong.details)) == ("q19998", False, True)
    assert report.how_many(cards, 20_000) == (
        " 5,000 of them have their sources here, 15,000 follow in brief."
    )
    page = report.render_report(report.ReportData("run", cards=cards))
    data = card_data(page)
    assert (len(data["cards"]), len(data["brief"])) == (5_000, 15_000)
    assert ["q19999", "question 19999 ?", "b", [["", "answer 19999", 1.0]],
            [["reference", "red"]]] in data["brief"]  # fmt: skip
    assert [button["count"] for button in data["filters"]] == [20_000, 19_999, 0, 1]
    assert len(page) < 5_000_000
    cards = row_cards(row_of(12_000, set(range(0, 12_000, 3))), "exact")
    brief = [card.answers[0].score for card in cards if card.is_brief]
    assert brief == sorted(brief)
    assert brief[0] == 0


def test_a_page_holds_a_bounded_number_of_brief_questions():
    cards = [
        report.brief_card(
            Question(f"q{n}", "val", "long " * 100), [report.CardAnswer("", "x" * 10_000)], []
        )
        for n in range(40_000)
    ]
    held = report.that_fit(cards)
    assert held == cards[: len(held)]
    page = report.render_report(report.ReportData("run", cards=held))
    assert 15_000_000 < len(page) < 17_000_000
    assert f", {40_000 - len(held):,} are left out: see per_question" in report.how_many(
        held, 40_000
    )


def test_reports_without_questions_have_no_cards():
    assert "card-data" not in report.render_report(report.ReportData("run"))


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
        "cut": 0,
    }
    # Two prompts with one example each, and one that did not fit: less than 2 each.
    assert trace_counts(QUESTIONS, PREDICTIONS, 2)["too_few_examples"] == 1


def test_pictures_are_thumbnails():
    png = next(Path(__file__).parents[2].glob("configs/atlas/*.png")).read_bytes()
    cards = [report.Card(f"{n} ?", [report.CardAnswer("", "")], picture=png) for n in range(400)]
    data = card_data(report.render_report(report.ReportData("run", cards=cards)))
    (uri,) = data["pictures"]  # of all cards, once
    assert uri.startswith("data:image/")
    assert len(uri) < 100_000
