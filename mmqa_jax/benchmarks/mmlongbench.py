"""MMLongBench-Doc's questions (https://github.com/mayubo2333/MMLongBench-Doc): long PDF documents.

    samples.json   doc_id, doc_type, question, answer, evidence_pages, evidence_sources,
                   answer_format, in the folder or in data/ below it

The PDF documents are not read here: `mmqa prepare folder` makes a corpus of them. A question's
document and pages are in `Question.extra`.

MMLongBench-Doc's score and F1 (eval/eval_score.py), and its file of results, the samples with
`pred`.

    mmlongbench/score   by the answer's format: whole numbers are equal, decimals are within 1 %,
                        also as percentages, texts have an ANLS above .5 or are equal, lists are as
                        long and their sorted items as equal

The authors have GPT-4o make a short answer of a response first; here the short answer is scored.
Lists are read as literals where the script evaluates them as code. What the script stops at is 0.
"""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from math import isclose
from pathlib import Path
from typing import Any

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats import official
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.multiple_choice import edit_distance
from mmqa_jax.evaluation.scores import group_of, json_rows, read_own_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import has_answers

# Keys of Question.extra: the PDF file, its pages from 1, what is on them, the answer's format.
DOCUMENT, PAGES, EVIDENCE, FORMAT = "document", "pages", "evidence", "answer_format"
SCORER = "mmlongbench/score"
UNANSWERABLE = "Not answerable"
FORMATS = ("Int", "Float", "Str", "List", "None")
MATERIALS = (Material("MMLongBench-Doc", "Ma et al., NeurIPS 2024", "CC BY-NC 4.0"),)
_NUMBER_OR_ADDRESS = re.compile(
    r"\d+(?:-\d+|\s\d+)?|\d{4}[-\s]\d{2}[-\s]\d{2}|\d{4}[-\s]\d{2}"
    r"|[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}"
)
_LEAST = 0.5  # ANLS of which is 0
_LONGEST = 10_000  # characters of a list, and of a text that is compared
_REMEDY = "put the repository's data/samples.json there"


def read_mmlongbench(folder: Path) -> official.BenchmarkFiles:
    """Reads the questions, all of the split `test`; `Question.category` is the document's type."""
    files = official.OfficialFiles(folder)
    path = files.required("samples.json", "data/samples.json", remedy=_REMEDY)
    questions = [
        _question(number, row) for number, row in enumerate(official.json_entries(path), start=1)
    ]
    kinds = Counter(question.extra[FORMAT] for question in questions)
    counts = {
        "test questions": len(questions),
        "documents": len({question.extra[DOCUMENT] for question in questions}),
        "unanswerable questions": sum(q.answers == (UNANSWERABLE,) for q in questions),
        **{f"{name} answers": kinds[name] for name in FORMATS if kinds[name]},
    }
    published = {"test questions": 1_082}
    return files.content(questions, counts, published, official.PictureFiles(folder, {}), [])


def _question(number: int, row: official.Entry) -> Question:
    kind = row.text(FORMAT)
    if kind not in FORMATS:
        raise row.wrong(FORMAT, " or ".join(FORMATS))
    pages = _literal(row.text("evidence_pages"))
    if not isinstance(pages, list) or not all(type(page) is int for page in pages):
        raise row.wrong("evidence_pages", "a list of pages' numbers")
    return Question(
        id=str(number),
        split="test",
        question=row.text("question"),
        answers=(row.text("answer"),),
        category=row.text("doc_type"),
        extra={
            DOCUMENT: row.text("doc_id"),
            PAGES: pages,
            EVIDENCE: list(row.texts("evidence_sources")),
            FORMAT: kind,
        },
    )


def _literal(text: str) -> Any:
    """The value that a text is a literal of; None where it is of none."""
    try:
        return ast.literal_eval(text) if len(text) <= _LONGEST else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def answer_score(answer: str, prediction: str, kind: str) -> float:
    """The score of a short answer from 0 to 1, by the format of the published one."""
    if kind == "Int":
        return float(_whole(answer) is not None and _whole(answer) == _rounded_down(prediction))
    if kind == "Float":
        wanted, predicted = _decimal(_clean(answer)), _decimal(_clean(prediction))
        return float(None not in (wanted, predicted) and _is_near(wanted, predicted))
    if kind in ("Str", "None"):
        wanted, predicted = _clean(answer), _clean(prediction)
        return float(wanted == predicted) if _must_equal(wanted) else anls(wanted, predicted)
    items = _items(answer), _items(prediction)
    if None in items or len(items[0]) != len(items[1]) or not items[0]:
        return 0.0
    wanted, predicted = (sorted(map(_clean, listed)) for listed in items)
    if _decimal(wanted[0]) is not None or _must_equal(wanted[0]):
        return float("-".join(wanted) == "-".join(predicted))
    return min(anls(*pair) for pair in zip(wanted, predicted, strict=True))


def anls(answer: str, prediction: str) -> float:
    """1 less the edit distance over the longer text's length; 0 up to a half, and of long texts."""
    longest = max(len(answer.upper()), len(prediction.upper()))
    if max(len(answer), len(prediction)) > _LONGEST:
        return 0.0
    if not longest:
        return 1.0
    similarity = 1.0 - edit_distance(answer, prediction) / longest
    return similarity if similarity > _LEAST else 0.0


def _clean(value: Any) -> str:
    """Lower case, without parentheses and their content, outer quotes, `$` before, `%` behind."""
    text = _without_parentheses(str(value).lower().strip()).strip()
    text = re.sub(r"^['\"]|['\"]$", "", text).strip()
    return text.lstrip("$").strip().rstrip("%").strip()


def _without_parentheses(text: str) -> str:
    """A text without what stands from each `(` to the next `)`, and the blanks before it."""
    pieces, end = [], 0
    while (start := text.find("(", end)) >= 0 and (close := text.find(")", start)) >= 0:
        pieces.append(text[end:start].rstrip())
        end = close + 1
    return "".join([*pieces, text[end:]])


def _must_equal(text: str) -> bool:
    """Whether a text is an address, a file, a page, a number or a date: right or wrong."""
    return (
        any(mark in text for mark in ("https://", "a.m.", "p.m."))
        or text.endswith((".py", "ipynb"))
        or text.startswith("page")
        or _NUMBER_OR_ADDRESS.fullmatch(text) is not None
    )


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _rounded_down(text: str) -> int | None:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return None


def _decimal(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_near(answer: float, prediction: float) -> bool:
    def digits(value: float) -> int:
        return len(str(value).split(".")[-1]) if "." in str(value) else 3

    for wanted in (answer / 100, answer, answer * 100):
        if isclose(wanted, prediction, rel_tol=0.01):
            return True
        places = max(min(digits(prediction), digits(wanted)), 2)
        if round(prediction, places) == round(wanted, places):
            return True
    return False


def _items(text: str) -> list[Any] | None:
    """The items of an answer, which is one item unless it begins as a list; None: no list."""
    if not text.startswith("["):
        return [text]
    value = _literal(text)
    return value if isinstance(value, list) else [value] if value is not None else None


def score_mmlongbench(
    questions: Sequence[Question], predictions: Sequence[Prediction]
) -> Evaluation:
    """Scores overall, by pages of evidence, what is on them, and type of document; F1 as a note.

    F1 is of the scores of answerable questions: recall over these, precision over the predictions
    that are not "Not answerable".
    """
    split = scored_split(questions, predictions, has_answers, "a published answer")
    scores = split.values(
        lambda q, p: answer_score(q.answers[0], p.answer.strip(), q.extra[FORMAT])
    )
    counted = split.counted
    answerable = group_of(counted, lambda q: q.answers != (UNANSWERABLE,))
    one_page = group_of(counted, lambda q: len(q.extra[PAGES]) == 1)
    evidence = dict.fromkeys(kind for q in counted for kind in q.extra[EVIDENCE])
    groups = {
        "single-page": one_page,
        "cross-page": ~one_page & answerable,
        "unanswerable": ~answerable,
        **{
            f"evidence: {kind}": group_of(counted, lambda q, kind=kind: kind in q.extra[EVIDENCE])
            for kind in evidence
        },
        **{
            name: group_of(counted, lambda q, name=name: q.category == name)
            for name in dict.fromkeys(q.category for q in counted)
        },
    }
    evaluation = split.evaluation({SCORER: scores}, groups)
    refused = sum(
        q.id in split.by_id and split.by_id[q.id].answer.strip() == UNANSWERABLE for q in counted
    )
    attempted = len(counted) - refused
    total = float(scores[answerable].sum())
    f1 = 0.0
    if total and attempted:
        recall, precision = total / answerable.sum(), total / attempted
        f1 = 2 * recall * precision / (recall + precision)
    evaluation.notes.append(f"F1 of answerable questions: {f1:.4f}")
    return evaluation


def read_results(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads the authors' samples with `pred`, in samples.json's order, or predictions.jsonl."""
    rows = list(json_rows(path))
    if not any("pred" in row for _, row in rows):
        return read_own_lines(path, questions)
    by_number = {question.id: question for question in questions}
    predictions = []
    for number, (where, row) in enumerate(rows, start=1):
        question = by_number.get(str(number))
        if question is None or row.get("question") != question.question:
            raise UserError(
                f"{where}: is not question {number} of samples.json; give results of the same "
                "samples, in their order."
            )
        if not isinstance(row.get("pred"), str):
            raise UserError(f"{where}: `pred` must be text; correct it.")
        predictions.append(Prediction(question.id, row["pred"]))
    return predictions


BENCHMARK = Benchmark(
    read=read_mmlongbench,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats="predictions.jsonl, or the authors' samples with `pred`",
    read_predictions=read_results,
    has_reference=has_answers,
    score=score_mmlongbench,
    headline="mmlongbench",
    boards=read_boards("mmlongbench"),
)
