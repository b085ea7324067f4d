"""MMLongBench-Doc: its samples, and scores that the authors' eval_score gives."""

import json

import pytest

from mmqa_jax.benchmarks.mmlongbench import (
    SCORER,
    answer_score,
    read_mmlongbench,
    read_results,
    score_mmlongbench,
)
from mmqa_jax.data.schema import Prediction
from tests.refusals import refuses

# (answer, prediction, format) -> what eval/eval_score.py of the authors gives.
SCORES = [
    ("8", "8", "Int", 1.0),
    ("8", "8.9", "Int", 1.0),
    ("8", "eight", "Int", 0.0),
    ("18.29%", "18.3", "Float", 1.0),
    ("18.29%", "0.1829", "Float", 1.0),
    ("18.29%", "18.6", "Float", 0.0),
    ("$1,200", "1200", "Float", 0.0),
    ("42.5", "nan", "Float", 0.0),
    ("Less well-off", "less well off", "Str", 0.9230769230769231),
    ("Less well-off", "better", "Str", 0.0),
    ("Blue (dark)", "'blue'", "Str", 1.0),
    ("2015-06", "2015-07", "Str", 0.0),
    ("page 3", "page 4", "Str", 0.0),
    ("Not answerable", "Not answerable", "None", 1.0),
    ("Not answerable", "5", "None", 0.0),
    ("['White', '10%']", "['10', 'white']", "List", 1.0),
    ("['White', '10%']", "['White', '11%']", "List", 0.0),
    ("['Circle', 'Rectangle']", "['rectangles', 'circle']", "List", 0.9),
    ("['Circle', 'Rectangle']", "circle", "List", 0.0),
    ("['Circle']", "circle", "List", 1.0),
    ("['Circle']", "[circle", "List", 0.0),
    ("[3, 5]", "[5, 3]", "List", 1.0),
]
SAMPLE = {
    "doc_id": "report.pdf",
    "doc_type": "Brochure",
    "question": "How many?",
    "answer": "8",
    "evidence_pages": "[5]",
    "evidence_sources": "['Chart', 'Table']",
    "answer_format": "Int",
}
UNANSWERABLE = {
    **SAMPLE, "answer": "Not answerable", "evidence_pages": "[]", "evidence_sources": "[]",
    "answer_format": "None", "doc_type": "Guidebook",
}  # fmt: skip
CROSS = {**SAMPLE, "answer": "['a', 'b']", "evidence_pages": "[1, 2]", "answer_format": "List"}


def write(folder, samples):
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "samples.json").write_text(json.dumps(samples))
    return folder


@pytest.mark.parametrize(("answer", "prediction", "kind", "score"), SCORES)
def test_scores_are_the_authors(answer, prediction, kind, score):
    assert answer_score(answer, prediction, kind) == pytest.approx(score, abs=1e-9)


def test_groups_and_f1(tmp_path):
    questions = read_mmlongbench(write(tmp_path, [SAMPLE, UNANSWERABLE, CROSS])).questions
    assert questions[0].extra == {
        "document": "report.pdf", "pages": [5], "evidence": ["Chart", "Table"],
        "answer_format": "Int",
    }  # fmt: skip
    predictions = [Prediction("1", "8"), Prediction("2", "Not answerable"), Prediction("3", "[]")]
    evaluation = score_mmlongbench(questions, predictions)
    (scores,) = evaluation.scored
    assert scores.per_question[SCORER].tolist() == [1, 1, 0]
    means = {name: values[SCORER] for name, values in scores.by_category.items()}
    assert means == {
        "single-page": 1, "cross-page": 0, "unanswerable": 1, "evidence: Chart": 0.5,
        "evidence: Table": 0.5, "Brochure": 0.5, "Guidebook": 1,
    }  # fmt: skip
    # eval_acc_and_f1: recall 1 of 2 answerable, precision 1 of 2 that are not "Not answerable".
    assert evaluation.notes == ["F1 of answerable questions: 0.5000"]


def test_results_of_the_authors(tmp_path):
    questions = read_mmlongbench(write(tmp_path, [SAMPLE, CROSS])).questions
    results = tmp_path / "results.json"
    rows = [{**SAMPLE, "pred": "8", "score": 1.0}, {**CROSS, "pred": "['a']", "score": 0.0}]
    results.write_text(json.dumps(rows))
    assert read_results(results, questions) == [Prediction("1", "8"), Prediction("2", "['a']")]
    results.write_text(json.dumps([{**SAMPLE, "question": "Another?", "pred": "8"}]))
    refuses("is not question 1 of samples.json", read_results, results, questions)
    results.write_text(json.dumps([{**SAMPLE, "pred": 8}]))
    refuses("`pred` must be text", read_results, results, questions)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("answer_format", "Date", "answer_format is 'Date'; Int or Float or"),
        ("evidence_pages", "five", "evidence_pages is 'five'; a list of pages"),
        ("evidence_sources", "Chart", "evidence_sources is 'Chart'"),
        ("answer", None, "answer is None; text was expected"),
    ],
)
def test_refused_samples(key, value, message, tmp_path):
    refuses(message, read_mmlongbench, write(tmp_path, [{**SAMPLE, key: value}]))


def test_no_samples(tmp_path):
    refuses("samples.json: no such file; put the repository's", read_mmlongbench, tmp_path)
