"""COCO's pictures, and the descriptions of pictures that stand in for pixels.

Four kinds of files describe pictures.

    captions TSV    image_id TAB [{"caption", "conf"}, ...]     VinVL's captions (PICa)
    tags TSV        image_id TAB [{"class", "conf"}, ...]       object tags (PICa)
    captions JSON   {name: caption}                             Prophet's by image_id, PromptCap's
    COCO's JSON     {"annotations": [{"image_id", "caption"}]}  five captions by people
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json, read_json, read_text
from mmqa_jax.data.formats.official import CAPTION, TAGS, Entry, OfficialFiles, json_entries
from mmqa_jax.data.formats.tables import real_number, whole_number
from mmqa_jax.data.schema import Material, Question

PICTURES = Material(
    "COCO, pictures and captions by people", "Lin et al., ECCV 2014", "under Flickr's terms of use"
)
VINVL = Material("VinVL captions and tags", "PICa's release", "MIT")
PEOPLE_CAPTIONS = "coco_captions"  # key of Question.extra: COCO's captions by people
DESCRIPTIONS = (CAPTION, TAGS, PEOPLE_CAPTIONS)

# Folders that pictures may lie in, below the folder of the official files.
FOLDERS_2014 = (".", "train2014", "val2014", "images", "images/train2014", "images/val2014")
FOLDERS_2017 = (
    *(".", "train2017", "val2017", "test2017", "images"),
    *("images/train2017", "images/val2017", "images/test2017"),
)


def picture_of(split: str, image_id: int) -> str:
    """The file name of a picture of train2014, val2014 or test2015."""
    return f"COCO_{split}_{image_id:012d}.jpg"


def picture_2017(image_id: int) -> str:
    """COCO 2017's file name of a picture, in whatever split."""
    return f"{image_id:012d}.jpg"


@dataclasses.dataclass(frozen=True)
class Descriptions:
    """Side files' descriptions of COCO's pictures, each by image_id."""

    captions: Mapping[int, str]  # one caption, a model's
    tags: Mapping[int, list[dict[str, Any]]]  # names of objects with their confidence
    by_people: Mapping[int, list[str]]  # COCO's captions

    def extra(self, image_id: int | None) -> dict[str, Any]:
        """The entries of Question.extra that describe a picture."""
        if image_id is None:
            return {}
        tables = zip(DESCRIPTIONS, (self.captions, self.tags, self.by_people), strict=True)
        return {key: table[image_id] for key, table in tables if image_id in table}


def read_descriptions(
    files: OfficialFiles, captions_json: str, folders: Sequence[str] = ("",)
) -> Descriptions:
    """Reads what there is of captions, tags and captions by people.

    VinVL's caption of a picture goes before that of the captions JSON.

    Args:
      captions_json: the name of the captions that Prophet's authors published for the benchmark.
      folders: where to look for the other files, as prefixes of their names.
    """

    def find(*names: str, without: str) -> Path | None:
        places = (f"{folder}{name}" for folder in folders for name in names)
        return files.optional(*places, without=without)

    captions: dict[int, str] = {}
    tags: dict[int, list[dict[str, Any]]] = {}
    by_people: dict[int, list[str]] = {}
    path = files.optional(captions_json, without="no captions of Prophet's authors")
    if path is not None:
        captions |= _by_number(read_named_captions(path), path)
    for split in ("train", "val"):
        path = find(
            f"vinvl_captions_{split}2014.tsv",
            f"VinVL_base_{split}2014.tsv",
            without=f"no VinVL captions of {split}2014's pictures",
        )
        if path is not None:
            captions |= read_captions(path)
        path = find(  # the two releases divide the same pictures and captions otherwise
            f"captions_{split}2014.json",
            f"captions_{split}2017.json",
            without=f"no captions by people of {split}2014's pictures",
        )
        if path is not None:
            by_people |= read_caption_annotations(path)
    for part in ("train", "val", "test"):  # of other pictures than COCO's splits
        path = find(f"tags_{part}.tsv", f"{part}.score.json.tsv", without="no tags of its pictures")
        if path is not None:
            tags |= read_scored_tsv(path, "class")
    return Descriptions(captions, tags, by_people)


def with_captions(
    files: OfficialFiles,
    questions: Sequence[Question],
    names_of: Callable[[Question], Sequence[str]],
    expected: str,
) -> list[Question]:
    """The questions, with the captions of the optional file captions.json.

    Args:
      names_of: the names that a question's caption may have, the first that is there counts.
      expected: what these names are, for messages.
    """
    path = files.optional("captions.json", without="no captions stand for pictures")
    if path is None:
        return list(questions)
    captions = read_named_captions(path)
    caption_of = [
        next((captions[name] for name in names_of(question) if name in captions), None)
        for question in questions
    ]
    if questions and not any(caption_of):
        raise UserError(
            f"{path}: none of its {len(captions):,} names belongs to a question; expected "
            f"{expected}; rename them or take the file away."
        )
    return [
        dataclasses.replace(question, extra={**question.extra, CAPTION: caption})
        if caption
        else question
        for question, caption in zip(questions, caption_of, strict=True)
    ]


def read_named_captions(path: Path) -> dict[str, str]:
    """name -> caption of a captions JSON; of several captions the first.

    ScienceQA's file has them under `captions`, beside the name of a model.
    """
    data = read_json(path)
    if isinstance(data, dict) and isinstance(data.get("captions"), dict):
        data = data["captions"]
    if not isinstance(data, dict) or not data:
        raise UserError(
            f'{path}: expected an object {{name: caption}} or {{name: {{"pred_captions": [...]}}}};'
            " fetch or write the file again."
        )
    return {name: _first(value, f"{path}, {name}") for name, value in data.items()}


def _first(value: Any, where: str) -> str:
    listed = value.get("pred_captions") if isinstance(value, dict) else [value]
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
        raise UserError(f'{where}: holds no caption; expected "pred_captions" with one or a text.')
    return listed[0]


def _by_number(captions: Mapping[str, str], path: Path) -> dict[int, str]:
    """image_id -> caption; UserError for a name that is no picture's number."""
    by_number = {}
    for name, caption in captions.items():
        image_id = whole_number(name)
        if image_id is None:
            raise UserError(
                f"{path}, {name:.60}: expected the number of a picture (image_id) as the name of a "
                "caption; fetch the file again."
            )
        by_number[image_id] = caption
    return by_number


def read_scored_tsv(path: Path, key: str) -> dict[int, list[dict[str, Any]]]:
    """image_id -> the objects of a captions or tags TSV, in the file's order.

    Each has a text under `key`, `caption` or `class`, and perhaps a number `conf`.
    """
    objects: dict[int, list[dict[str, Any]]] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        name, _, text = line.partition("\t")
        rows = parse_json(text, f"{where}: expected a picture's number, a tab and a JSON list")
        valid = isinstance(rows, list) and all(
            isinstance(row, dict)
            and isinstance(row.get(key), str)
            and real_number(row.get("conf", 0.0)) is not None
            for row in rows
        )
        image_id = whole_number(name)
        if image_id is None or not valid:
            raise UserError(
                f"{where}: expected a picture's number, a tab and a JSON list of objects with a "
                f'text "{key}" and a number "conf"; repair that line or fetch the file again.'
            )
        objects.setdefault(image_id, []).extend(rows)
    return objects


def read_captions(path: Path) -> dict[int, str]:
    """image_id -> its most confident caption, of a captions TSV."""
    return {
        image_id: max(rows, key=lambda row: row.get("conf", 0.0))["caption"]
        for image_id, rows in read_scored_tsv(path, "caption").items()
        if rows
    }


def read_caption_annotations(path: Path) -> dict[int, list[str]]:
    """image_id -> its captions by people, of COCO's captions JSON."""
    captions: dict[int, list[str]] = {}
    for row in json_entries(path, "annotations"):
        captions.setdefault(row.number("image_id"), []).append(row.text("caption", empty=True))
    return captions


# Questions and annotations in the JSON of VQA, which VQAv2 and OK-VQA share.
#
# Each of the two files is one object.
#
#   questions    {"questions": [{"image_id", "question", "question_id"}]}
#   annotations  {"annotations": [{"question_id", "image_id", "answers": [{"answer"}]}]}


class Reference(NamedTuple):
    """The reference answer to one question."""

    image_id: int
    answers: tuple[str, ...]
    category: str
    extra: dict[str, Any]


def read_questions(path: Path) -> dict[int, tuple[int, str]]:
    """question_id -> (image_id, question)."""
    rows = by_question(path, "questions").items()
    return {key: (row.number("image_id"), row.text("question", empty=True)) for key, row in rows}


def read_annotations(path: Path, key: str, names: Mapping[str, str]) -> dict[int, Reference]:
    """question_id -> the annotators' answers, and the category under `key`, by its name in
    `names`.
    """
    references: dict[int, Reference] = {}
    for question_id, row in by_question(path, "annotations").items():
        if not isinstance(row.get("answers"), list) or not row["answers"]:
            raise row.error("holds no list of answers")
        answers = [Entry(f"{row.where}, answers", answer) for answer in row["answers"]]
        kind = str(row.get(key, ""))
        extra: dict[str, Any] = {}
        if all(isinstance(answer.get("raw_answer"), str) for answer in answers):
            extra["raw_answers"] = [answer["raw_answer"] for answer in answers]
        texts = tuple(answer.text("answer", empty=True) for answer in answers)
        category = names.get(kind, kind)
        references[question_id] = Reference(row.number("image_id"), texts, category, extra)
    return references


def by_question(path: Path, key: str | None) -> dict[int, Entry]:
    """question_id -> entry of a JSON list, or of the list under `key`."""
    entries: dict[int, Entry] = {}
    for row in json_entries(path, key):
        question_id = row.number("question_id")
        if question_id in entries:
            raise row.error(f"question_id {question_id} is there twice")
        entries[question_id] = row
    return entries


def check_same(
    known: Mapping[int, Reference],
    asked: Mapping[int, tuple[int, str]],
    answers_in: Path | None,
    asked_in: Path,
) -> None:
    """UserError for answers to other questions, or to questions on other pictures."""
    for question_id, reference in known.items():
        if question_id not in asked:
            raise UserError(
                f"{answers_in}: answers question {question_id}, which is not in {asked_in.name}; "
                "take both files from the same release and split."
            )
        if reference.image_id != asked[question_id][0]:
            raise UserError(
                f"{answers_in}: question {question_id} is on picture {reference.image_id} there, "
                f"but on {asked[question_id][0]} in {asked_in.name}; take both from one release."
            )
