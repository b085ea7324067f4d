"""CiteVQA: its samples, and scores that the functions of the authors' eval/run.py give."""

import json

import numpy as np
import pytest

from mmqa_jax.benchmarks.citevqa import (
    RECALL,
    SAA,
    cited_boxes,
    read_citevqa,
    read_results,
    score_citevqa,
    strict_attributed,
)
from mmqa_jax.data.schema import Prediction
from mmqa_jax.evaluation.boxes import PageBox, boxes_found, zone_f1
from tests.refusals import refuses


def tag(page, x1, y1, x2, y2, end=" />", doc=""):
    return f'<bbox {doc}page="{page}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"{end}'


# (gold, cited) -> recall and precision of eval_recall_single and eval_precision_single.
SCORES = [
    (tag(2, 678, 186, 745, 309),
     tag(2, 678, 178, 745, 309) + tag(2, 670, 178, 745, 279, " x>"), 1.0, 1.0),
    (tag(2, 505.5, 471, 597, 502) + tag(1, 255, 501, 291, 534) + tag(2, 109, 570, 162, 727),
     tag(2, 109, 570, 154, 697) + tag(2, 525.5, 471, 567, 522), 1 / 3, 0.5),
    (tag(2, 642, 83, 627, 154, ">"), tag(2, 634.5, 83, 597, 124, ">"), 0.0, 0.0),
    (tag(3, 699, 603, 701, 723), tag(3, 719, 595, 671, 715), 0.0, 0.0),
    (tag(1, 0, 0, 10, 10) + tag(1, 0, 0, 10, 9), tag(1, 0, 0, 10, 10), 1.0, 2.0),
    (tag(1, 0, 0, 10, 10), tag(1, 0, 0, 10, 10, doc='doc="2" '), 0.0, 0.0),
]  # fmt: skip
SAMPLE = {
    "index": 7,
    "Question": "How many tons?",
    "PDF_Source": ["data/pdf/a.pdf"],
    "dataset_type": "Single-Doc",
    "answer_bboxes": f"It is 1.31: {tag(8, 584, 65, 598, 371)}",
}


@pytest.mark.parametrize(("gold", "cited", "recall", "precision"), SCORES)
def test_rectangles_are_found_as_by_the_authors(gold, cited, recall, precision):
    gold, cited = cited_boxes(gold), cited_boxes(cited)
    hits = boxes_found(gold, cited)
    assert (hits / len(gold), hits / len(cited)) == (recall, precision)


@pytest.mark.parametrize(
    ("answer", "regions", "recall", "strict"),
    [(4, 4, 0, 1), (4, 3.9, 0.6, 1), (5, 3, 0.59, 0), (3.5, 5, 1, 0)],
)
def test_the_strict_score_is_the_authors(answer, regions, recall, strict):
    assert strict_attributed(answer, regions, recall) == strict  # compute_saa


def test_zones_are_counted_pixels():
    rng = np.random.default_rng(0)
    for _ in range(20):
        boxes, masks = [], []
        for _ in range(2):
            corners = rng.integers(0, 40, (rng.integers(0, 4), 2))
            sizes = rng.integers(1, 20, corners.shape)
            pages = rng.integers(1, 3, len(corners))
            mask = np.zeros((3, 64, 64), bool)
            for page, (x, y), (w, h) in zip(pages, corners, sizes, strict=True):
                mask[page, y : y + h, x : x + w] = True
            zipped = zip(pages, corners, sizes, strict=True)
            boxes.append([PageBox(1, p, *xy, *(xy + wh)) for p, xy, wh in zipped])
            masks.append(mask)
        both, total = (masks[0] & masks[1]).sum(), sum(mask.sum() for mask in masks)
        assert zone_f1(*boxes) == pytest.approx(2 * both / total if total else 0)


def test_samples_and_results_are_read_and_scored(tmp_path):
    path = tmp_path / "CiteVQA.json"
    path.write_text(json.dumps([SAMPLE, {**SAMPLE, "index": 8}]))
    questions = read_citevqa(tmp_path).questions
    assert questions[0].answers == ("It is 1.31: [citation]",)
    results = tmp_path / "results.json"
    predicted = [
        {**SAMPLE, "model_predict": SAMPLE["answer_bboxes"], "qa_acc_score": 4, "rel_score": 0},
        {**SAMPLE, "index": 8, "model_predict": "1.31", "qa_acc_score": 5, "rel_score": 5},
    ]
    results.write_text(json.dumps(predicted))
    scores = score_citevqa(questions, read_results(results, questions)).scored[0]
    assert [list(scores.per_question[name]) for name in (RECALL, SAA)] == [[1, 0], [1, 1]]
    unjudged = score_citevqa(questions, [Prediction("7", "1.31")])
    assert SAA not in unjudged.scored[0].per_question
    assert "needs a judge's points" in unjudged.notes[-1]
    for wrong, words in [({"model_predict": 3}, "must be text"),
                         ({"model_predict": "", "rel_score": 6}, "from 0 to 5")]:  # fmt: skip
        results.write_text(json.dumps([{**SAMPLE, **wrong}, predicted[1]]))
        refuses(words, read_results, results, questions)
    path.write_text(json.dumps([{**SAMPLE, "dataset_type": "Other"}]))
    refuses("dataset_type", read_citevqa, tmp_path)
