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

A set's score is the mean over its languages, a version's the mean over its sets; those stand in
notes. Questions without a relevant page are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
from mmqa_jax.evaluation.scores import Scores, groups_by
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
# Keys of Question.extra: the language; the grades of `positives`, in their order.
LANGUAGE, GRADES = "language", "grades"
MATERIALS = (Material("ViDoRe", "Faysse et al. 2024; Macé et al. 2025; Loison et al. 2026"),)

_TEXTS = ("markdown", "text_description")
_KEPT = ("query_types", "query_format", "content_type")


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
    judged = _judgments(qrels, name, sources)
    key = _key(queries[0], "query-id", "query_id")
    rows = official.parquet_entries(queries, (key, "query"), (LANGUAGE, "answer", *_KEPT))
    questions = official.read_entries(
        rows, lambda row: _question(f"{name}/{_id(row, key)}", row, name, judged), key
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
) -> dict[str, dict[str, int]]:
    """Question id -> relevant page -> grade above 0."""
    judged: dict[str, dict[str, int]] = {}
    query = _key(paths[0], "query-id", "query_id")
    page = _key(paths[0], "corpus-id", "corpus_id")
    for row in official.parquet_entries(paths, (query, page, "score")):
        judged_page, grade = f"{name}/{_id(row, page)}", row["score"]
        if judged_page not in sources:
            raise row.error(f"judges page {judged_page}, which corpus/ has not")
        if not isinstance(grade, int | float) or not float(grade).is_integer():
            raise row.wrong("score", "a whole number")
        if grade > 0:
            judged.setdefault(f"{name}/{_id(row, query)}", {})[judged_page] = int(grade)
    return judged


def _question(
    name: str, row: official.Entry, category: str, judged: dict[str, dict[str, int]]
) -> Question:
    grades, answer = judged.get(name, {}), row.get("answer")
    row.text(LANGUAGE, "")  # refuses another value
    extra = {key: row[key] for key in (LANGUAGE, *_KEPT) if row.get(key) is not None}
    return Question(
        id=name,
        split="test",
        question=row.text("query"),
        answers=(answer,) if isinstance(answer, str) and answer else (),
        category=category,
        positives=tuple(grades),
        extra={**extra, GRADES: list(grades.values())},
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
    return evaluation


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
    read_predictions=retrieval.read_found,
    has_reference=retrieval.has_positives,
    score=score_vidore,
    headline="vidore/official",
    write_submission=write_vidore_results,
    ranks=True,
    boards=read_boards("vidore", V3),
)
