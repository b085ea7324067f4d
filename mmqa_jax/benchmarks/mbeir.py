"""M-BEIR's files (https://github.com/TIGER-AI-Lab/UniIR): queries of ten data sets, one collection.

    cand_pool/global/mbeir_union_test_cand_pool.jsonl   the 5.6 million candidates of all sets
    cand_pool/local/mbeir_SET_cand_pool.jsonl           those of one set, such as webqa_task1
    query/{val,test}/mbeir_SET_{val,test}.jsonl         the queries, with their positives
    qrels/{val,test}/mbeir_SET_{val,test}_qrels.txt     optional: the judgments that UniIR scores by
    instructions/query_instructions.tsv                 optional: four wordings of each task
    mbeir_images/                                       the pictures

A query begins with an instruction for its set, as UniIR's does. UniIR draws one of the four anew in
each run, in evaluation too; here the query's id decides. A candidate is a text, a picture, or a
picture with a text. A query's task follows from its modality and that of its positives.

M-BEIR's scores and its run files (UniIR src/common/mbeir_retriever.py, mbeir_analyst.py).

    mbeir/recall@k      1 where any positive is among the first k, else 0
    mbeir/official      recall@5, of Fashion200K and FashionIQ recall@10

Each set has a score of its own; their average, which papers report, stands in a note. In the pool
of all sets a first candidate that is wrong may be of the wrong modality or of another domain: a
table says how often.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json
from mmqa_jax.data.corpus import Corpus, fold_of
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.tables import read_table
from mmqa_jax.data.schema import SPLITS, Material, Prediction, Question, Ranking, Source
from mmqa_jax.evaluation import retrieval
from mmqa_jax.evaluation.scores import groups_by, paired
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.tables import Table
from mmqa_jax.retrieval.rankings import gold_of, read_qrels, write_run

# The number of a data set before the colon of its ids (src/data/preprocessing/utils.py).
DATASETS = (
    *("visualnews", "fashion200k", "webqa", "edis", "nights"),
    *("oven", "infoseek", "fashioniq", "cirr", "mscoco"),
)
# (modality of the query, of its positives) -> number of the task; no set has 5.
TASKS = {
    ("text", "image"): 0,
    ("text", "text"): 1,
    ("text", "image,text"): 2,
    ("image", "text"): 3,
    ("image", "image"): 4,
    ("image,text", "text"): 6,
    ("image,text", "image"): 7,
    ("image,text", "image,text"): 8,
}
# The test sets, in the order of UniIR's table.
SETS = (
    *("visualnews_task0", "mscoco_task0", "fashion200k_task0", "webqa_task1", "edis_task2"),
    *("webqa_task2", "visualnews_task3", "mscoco_task3", "fashion200k_task3", "nights_task4"),
    *("oven_task6", "infoseek_task6", "fashioniq_task7", "cirr_task7", "oven_task8"),
    "infoseek_task8",
)
# Keys of `extra`: a query without its instruction; what WebQA calls a query or a candidate of it.
QUERY, WEBQA_ID = "query", "webqa_id"
_MODALITY = "modality"  # of a candidate whose text or picture does not tell it
MATERIALS = (
    Material(
        "M-BEIR",
        "Wei et al., ECCV 2024",
        "VisualNews, Fashion200K, WebQA, EDIS, NIGHTS, OVEN, InfoSeek, FashionIQ, CIRR and MSCOCO, "
        "under their own licenses",
    ),
)

_UNION = "cand_pool/global/mbeir_union_test_cand_pool.jsonl"
_INSTRUCTIONS = "instructions/query_instructions.tsv"
_KEY_OF_PROMPTS = ("dataset_id", "query_modality", "cand_modality")
_POOL = re.compile(r"mbeir_(?P<name>\w+?)(_(?P<split>train|val|test))?_cand_pool")
_ID = re.compile(r"\d:\d+")


def read_mbeir(path: Path) -> official.BenchmarkFiles:
    """Reads a pool of candidates with the queries that search it.

    `Question.category` is the set, `webqa_task1`; `positives` and `negatives` are those that are in
    the pool.

    `path`: the folder of all files, of which the pool of all sets is read; or the file of a pool in
    it, of which the pool of this set.
    """
    folder, pool = _folder_and_pool(path)
    files = official.OfficialFiles(folder)
    pool = files.required(
        str(pool.relative_to(folder)),
        remedy="fetch M-BEIR's folders cand_pool, query, qrels, instructions and mbeir_images",
    )
    named = _POOL.fullmatch(pool.stem)
    if named is None:
        raise UserError(
            f"{pool}: is not named as M-BEIR's pools are (mbeir_SET_cand_pool.jsonl); give it its "
            "name again."
        )
    sources = official.read_entries(official.line_entries(pool), _candidate, "did")
    instructions = _instructions(files)
    questions: dict[str, Question] = {}
    for split, queries in _query_files(folder, named["name"], named["split"]):
        files.read_files.append(queries)
        judged = _judged(files, queries, split)
        read = functools.partial(
            _query, split=split, sources=sources, judged=judged, instructions=instructions
        )
        questions |= official.read_entries(official.line_entries(queries), read, "qid")
    if not questions:
        split, name = named["split"] or "test", named["name"]
        name = "SET" if name == "union" else name
        raise UserError(
            f"{folder}: has no queries for {pool.name}; put query/{split}/mbeir_{name}_{split}"
            ".jsonl there."
        )
    names = official.picture_names((*sources.values(), *questions.values()))
    pictures = official.PictureFiles(folder, {name: [name] for name in names})
    queries, candidates = (
        official.with_present_pictures(items.values(), pictures) for items in (questions, sources)
    )
    present = official.picture_names((*queries, *candidates))
    if not present:
        files.missing["mbeir_images/"] = "no pictures; texts stand alone"
    kinds = Counter(f"candidates, {candidate_modality(source)}" for source in candidates)
    sets = Counter(f"{query.split} queries of {query.category}" for query in queries)
    counts = (
        dict(sorted(kinds.items())) | {"picture files": len(present)} | dict(sorted(sets.items()))
    )
    return files.content(queries, counts, {}, pictures, candidates)


def dataset_of(name: str) -> str:
    """The data set that a query or candidate is of, by its id; "" for another id."""
    number = name.rpartition(":")[0].rpartition(":")[2]
    return DATASETS[int(number)] if len(number) == 1 and number.isdecimal() else ""


def candidate_modality(source: Source) -> str:
    """`text`, `image` or `image,text`, as M-BEIR says it."""
    if source.modality == "text":
        return "text"
    return source.extra.get(_MODALITY) or ("image,text" if source.text else "image")


def as_sentence(text: str | None) -> str:
    """A text as UniIR embeds it: a capital letter first, and a mark at the end."""
    text = (text or "").replace("\r", "").strip().strip('"')
    if not text:
        return ""
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else f"{text}."


def _folder_and_pool(path: Path) -> tuple[Path, Path]:
    if path.is_dir():
        return path, path / _UNION
    folder = next((parent for parent in path.parents if (parent / "query").is_dir()), None)
    if folder is None:
        raise UserError(
            f"{path}: lies in no folder of M-BEIR, which has a folder `query` beside `cand_pool`; "
            "keep its files as they were fetched."
        )
    return folder, path


def _query_files(folder: Path, name: str, split: str | None) -> Iterator[tuple[str, Path]]:
    """(split, file of queries) that go with a pool of this name."""
    for split_name in (split,) if split else SPLITS[1:]:
        pattern = "mbeir_*" if name == "union" else f"mbeir_{name}"
        for path in sorted((folder / "query" / split_name).glob(f"{pattern}_{split_name}.jsonl")):
            yield split_name, path


def _judged(
    files: official.OfficialFiles, queries: Path, split: str
) -> Mapping[str, Mapping[str, int]] | None:
    """qid -> relevant dids; None without a file of judgments."""
    path = files.optional(
        f"qrels/{split}/{queries.stem}_qrels.txt",
        without="the positives that the queries list are the judgments",
    )
    return None if path is None else gold_of(read_qrels(path))


def _instructions(files: official.OfficialFiles) -> Mapping[tuple[str, str, str], list[str]] | None:
    """(number of a data set, modality of the query, of the candidates) -> wordings."""
    path = files.optional(_INSTRUCTIONS, without="queries stand without instructions")
    if path is None:
        return None
    wordings = {}
    for where, cells in read_table(path, _KEY_OF_PROMPTS):
        official.Entry(where, cells).text("prompt_1")  # refuses a row without prompts
        prompts = [text for name, text in cells.items() if name.startswith("prompt") and text]
        wordings[tuple(cells[key] for key in _KEY_OF_PROMPTS)] = prompts
    return wordings


def _candidate(row: official.Entry) -> Source:
    name, kind = _id(row, "did", row.get("did")), _modality(row, "modality")
    extra: dict[str, Any] = {}
    if dataset_of(name) == "webqa":
        listed = _inner(row, "src_content")
        webqa_id = listed.get("snippet_id") or listed.get("image_id")
        extra = {WEBQA_ID: webqa_id} if webqa_id else {}
    text, picture = as_sentence(row.text("txt", "")), row.text("img_path", "")
    if not text and not picture:
        raise row.error("has neither txt nor img_path")
    if kind != "text" and (kind == "image,text") != bool(text):
        extra[_MODALITY] = kind
    modality = "text" if kind == "text" else "image"
    return Source(name, modality, text, image=picture or None, extra=extra)


def _query(
    row: official.Entry,
    split: str,
    sources: Mapping[str, Source],
    judged: Mapping[str, Mapping[str, int]] | None,
    instructions: Mapping[tuple[str, str, str], list[str]] | None,
) -> Question:
    name, kind = _id(row, "qid", row.get("qid")), _modality(row, "query_modality")
    positives = _ids(row, "pos_cand_list")
    if judged is not None:
        if not judged.get(name):
            raise row.error(f"the file of qrels judges nothing for {name}")
        positives = [*judged[name]]
    # OVEN's and InfoSeek's positives are in both pools, of which a local one has its own alone.
    positives = [candidate for candidate in dict.fromkeys(positives) if candidate in sources]
    if not positives:
        raise row.error(f"none of the positives of {name} is in the pool")
    same_dataset = [
        candidate for candidate in positives if dataset_of(candidate) == dataset_of(name)
    ]
    wanted = candidate_modality(sources[(same_dataset or positives)[0]])
    if (kind, wanted) not in TASKS:
        raise row.error(f"asks from {kind!r} to {wanted!r}, no task of M-BEIR")
    query = row.text("query_txt", "")
    asked = query
    if instructions is not None:
        key = name.partition(":")[0], kind, wanted
        if not instructions.get(key):
            raise row.error(f"{_INSTRUCTIONS} has no prompt for {', '.join(key)}")
        wording = instructions[key][fold_of(name, len(instructions[key]))]
        asked = f"{as_sentence(wording)} {query}"
    extra = {QUERY: query}
    if dataset_of(name) == "webqa":
        guid = _inner(row, "query_src_content").get("Guid")
        extra |= {WEBQA_ID: guid} if guid else {}
    return Question(
        # The ids of a data set begin at 1 in every split; those of test are as they are.
        id=name if split == "test" else f"{split}:{name}",
        split=split,
        question=as_sentence(asked),
        image=row.text("query_img_path", "") or None,
        category=f"{dataset_of(name)}_task{TASKS[kind, wanted]}",
        positives=tuple(positives),
        negatives=tuple(
            candidate
            for candidate in dict.fromkeys(_ids(row, "neg_cand_list"))
            if candidate in sources and candidate not in positives
        ),
        extra=extra,
    )


def _id(row: official.Entry, key: str, value: Any) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise row.error(f"{key} is {value!r:.60}; DATASET:NUMBER was expected")
    return value


def _ids(row: official.Entry, key: str) -> list[str]:
    value = row.get(key) or []
    if not isinstance(value, list):
        raise row.wrong(key, "a list of ids")
    return [_id(row, key, item) for item in value]


def _modality(row: official.Entry, key: str) -> str:
    kind = ",".join(sorted(row.text(key, "").split(",")))
    if kind not in ("text", "image", "image,text"):
        raise row.wrong(key, "text, image or both")
    return kind


def _inner(row: official.Entry, key: str) -> dict[str, Any]:
    """Parses the original data set's entry, JSON in a text; {} where the file has none."""
    text = row.text(key, "")
    content = parse_json(text, f"{row.where}, {key}") if text else {}
    return content if isinstance(content, dict) else {}


OFFICIAL = "mbeir/official"
KS = (1, 5, 10, 20, 50)
_USUAL_K, _FASHION_K = 5, 10
_FASHION = ("fashion200k", "fashioniq")
DOMAINS = {
    **dict.fromkeys(("visualnews", "edis"), "news"),
    **dict.fromkeys(("fashion200k", "fashioniq"), "fashion"),
    **dict.fromkeys(("webqa", "oven", "infoseek"), "wiki"),
    **dict.fromkeys(("nights", "cirr", "mscoco"), "common"),
}


def official_k(name: str) -> int:
    """The k by which a set (`webqa_task1`) is compared."""
    return _FASHION_K if name.startswith(_FASHION) else _USUAL_K


def score_mbeir(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """recall@k by set and by task; a query without a ranking has found nothing."""
    scored = scored_split(questions, predictions, retrieval.has_positives, "positives")
    counted = scored.counted
    depth = max((len(ranking.sources) for ranking in scored.by_id.values()), default=0)
    ranked = [ranking.sources for ranking in scored.predictions]
    hits = retrieval.score_rankings([query.positives for query in counted], ranked, KS).per_question
    official = [hits[f"hit_any@{official_k(q.category)}"][n] for n, q in enumerate(counted)]
    recall = {f"mbeir/recall@{k}": hits[f"hit_any@{k}"] for k in KS if k <= max(depth, _FASHION_K)}
    evaluation = scored.evaluation({OFFICIAL: np.array(official), **recall}, _groups(counted))
    (scores,) = evaluation.scored
    means = [scores.of_category(OFFICIAL, name).mean() for name in sets_of(counted)]
    measure = f"recall@{_USUAL_K} (Fashion200K, FashionIQ: @{_FASHION_K})"
    evaluation.notes.append(retrieval.average_note(means, f"{len(SETS)} sets", measure))
    if depth < _FASHION_K:
        evaluation.notes.append(f"the rankings hold {depth} candidates at most")
    return evaluation


def sets_of(questions: Sequence[Question]) -> list[str]:
    """The sets of the queries, in the order of UniIR's table."""
    there = dict.fromkeys(question.category for question in questions)
    return sorted(there, key=lambda name: SETS.index(name) if name in SETS else len(SETS))


def first_errors(
    corpus: Corpus, questions: Sequence[Question], predictions: Sequence[Prediction]
) -> list[Table]:
    """Counts, by set, why first candidates are no positives, as shares of these candidates."""

    def kind_of(question: Question, source: Source) -> str:
        if candidate_modality(source) != wanted_modality(question):
            return "wrong modality"
        same = DOMAINS.get(dataset_of(source.id)) == DOMAINS.get(dataset_of(question.id))
        return "other" if same else "wrong domain"

    kinds = ("wrong modality", "wrong domain", "other")
    pairs = paired(questions, predictions)
    return retrieval.first_errors_table("mbeir", corpus, pairs, sets_of(questions), kinds, kind_of)


def wanted_modality(question: Question) -> str:
    """The modality of a query's positives, by the task of its set."""
    task = int(question.category.rpartition("_task")[2])
    return next(wanted for (_, wanted), number in TASKS.items() if number == task)


def official_id(question: Question) -> str:
    """A query's id in M-BEIR's files, which does not tell the split."""
    return question.id.removeprefix(f"{question.split}:")


def read_mbeir_runs(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads rankings as `read_found` does; queries may have their official ids."""
    query_ids = {official_id(question): question.id for question in questions}
    return [
        dataclasses.replace(
            ranking, question_id=query_ids.get(ranking.question_id, ranking.question_id)
        )
        for ranking in retrieval.read_found(path, questions)
    ]


def write_mbeir_run(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the rankings as UniIR's run files: TREC's columns, and the number of the task."""
    rankings, tags = [], []
    for question, prediction in paired(questions, predictions):
        # Only the order counts where a file gives no scores.
        places = range(1, len(prediction.sources) + 1)
        scores = prediction.source_scores or tuple(1 / place for place in places)
        rankings.append(Ranking(official_id(question), prediction.sources, tuple(scores)))
        task = question.category.rpartition("_task")[2]
        tags.append(f"mbeir_{question.category}_{question.split} {task}")
    write_run(path, rankings, tags)


def _groups(questions: Sequence[Question]) -> Mapping[str, np.ndarray]:
    categories = np.array([question.category for question in questions])
    return groups_by(questions, lambda q: q.category, sets_of(questions)) | {
        f"task {number}: {query} to {wanted}": np.char.endswith(categories, f"_task{number}")
        for (query, wanted), number in TASKS.items()
    }


BENCHMARK = Benchmark(
    read=read_mbeir,
    materials=MATERIALS,
    takes_file=True,
    split="test",
    formats=retrieval.FORMATS,
    read_predictions=read_mbeir_runs,
    has_reference=retrieval.has_positives,
    score=score_mbeir,
    headline="mbeir/official",
    write_submission=write_mbeir_run,
    submission="mbeir_run.txt",
    ranks=True,
    analyze=first_errors,
    boards=read_boards("mbeir", SETS),
)
