"""A-OKVQA's JSON and Parquet in, schema out."""

import re

import pyarrow
import pyarrow.parquet
import pytest
from cli_runs import png
from shared_data import SHARED, shared_benchmark
from vqa_files import aokvqa_row, write, write_aokvqa

from mmqa_jax.benchmarks.aokvqa import read_aokvqa
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.decode import PictureError


def hub_rows(split: str = "val") -> list[dict]:
    """Rows as the hub stores them: lists as Python literals, pictures as structs."""
    rows = []
    for number, row in enumerate(aokvqa_row(name, split) for name in ("q1", "q2", "q3")):
        answers = row.get("direct_answers")
        rows.append(
            {
                "image": {"bytes": png((number, 0, 0)), "path": None},
                "question_id": row["question_id"],
                "question": row["question"],
                "choices": row["choices"],
                "correct_choice_idx": row.get("correct_choice_idx"),
                "direct_answers": None if answers is None else repr(answers),
                "difficult_direct_answer": number == 1,
                "rationales": row.get("rationales", []),
            }
        )
    return rows


def write_parquet(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def test_json(tmp_path):
    raw = write_aokvqa(tmp_path / "aokvqa")
    (tmp_path / "okvqa").mkdir()
    (tmp_path / "okvqa/vinvl_captions_val2014.tsv").write_text('3\t[{"caption": "a sky"}]\n')
    (raw / "val2017").mkdir()
    (raw / "val2017/000000000002.jpg").write_bytes(png((7, 7, 7)))
    found = read_aokvqa(raw)
    first, difficult, third, hidden = found.questions
    assert (first.id, first.split, first.question) == ("q1", "val", "What is q1?")
    assert first.answers == ("moon",) * 2 + ("the moon",) * 8
    assert (first.choices, first.answer_index) == (("sun", "moon", "star", "sky"), 1)
    assert first.rationale == "It shines."
    assert first.extra["rationales"] == ["It shines.", "It is round.", "It is night."]
    assert difficult.extra["difficult_direct_answer"] is True
    assert "caption" not in first.extra
    assert third.extra["caption"] == "a sky"
    assert (first.image, third.image) == ("000000000002.jpg", None)
    assert found.read_picture(first.image) == png((7, 7, 7))
    assert (hidden.split, hidden.answers, hidden.answer_index) == ("test", (), None)
    assert found.counts["val questions"] == 3
    assert found.counts["val questions marked difficult"] == 1
    assert found.counts["val questions with a picture file"] == 2
    assert found.counts["val questions with caption"] == 1
    assert "vinvl_captions_val2014.tsv" not in found.missing
    assert {name for name in found.missing if "vinvl" not in name} == {
        *("aokvqa_v1p0_train.json", "captions_aokvqa.json"),
        *("captions_train2014.json", "captions_val2014.json"),
        *("tags_train.tsv", "tags_val.tsv", "tags_test.tsv"),
    }


def test_descriptions_of_pictures_as_okvqa_has_them(tmp_path):
    raw, beside = write_aokvqa(tmp_path / "aokvqa"), tmp_path / "okvqa"
    beside.mkdir()
    write(raw / "captions_aokvqa.json", {"2": "a disc", "3": "a dark sky"})
    (beside / "VinVL_base_train2014.tsv").write_text('3\t[{"caption": "a sky", "conf": 0.9}]\n')
    (raw / "tags_val.tsv").write_text('2\t[{"class": "moon", "conf": 0.9}]\n')
    (beside / "test.score.json.tsv").write_text('3\t[{"class": "star", "conf": 0.5}]\n')
    people = [{"image_id": 2, "caption": "the moon"}, {"image_id": 2, "caption": "a moon"}]
    write(raw / "captions_train2017.json", {"annotations": people})
    write(beside / "captions_val2014.json", {"annotations": [{"image_id": 3, "caption": "sky"}]})
    found = read_aokvqa(raw)
    first, _, third, hidden = (question.extra for question in found.questions)
    assert (first["caption"], third["caption"], hidden["caption"]) == ("a disc", "a sky", "a disc")
    assert first["tags"] == [{"class": "moon", "conf": 0.9}]
    assert third["tags"] == [{"class": "star", "conf": 0.5}]
    assert (first["coco_captions"], third["coco_captions"]) == (["the moon", "a moon"], ["sky"])
    for key in ("caption", "tags", "coco_captions"):
        assert found.counts[f"val questions with {key}"] == 3


@pytest.mark.parametrize("place", [".", "data"])
def test_parquet(place, tmp_path):
    rows = hub_rows()
    for number, part in enumerate((rows[:1], rows[1:])):
        name = f"validation-0000{number}-of-00002-abc.parquet"
        write_parquet(tmp_path / place / name, part, row_group_size=1)
    write_parquet(tmp_path / place / "test-00000-of-00001.parquet", [
        {**row, "question_id": f"t{n}"} for n, row in enumerate(hub_rows("test"))
    ])  # fmt: skip
    found = read_aokvqa(tmp_path)
    questions = {question.id: question for question in found.questions}
    assert list(questions) == ["q1", "q2", "q3", "t0", "t1", "t2"]
    assert questions["q1"].answers == ("moon",) * 2 + ("the moon",) * 8
    assert questions["q1"].choices == ("sun", "moon", "star", "sky")
    assert questions["q2"].extra["difficult_direct_answer"] is True
    assert (questions["t1"].split, questions["t1"].answers) == ("test", ())
    assert questions["t1"].answer_index is None
    for number, name in enumerate(("q1", "q2", "q3")):
        assert found.read_picture(questions[name].image) == png((number, 0, 0))


def test_json_questions_with_pictures_of_parquet(tmp_path):
    write_aokvqa(tmp_path)
    write_parquet(tmp_path / "validation-00000-of-00001.parquet", hub_rows()[:2])
    found = {question.id: question for question in read_aokvqa(tmp_path).questions}
    assert found["q1"].extra["image_id"] == 2
    assert [found[name].image for name in ("q1", "q2", "q3")] == ["q1", "q2", None]


def test_a_single_file(tmp_path):
    write_aokvqa(tmp_path)
    found = read_aokvqa(tmp_path / "aokvqa_v1p0_val.json")
    assert [question.id for question in found.questions] == ["q1", "q2", "q3"]
    path = write_parquet(tmp_path / "validation-x.parquet", hub_rows())
    assert len(read_aokvqa(path).questions) == 3


def test_a_row_without_a_pictures_bytes(tmp_path):
    rows = hub_rows()
    rows[0]["image"] = {"bytes": None, "path": "lost.jpg"}
    write_parquet(tmp_path / "validation-x.parquet", rows)
    found = read_aokvqa(tmp_path)
    with pytest.raises(PictureError, match=r"validation-x\.parquet, id q1: holds no picture's"):
        found.read_picture(found.questions[0].image)


def refused(path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_aokvqa(path)
    assert re.fullmatch(r"[^\n]+\.", str(error.value))


def test_parquet_that_cannot_be_read(tmp_path):
    path = write_parquet(tmp_path / "validation-x.parquet", hub_rows())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, r"validation-x\.parquet: cannot be read as Parquet .*the file is cut off or")
    # The end, with the index, is whole, but the data is not.
    path.write_bytes(b"PAR1" + b"\0" * (len(whole) // 3) + whole[4 + len(whole) // 3 :])
    refused(tmp_path, r"validation-x\.parquet: cannot be read as Parquet")
    write_parquet(path, [{k: v for k, v in row.items() if k != "choices"} for row in hub_rows()])
    refused(tmp_path, r"has no column choices \(it has image, question_id, .*\); fetch the benchm")
    write_parquet(path, [{k: v for k, v in r.items() if "difficult" not in k} for r in hub_rows()])
    refused(tmp_path, r"row 0: difficult_direct_answer is None; true or false")
    rows = hub_rows()
    rows[1]["direct_answers"] = "['moon', __import__('os')]"
    write_parquet(path, rows)
    refused(tmp_path, r"validation-x\.parquet, row 1: direct_answers is .*; a list of texts")
    write_parquet(tmp_path / "some.parquet", hub_rows())
    refused(tmp_path / "some.parquet", r"its name says no split; call it train-\*, validation-\*, ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "dev"}, r"entry 2: split is 'dev'; one of train, val, test was expected"),
        ({"question_id": 7}, r"entry 2: question_id is 7; text was expected"),
        ({"question_id": "q0"}, r"entry 2: question_id 'q0' is there twice"),
        ({"question": " "}, r"entry 2: question is ' '; text was expected"),
        ({"choices": [1, 2]}, r"entry 2: choices is \[1, 2\]; a list of texts was expected"),
        ({"choices": []}, r"entry 2: correct_choice_idx is 1; no number was expected"),
        (
            {"difficult_direct_answer": None},
            r"entry 2: difficult_direct_answer is None; true or false",
        ),
        ({"correct_choice_idx": 4}, r"correct_choice_idx is 4; a number from 0 to 3 was expected"),
        ({"correct_choice_idx": True}, r"correct_choice_idx is True; a number"),
        ({"image_id": "2"}, r"entry 2: image_id is '2'; a whole number was expected"),
        ({"question": "\ud83d"}, r"line \d+, column \d+: holds '\\ud83d', half of a"),
    ],
)
def test_malformed_questions(change, message, tmp_path):
    path = tmp_path / "aokvqa_v1p0_val.json"
    write(path, [aokvqa_row("q0"), aokvqa_row("q1", **change)])
    refused(path, message)


def test_files_of_another_shape(tmp_path):
    path = write(tmp_path / "aokvqa_v1p0_val.json", {"q1": aokvqa_row("q1")})
    refused(tmp_path, r"aokvqa_v1p0_val\.json: a list was expected")
    write(path, ["q1"])
    refused(tmp_path, r"aokvqa_v1p0_val\.json, entry 1: an object was expected")
    path.unlink()
    refused(tmp_path, r"holds none of A-OKVQA's questions; put aokvqa_v1p0_val\.json or the hub's")


@pytest.mark.skipif(
    not (SHARED / "aokvqa").exists(), reason="needs ../shared/data/aokvqa (MMQA_SHARED_DATA)"
)
def test_the_real_files():
    found = shared_benchmark(read_aokvqa, "aokvqa")
    for split in ("val", "test"):
        assert found.counts[f"{split} questions"] == found.published[f"{split} questions"]
    assert found.counts["val questions with caption"] == 1_145
    assert found.counts["val questions marked difficult"] == 70
    assert {len(q.answers) for q in found.questions if q.split == "val"} == {10}
    assert {len(q.choices) for q in found.questions} == {4}
