"""Multimodal-CoT: its texts byte for byte, both stages trained, a row that runs them."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from cli_runs import ROOT, done, flags_with, rows_of
from flax import nnx
from science import prepare_science
from shared_data import SHARED, require, shared_benchmark
from tiny_checkpoints import CONFIGS
from tiny_t5 import write_folder

from mmqa_jax.benchmarks.scienceqa import read_scienceqa
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.store import PictureVectors
from mmqa_jax.data.schema import Question
from mmqa_jax.inference.t5_readers import check_width
from mmqa_jax.models.t5.network import T5, MultimodalT5
from mmqa_jax.papers.mmcot import SETTINGS, chosen_option
from mmqa_jax.prompting.rationales import source_text, target_text
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

# SHA-256 of the lines [pid, source, target] in JSON, by pid, of all 1,773 problems as
# amazon-science/mm-cot (8dd4ac0) makes them: build_train_pair of utils_prompt.py with or without
# use_caption and curr_le_data, then the white space of utils_data.py.
AUTHORS = {
    ("QCM-LE", False, None): "c3e9b340633eedce8849041c99e389cf3761fbb117c6c66702b34b4c2e30a515",
    ("QCM-E", False, None): "b012fda8940d5200f45d10f8dab0f787bb207c33a3dd5adf0b5afe3bee695926",
    ("QCM-A", False, None): "66a73905edee0b94ce109f16964d9dc844685b98a68b1e3925b554cd9e8fec39",
    ("QCM-LEA", False, None): "4c52c0dc9cb7128b5edc4cd969c3164726618263e4407e7e7fe2ab9f243c64af",
    ("QCM-ALE", False, None): "05b4b6a563c1361b15db7ed350ba98724193501412e4a8d6731fb33b8b1bf22d",
    ("QCMG-A", False, None): "db5a9a6a66ecf1ce0f93381f0fe7d2e42f959dc77ca37915920dba347652af3c",
    ("QCMG-A", True, "Solution: It  is so."):
        "dd0513a2ee64d3c9089fbc7bf063c788d908dd5cc6b0a37d9243c19871f35f11",
}  # fmt: skip


@pytest.fixture(scope="module")
def problems() -> list[Question]:
    require(SHARED / "scienceqa")
    ids = json.loads((SHARED / "scienceqa" / "problems_subset.json").read_text())
    found = {q.id: q for q in shared_benchmark(read_scienceqa, "scienceqa").questions}
    return [found[pid] for pid in sorted(ids)]


@pytest.mark.parametrize("case", AUTHORS, ids=str)
def test_texts_are_the_authors_byte_for_byte(problems, case):
    format, captions, rationale = case
    digest = hashlib.sha256()
    for question in problems:
        source = source_text(question, format, rationale, captions=captions)
        line = [question.id, source, target_text(question, format)]
        digest.update(json.dumps(line).encode() + b"\n")
    assert digest.hexdigest() == AUTHORS[case]


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("The answer is (B).", 1),
        ("The answer is (A). The answer is (A).", None),
        ("The answer is B.", None),
        ("The answer is (D).", None),
    ],
)
def test_options_are_read_as_by_the_authors(text, option):
    """extract_ans of main.py: exactly one, in brackets; an option that is not there is none."""
    assert chosen_option(text, 3) == option


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rationale_format": "QCM-A"}, "rationale_format=QCM-A: writes an answer; use QCM-LE or"),
        ({"answer_format": "QCM-A"}, "answer_format=QCM-A: does not answer .*; use QCMG-A"),
        ({"answer_format": "QCM-LEA"}, "answer_format=QCM-LEA: does not answer .*; use QCMG-A"),
    ],
)
def test_stages_that_do_not_belong_together_are_refused(options, message):
    with pytest.raises(UserError, match=rf"config key options\.{message}"):
        SETTINGS["mmcot"].check_row(options, {})


def test_hidden_answers_cannot_be_shown():
    questions = [Question("a", "test", "?", answer_index=0), Question("b", "test", "?")]
    SETTINGS["mmcot"].check_inputs(questions, {"decoding": "written"}, {})
    message = r"options\.decoding=forced: .* text, which 1 of 2 questions hide; set it to written"
    with pytest.raises(UserError, match=message):
        SETTINGS["mmcot"].check_inputs(questions, {"decoding": "forced"}, {})


def test_more_options_than_the_authors_know():
    asked = Question("q7", "test", "Which?", choices=tuple("abcdef"), answer_index=5)
    message = r"question q7: has 6 options, Multimodal-CoT knows 5; leave it out of the data"
    refuses(message, source_text, asked, "QCM-LE")
    refuses(message, target_text, asked, "QCM-A")


def write_vectors(folder, shape=(3, 6)):
    """Pictures of every second question."""
    rng = np.random.default_rng(0)
    np.save(folder / "detr.npy", rng.standard_normal((12, *shape)).astype(np.float32))
    (folder / "name_map.json").write_text(json.dumps({str(2 * n): str(n) for n in range(12)}))
    return folder / "detr.npy"


def test_vectors_are_read_by_question(tmp_path):
    file = write_vectors(tmp_path)
    vectors, array = PictureVectors(str(file)), np.load(file)
    np.testing.assert_array_equal(vectors.of(Question("8", "test", "?")), array[4])
    assert not vectors.of(Question("9", "test", "?")).any()
    np.save(tmp_path / "resnet.npy", array[:, 0])
    assert PictureVectors(str(tmp_path / "resnet.npy")).shape == (1, 6)
    np.save(file, array[:5])
    refuses(r"names row 11, but .* has 5", PictureVectors, str(file))
    shutil.copy(file, tmp_path / "vit.pth")
    refuses(r"read from \.npy", PictureVectors, str(tmp_path / "vit.pth"))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("detr.npy", None, r"detr\.npy: no such file; fetch it"),
        ("detr.npy", b"", r"detr\.npy: no array .*; fetch it"),
        ("detr.npy", b"PK\3\4", r"detr\.npy: no array .*; fetch"),
        ("detr.npy", {"x": np.ones(3)}, r"detr\.npy: an archive of arrays; save the one array by"),
        (
            "detr.npy",
            np.ones(3),
            r"detr\.npy: has shape \(3,\) and type float64; pictures x .*; fetch",
        ),
        (
            "detr.npy",
            np.ones((2, 3, 4), int),
            r"detr\.npy: has shape .* and type int64; pictures x",
        ),
        *(
            ("name_map.json", text, r"name_map\.json: question ids with rows were expected; fetch")
            for text in (b"[1]", b'{"a": "x"}', b'{"a": -1}', b'{"a": 1.5}', b'{"a": Infinity}')
        ),
    ],
)
def test_vectors_that_are_none_are_refused(tmp_path, file, content, message):
    vectors = write_vectors(tmp_path)
    (tmp_path / file).unlink()
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    elif content is not None:
        with open(tmp_path / file, "wb") as opened:
            np.savez(opened, **content) if isinstance(content, dict) else np.save(opened, content)
    refuses(message, PictureVectors, str(vectors))


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (T5, "t5", "run: holds no T5 of Multimodal-CoT; name a run of task multimodal_cot"),
        (MultimodalT5, "multimodal_t5", "run: reads pictures of 5 values a vector, these have 6"),
    ],
)
def test_a_model_of_other_vectors_is_refused(kind, config, message, tmp_path):
    vectors = PictureVectors(str(write_vectors(tmp_path)))
    model = nnx.eval_shape(lambda: kind(CONFIGS[config], rngs=nnx.Rngs()))
    refuses(message, check_width, model, vectors, "run")


def test_a_stage_is_trained_and_both_answer(tmp_path, refused):
    """From a plain T5; what is trained is a row's model, and is exported under the authors' names."""
    data, base = prepare_science(tmp_path), write_folder(tmp_path / "t5")
    vectors = write_vectors(tmp_path)
    config = f"--config={ROOT}/configs/scienceqa/multimodal_cot.py"
    values = {
        "init": base, "data.dir": data, "model.changes.features": 6, "pictures.file": vectors,
        "pictures.vectors": 3, "pictures.features": 6, "batches.batch_size": 4,
        "batches.lengths": "(128,)", "batches.targets": 24, "batches.threads": 0,
        "train.steps": 8, "train.log_every": 4, "train.checkpoint_every": 8,
        "train.optimizer.learning_rate": 0.01,
    }  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    done("train", f"{config}:rationale", f"--workdir={tmp_path / 'rationale'}", *flags)
    rows = rows_of(tmp_path / "rationale" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.3
    # The second stage learns other texts by the same steps.
    done("train", f"{config}:answer", f"--workdir={tmp_path / 'answer'}", *flags, "--only_start")
    wrong = (f"--workdir={tmp_path / 'no'}", *flags, "--config.pictures.vectors=4")
    refused("train", config, *wrong, message="has 3 vectors of 6 values")
    parts = {
        f"parts.{stage}_model.{key}": value
        for stage in ("rationale", "answer")
        for key, value in (("model", tmp_path / stage), ("vectors", vectors),
                           ("names", tmp_path / "name_map.json"))
    }  # fmt: skip
    row = {**parts, "data.dir": data, "options.rationale_tokens": 8, "options.answer_tokens": 8}
    tables = "scienceqa/tables.py:mmcot_base"
    done(*flags_with("run", f"{tables}_written", tmp_path / "row", row))
    traces = rows_of(tmp_path / "row" / "trace.jsonl")
    assert len(traces) == 4
    rationale, _ = traces[0]["outputs"]
    assert f"{rationale['text']} Answer:" in traces[0]["prompts"][0].replace("  ", " ")
    # Shown the right texts: what the published figures are of.
    done(*flags_with("run", tables, tmp_path / "forced", row))
    trace = rows_of(tmp_path / "forced" / "trace.jsonl")[0]
    assert trace["outputs"] != traces[0]["outputs"]
    done(
        "convert", "--model=multimodal_t5", f"--source={tmp_path / 'answer'}",
        f"--out={tmp_path / 'hf'}", "--export=hf",
    )  # fmt: skip
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["architectures"] == ["T5ForMultimodalGeneration"]
