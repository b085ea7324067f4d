"""VQAv2's official files (https://visualqa.org), on which Prophet's VQA model is pretrained.

    v2_OpenEnded_mscoco_{train,val}2014_questions.json, v2_OpenEnded_mscoco_test2015_questions.json
    v2_mscoco_{train,val}2014_annotations.json          ten answers and an answer type each
    train2014/ val2014/ test2015/                       COCO's pictures

OK-VQA's test questions are on pictures of val2014. Where OK-VQA's file lies beside the others
(OpenEnded_mscoco_val2014_questions.json), the questions on these pictures are a split of their
own, so that nobody pretrains on them by mistake (Prophet's `v2valvg_no_ok`).

Visual Genome's questions, where their files lie there too, are the split `vg`,
and those on OK-VQA's test pictures the split `vg_on_okvqa_test`.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mmqa_jax.benchmarks.benchmark import Benchmark
from mmqa_jax.benchmarks.okvqa import read_okvqa_predictions, score_okvqa, write_okvqa_submission
from mmqa_jax.data.formats import coco
from mmqa_jax.data.formats.coco import Reference, check_same, read_annotations, read_questions
from mmqa_jax.data.formats.official import (
    BenchmarkFiles,
    Entry,
    OfficialFiles,
    PictureFolders,
    json_entries,
    picture_names,
)
from mmqa_jax.data.schema import Material, Question
from mmqa_jax.evaluation.vqa import has_answers

# Split -> COCO's split, which names the files.
COCO_SPLIT = {"train": "train2014", "val": "val2014", "test": "test2015"}
ON_OKVQA_TEST = "val_on_okvqa_test"  # questions of val on pictures of OK-VQA's test questions
GENOME, GENOME_ON_OKVQA_TEST = "vg", "vg_on_okvqa_test"
_VG_PICTURES = ("train2014", "val2014")  # COCO's splits that Visual Genome shares
_OKVQA = "OpenEnded_mscoco_val2014_questions.json"
_FOLDERS = (*coco.FOLDERS_2014, "test2015", "images/test2015")
# Goyal et al. (CVPR 2017), as counted on the page that the files are published on.
PUBLISHED_COUNTS = {"train questions": 443_757, "val questions": 214_354, "test questions": 447_793}
MATERIALS = (Material("VQAv2", "Goyal et al., CVPR 2017", "annotations CC BY 4.0"), coco.PICTURES)


def read_vqav2(folder: Path) -> BenchmarkFiles:
    """Reads what there is of the official files in `folder`.

    `Question.answers` are the annotators' ten answers, the category is the answer type (yes/no,
    number, other).
    """
    files = OfficialFiles(folder)
    pictures = PictureFolders(folder, _FOLDERS)
    okvqa = files.optional(_OKVQA, without=f"no split {ON_OKVQA_TEST}")
    held_out = {} if okvqa is None else read_questions(okvqa)
    on_okvqa = {image_id for image_id, _ in held_out.values()}
    questions: list[Question] = []
    for split, coco_split in COCO_SPLIT.items():
        asked, known = _split(files, split, coco_split)
        hidden = Reference(0, (), "", {})
        for question_id, (image_id, text) in asked.items():
            name = coco.picture_of(coco_split, image_id)
            reference = known.get(question_id, hidden)
            questions.append(
                Question(
                    id=str(question_id),
                    split=ON_OKVQA_TEST if split == "val" and image_id in on_okvqa else split,
                    question=text,
                    image=name if name in pictures else None,
                    answers=reference.answers,
                    category=reference.category,
                    extra={"image_id": image_id, **reference.extra},
                )
            )
    files.check_questions(
        questions,
        "VQAv2",
        "v2_OpenEnded_mscoco_train2014_questions.json and v2_mscoco_train2014_annotations.json",
    )
    for question_id, asked_of in read_visual_genome(files).items():
        candidates = (coco.picture_of(split, asked_of.image_id) for split in _VG_PICTURES)
        held_out_picture = asked_of.image_id in on_okvqa
        questions.append(
            Question(
                id=f"{GENOME}{question_id}",  # the numbers are also VQAv2's
                split=GENOME_ON_OKVQA_TEST if held_out_picture else GENOME,
                question=asked_of.question,
                image=next((name for name in candidates if name in pictures), None),
                answers=asked_of.answers,
                extra={"image_id": asked_of.image_id},
            )
        )
    pictured = len(picture_names(questions))
    if not pictured:
        files.missing["train2014/, val2014/"] = "no pictures; read their features instead"
    return files.content(questions, _counts(questions, pictured), PUBLISHED_COUNTS, pictures)


def _split(
    files: OfficialFiles, split: str, coco_split: str
) -> tuple[dict[int, tuple[int, str]], dict[int, Reference]]:
    """Questions and references of a split by question_id; empty if its files are absent."""
    asked_in = files.optional(
        f"v2_OpenEnded_mscoco_{coco_split}_questions.json", without=f"no split {split}"
    )
    if asked_in is None:
        return {}, {}
    asked = read_questions(asked_in)
    if split == "test":  # its answers are not published
        return asked, {}
    annotated_in = files.optional(
        f"v2_mscoco_{coco_split}_annotations.json", without=f"no answers of split {split}"
    )
    if annotated_in is None:
        return asked, {}
    known = read_annotations(annotated_in, "answer_type", {})
    check_same(known, asked, annotated_in, asked_in)
    return asked, known


def _counts(questions: list[Question], picture_files: int) -> dict[str, int]:
    """Counts val's questions as val and as vg, and once more if they are on OK-VQA's pictures."""
    whole = {ON_OKVQA_TEST: "val", GENOME_ON_OKVQA_TEST: GENOME}
    counts = Counter(f"{whole.get(q.split, q.split)} questions" for q in questions)
    for split, name in whole.items():
        if f"{name} questions" in counts:
            what = f"{name} questions on OK-VQA's test pictures"
            counts[what] = sum(q.split == split for q in questions)
    counts["questions with answers"] = sum(bool(q.answers) for q in questions)
    counts["picture files"] = picture_files
    return counts


# Visual Genome's questions on COCO's pictures, which Prophet and openvqa add to VQAv2's.
#
#   question_answers.json                   the official file: [{"id", "qas": [{"qa_id", "question",
#                                           "answer"}]}]
#   image_data.json                         the official file: [{"image_id", "coco_id"}], null where
#                                           not of COCO
#   VG_questions.json, VG_annotations.json  openvqa's selection in VQA's format
#   vg_questions.json, vg_annotations.json  Prophet's, the same
#
# Pictures are named by COCO's ids in all of them, so that VQAv2's features serve.

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
    asked: dict[int, GenomeQuestion] = {}
    for row in json_entries(path):
        image_id = coco.get(row.number("id"))
        if not isinstance(row.get("qas"), list):
            raise row.error("holds no list of qas")
        for pair in row["qas"] if image_id is not None else ():
            pair = Entry(f"{row.where}, qas", pair)
            key = pair.number("qa_id")
            if key in asked:
                raise row.error(f"qa_id {key} is there twice")
            # Answers are sentences: `Outside.`
            answers = (pair.text("answer", empty=True).strip().rstrip("."),) * _ANNOTATORS
            asked[key] = GenomeQuestion(image_id, pair.text("question", empty=True), answers)
    return asked


def _coco_ids(path: Path) -> dict[int, int]:
    """Returns Visual Genome's id of a picture -> COCO's id, if it has one."""
    return {
        row.number("image_id"): row.number("coco_id")
        for row in json_entries(path)
        if row.get("coco_id") is not None
    }


BENCHMARK = Benchmark(
    read=read_vqav2,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="val",
    formats="predictions.jsonl, or the official list of {question_id, answer} as JSON",
    read_predictions=read_okvqa_predictions,
    has_reference=has_answers,
    score=score_okvqa,
    write_submission=write_okvqa_submission,
)
