"""ViDoRe's sets (https://github.com/illuin-tech/vidore-benchmark): questions on pictured pages.

    corpus/*.parquet     corpus-id, image, in v3 also markdown: the pages of all documents
    queries/*.parquet    query-id, query, in v2 and v3 also language
    qrels/*.parquet      query-id, corpus-id, score: the relevant pages of a question, graded

A folder holds one set, of v1 in the layout that ends in `_beir`, of v2 or v3. v3 writes corpus_id
and query_id. Each set is a corpus of its own: a question is searched in the pages of its set.

ViDoRe's score as MTEB computes it, and MTEB's file of results (mteb _evaluators, results).

    vidore/ndcg@5, @10   trec_eval's nDCG: a page gains its grade, equal scores (as float32) are in
                         descending order of their ids
    vidore/official      the version's main score: nDCG@5 of v1 and v2, nDCG@10 of v3

    box F1               a note, of v3's pages with rectangles of annotators: F1 of the area that
                         the cited rectangles of a page cover beside that of an annotator, all of a
                         page as one zone; the best annotator counts

Box F1 is ViDoRe V3's of visual grounding (Loison et al., 2026), whose code is not public; that the
best annotator counts, and a page without a cited rectangle as 0, is how it is read here.
A set's score is the mean over its languages, a version's the mean over its sets; those stand in
notes. Questions without a relevant page are left out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_json
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.schema import Material, Prediction, Question, Source
from mmqa_jax.evaluation import retrieval
from mmqa_jax.evaluation.boxes import PageBox, zone_f1
from mmqa_jax.evaluation.scores import Scores, groups_by, json_rows
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

Pages = Literal["text", "pictures", "both"]


def _tasks(before: str, **names: str) -> dict[str, str]:
    return {name: f"{before}{task}Retrieval" for name, task in names.items()}


# Set -> its task in MTEB, which has the leaderboards; the versions' main scores are nDCG@5, 5, 10.
V1 = _tasks(
    "Vidore",
    arxivqa_test_subsampled_beir="ArxivQA",
    docvqa_test_subsampled_beir="DocVQA",
    infovqa_test_subsampled_beir="InfoVQA",
    tabfquad_test_subsampled_beir="Tabfquad",
    tatdqa_test_beir="Tatdqa",
    shiftproject_test_beir="ShiftProject",
    syntheticDocQA_artificial_intelligence_test_beir="SyntheticDocQAAI",
    syntheticDocQA_energy_test_beir="SyntheticDocQAEnergy",
    syntheticDocQA_government_reports_test_beir="SyntheticDocQAGovernmentReports",
    syntheticDocQA_healthcare_industry_test_beir="SyntheticDocQAHealthcareIndustry",
)
V2 = _tasks(
    "Vidore2",
    esg_reports_v2="ESGReports",
    economics_reports_v2="EconomicsReports",
    biomedical_lectures_v2="BioMedicalLectures",
    esg_reports_human_labeled_v2="ESGReportsHL",
)
V3 = _tasks(
    "Vidore3",
    vidore_v3_finance_en="FinanceEn",
    vidore_v3_industrial="Industrial",
    vidore_v3_computer_science="ComputerScience",
    vidore_v3_pharmaceuticals="Pharmaceuticals",
    vidore_v3_hr="Hr",
    vidore_v3_finance_fr="FinanceFr",
    vidore_v3_physics="Physics",
    vidore_v3_energy="Energy",
)  # telecom and nuclear are private
TASKS = {**V1, **V2, **V3}
# Keys of Question.extra: the language; of `positives`, in their order, the grades, and rectangles
# [annotator, left, top, right, bottom] in pixels. BOXES is also a key of predictions.jsonl and of
# the trace: page -> cited rectangles.
LANGUAGE, GRADES, BOXES = "language", "grades", "boxes"
MATERIALS = (Material("ViDoRe", "Faysse et al. 2024; Macé et al. 2025; Loison et al. 2026"),)

_TEXTS = ("markdown", "text_description")
_KEPT = ("query_types", "query_format", "content_type")
_DRAWN, _EDGES = "bounding_boxes", ("annotator", "x1", "y1", "x2", "y2")  # of v3's qrels


def read_vidore(folder: Path, pages: Pages = "pictures") -> official.BenchmarkFiles:
    """Reads one set; all questions are of the split `test`, `Question.category` is the set.

    Args:
      folder: of the set, by whose name it is known.
      pages: as sources: their `pictures`, their `text` (of v3), or `both`, the text as a caption.
    """
    name = _set_name(folder)
    corpus, queries, qrels = (
        official.parquet_files(
            folder / part, remedy="fetch the set's folders corpus, queries and qrels"
        )
        for part in ("corpus", "queries", "qrels")
    )
    files = official.OfficialFiles(folder)
    files.read_files += [*corpus, *queries, *qrels]
    pages_key = _key(corpus[0], "corpus-id", "corpus_id")
    texts = [column for column in _TEXTS if column in official.parquet_columns(corpus[0])][:1]
    if pages != "pictures" and not texts:
        raise UserError(
            f"--pages={pages}: {folder} has no text of its pages (column {' or '.join(_TEXTS)}); "
            "give --pages=pictures."
        )
    for path in corpus if pages != "text" else ():
        official.require_columns(path, ["image"])
    texts = texts if pages != "pictures" else []
    rows = official.parquet_entries(corpus, (pages_key, *texts), ("doc_id", "page_number_in_doc"))
    sources = official.read_entries(
        rows, lambda row: _page(f"{name}/{_id(row, pages_key)}", row, texts, pages), pages_key
    )
    judged, boxes = _judgments(qrels, name, sources)
    key = _key(queries[0], "query-id", "query_id")
    rows = official.parquet_entries(queries, (key, "query"), (LANGUAGE, "answer", *_KEPT))
    questions = official.read_entries(
        rows, lambda row: _question(f"{name}/{_id(row, key)}", row, name, judged, boxes), key
    )
    counts = {"pages": len(sources), "test questions": len(questions)}
    counts |= official.counts_of(
        questions.values(), (), {"questions with relevant pages": lambda query: query.positives}
    )
    languages = Counter(map(_language, questions.values()))
    counts |= {f"{spoken} questions": n for spoken, n in sorted(languages.items()) if spoken}
    pictures = official.ParquetPictures(corpus, pages_key, before=f"{name}/")
    return files.content(questions.values(), counts, {}, pictures, [*sources.values()])


def _set_name(folder: Path) -> str:
    """The set in a folder that has its name, or lies in the hub's cache below one that has."""
    folder = folder.resolve()
    name = folder.name
    if folder.parent.name == "snapshots":
        name = folder.parent.parent.name.rpartition("--")[2]
    if name not in TASKS:
        raise UserError(
            f"{folder}: is not named as a set of ViDoRe ({', '.join(V2)}, {next(iter(V3))}, ...); "
            "name the folder of one set, with its name."
        )
    return name


def _key(path: Path, *names: str) -> str:
    """The name that a column has in this version."""
    columns = official.parquet_columns(path)
    return next((name for name in names if name in columns), names[0])


def _page(name: str, row: official.Entry, texts: Sequence[str], pages: Pages) -> Source:
    text = str(row[texts[0]] or "") if texts else ""
    extra = {
        key: row[column]
        for key, column in (("file", "doc_id"), ("page", "page_number_in_doc"))
        if row.get(column) is not None
    }
    if pages == "text":
        return Source(name, "text", text, extra=extra)
    return Source(name, "image", text, image=name, extra=extra)


def _judgments(
    paths: Sequence[Path], name: str, sources: dict[str, Source]
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, list[list[int]]]]]:
    """Question id -> relevant page -> grade above 0, and -> annotators' rectangles."""
    judged: dict[str, dict[str, int]] = {}
    boxes: dict[str, dict[str, list[list[int]]]] = {}
    query = _key(paths[0], "query-id", "query_id")
    page = _key(paths[0], "corpus-id", "corpus_id")
    for row in official.parquet_entries(paths, (query, page, "score"), (_DRAWN,)):
        judged_page, grade = f"{name}/{_id(row, page)}", row["score"]
        if judged_page not in sources:
            raise row.error(f"judges page {judged_page}, which corpus/ has not")
        if not isinstance(grade, int | float) or not float(grade).is_integer():
            raise row.wrong("score", "a whole number")
        if grade > 0:
            question = f"{name}/{_id(row, query)}"
            judged.setdefault(question, {})[judged_page] = int(grade)
            drawn = [[box.get(key) for key in _EDGES] for box in row.get(_DRAWN) or ()]
            if not all(type(edge) is int for box in drawn for edge in box):
                raise row.wrong(_DRAWN, f"rectangles with {', '.join(_EDGES)}")
            boxes.setdefault(question, {})[judged_page] = drawn
    return judged, boxes


def _question(
    name: str,
    row: official.Entry,
    category: str,
    judged: dict[str, dict[str, int]],
    boxes: dict[str, dict[str, list[list[int]]]],
) -> Question:
    grades, answer = judged.get(name, {}), row.get("answer")
    drawn = [*boxes.get(name, {}).values()]
    row.text(LANGUAGE, "")  # refuses another value
    extra = {key: row[key] for key in (LANGUAGE, *_KEPT) if row.get(key) is not None}
    return Question(
        id=name,
        split="test",
        question=row.text("query"),
        answers=(answer,) if isinstance(answer, str) and answer else (),
        category=category,
        positives=tuple(grades),
        extra={**extra, GRADES: list(grades.values()), **({BOXES: drawn} if any(drawn) else {})},
    )


def _id(row: official.Entry, key: str) -> str:
    value = row[key]
    if whole_number(value) is None and (not isinstance(value, str) or not value):
        raise row.wrong(key, "a number or text")
    return str(value)


OFFICIAL = "vidore/official"
KS = (5, 10)
_MAIN_K = {"v1": 5, "v2": 5, "v3": 10}
_VERSIONS = {"v1": V1, "v2": V2, "v3": V3}
_ISO = {"english": "eng", "french": "fra", "german": "deu"}
_ISO |= {"italian": "ita", "portuguese": "por", "spanish": "spa"}
_DIGITS = 5  # of MTEB's means


def version_of(name: str) -> str:
    """`v1`, `v2` or `v3` of a set."""
    return next(version for version, sets in _VERSIONS.items() if name in sets)


def score_vidore(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """nDCG by set, language and version; a question without a ranking has found nothing.

    MTEB leaves questions without a ranking out of its means.
    """
    scored = scored_split(questions, predictions, retrieval.has_positives, "relevant pages")
    counted = scored.counted
    gold = [dict(zip(query.positives, query.extra[GRADES], strict=True)) for query in counted]
    ndcg = retrieval.score_rankings(
        gold, list(map(retrieval.as_trec_orders, scored.predictions)), KS
    ).per_question
    main = [ndcg[f"ndcg@{_MAIN_K[version_of(q.category)]}"][n] for n, q in enumerate(counted)]
    per_question = {OFFICIAL: np.array(main), **{f"vidore/ndcg@{k}": ndcg[f"ndcg@{k}"] for k in KS}}
    evaluation = scored.evaluation(per_question, _groups(counted))
    (scores,) = evaluation.scored
    for version, sets in _VERSIONS.items():
        there = [name for name in sets if scores.counts.get(name)]
        if there:
            means = [set_score(scores, name) for name in there]
            note = retrieval.average_note(means, f"{len(sets)} sets", f"nDCG@{_MAIN_K[version]}")
            evaluation.notes.append(f"{version}, {note}")
    if any(BOXES in prediction.trace for prediction in scored.predictions):
        pairs = zip(counted, scored.predictions, strict=True)
        f1s = [score for query, prediction in pairs for score in box_f1s(query, prediction)]
        if f1s:
            mean = float(np.mean(f1s))
            evaluation.notes.append(f"box F1 of {len(f1s):,} pages with rectangles: {mean:.4f}")
    return evaluation


def box_f1s(question: Question, prediction: Prediction) -> list[float]:
    """F1 of the cited rectangles of each relevant page that has annotators', beside the best of
    them."""
    scores = []
    for page, drawn in zip(question.positives, question.extra.get(BOXES, ()), strict=False):
        zones: dict[int, list[PageBox]] = {}
        for annotator, *edges in drawn:
            zones.setdefault(annotator, []).append(PageBox(1, 1, *edges))
        cited = [PageBox(1, 1, *edges) for edges in prediction.trace.get(BOXES, {}).get(page, ())]
        if zones:
            scores.append(max(zone_f1(zone, cited) for zone in zones.values()))
    return scores


def read_rankings(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads rankings; lines of predictions.jsonl may have `boxes`: page -> rectangles [left, top,
    right, bottom] in pixels of its picture."""
    predictions = retrieval.read_found(path, questions)
    if path.suffix != ".jsonl":
        return predictions
    cited = {}
    for where, row in json_rows(path):
        boxes = row.get(BOXES)
        if boxes is None:
            continue
        pages = boxes.values() if isinstance(boxes, dict) else [None]
        if not all(isinstance(page, list) and all(map(_is_box, page)) for page in pages):
            raise UserError(
                f"{where}: `{BOXES}` must be page -> rectangles [left, top, right, bottom] in "
                "pixels, left before right and top before bottom; correct it."
            )
        cited[str(row.get("question_id"))] = {BOXES: boxes}
    return [
        dataclasses.replace(prediction, trace=prediction.trace | cited[prediction.question_id])
        if prediction.question_id in cited
        else prediction
        for prediction in predictions
    ]


def _is_box(box: Any) -> bool:
    is_four = isinstance(box, list) and len(box) == 4
    is_numbers = is_four and all(type(edge) in (int, float) and isfinite(edge) for edge in box)
    return is_numbers and box[0] <= box[2] and box[1] <= box[3]


def set_score(scores: Scores, name: str) -> float:
    """A set's main score: the mean over its languages."""
    of_set = [group for group in scores.counts if group.startswith(f"{name}, ")] or [name]
    return float(np.mean([scores.of_category(OFFICIAL, group).mean() for group in of_set]))


def write_vidore_results(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes one set's scores as MTEB's results of a task, without the dataset's revision."""
    names = list(dict.fromkeys(question.category for question in questions))
    if len(names) > 1:
        raise UserError(
            f"{path}: MTEB has a file for each set, and the questions are of {len(names)} sets; "
            "give --references the folder of one."
        )
    (scores,) = score_vidore(questions, predictions).scored
    subsets = [language for language in _ISO if scores.counts.get(f"{names[0]}, {language}")]
    rows = [_subset(scores, f"{names[0]}, {language}", language) for language in subsets]
    content = {
        "dataset_revision": "no_revision_available",
        "task_name": TASKS[names[0]],
        "mteb_version": None,
        "scores": {"test": rows or [_subset(scores, names[0], "default")]},
        "evaluation_time": None,
        "kg_co2_emissions": None,
    }
    write_json(path, content)


def _subset(scores: Scores, group: str, name: str) -> dict[str, Any]:
    def mean(scorer: str) -> float:
        return round(float(scores.of_category(scorer, group).mean()), _DIGITS)

    return {
        **{f"ndcg_at_{k}": mean(f"vidore/ndcg@{k}") for k in KS},
        "main_score": mean(OFFICIAL),
        "hf_subset": name,
        "languages": [f"{_ISO.get(name, 'eng')}-Latn"],
    }


def _groups(questions: Sequence[Question]) -> Mapping[str, np.ndarray]:
    """Groups questions by set, by language, and by language within the sets that have several."""
    sets = {question.category for question in questions}
    languages = groups_by(questions, _language)
    groups: dict[str, np.ndarray] = {}
    for name in (name for name in TASKS if name in sets):
        groups |= groups_by(questions, lambda q: q.category, [name])
        spoken = dict.fromkeys(_language(q) for q in questions if q.category == name)
        spoken.pop("", None)
        if len(spoken) > 1:
            groups |= {f"{name}, {key}": groups[name] & languages[key] for key in spoken}
    return groups | languages


def _language(question: Question) -> str:
    return question.extra.get(LANGUAGE, "")


BENCHMARK = Benchmark(
    read=read_vidore,
    materials=MATERIALS,
    split="test",
    formats=retrieval.FORMATS,
    read_predictions=read_rankings,
    has_reference=retrieval.has_positives,
    score=score_vidore,
    headline="vidore/official",
    write_submission=write_vidore_results,
    ranks=True,
    boards=read_boards("vidore", V3),
)
