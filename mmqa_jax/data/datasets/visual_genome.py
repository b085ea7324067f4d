"""Visual Genome's questions on COCO's pictures, which Prophet and openvqa add to VQAv2's.

    question_answers.json    the official file: [{"id", "qas": [{"qa_id", "question", "answer"}]}]
    image_data.json          the official file: [{"image_id", "coco_id"}], null where not of COCO
    VG_questions.json, VG_annotations.json                  openvqa's selection in VQA's format
    vg_questions.json, vg_annotations.json                  Prophet's, the same

Pictures are named by COCO's ids in all of them, so that VQAv2's features serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.datasets.benchmark import OfficialFiles
from mmqa_jax.data.datasets.vqa_json import (
    check_same,
    number,
    read_annotations,
    read_questions,
    text_of,
)

_ANNOTATORS = 10  # one person answered; VQA's soft target of ten equal answers is 1


class GenomeQuestion(NamedTuple):
    """A question on one of COCO's pictures and its answers."""

    image_id: int
    question: str
    answers: tuple[str, ...]


def read_visual_genome(files: OfficialFiles) -> dict[int, GenomeQuestion]:
    """question_id -> its question; {} where there are no such files.

    Of the official files the questions on pictures that are not COCO's are left out. Their one
    answer counts as ten equal ones, so that a VQA model's target for it is 1.
    """
    without = "no questions of Visual Genome"
    asked_in = files.optional("VG_questions.json", "vg_questions.json", without=without)
    if asked_in is not None:
        answers_in = files.required(
            asked_in.name.replace("questions", "annotations"),
            remedy=f"{asked_in.name} needs it; fetch both from one place",
        )
        asked, known = read_questions(asked_in), read_annotations(answers_in, "answer_type", {})
        check_same(known, asked, answers_in, asked_in)
        return {
            key: GenomeQuestion(image_id, text, known[key].answers if key in known else ())
            for key, (image_id, text) in asked.items()
        }
    official = files.optional("question_answers.json", without=without)
    if official is None:
        return {}
    files.missing.pop("VG_questions.json")
    coco = _coco_ids(
        files.required(
            "image_data.json", remedy="question_answers.json needs it to name COCO's pictures"
        )
    )
    return _official(official, coco)


def _official(path: Path, coco: Mapping[int, int]) -> dict[int, GenomeQuestion]:
    found: dict[int, GenomeQuestion] = {}
    for where, row in _rows(path):
        image_id = coco.get(number(row, "id", where))
        pairs = row.get("qas")
        if not isinstance(pairs, list) or not all(isinstance(pair, dict) for pair in pairs):
            raise UserError(f"{where}: holds no list of qas; fetch the file again.")
        for pair in pairs if image_id is not None else ():
            key = number(pair, "qa_id", f"{where}, qas")
            if key in found:
                raise UserError(f"{where}: qa_id {key} appears twice; remove one.")
            question, answer = (text_of(pair, name, where) for name in ("question", "answer"))
            # Answers are sentences: `Outside.`
            answers = (answer.strip().rstrip("."),) * _ANNOTATORS
            found[key] = GenomeQuestion(image_id, question, answers)
    return found


def _coco_ids(path: Path) -> dict[int, int]:
    """Visual Genome's id of a picture -> COCO's, of those that have one."""
    return {
        number(row, "image_id", where): number(row, "coco_id", where)
        for where, row in _rows(path)
        if row.get("coco_id") is not None
    }


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, entry) of a JSON list of objects."""
    rows = read_json(path)
    if not isinstance(rows, list):
        raise UserError(f"{path}: a list was expected; fetch the file again.")
    for count, row in enumerate(rows, start=1):
        where = f"{path}, entry {count}"
        if not isinstance(row, dict):
            raise UserError(f"{where}: an object was expected; fetch the file again.")
        yield where, row
