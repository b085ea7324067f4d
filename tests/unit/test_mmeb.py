"""MMEB-V2's image tasks: their files, and hits as the authors count them."""

import pyarrow
import pyarrow.parquet
import pytest
from cli_runs import png

from mmqa_jax.benchmarks.mmeb import SCORER, read_mmeb, score_mmeb
from mmqa_jax.data.schema import Prediction
from tests.refusals import refuses

CLASSES = {
    "qry_inst": "<|image_1|>\nIdentify the object.", "qry_text": "", "qry_img_path": "VOC/1.png",
    "tgt_inst": "", "tgt_text": ["boat", "bird", "boat"], "tgt_img_path": ["", "", ""],
}  # fmt: skip
FOUND = {
    "qry_inst": "Find a picture of", "qry_text": "a red boat", "qry_img_path": "",
    "tgt_inst": "<|image_1|>\nRepresent it.", "tgt_text": ["a boat", "a bird", "again"],
    "tgt_img_path": ["a.png", "b.png", "a.png"],
}  # fmt: skip
# Candidates in the order of a ranking, as numbers of FOUND's -> hit_at_k(..., 1) of the authors'
# metrics.py, whose label is the first.
HITS = [([0, 1], 1.0), ([1, 0], 0.0), ([1], 0.0), ([], 0.0), ([0], 1.0)]


def task(folder, name, *rows):
    (folder / name).mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(list(rows))
    pyarrow.parquet.write_table(table, folder / name / "test-00000-of-00001.parquet")
    return folder / name


def test_candidates_are_told_apart_as_the_authors_do(tmp_path):
    (tmp_path / "image-tasks/VOC").mkdir(parents=True)
    (tmp_path / "image-tasks/VOC/1.png").write_bytes(png((1, 2, 3)))
    files = read_mmeb(task(tmp_path, "VOC2007", CLASSES, {**CLASSES, "tgt_text": ["bird"] * 3}))
    first, second = files.questions
    assert (first.id, first.question) == ("VOC2007/0", "Identify the object.")
    assert files.read_picture(first.image) == png((1, 2, 3))
    assert [source.text for source in files.sources] == ["boat", "bird"]
    assert (first.positives, first.negatives) == (("VOC2007/0",), ("VOC2007/1",))
    assert (second.positives, second.negatives) == (("VOC2007/1",), ())
    (found,) = read_mmeb(task(tmp_path, "WebQA", FOUND)).questions
    assert found.question == "Find a picture of a red boat"
    assert len(found.negatives) == 1  # one picture is one candidate
    seen = {**FOUND, "qry_img_path": "q.png"}
    (seen,) = read_mmeb(task(tmp_path, "RefCOCO-Matching", seen)).questions
    assert len(seen.negatives) == 2  # with a picture, its text tells it apart


@pytest.mark.parametrize(("ranking", "hit"), HITS)
def test_hits(ranking, hit, tmp_path):
    questions = read_mmeb(task(tmp_path, "WebQA", FOUND)).questions
    others = read_mmeb(task(tmp_path, "VOC2007", CLASSES)).questions
    sources = (
        "VOC2007/0",
        *(f"WebQA/{number}" for number in ranking),
    )  # of another's is passed over
    evaluation = score_mmeb([*questions, *others], [Prediction("WebQA/0", "", sources)])
    (scores,) = evaluation.scored
    means = {name: values[SCORER] for name, values in scores.by_category.items()}
    assert means == {
        "WebQA": hit, "VOC2007": 0, "kind: retrieval": hit, "kind: classification": 0,
    }  # fmt: skip
    assert evaluation.notes == [f"average of 2 of 36 image tasks, hit@1: {50 * hit:.2f} %"]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("Boats", CLASSES, "is no task's folder"),
        (
            "MSR-VTT",
            FOUND,
            "MSR-VTT is a task of videos, .* give the folder of one of the 36 image",
        ),
        ("WebQA", {**FOUND, "tgt_img_path": ["a.png"]}, "row 0: tgt_text and tgt_img_path are not"),
    ],
)
def test_refused(name, row, message, tmp_path):
    refuses(message, read_mmeb, task(tmp_path, name, row))
    (tmp_path / "empty/WebQA").mkdir(parents=True)
    refuses(r"holds no test-\*\.parquet", read_mmeb, tmp_path / "empty/WebQA")
