"""`mmqa train` of a Qwen-VL on A-OKVQA's official files, the verbs that use the run, and the rows."""

import io
import json
import re

import cloudpickle
import jax
import numpy as np
import pytest
from cli_runs import (
    ROOT,
    assert_export_is_the_run,
    done,
    flags_with,
    mmqa,
    of_engine,
    png,
    quietly,
    rows_of,
    traced_loss,
    write_rows,
)
from flax import nnx
from PIL import Image
from tiny_llm import write_qwen_vl
from vqa_files import aokvqa_row, write

from mmqa_jax.core.config import load_config
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.formats.orbax_reader import stored_specs
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import read_metadata

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

# Letters are tokens here: a question has about 80.
TINY = {
    "examples.templates": "('rmr.text',)", "inference.batch_size": 4, "batches.length": 128,
    "batches.targets": 24, "batches.batch_size": 2, "batches.threads": 0, "train.steps": 12,
    "train.checkpoint_every": 6, "train.log_every": 3, "train.evaluate_every": 6, "train.keep": 2,
    "train.optimizer.learning_rate": 0.02, "train.optimizer.warmup": 0.0,
    "model.vision.max_pixels": 400,
}  # fmt: skip
ENGINE = {"slots": 2, "length": 512, "buckets": "(64,)", "prefill_tokens": 64}


def flags_of(inputs, workdir, **changes) -> list[str]:
    values = {**TINY, "init": inputs / "vlm", "data.dir": inputs / "data", **changes}
    return flags_with("train", "aokvqa/vlm_finetune.py", workdir, values)


def _thin() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (402, 2)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def inputs(cli_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm")
    raw = folder / "raw"
    (raw / "train2017").mkdir(parents=True)
    (raw / "val2017").mkdir()
    for split, count in (("train", 9), ("val", 3)):
        rows = []
        for n in range(count):
            image_id = n % 2 + 1 + 10 * (split == "val")
            if n == count - 1:
                image_id = 99
            rows.append(
                aokvqa_row(f"{split}{n}", split, image_id=image_id, correct_choice_idx=n % 2,
                           question="Which one is it?")
            )  # fmt: skip
            color = (200, 30, 40) if n % 2 else (20, 30, 210)
            data = _thin() if image_id == 99 else png(color)
            (raw / f"{split}2017" / f"{image_id:012d}.jpg").write_bytes(data)
        write(raw / f"aokvqa_v1p0_{split}.json", rows)
    with quietly(cli_cache):
        done("prepare", "aokvqa", f"--raw={raw}", f"--out={folder / 'data'}")
        write_qwen_vl(folder / "vlm")
        result = done(*flags_of(folder, folder / "run"))
    assert result["task"] == "vision_language"
    assert result["best"]["metric"] == "accuracy"
    return folder


def test_the_loss_falls_and_the_answers_are_validated(inputs):
    rows = rows_of(inputs / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.1
    last = [row for row in rows if "eval/accuracy" in row][-1]
    assert last["step"] == 12
    assert last["eval/accuracy"] in (0.0, 0.5, 1.0)  # of two: the thin picture's is left out
    assert last["eval/log_likelihood"] < 0


def test_the_run_is_a_plain_qwen_vl_with_its_tower_as_it_was(inputs):
    record = read_metadata(inputs / "run")
    assert (record["model"], record["task"], record["step"]) == ("qwen_vl", "vision_language", 12)
    assert record["config"]["vision"]["max_pixels"] == 400
    assert all("/lora_" in name for name in stored_specs(inputs / "run" / "weights"))
    ours = load_converted(inputs / "run")
    assert ours.config.vision.max_pixels == 400
    base = flatten_named(nnx.state(load_published("qwen_vl", inputs / "vlm"), nnx.Param))
    trained = flatten_named(nnx.state(ours, nnx.Param))
    assert set(base) == set(trained)
    changed = {name for name in base if (np.asarray(base[name]) != trained[name]).any()}
    linears = ("q", "k", "v", "out", "gate", "up", "down")
    assert changed == {f"llama/layers/{name}/kernel" for name in linears}
    names = stored_specs(inputs / "run" / "checkpoints" / "12" / "train")
    moments = [name for name in names if "/mu/" in name]
    assert moments
    assert all("lora_" in name for name in moments)


def test_a_prompt_with_a_picture_is_answered_by_the_run(inputs, tmp_path):
    (tmp_path / "red.png").write_bytes(png((200, 30, 40)))
    asked = [{"type": "image", "image": "red.png"}, {"type": "text", "text": "Which one?"}]
    prompts = write_rows(
        tmp_path / "prompts.jsonl",
        [{"id": "a", "messages": [{"role": "user", "content": asked}], "max_new_tokens": 6,
          "logprobs": True}],
    )  # fmt: skip
    sizes = [f"--config.engine.{key}={value}" for key, value in ENGINE.items()]
    out = tmp_path / "answers.jsonl"
    done("prompt", f"--prompts={prompts}", f"--out={out}", f"--model={inputs / 'run'}", *sizes)
    (answer,) = rows_of(out)
    assert 0 < len(answer["logprobs"]) <= 6


def test_the_exported_run_is_the_same_model(inputs, tmp_path):
    assert_export_is_the_run("qwen_vl", inputs / "run", tmp_path / "hf")


@pytest.mark.parametrize("row", ["qwen25_vl", "rmr_qwen3_vl"])
def test_rows_with_the_run(inputs, tmp_path, row):
    """The vision-language model alone, and behind three triplets."""
    values = {
        "data.dir": inputs / "data",
        "parts.llm.model": inputs / "run" / "best",
        "parts.library.data": inputs / "data",
        "parts.library.text_model": "",
        "parts.library.image_model": "",
        "options.similarity": "random",
        "options.max_new_tokens": 4,
        **of_engine(ENGINE),
    }
    result = done(*flags_with("run", f"aokvqa/tables.py:{row}", tmp_path / "row", values))
    assert (result["row"], result["questions"]) == (row, 3)
    assert "a_okvqa_da/official" in result["scores"]
    shots = [len(trace["shots"][0]) for trace in rows_of(tmp_path / "row" / "trace.jsonl")]
    assert max(shots) <= (3 if row.startswith("rmr") else 0)


def test_worker_processes_make_the_same_batches(inputs):
    """What is sent to them: nothing of it may be lost on the way."""
    config, made = read_config(inputs / "run"), []
    corpus = open_corpus(config.data.dir)
    for workers in (0, 1):
        config.batches.workers = workers
        task = read_task(config).in_folder(inputs / "run")
        made.append(task.recipe(corpus, task.open_tokenizer(inputs / "run")).batches)
    here, there = made[0], cloudpickle.loads(cloudpickle.dumps(made[1]._make))
    for position in range(3):
        want, (got, _) = next(here), there(position)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_toy_from_scratch(inputs, tmp_path):
    """The config's mode `runlocal`, with its own tokenizer, up to the loss of its first batch."""
    config = load_config(
        f"{ROOT}/configs/aokvqa/vlm_finetune.py:runlocal", [f"data.dir={inputs / 'data'}"]
    )
    assert traced_loss(tmp_path, config)["input_ids"].shape[0] == 2
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches.length": 460}, r"batches\.length=460: with 64 of a picture .* at most 512"),
        ({"pictures.max_broken": 0}, r"1 picture cannot be read, more than the 0 allowed"),
    ],
)  # fmt: skip
def test_wrong_configs(inputs, tmp_path, changes, message):
    ended = mmqa(*flags_of(inputs, tmp_path / "run", **changes))
    assert ended.code in (1, 2)
    assert re.search(message, ended.err), ended.err


def test_other_models_are_refused(inputs, tmp_path, refused):
    """A text-only one, and a LLaVA with a key of Qwen-VL's, by their config.json alone."""
    for name, model_type, message in (
        ("llm", "llama", "llm: holds a llama, a qwen_vl was expected; name a Qwen-VL"),
        ("llava", "llava", "model.vision.max_pixels: the weights of init=.*llava decide it"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
        refused(*flags_of(inputs, tmp_path / "run", init=tmp_path / name), message=message)
