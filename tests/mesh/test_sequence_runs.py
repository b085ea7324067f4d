"""`mmqa train` of long rows, with validation and experts: the mesh's `sequence` changes no figure."""

import dataclasses
import re

import jax
import pytest
from cli_runs import done, flags_with, png, rows_of
from planner_runs import PLANS, prepare_questions, write_finished
from science import prepare_science
from tiny_llm import letters, llama_config, write_folder, write_qwen_vl
from verbs_on_mesh import on_devices
from vqa_files import aokvqa_row, write

pytestmark = pytest.mark.slow

TINY = {
    "train.steps": 2, "train.evaluate_every": 2, "train.checkpoint_every": 0, "train.log_every": 1,
    "train.optimizer.warmup": 0.0,
}  # fmt: skip
MIXTURE = {
    **TINY, "library.text_model": "", "examples.similarity": "random", "examples.shots": 1,
    "batches.batch_size": 4, "batches.length": 192, "batches.targets": 96, "batches.threads": 0,
    "inference.batch_size": 4, "validate.questions": 4, "validate.shots": "(0, 1)",
}  # fmt: skip
PLANNER = {
    **TINY, "tokenizer": "corpus:600", "data.split": "train", "data.agents": "('manager',)",
    "data.folds": 1, "validate.fold": 0, "validate.questions": 0, "batches.batch_size": 8,
    "batches.length": 152, "inference.new_tokens": 16, "model.changes.layers": 1,
}  # fmt: skip


PICTURED = {
    **TINY, "examples.templates": "('rmr.text',)", "inference.batch_size": 4,
    "batches.batch_size": 4, "batches.length": 128, "batches.targets": 24, "batches.threads": 0,
    "model.vision.max_pixels": 400,
}  # fmt: skip


def same_on_a_mesh(flags, folder):
    """Trains on one device and on eight, and compares what metrics.jsonl has."""
    metrics = []
    for name, shape, devices in (
        ("one", {}, jax.devices()[:1]),
        ("many", {"data": 2, "sequence": 2, "tensor": 2}, jax.devices()),
    ):
        mesh = {
            f"mesh.{axis}": shape.get(axis, 1) for axis in ("data", "fsdp", "sequence", "tensor")
        }
        with on_devices(devices):
            done(*flags(folder / name, mesh), initializers=True)
        metrics.append(rows_of(folder / name / "metrics.jsonl"))
    assert any("eval/" in key for row in metrics[0] for key in row)
    for row, other in zip(*metrics, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            if not re.search("second|mfu|memory|time", key):
                assert other[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key


def test_a_mixture(tmp_path):
    """LoRA, of which the first step of validation is that of the base."""
    prepare_science(tmp_path)
    model = llama_config(len(letters().get_vocab()), positions=512)
    write_folder(
        tmp_path / "llm",
        dataclasses.replace(model, family="qwen3_moe", qk_norm="head", experts=4, active_experts=2),
    )

    def flags(workdir, mesh):
        values = {**MIXTURE, **mesh, "data.dir": tmp_path / "data", "init": tmp_path / "llm"}
        return flags_with("train", "scienceqa/rmr_finetune.py", workdir, values)

    same_on_a_mesh(flags, tmp_path)


def test_a_planner_by_reward(tmp_path):
    """It draws its plans on the mesh, where no rows are split."""
    prepare_questions(tmp_path)
    write_finished(tmp_path / "row", lambda n, plan: float(plan == PLANS[n % len(PLANS)]))

    def flags(workdir, mesh):
        values = {
            **PLANNER,
            **mesh,
            "data.dir": tmp_path / "data",
            "data.outcomes": tmp_path / "row",
        }
        return flags_with("train", "okvqa/planner.py:reward_runlocal", workdir, values)

    same_on_a_mesh(flags, tmp_path)


def test_a_model_that_reads_pictures(tmp_path):
    """Of questions with a picture each; its patches are split as the rows' tokens are."""
    raw = tmp_path / "raw"
    for split, count in (("train", 6), ("val", 2)):
        (raw / f"{split}2017").mkdir(parents=True)
        rows = [
            aokvqa_row(f"{split}{n}", split, image_id=n, correct_choice_idx=n % 2)
            for n in range(count)
        ]
        write(raw / f"aokvqa_v1p0_{split}.json", rows)
        for n in range(count):
            (raw / f"{split}2017" / f"{n:012d}.jpg").write_bytes(png((20 * n, 200 - 20 * n, 9)))
    done("prepare", "aokvqa", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    write_qwen_vl(tmp_path / "llm")

    def flags(workdir, mesh):
        values = {**PICTURED, **mesh, "data.dir": tmp_path / "data", "init": tmp_path / "llm"}
        return flags_with("train", "aokvqa/vlm_finetune.py", workdir, values)

    same_on_a_mesh(flags, tmp_path)
