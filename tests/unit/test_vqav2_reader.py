"""VQAv2's official files: splits, answers, and the pictures that OK-VQA tests on."""

import json

import pytest

from mmqa_jax.benchmarks.vqav2 import GENOME, GENOME_ON_OKVQA_TEST, ON_OKVQA_TEST, read_vqav2
from mmqa_jax.data.answers import make_vocabulary
from tests.refusals import refuses

ANSWERS = ["yes"] * 7 + ["no"] * 3


def write(path, data):
    path.write_text(json.dumps(data))


def write_split(folder, name, rows, *, annotated=True):
    """rows: question_id -> image_id."""
    asked = [
        {"image_id": image, "question": f"Is it {number}?", "question_id": number}
        for number, image in rows.items()
    ]
    answers = [{"answer_id": n, "answer": a, "answer_confidence": "yes"} for n, a in
               enumerate(ANSWERS, start=1)]  # fmt: skip
    annotations = [
        {
            "question_id": number, "image_id": image, "question_type": "is it",
            "answer_type": "yes/no", "multiple_choice_answer": "yes", "answers": answers,
        }
        for number, image in rows.items()
    ]  # fmt: skip
    write(folder / f"v2_OpenEnded_mscoco_{name}_questions.json", {"questions": asked})
    if annotated:
        write(folder / f"v2_mscoco_{name}_annotations.json", {"annotations": annotations})


@pytest.fixture
def folder(tmp_path):
    write_split(tmp_path, "train2014", {9001: 9, 9002: 9})
    write_split(tmp_path, "val2014", {42000: 42, 42001: 42, 73000: 73})
    write_split(tmp_path, "test2015", {1000: 1}, annotated=False)
    return tmp_path


def test_splits_and_answers(folder):
    benchmark = read_vqav2(folder)
    found = {q.id: q for q in benchmark.questions}
    assert {q.split for q in benchmark.questions} == {"train", "val", "test"}
    assert found["42000"].answers == tuple(ANSWERS)
    assert found["42000"].category == "yes/no"
    assert found["42000"].extra == {"image_id": 42}
    assert found["1000"].answers == ()
    assert benchmark.counts["questions with answers"] == 5
    assert benchmark.counts["test questions"] == 1


def test_questions_on_okvqa_test_pictures_are_a_split_of_their_own(folder):
    asked = [{"image_id": 42, "question": "What is it for?", "question_id": 425}]
    write(folder / "OpenEnded_mscoco_val2014_questions.json", {"questions": asked})
    benchmark = read_vqav2(folder)
    held_out = {q.id for q in benchmark.questions if q.split == ON_OKVQA_TEST}
    assert held_out == {"42000", "42001"}
    assert benchmark.counts["val questions"] == 3  # as published, whatever the split
    assert benchmark.counts["val questions on OK-VQA's test pictures"] == 2


def test_answers_to_other_questions_are_refused(folder):
    write_split(folder, "val2014", {42000: 42, 99000: 99})
    write(
        folder / "v2_OpenEnded_mscoco_val2014_questions.json",
        {"questions": [{"image_id": 42, "question": "Is it?", "question_id": 42000}]},
    )
    refuses(r"v2_mscoco_val2014_annotations\.json: answers question", read_vqav2, folder)


def test_an_empty_folder_says_what_to_put_there(tmp_path):
    refuses(r"v2_OpenEnded_mscoco_train2014_questions\.json", read_vqav2, tmp_path)


def on_okvqa(folder):
    asked = [{"image_id": 42, "question": "What is it for?", "question_id": 425}]
    write(folder / "OpenEnded_mscoco_val2014_questions.json", {"questions": asked})


def test_visual_genome_in_vqas_format(folder):
    on_okvqa(folder)
    asked = {9001: 9, 500: 42}  # 9001 is also a question of VQAv2
    rows = [{"image_id": i, "question": f"Who, {n}?", "question_id": n} for n, i in asked.items()]
    known = [
        {"image_id": i, "question_id": n, "answers": [{"answer": "a man"}]}
        for n, i in asked.items()
    ]
    write(folder / "VG_questions.json", {"questions": rows})
    refuses(r"VG_annotations\.json: no such file", read_vqav2, folder)
    write(folder / "VG_annotations.json", {"annotations": known})
    benchmark = read_vqav2(folder)
    found = {q.id: q for q in benchmark.questions}
    assert found["vg9001"].split == GENOME
    assert found["vg500"].split == GENOME_ON_OKVQA_TEST
    assert found["vg9001"].question == "Who, 9001?"
    assert found["vg9001"].answers == ("a man",)
    assert found["9001"].split == "train"
    assert benchmark.counts["vg questions"] == 2
    assert benchmark.counts["vg questions on OK-VQA's test pictures"] == 1


def test_visual_genomes_official_files(folder):
    """Pictures get COCO's ids; those that COCO lacks are left out; one answer has target 1."""
    on_okvqa(folder)
    pair = {"question": "Where is it?", "answer": "Outside."}
    pictures = [(1, [7, 8]), (2, [9]), (3, [10])]
    rows = [
        {"id": n, "qas": [{**pair, "image_id": n, "qa_id": key} for key in keys]}
        for n, keys in pictures
    ]
    write(folder / "question_answers.json", rows)
    refuses(r"image_data\.json: no such file", read_vqav2, folder)
    coco = [{"image_id": n, "coco_id": of} for n, of in ((1, 9), (2, None), (3, 42))]
    write(folder / "image_data.json", coco)
    genome = {q.id: q for q in read_vqav2(folder).questions if q.id.startswith("vg")}
    assert {name: (q.split, q.extra["image_id"]) for name, q in genome.items()} == {
        "vg7": (GENOME, 9), "vg8": (GENOME, 9), "vg10": (GENOME_ON_OKVQA_TEST, 42),
    }  # fmt: skip
    assert make_vocabulary(genome.values(), 3).targets(genome["vg7"]) == {0: 1.0}
    write(folder / "question_answers.json", [*rows, rows[0]])
    refuses(r"question_answers\.json, entry 4: qa_id 7 is there twice", read_vqav2, folder)
