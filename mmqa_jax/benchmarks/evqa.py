"""Encyclopedic-VQA's files (google-research, encyclopedic_vqa): questions on entities.

    {train,val,test}.csv           a row a question, with the names of up to five pictures
    inaturalist/{train,val}.json   iNaturalist 2021's annotations: each image's id, file_name
    inaturalist/                   its pictures, by file_name (train/..., val/...)
    landmarks/                     Google Landmarks v2, a/b/c/abc....jpg by the first three letters

A question is asked of each of its pictures. `answer` holds alternatives between `|`, of a
multi_answer question lists with `&&` between their items. Its article of Wikipedia is
`wikipedia_url`; a 2_hop question has two, of the entity that the picture shows and of the one that
answers.

Encyclopedic-VQA's score (google-research, encyclopedic_vqa/evaluation_utils.py).

    evqa/exact_match   the answer equals an alternative once both are normalized; of a multi_answer
                       question the two sets of items have at least half of their union in common
    evqa/bem           or else BEM, a BERT that judges answers, says that it is equivalent

The benchmark's accuracy is `evqa/bem`. It needs the weights (bem.py); without them exact match is
what there is, which is stricter.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.data.answers import strip_whitespace, vqa_contractions
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.tables import read_table, whole_number
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.scores import group_of, groups_by, read_own_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import has_answers

TYPES = ("templated", "automatic", "multi_answer", "2_hop")
# Between the items of an answer that is a list.
ITEMS = "&&"
# Keys of Question.extra: the articles that answer and their sections, which of its row's pictures a
# question has (from 0), how many articles it needs, and whether the article is not in train.
ARTICLES, SECTIONS, PICTURE, HOPS = "wikipedia_url", "evidence_section_id", "picture", "hops"
UNSEEN = "unseen_entity"
MATERIALS = (
    Material("Encyclopedic-VQA", "Mensink et al., ICCV 2023"),
    Material("iNaturalist 2021, pictures"),
    Material("Google Landmarks v2, pictures"),
)

_SPLITS = ("train", "val", "test")
_BETWEEN = "|"
_COLUMNS = (
    *("question", "answer", "question_type", "dataset_name", "dataset_image_ids"),
    *("wikipedia_url", "wikipedia_title"),
)
# Further columns that are kept as they are.
_KEPT = ("wikipedia_title", "question_original", "evidence", "evidence_section_title")
_NAME = re.compile(r"\w+")


def read_evqa(folder: Path) -> official.BenchmarkFiles:
    """Reads the questions that there are, one for each picture; `Question.category` is the type.

    An id is `SPLIT_ROW_PICTURE`, both counted from 0: the files have none. `answers` are the
    alternatives as they are written.
    """
    files = official.OfficialFiles(folder)
    questions: list[Question] = []
    counts: dict[str, int] = {}
    for split in _SPLITS:
        path = files.optional(f"{split}.csv", without=f"there are no {split} questions")
        rows = [] if path is None else read_table(path, _COLUMNS)
        for number, (where, cells) in enumerate(rows):
            questions += _questions(f"{split}_{number}", split, official.Entry(where, cells))
        counts |= {f"{split} rows": len(rows)} if rows else {}
    files.check_questions(questions, "Encyclopedic-VQA", "test.csv, or another split's file,")
    pictures = _pictures(files, official.picture_names(questions))
    questions = official.with_present_pictures(questions, pictures)
    pictured = official.picture_names(questions)
    if not pictured:
        files.missing["inaturalist/, landmarks/"] = "no pictures, without which few can be answered"
    counts |= Counter(f"{question.split} questions" for question in questions)
    kinds = Counter(f"{question.split} {question.category}" for question in questions)
    counts |= {**dict(sorted(kinds.items())), "picture files": len(pictured)}
    return files.content(questions, counts, {}, pictures)


def _questions(name: str, split: str, row: official.Entry) -> list[Question]:
    """A row's questions, one a picture."""
    for column in ("question", "answer", "wikipedia_url"):
        if not row.text(column).strip():
            raise row.error(f"{column} is empty")
    kind = row.choice("question_type", TYPES)
    extra: dict[str, Any] = {key: row[key] for key in _KEPT if row.get(key)}
    extra[ARTICLES] = row["wikipedia_url"].split(_BETWEEN)
    extra[HOPS] = 2 if kind == "2_hop" else 1
    sections = [whole_number(text) for text in row.get(SECTIONS, "").split(_BETWEEN) if text]
    if sections and None not in sections:
        extra[SECTIONS] = sections
    used = row.get("wikipedia_url_used_in_train", "")
    if used:
        extra[UNSEEN] = used.lower() == "false"
    return [
        Question(
            id=f"{name}_{number}",
            split=split,
            question=row["question"],
            image=picture,
            answers=tuple(row["answer"].split(_BETWEEN)),
            category=kind,
            extra={**extra, "image_id": picture, PICTURE: number},
        )
        for number, picture in enumerate(_picture_names(row))
    ]


def _picture_names(row: official.Entry) -> list[str]:
    """`DATASET/ID` of each of a row's pictures."""
    dataset = row.choice("dataset_name", _PLACES)
    names = row["dataset_image_ids"].split(_BETWEEN)
    if not all(map(_NAME.fullmatch, names)):
        raise row.wrong("dataset_image_ids", "ids with | between them")
    return [f"{dataset}/{name}" for name in names]


def _pictures(files: official.OfficialFiles, wanted: set[str]) -> official.PictureFiles:
    """Each wanted picture by its name, at the places where its data set has it."""
    ids: dict[str, list[str]] = {kind: [] for kind in _PLACES}
    for name in sorted(wanted):
        kind, _, picture_id = name.partition("/")
        ids[kind].append(picture_id)
    places: dict[str, list[str]] = {}
    for kind, of_kind in _PLACES.items():
        if ids[kind]:
            paths_of = of_kind(files, set(ids[kind]))
            places |= {f"{kind}/{name}": paths for name, paths in paths_of.items()}
    return official.PictureFiles(files.folder, places)


def _inaturalist(files: official.OfficialFiles, wanted: set[str]) -> dict[str, list[str]]:
    """Finds the places of these ids' pictures: `file_name` of the annotations of train and val."""
    places: dict[str, list[str]] = {}
    for split in ("train", "val"):
        path = files.optional(
            f"inaturalist/{split}.json",
            without=f"iNaturalist's pictures of {split} have no names",
        )
        for image in () if path is None else official.json_entries(path, "images"):
            name = str(image.number("id"))
            if name not in wanted:
                continue
            if name in places:
                raise image.error(f"id {name} is there twice, or in train.json as well")
            places[name] = [f"inaturalist/{image.text('file_name')}"]
    return places


def _landmarks(files: official.OfficialFiles, wanted: set[str]) -> dict[str, list[str]]:
    """Returns the places of these ids' pictures, under any of Google Landmarks v2's three parts."""
    folders = ("landmarks", *(f"landmarks/{part}" for part in ("train", "index", "test")))
    return {
        name: [f"{folder}/{'/'.join(name[:3])}/{name}.jpg" for folder in folders] for name in wanted
    }


_PLACES = {"inaturalist": _inaturalist, "landmarks": _landmarks}

EXACT, BEM = "evqa/exact_match", "evqa/bem"
_LEAST_OVERLAP = 0.5
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + "‘’´`")
_ARTICLES = re.compile(r"\b(the answer is|a|an|the)\b")
_SPAN = "<extra_id_0> "  # what T5 writes before an answer
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORDS = {
    **dict.fromkeys(("none", "zero"), "0"),
    **{word: str(number) for number, word in enumerate(_NUMBERS, start=1)},
    **dict.fromkeys(("entailment", "true"), "yes"),
    **dict.fromkeys(("contradiction", "false"), "no"),
}

# (question, alternative, answer) of pairs -> whether BEM calls them equivalent; see bem.py.
Judge = Callable[[Sequence[tuple[str, str, str]]], Sequence[bool]]


def normalize_evqa(text: str) -> str:
    """Lower case, no punctuation, no articles, numbers to ten as digits, contractions spelled."""
    text = strip_whitespace(text.lower())
    if text.startswith(_SPAN):
        text = text.replace(_SPAN, "")
    words = _ARTICLES.sub(" ", text.translate(_NO_PUNCTUATION)).split()
    spelled = (_WORDS.get(word, word) for word in words)
    contractions = vqa_contractions()
    return " ".join(contractions.get(word, word) for word in spelled)


def matches(answer: str, alternative: str, kind: str) -> bool:
    """The official exact match of an answer with one alternative of a question of type `kind`.

    At an alternative that normalizes to nothing the script stops; here none matches it.
    """
    if kind == "multi_answer":
        wanted = _items(alternative.split(ITEMS))
        listed = _items(answer.replace(" and ", ",").replace(" & ", ",").split(","))
        return bool(wanted) and len(wanted & listed) / len(wanted | listed) >= _LEAST_OVERLAP
    wanted = normalize_evqa(alternative)
    return bool(wanted) and normalize_evqa(answer) == wanted


def is_exact(answer: str, question: Question) -> bool:
    """Whether an answer matches any alternative."""
    return any(matches(answer, alternative, question.category) for alternative in question.answers)


def score_evqa(
    questions: Sequence[Question], predictions: Sequence[Prediction], judge: Judge | None = None
) -> Evaluation:
    """The scores, by type, of single-hop questions and of entities that train has not.

    BEM is the judge; without one only exact matches count.
    """
    scored = scored_split(questions, predictions, has_answers, "an answer")
    answers = [prediction.answer for prediction in scored.predictions]
    exact = [is_exact(answer, q) for answer, q in zip(answers, scored.counted, strict=True)]
    right = {EXACT: np.array(exact, float)}
    notes = ["the benchmark's accuracy is BEM's, which was not given: exact match is stricter"]
    if judge is not None:
        notes = []
        right[BEM] = np.array(_judged(scored.counted, answers, exact, judge), float)
    return scored.evaluation(right, _groups(scored.counted), notes=notes)


def _judged(
    questions: Sequence[Question], answers: Sequence[str], exact: Sequence[bool], judge: Judge
) -> list[bool]:
    """Exact matches, and what BEM calls equivalent of the rest, an empty answer among them."""
    asked = []
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        for alternative in () if exact[row] else filter(None, question.answers):
            if question.category == "multi_answer":
                alternative = alternative.replace(ITEMS, ",")
            asked.append((row, (question.question, alternative, answer)))
    right = list(exact)
    for (row, _), equivalent in zip(asked, judge([pair for _, pair in asked]), strict=True):
        right[row] |= bool(equivalent)
    return right


def _items(texts: Sequence[str]) -> set[str]:
    return {item for item in map(normalize_evqa, texts) if item}


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    return {
        **groups_by(questions, lambda q: q.category, TYPES),
        "single hop": group_of(questions, lambda q: q.category != "2_hop"),
        "unseen entity": group_of(questions, lambda q: bool(q.extra.get(UNSEEN))),
    }


BENCHMARK = Benchmark(
    read=read_evqa,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats="predictions.jsonl",
    read_predictions=read_own_lines,
    has_reference=has_answers,
    score=score_evqa,
    headline="evqa",
    verdicts=("evqa/bem", "evqa/exact_match"),
    judged=True,
    boards=read_boards("evqa"),
)
