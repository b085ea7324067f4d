"""Examples by the vectors that PICa's authors published; its own code chose the same ones."""

import json

import numpy as np
import pytest
from cli_runs import ROOT, done
from vqa_files import write_okvqa

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.examples.library import ExampleLibrary, PublishedVectors
from mmqa_jax.runs.parts import check_prompted
from mmqa_jax.runs.row import read_row
from mmqa_jax.runs.run import run_row
from mmqa_jax.tasks.library import LibrarySpec

DIM = 16
QUESTION, IMAGE = "question", "convertedidx_image"


def file_of(folder, split: str, kind: str):
    return folder / f"coco_clip_vitb16_{split}2014_okvqa_{kind}.npy"


def index_of(folder, split: str):
    return folder / f"okvqa_qa_line2sample_idx_{split}2014.json"


def write_vectors(folder, samples: dict[str, list[str]], seed: int = 0):
    """The files of `samples`, split -> `image_id<->question_id`s, with vectors of any length."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for split, rows in samples.items():
        index_of(folder, split).write_text(json.dumps({str(n): row for n, row in enumerate(rows)}))
        for kind in (QUESTION, IMAGE):
            vectors = rng.normal(size=(len(rows), DIM)) * rng.uniform(0.1, 9, (len(rows), 1))
            np.save(file_of(folder, split, kind), vectors.astype(np.float32))
    return folder


SAMPLES = {
    "train": [f"{n % 7}<->{n}" for n in range(60)],
    "val": [f"{n % 5}<->{n}" for n in range(100, 109)],
}


def questions(split: str) -> list[Question]:
    found = [sample.split("<->") for sample in SAMPLES[split]]
    return [Question(name, split, "?", extra={"image_id": int(image)}) for image, name in found]


@pytest.fixture
def folder(tmp_path):
    return write_vectors(tmp_path / "coco_clip_new", SAMPLES)


def picas_choice(folder, key: str, metric: str, n: int) -> list[str]:
    """A restatement of get_context_keys, with its files and its keys."""
    lines = json.loads(index_of(folder, "val").read_text())
    line = int(next(number for number, sample in lines.items() if sample == key))
    samples = json.loads(index_of(folder, "train").read_text())
    kinds = (QUESTION, IMAGE) if metric == "imagequestion" else (QUESTION,)
    similarity = sum(
        np.load(file_of(folder, "train", kind)) @ np.load(file_of(folder, "val", kind))[line]
        for kind in kinds
    )
    return [samples[str(row)] for row in similarity.argsort()[-n:][::-1]]


@pytest.mark.parametrize(
    ("similarity", "metric"), [("question", "question"), ("question_and_image", "imagequestion")]
)
def test_the_examples_of_picas_code(folder, similarity, metric):
    library = ExampleLibrary(questions("train"), vectors=PublishedVectors(folder))
    chosen = library.select(questions("val"), 20, similarity)
    for key, shots in zip(SAMPLES["val"], chosen, strict=True):
        expected = [sample.split("<->")[1] for sample in picas_choice(folder, key, metric, 20)]
        assert [shot.question.id for shot in shots] == expected


def test_similarities_are_plain_dot_products(folder):
    library = ExampleLibrary(questions("train"), vectors=PublishedVectors(folder))
    (shots,) = library.select(questions("val")[3:4], 60, "image")
    products = np.load(file_of(folder, "train", IMAGE)) @ np.load(file_of(folder, "val", IMAGE))[3]
    np.testing.assert_allclose([s.similarity for s in shots], -np.sort(-products), rtol=1e-5)


def test_of_equal_examples_the_later_line_comes_first(folder):
    vectors = np.load(file_of(folder, "train", QUESTION))
    np.save(file_of(folder, "train", QUESTION), np.ones_like(vectors))
    np.save(file_of(folder, "val", QUESTION), np.ones((9, DIM), np.float32))
    library = ExampleLibrary(questions("train"), vectors=PublishedVectors(folder))
    (shots,) = library.select(questions("val")[:1], 3, "question")
    assert [shot.question.id for shot in shots] == ["59", "58", "57"]


def test_one_split_as_library_and_queries(folder):
    library = ExampleLibrary(questions("val"), folds=2, vectors=PublishedVectors(folder))
    for question, shots in zip(
        questions("val"), library.select(questions("val"), 9, "question"), strict=True
    ):
        assert question.id not in {shot.question.id for shot in shots}


def test_other_floats_are_read_as_float32(folder):
    kept = PublishedVectors(folder).of(questions("val"), "question")
    for split in SAMPLES:
        path = file_of(folder, split, QUESTION)
        np.save(path, np.load(path).astype(np.float64))
    again = PublishedVectors(folder).of(questions("val"), "question")
    assert again.dtype == np.float32
    np.testing.assert_array_equal(kept, again)


def refused(folder, message: str, *, kind: str = "question", asked=None) -> None:
    with pytest.raises(UserError, match=message) as error:
        PublishedVectors(folder).of(questions("val") if asked is None else asked, kind)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_questions_that_the_files_do_not_have(folder):
    refused(
        folder, r"coco_clip_new: has no vector of question 7b;", asked=[Question("7b", "", "?")]
    )
    other = Question("101", "val", "?", extra={"image_id": 44})
    refused(folder, r"question 101 is on picture 1 there, but on 44 in the prep", asked=[other])
    refused(
        folder, r"similarity of the bimodal: .* set similarity to one of question", kind="bimodal"
    )


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], r"idx_val2014\.json: an object .* was expected"),
        ({}, r"idx_val2014\.json: an object .* was expected"),
        ({"0": "1<->9", "2": "1<->8"}, r"line 1: is None; \"image_id<->question_id\" was expected"),
        ({"0": "1-9"}, r"line 0: is '1-9'; \"image_id<->question_id\""),
        ({"0": "x<->9"}, r"line 0: is 'x<->9'"),
        ({"0": ["1", "9"]}, r"line 0: is \['1', '9'\]"),
        ({"0": "1<->99", "1": "2<->99"}, r"line 1: question 99 is there twice"),
        ({"0": "1<->5"}, r"idx_val2014\.json, line 0: question 5 is there twice"),  # in train too
    ],
)
def test_a_malformed_index(index, message, folder):
    index_of(folder, "val").write_text(json.dumps(index))
    refused(folder, message)


def test_files_that_do_not_belong_together(folder):
    path = file_of(folder, "val", QUESTION)
    np.save(path, np.ones((8, DIM), np.float32))
    refused(folder, r"val2014_okvqa_question\.npy: has 8 rows, but okvqa_.*json has 9 lines; take")
    np.save(path, np.ones((9, DIM + 1), np.float32))
    refused(folder, r"its vectors have 17 dimensions, those of coco_.*train2014.* 16; take both")


def test_arrays_that_cannot_be_read(folder):
    path = file_of(folder, "val", QUESTION)
    np.save(path, np.array([{"a": 1}] * 9, object), allow_pickle=True)
    refused(folder, r"question\.npy: cannot be read as an array of numbers \(.*\); fetch it again")
    whole = np.ones((9, DIM), np.float32)
    np.save(path, whole)
    path.write_bytes(path.read_bytes()[:-40])
    refused(folder, r"question\.npy: cannot be read as an array of numbers")
    path.write_bytes(b"<html>not found</html>")
    refused(folder, r"question\.npy: cannot be read as an array of numbers")
    for other in (whole.astype(int), whole[0], np.array(["a", "b"])):
        np.save(path, other)
        refused(folder, r"question\.npy: holds .* of .*; floats in rows and columns were expected")
    whole[4, 2] = np.nan
    np.save(path, whole)
    refused(folder, r"question\.npy, row 4: holds a value that is no finite number")
    path.unlink()
    refused(folder, r"question\.npy: no such file; fetch the folder coco_clip_new")
    PublishedVectors(folder).of(questions("val"), "image")  # which needs no other file
    index_of(folder, "train").unlink()
    refused(folder, r"okvqa_qa_line2sample_idx_train2014\.json: no such file")


@pytest.mark.parametrize("similarity", ["question", "image", "question_and_image"])
def test_similarities_without_models(similarity):
    library = {"text_model": "", "image_model": "", "vectors": "folder"}
    check_prompted({"similarity": similarity}, LibrarySpec(**library))
    with pytest.raises(UserError, match="has no embedder"):
        check_prompted({"similarity": similarity}, LibrarySpec(**{**library, "vectors": ""}))
    with pytest.raises(UserError, match=r"similarity=bimodal: parts\.library\.vectors compares"):
        check_prompted({"similarity": "bimodal"}, LibrarySpec(**library))


def test_a_row_with_published_vectors(tmp_path, quiet):
    write_okvqa(tmp_path / "raw")
    done("prepare", "okvqa", f"--raw={tmp_path / 'raw'}", f"--out={tmp_path / 'data'}")
    samples = {"train": ["1<->15"], "val": ["2<->25", "2<->26", "3<->35"]}
    folder = write_vectors(tmp_path / "coco_clip_new", samples)
    config = load_config(f"{ROOT}/configs/okvqa/tables.py:pica_full")
    read_row(config)
    config.data.dir, config.parts.library.vectors = str(tmp_path / "data"), str(folder)
    with config.unlocked():  # its examples, without a server
        config.setting, config.options = "copy_nearest", {"similarity": "question_and_image"}
        del config.parts["llm"]
    run_row(read_row(config), tmp_path / "run")
    rows = [row for _, row in read_jsonl(tmp_path / "run" / "predictions.jsonl")]
    assert {row["answer"] for row in rows} == {"ivy"}
    assert len(rows) == 3
