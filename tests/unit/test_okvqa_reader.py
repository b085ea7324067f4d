"""OK-VQA's official files in, schema out; files that do not belong together are refused."""

import re

import pytest
from cli_runs import png
from shared_data import SHARED, shared_benchmark
from vqa_files import soft_labels, write, write_okvqa

from mmqa_jax.benchmarks.okvqa import CATEGORIES, read_okvqa
from mmqa_jax.core.errors import UserError


def test_annotations_captions_and_tags(tmp_path):
    found = read_okvqa(write_okvqa(tmp_path))
    questions = {question.id: question for question in found.questions}
    assert list(questions) == ["15", "25", "26", "35"]
    assert {q.split for q in found.questions} == {"train", "test"}
    race = questions["25"]
    assert (race.split, race.question, race.image) == ("test", "What sport is this?", None)
    assert race.answers == ("race",) * 4 + ("ride",) * 2 + ("bike",) * 4
    assert race.category == "Vehicles and Transportation"
    assert race.extra["raw_answers"][0] == "races"
    assert race.extra["caption"] == "a bike"  # the surer of two
    assert race.extra["tags"] == [{"class": "bike", "conf": 0.99}]
    assert questions["35"].extra["tags"] == [{"class": "pot", "conf": 0.5}]
    assert "soft_labels" not in race.extra
    assert questions["15"].extra.keys() == {"image_id", "raw_answers"}
    assert found.counts["train questions with caption"] == 0
    assert found.counts["test questions with caption"] == 2
    assert found.counts["test questions with annotators' answers"] == 3
    assert found.counts["pictures"] == 3
    assert found.read_picture is None
    assert "train2014/, val2014/" in found.missing


def test_pictures_of_a_folder_per_split_and_of_one_folder(tmp_path):
    found = read_okvqa(write_okvqa(tmp_path, pictures=True))
    images = {question.id: question.image for question in found.questions}
    assert images == {
        "15": "COCO_train2014_000000000001.jpg",
        "25": "COCO_val2014_000000000002.jpg",
        "26": "COCO_val2014_000000000002.jpg",
        "35": None,
    }
    assert found.read_picture(images["25"]) == png((1, 2, 3))
    assert found.counts["picture files"] == 2
    before = found.inputs
    (tmp_path / "val2014" / images["25"]).write_bytes(png((1, 2, 3)) + b"0")
    assert read_okvqa(tmp_path).inputs != before


def test_soft_labels_where_annotations_are_absent(tmp_path):
    write_okvqa(tmp_path)
    (tmp_path / "mscoco_val2014_annotations.json").unlink()
    write(tmp_path / "val_soft_labels.json", soft_labels())
    for asked in (True, False):  # the labels know the questions too
        found = {question.id: question for question in read_okvqa(tmp_path).questions}
        assert set(found) == {"15", "25", "26", "35"}
        assert found["25"].answers == ("race", "bike", "ride")
        assert found["25"].extra["soft_labels"] == {"race": 1, "ride": 0.667, "bike": 1}
        assert found["25"].extra["image_id"] == 2
        assert found["25"].category == CATEGORIES["one"]
        if asked:
            (tmp_path / "OpenEnded_mscoco_val2014_questions.json").unlink()


def test_coco_captions_by_people(tmp_path):
    write_okvqa(tmp_path)
    rows = [{"image_id": 2, "id": n, "caption": f"caption {n}"} for n in range(5)]
    write(tmp_path / "captions_val2014.json", {"annotations": rows})
    found = {question.id: question for question in read_okvqa(tmp_path).questions}
    assert found["26"].extra["coco_captions"] == [f"caption {n}" for n in range(5)]
    for content, message in (
        ({"annotations": [{"image_id": "2"}]}, "entry 1: caption is None; text was expected"),
        ({"images": []}, 'an object with a list "annotations" was expected; fetch'),
    ):
        write(tmp_path / "captions_val2014.json", content)
        refused(tmp_path, rf"captions_val2014\.json[,:] {message}")


def caption_of(folder, *names: str) -> list[str | None]:
    found = {question.id: question for question in read_okvqa(folder).questions}
    return [found[name].extra.get("caption") for name in names]


def test_captions_of_prophets_authors_behind_those_of_vinvl(tmp_path):
    write_okvqa(tmp_path)
    write(
        tmp_path / "captions_okvqa.json", {"1": "green ivy", "2": "not shown", "9": "no question"}
    )
    assert caption_of(tmp_path, "15", "25", "35") == ["green ivy", "a bike", None]
    counts = read_okvqa(tmp_path).counts
    assert (counts["train questions with caption"], counts["test questions with caption"]) == (1, 2)
    for name in ("VinVL_base_train2014.tsv", "vinvl_captions_train2014.tsv"):
        (tmp_path / name).write_text(f'1\t[{{"caption": "{name}", "conf": 0.4}}]\n')
        assert caption_of(tmp_path, "15", "25") == [name, "a bike"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"captions_okvqa\.json: expected an object \{name: caption\}"),
        ({"COCO_1": "a"}, r"captions_okvqa\.json, COCO_1: expected the number of a picture"),
        ({"1": None}, r"captions_okvqa\.json, 1: holds no caption"),
        (
            {"1": "\ud83d"},
            r"captions_okvqa\.json, line 2, column 8: holds '\\ud83d', half of a character",
        ),
    ],
)
def test_malformed_captions_of_prophets_authors(content, message, tmp_path):
    write(write_okvqa(tmp_path) / "captions_okvqa.json", content)
    refused(tmp_path, message)


def refused(folder, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_okvqa(folder)
    assert re.fullmatch(r"[^\n]+\.", str(error.value))


def test_annotations_of_other_questions(tmp_path):
    write_okvqa(tmp_path)
    train, val = (tmp_path / f"mscoco_{split}2014_annotations.json" for split in ("train", "val"))
    text = val.read_text()
    val.write_text(train.read_text())
    message = r"mscoco_val2014_annotations\.json: answers question 15, which is not in OpenEnded_"
    refused(tmp_path, message)
    val.write_text(text.replace('"image_id": 3', '"image_id": 4'))
    refused(tmp_path, r"question 35 is on picture 4 there, but on 3 in OpenEnded_mscoco_val2014_q")
    (tmp_path / "OpenEnded_mscoco_val2014_questions.json").unlink()
    refused(tmp_path, r"annotations\.json: its questions are missing; put OpenEnded_mscoco_val2014")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OpenEnded_mscoco_val2014_questions.json", [1], r"entry 1: an object was expected"),
        (
            "OpenEnded_mscoco_val2014_questions.json",
            {"q": []},
            r'an object with a list "questions"',
        ),
        (
            "OpenEnded_mscoco_val2014_questions.json",
            {"questions": [{"question_id": 1, "image_id": 1, "question": None}]},
            r"entry 1: question is None; text was expected",
        ),
        (
            "OpenEnded_mscoco_val2014_questions.json",
            {"questions": [{"question_id": 1, "image_id": 1, "question": "?"}] * 2},
            r"entry 2: question_id 1 is there twice; fetch",
        ),
        (
            "mscoco_val2014_annotations.json",
            {"annotations": [{"question_id": 25, "image_id": 2, "answers": []}]},
            r"annotations\.json, entry 1: holds no list of answers",
        ),
        (
            "mscoco_val2014_annotations.json",
            {"annotations": [{"question_id": 25, "image_id": 2, "answers": ["a"]}]},
            r"annotations\.json, entry 1, answers: an object was expected",
        ),
        (
            "mscoco_val2014_annotations.json",
            {"annotations": [{"question_id": "x", "image_id": 2}]},
            r"entry 1: question_id is 'x'; a whole number was expected",
        ),
    ],
)
def test_malformed_official_files(name, value, message, tmp_path):
    write(write_okvqa(tmp_path) / name, value)
    refused(tmp_path, message)


def test_malformed_soft_labels(tmp_path):
    write_okvqa(tmp_path)
    (tmp_path / "mscoco_val2014_annotations.json").unlink()
    rows = soft_labels()
    rows[1]["label"] = {"two": 2}
    write(tmp_path / "val_soft_labels.json", rows)
    refused(tmp_path, r"val_soft_labels\.json, entry 2: `label` must be an object of answer -> w")
    rows[1] = {**rows[0], "question_id": 26, "img_id": "none"}
    write(tmp_path / "val_soft_labels.json", rows)
    refused(tmp_path, r"val_soft_labels\.json, entry 2: img_id ends in no number")


@pytest.mark.parametrize(
    "line",
    [
        *('3\t[{"caption": "cut off', "3", '3\t[{"class": "x"}]', 'x\t[{"caption": "y"}]'),
        *(f'3\t[{{"caption": "y", "conf": {conf}}}]' for conf in ('"0.9"', "null", "true", "[1]")),
    ],
)
def test_a_broken_line_of_captions(line, tmp_path):
    path = write_okvqa(tmp_path) / "vinvl_captions_val2014.tsv"
    path.write_text(path.read_text() + line + "\n")
    refused(tmp_path, r"vinvl_captions_val2014\.tsv, line 2: .*fetch the file again")


def test_a_folder_without_questions(tmp_path):
    refused(tmp_path, r"holds none of OK-VQA's questions; put OpenEnded_mscoco_val2014_questions")
    refused(tmp_path / "none", r"no such folder, a folder with the benchmark's official files")


@pytest.mark.skipif(
    not (SHARED / "okvqa").exists(), reason="needs ../shared/data/okvqa (MMQA_SHARED_DATA)"
)
def test_the_real_files():
    found = shared_benchmark(read_okvqa, "okvqa")
    assert {name: found.counts[name] for name in found.published} == found.published
    assert found.counts["test questions with caption"] == 5_046
    assert found.counts["test questions with soft_labels"] == 5_046
    assert found.counts["train questions with caption"] == 0
    # Its official annotation has question_type "four" and the answers pony tail (6 times), braid
    # (2) and ponytail (2), as its file mscoco_train2014_annotations.json is quoted.
    first = found.questions[0]
    assert (first.id, first.category) == ("516065", "Sports and Recreation")
    assert first.extra["soft_labels"] == {"pony tail": 1, "braid": 0.667, "ponytail": 0.667}
    (described,) = (question for question in found.questions if question.id == "2971475")
    assert described.extra["caption"] == "a black motorcycle parked in a parking lot."
