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
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_text
from mmqa_jax.core.json_text import parse_json
from mmqa_jax.data.datasets.benchmark import Benchmark, OfficialFiles, PictureFiles, object_rows
from mmqa_jax.data.schema import SPLITS, Material, Question, Source
from mmqa_jax.data.splits import fold_of
from mmqa_jax.data.table_files import whole_number

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
_POOL = re.compile(r"mbeir_(?P<name>\w+?)(_(?P<split>train|val|test))?_cand_pool")
_ID = re.compile(r"\d:\d+")
_AGAIN = "fetch the file again"


def read_mbeir(path: Path) -> Benchmark:
    """Reads a pool of candidates with the queries that search it.

    `Question.category` is the set, `webqa_task1`; `positives` and `negatives` are those that are in
    the pool.

    Args:
      path: the folder of all files, of which the pool of all sets is read; or the file of a pool in
        it, of which the pool of this set.
    """
    folder, pool = _folder_and_pool(path)
    files = OfficialFiles(folder)
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
    sources: dict[str, Source] = {}
    for where, row in object_rows(pool):
        source = _candidate(row, where)
        if source.id in sources:
            raise UserError(f"{where}: did {source.id} is there twice; {_AGAIN}.")
        sources[source.id] = source
    instructions = _instructions(files)
    questions: dict[str, Question] = {}
    for split, queries in _query_files(folder, named["name"], named["split"]):
        files.found.append(queries)
        judged = _judged(files, queries, split)
        for where, row in object_rows(queries):
            question = _query(row, split, sources, judged, instructions, where)
            if question.id in questions:
                raise UserError(f"{where}: qid {question.id} is there twice; {_AGAIN}.")
            questions[question.id] = question
    if not questions:
        split, name = named["split"] or "test", named["name"]
        name = "SET" if name == "union" else name
        raise UserError(
            f"{folder}: has no queries for {pool.name}; put query/{split}/mbeir_{name}_{split}"
            ".jsonl there."
        )
    every = [*sources.values(), *questions.values()]
    pictures = PictureFiles(folder, {one.image: [one.image] for one in every if one.image})
    found = {one.image for one in every if one.image is not None and one.image in pictures}
    if not found:
        files.missing["mbeir_images/"] = "no pictures; texts stand alone"
    return Benchmark(
        name="mbeir",
        questions=[_with_picture(one, found) for one in questions.values()],
        sources=[_with_picture(one, found) for one in sources.values()],
        counts=_counts(questions, sources, len(found)),
        published={},
        files=files.found,
        missing=files.missing,
        read_picture=pictures if found else None,
        inputs=pictures.signature(sorted(found)) if found else None,
    )


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
    folder = next((one for one in path.parents if (one / "query").is_dir()), None)
    if folder is None:
        raise UserError(
            f"{path}: lies in no folder of M-BEIR, which has a folder `query` beside `cand_pool`; "
            "keep its files as they were fetched."
        )
    return folder, path


def _query_files(folder: Path, name: str, split: str | None) -> Iterator[tuple[str, Path]]:
    """(split, file of queries) that go with a pool of this name."""
    for one in (split,) if split else SPLITS[1:]:
        pattern = "mbeir_*" if name == "union" else f"mbeir_{name}"
        for path in sorted((folder / "query" / one).glob(f"{pattern}_{one}.jsonl")):
            yield one, path


def _judged(files: OfficialFiles, queries: Path, split: str) -> Mapping[str, list[str]] | None:
    """qid -> relevant dids; None without a file of judgments."""
    path = files.optional(
        f"qrels/{split}/{queries.stem}_qrels.txt",
        without="the positives that the queries list are the judgments",
    )
    if path is None:
        return None
    judged: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        cells = line.split()
        relevance = whole_number(cells[3]) if len(cells) == 5 else None
        if cells and relevance is None:
            raise UserError(
                f"{path}, line {number}: `qid 0 did relevance task` was expected; {_AGAIN}."
            )
        if relevance:
            judged.setdefault(cells[0], []).append(cells[2])
    return judged


def _instructions(files: OfficialFiles) -> Mapping[tuple[str, str, str], list[str]] | None:
    """(number of a data set, modality of the query, of the candidates) -> wordings."""
    path = files.optional(_INSTRUCTIONS, without="queries stand without instructions")
    if path is None:
        return None
    wordings = {}
    for number, line in enumerate(read_text(path).split("\n")[1:], start=2):
        cells = line.strip().split("\t")
        if line.strip() and len(cells) < 5:
            raise UserError(
                f"{path}, line {number}: query_modality, cand_modality, dataset_name, dataset_id "
                f"and prompts were expected, with tabs between them; {_AGAIN}."
            )
        if line.strip():
            wordings[cells[3], cells[0], cells[1]] = [one for one in cells[4:] if one]
    return wordings


def _candidate(row: dict[str, Any], where: str) -> Source:
    name, kind = _id(row.get("did"), "did", where), _modality(row, "modality", where)
    extra: dict[str, Any] = {}
    if dataset_of(name) == "webqa":
        listed = _inner(row, "src_content", where)
        own = listed.get("snippet_id") or listed.get("image_id")
        extra = {WEBQA_ID: own} if own else {}
    text, picture = as_sentence(_text(row, "txt", where)), _text(row, "img_path", where)
    if not text and not picture:
        raise UserError(f"{where}: has neither txt nor img_path; {_AGAIN}.")
    if kind != "text" and (kind == "image,text") != bool(text):
        extra[_MODALITY] = kind
    modality = "text" if kind == "text" else "image"
    return Source(name, modality, text, image=picture or None, extra=extra)


def _query(
    row: dict[str, Any],
    split: str,
    sources: Mapping[str, Source],
    judged: Mapping[str, list[str]] | None,
    instructions: Mapping[tuple[str, str, str], list[str]] | None,
    where: str,
) -> Question:
    name, kind = _id(row.get("qid"), "qid", where), _modality(row, "query_modality", where)
    positives = _ids(row, "pos_cand_list", where)
    if judged is not None:
        if name not in judged:
            raise UserError(f"{where}: the file of qrels judges nothing for {name}; fetch both.")
        positives = judged[name]
    # OVEN's and InfoSeek's positives are in both pools, of which a local one has its own alone.
    positives = [one for one in dict.fromkeys(positives) if one in sources]
    if not positives:
        raise UserError(
            f"{where}: none of the positives of {name} is in the pool; fetch the pool again."
        )
    own = [one for one in positives if dataset_of(one) == dataset_of(name)]
    wanted = candidate_modality(sources[(own or positives)[0]])
    if (kind, wanted) not in TASKS:
        raise UserError(f"{where}: asks from {kind!r} to {wanted!r}, no task of M-BEIR; {_AGAIN}.")
    query = _text(row, "query_txt", where)
    asked = query
    if instructions is not None:
        key = name.partition(":")[0], kind, wanted
        if not instructions.get(key):
            raise UserError(
                f"{where}: {_INSTRUCTIONS} has no prompt for {', '.join(key)}; fetch it."
            )
        wording = instructions[key][fold_of(name, len(instructions[key]))]
        asked = f"{as_sentence(wording)} {query}"
    extra = {QUERY: query}
    if dataset_of(name) == "webqa":
        guid = _inner(row, "query_src_content", where).get("Guid")
        extra |= {WEBQA_ID: guid} if guid else {}
    return Question(
        # The ids of a data set begin at 1 in every split; those of test are as they are.
        id=name if split == "test" else f"{split}:{name}",
        split=split,
        question=as_sentence(asked),
        image=_text(row, "query_img_path", where) or None,
        category=f"{dataset_of(name)}_task{TASKS[kind, wanted]}",
        positives=tuple(positives),
        negatives=tuple(
            one
            for one in dict.fromkeys(_ids(row, "neg_cand_list", where))
            if one in sources and one not in positives
        ),
        extra=extra,
    )


def _with_picture(one: Any, found: set[str]) -> Any:
    """A source or question, without the name of a picture that is not there."""
    there = one.image is None or one.image in found
    return one if there else dataclasses.replace(one, image=None)


def _id(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise UserError(f"{where}: {key} is {value!r:.60}; DATASET:NUMBER was expected; {_AGAIN}.")
    return value


def _ids(row: dict[str, Any], key: str, where: str) -> list[str]:
    value = row.get(key) or []
    if not isinstance(value, list):
        raise UserError(f"{where}: {key} must be a list of ids; {_AGAIN}.")
    return [_id(one, key, where) for one in value]


def _modality(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    kind = ",".join(sorted(value.split(","))) if isinstance(value, str) else ""
    if kind not in ("text", "image", "image,text"):
        raise UserError(f"{where}: {key} is {value!r:.60}; text, image or both; {_AGAIN}.")
    return kind


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str | None):
        raise UserError(f"{where}: {key} is {value!r:.60}; text was expected; {_AGAIN}.")
    return value or ""


def _inner(row: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """What the original data set says, JSON in a text; {} where nothing is kept."""
    text = _text(row, key, where)
    content = parse_json(text, f"{where}, {key}") if text else {}
    return content if isinstance(content, dict) else {}


def _counts(
    questions: Mapping[str, Question], sources: Mapping[str, Source], picture_files: int
) -> dict[str, int]:
    kinds = Counter(candidate_modality(source) for source in sources.values())
    sets = Counter(f"{one.split} queries of {one.category}" for one in questions.values())
    return {
        **{f"candidates, {kind}": count for kind, count in sorted(kinds.items())},
        "picture files": picture_files,
        **dict(sorted(sets.items())),
    }
