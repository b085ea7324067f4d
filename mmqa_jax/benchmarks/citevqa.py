"""CiteVQA's questions (https://github.com/opendatalab/CiteVQA): answers that cite rectangles.

    CiteVQA.json   index, Question, PDF_Source, dataset_type, answer_bboxes: the answer, each piece
                   of evidence with <bbox page="1" x1="" y1="" x2="" y2="" />, of several documents
                   also doc="1"; in the folder or in data/validation/ below it

Coordinates are thousandths of the page from its top left corner. The PDF documents are not read
here: `mmqa prepare folder` makes a corpus of them. An answer without rectangles that cites passages
of it, as a row's does, cites the rectangle around the lines of each (`evidence`).

CiteVQA's scores (eval/run.py), and its file of results, the samples with `model_predict`.

    citevqa/recall    gold rectangles that a cited one covers with an IoU of .5
    citevqa/saa       strict attributed accuracy: the answer has 4 of 5 points of a judge, and the
                      cited regions 4 of 5, or recall is .6
    citevqa/zone_f1   F1 of the areas that cited and gold rectangles cover (evaluation/boxes.py)

A judge's points are read from the results (`qa_acc_score`, `rel_score`, from 0 to 5); the authors'
script divides them by 20 as it reads a reply, though its own threshold and summary take 0 to 5.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.documents.document import around
from mmqa_jax.data.formats import official
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.boxes import PageBox, boxes_found, zone_f1
from mmqa_jax.evaluation.scores import groups_by, id_of, json_rows, read_own_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

# Keys of Question.extra: the PDF files, the answer with its rectangles; of a trace: a judge's
# points of the answer and of the cited regions.
DOCUMENTS, MARKED, ANSWER_POINTS, REGION_POINTS = "documents", "marked", "answer", "regions"
EVIDENCE = "evidence"  # key of a line of predictions.jsonl, and of the trace
RECALL, SAA, ZONES = "citevqa/recall", "citevqa/saa", "citevqa/zone_f1"
KINDS = ("Single-Doc", "Multi (1-Gold)", "Multi (N-Gold)")
MATERIALS = (
    Material("CiteVQA", "Ma et al., 2026", "MIT, its documents for research and no commerce"),
)
_GOOD, _RECALL = 4, 0.6  # points of 5, and the recall that stands for those of the regions
_BOX = re.compile(
    r'<bbox\s+(?:doc="(\d{1,9})"\s+)?page="(\d{1,9})"\s+x1="([\d.]{1,20})"\s+y1="([\d.]{1,20})"\s+'
    r'x2="([\d.]{1,20})"\s+y2="([\d.]{1,20})"\s*/?>'
)
_REMEDY = "put the data set's CiteVQA.json there"


def read_citevqa(folder: Path) -> official.BenchmarkFiles:
    """Reads the questions, all of the split `test`; `Question.category` is the kind of task."""
    files = official.OfficialFiles(folder)
    names = ("CiteVQA.json", "data/validation/CiteVQA.json", "data/data_items.json")
    path = files.required(*names, remedy=_REMEDY)
    questions = [*official.read_entries(official.json_entries(path), _question, "index").values()]
    kinds = {kind: lambda q, kind=kind: q.category == kind for kind in KINDS}
    counts = official.counts_of(questions, ("test",), kinds)
    counts["documents"] = len({name for q in questions for name in q.extra[DOCUMENTS]})
    published = {"test questions": 1_897, "documents": 711}
    return files.content(questions, counts, published, official.PictureFiles(folder, {}), [])


def _question(row: official.Entry) -> Question:
    marked = row.text("answer_bboxes")
    return Question(
        id=str(row.number("index")),
        split="test",
        question=row.text("Question"),
        answers=(_BOX.sub("[citation]", marked),),
        category=row.choice("dataset_type", KINDS),
        extra={DOCUMENTS: list(row.texts("PDF_Source")), MARKED: marked},
    )


def cited_boxes(text: str) -> list[PageBox]:
    """The rectangles that an answer cites; of one document it is the first."""
    boxes = []
    for document, page, *edges in _BOX.findall(text):
        try:
            left, top, right, bottom = map(float, edges)
        except ValueError:  # 1.2.3
            continue
        boxes.append(PageBox(int(document or 1), int(page), left, top, right, bottom))
    return boxes


def evidence_boxes(question: Question, evidence: Sequence[Mapping[str, Any]]) -> list[PageBox]:
    """The rectangles of cited passages; 0 is a document that is not the question's."""
    names = [PurePosixPath(name).name for name in question.extra[DOCUMENTS]]
    boxes = []
    for place in evidence:
        if place.get("boxes") and place.get("page_size"):
            name = PurePosixPath(place["file"]).name
            document = names.index(name) + 1 if name in names else 0
            width, height = place["page_size"]
            left, top, right, bottom = around(place["boxes"])
            edges = (left / width, top / height, right / width, bottom / height)
            boxes.append(PageBox(document, place["page"], *(1000 * edge for edge in edges)))
    return boxes


def _cited(question: Question, prediction: Prediction) -> list[PageBox]:
    boxes = cited_boxes(prediction.answer)
    return boxes or evidence_boxes(question, prediction.trace.get(EVIDENCE, ()))


def strict_attributed(answer: float, regions: float, recall: float) -> float:
    """1 of an answer that is right and cites what supports it, by a judge's points."""
    return float(answer >= _GOOD and (regions >= _GOOD or recall >= _RECALL))


def has_boxes(question: Question) -> bool:
    """Tells whether the rectangles of the evidence are published."""
    return bool(cited_boxes(question.extra.get(MARKED, "")))


def score_citevqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Scores by kind of task; precision, F1 and pages, which the authors average over the answers
    that have them, are notes."""
    split = scored_split(questions, predictions, has_boxes, "published rectangles")
    precisions, f1s, judged = [], [], []

    def recall_of(question: Question, prediction: Prediction) -> float:
        gold, cited = cited_boxes(question.extra[MARKED]), _cited(question, prediction)
        hits = boxes_found(gold, cited)
        recall = hits / len(gold)
        if cited:
            precisions.append(precision := hits / len(cited))
            if hits:
                f1s.append(2 * precision * recall / (precision + recall))
        points = prediction.trace.get("judge", {})
        if ANSWER_POINTS in points and REGION_POINTS in points:
            judged.append(strict_attributed(points[ANSWER_POINTS], points[REGION_POINTS], recall))
        return recall

    def zones_of(question: Question, prediction: Prediction) -> float:
        return zone_f1(cited_boxes(question.extra[MARKED]), _cited(question, prediction))

    scores = {RECALL: split.values(recall_of), ZONES: split.values(zones_of)}
    if judged and len(judged) == len(split.by_id):
        values = iter(judged)
        scores[SAA] = split.values(lambda question, prediction: next(values))
    evaluation = split.evaluation(scores, groups_by(split.counted, lambda q: q.category))
    for name, values in (("precision", precisions), ("F1", f1s)):
        if values:
            mean, count = float(np.mean(values)), len(values)
            evaluation.notes.append(f"{name} of the {count:,} answers that have one: {mean:.4f}")
    if SAA not in scores:
        evaluation.notes.append(
            f"{SAA} needs a judge's points (`qa_acc_score` and `rel_score` of the results) of each "
            "answer"
        )
    return evaluation


def read_results(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads the authors' results with `model_predict`, or predictions.jsonl, whose answers have
    rectangles in the authors' form, or whose `evidence` has them."""
    rows = list(json_rows(path))
    if not any("model_predict" in row for _, row in rows):
        pairs = zip(read_own_lines(path, questions), rows, strict=True)
        return [
            dataclasses.replace(prediction, trace={EVIDENCE: row.get(EVIDENCE) or ()})
            for prediction, (_, row) in pairs
        ]
    known = {question.id for question in questions}
    predictions = []
    for where, row in rows:
        if not isinstance(row.get("model_predict"), str):
            raise UserError(f"{where}: `model_predict` must be text; correct it.")
        points = {}
        for key, name in ((ANSWER_POINTS, "qa_acc_score"), (REGION_POINTS, "rel_score")):
            value = row.get(name)
            if value is None:
                continue
            if type(value) not in (int, float) or not 0 <= value <= 5:
                raise UserError(f"{where}: `{name}` must be a number from 0 to 5; correct it.")
            points[key] = value
        name = id_of(row.get("index"), where, known, "index")
        predictions.append(Prediction(name, row["model_predict"], trace={"judge": points}))
    return predictions


BENCHMARK = Benchmark(
    read=read_citevqa,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats="predictions.jsonl, or the authors' results with `model_predict`",
    read_predictions=read_results,
    has_reference=has_boxes,
    score=score_citevqa,
    headline="citevqa",
    boards=read_boards("citevqa"),
)
