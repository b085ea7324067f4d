"""`mmqa train` of a language model, and the verbs that use the run."""

from __future__ import annotations

import numpy as np
import pytest
from cli_runs import (
    ENGINE,
    assert_export_is_the_run,
    done,
    flags_with,
    killed_after,
    mmqa,
    quietly,
    rows_of,
    weights_of,
    write_rows,
)
from flax import nnx
from science import prepare_science
from tiny_llm import letters, llama_config, write_folder

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.prompting.text_tokenizer import open_tokenizer
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.formats.orbax_reader import stored_specs
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import read_metadata

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

# Letters are tokens here: a question has about 80.
TINY = {
    "library.text_model": "", "examples.similarity": "random", "inference.batch_size": 2,
    "examples.templates": "('rmr.rationale', 'rmr.text')",
    "examples.shots": 1, "batches.length": 192, "batches.targets": 96, "batches.batch_size": 2,
    "batches.threads": 0, "train.steps": 12, "train.checkpoint_every": 6, "train.log_every": 3,
    "train.evaluate_every": 6, "train.keep": 2, "validate.questions": 2, "validate.shots": "(0, 1)",
    "train.optimizer.learning_rate": 0.02, "train.optimizer.warmup": 0.0,
}  # fmt: skip


def flags_of(inputs, workdir, mode: str = "", **changes) -> list[str]:
    values = {**TINY, "init": inputs / "llm", "data.dir": inputs / "data", **changes}
    config = "scienceqa/rmr_finetune.py" + (f":{mode}" if mode else "")
    return flags_with("train", config, workdir, values)


@pytest.fixture(scope="module")
def inputs(cli_cache, tmp_path_factory):
    """A tiny LLaMA, a tiny ScienceQA, and a LoRA run over both."""
    folder = tmp_path_factory.mktemp("finetune")
    with quietly(cli_cache):
        prepare_science(folder)
        write_folder(folder / "llm")
        result = done(*flags_of(folder, folder / "run"))
    assert result["task"] == "language_model"
    assert result["best"]["metric"] == "accuracy"
    return folder


def test_the_loss_falls_and_validation_is_logged(inputs):
    rows = rows_of(inputs / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.1
    last = [row for row in rows if "eval/accuracy" in row][-1]
    assert last["step"] == 12
    for name in ("accuracy", "log_likelihood"):
        both = [last[f"eval/{name}@k{count}"] for count in (0, 1)]
        assert last[f"eval/{name}"] == pytest.approx(np.mean(both))


def test_the_run_is_a_plain_llama_without_optimizer_state_of_its_base(inputs):
    """Weights under LLaMA's names, merged; checkpoints hold moments of the additions alone."""
    record = read_metadata(inputs / "run")
    assert (record["model"], record["task"], record["step"]) == ("llama", "language_model", 12)
    model = load_converted(inputs / "run")
    assert not [name for name in flatten_named(stored_specs(inputs / "run" / "weights"))
                if "lora" in name]  # fmt: skip
    assert model.config.vocab_size == llama_config(letters().get_vocab_size()).vocab_size
    train = inputs / "run" / "checkpoints" / "12" / "train"
    names = [name for name in stored_specs(train) if "/mu/" in name]
    assert names
    assert all("lora_" in name for name in names)


def test_prompts_are_answered_by_the_run(inputs, tmp_path):
    prompts = write_rows(
        tmp_path / "prompts.jsonl",
        [{"id": "a", "prompt": "Which word", "choices": [" is one", " is two"]}],
    )
    sizes = [f"--config.engine.{key}={value}" for key, value in ENGINE.items()]
    out = tmp_path / "answers.jsonl"
    done("prompt", f"--prompts={prompts}", f"--out={out}", f"--model={inputs / 'run'}", *sizes)
    (answer,) = rows_of(out)
    assert all(score["logprob"] < 0 for score in answer["scores"])


def test_the_exported_run_is_the_same_model(inputs, tmp_path):
    assert_export_is_the_run("llama", inputs / "run", tmp_path / "hf")
    own, of_base = (open_tokenizer(inputs / name) for name in ("run", "llm"))
    assert own.fingerprint == of_base.fingerprint


def test_a_row_with_the_run(inputs, tmp_path):
    values = {"data.dir": inputs / "data", "parts.llm.model": inputs / "run" / "best",
              "parts.library.text_model": "", "options.similarity": "random"}  # fmt: skip
    values |= {f"parts.llm.engine.{key}": value for key, value in ENGINE.items()}
    config = "scienceqa/tables.py:smollm2_finetuned_k0"
    result = done(*flags_with("run", config, tmp_path / "row", values))
    assert (result["row"], result["questions"]) == ("smollm2_finetuned_k0", 4)


def test_all_parameters_are_trained_without_lora(inputs, tmp_path):
    full = {"train.steps": 2, "train.evaluate_every": 0, "train.checkpoint_every": 2}
    done(*flags_of(inputs, tmp_path / "run", "full", **full))
    base = flatten_named(nnx.state(load_published("llama", inputs / "llm")))
    trained = weights_of(tmp_path / "run")
    assert set(trained) == set(base)
    assert all((trained[name] != np.asarray(base[name])).any() for name in base)


@pytest.fixture
def interrupted(inputs, tmp_path):
    return killed_after(6, inputs / "run", tmp_path / "run")


def test_an_interrupted_run_resumes_to_the_same_weights(inputs, interrupted):
    done(*flags_of(inputs, interrupted))
    want, got = weights_of(inputs / "run"), weights_of(interrupted)
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


def test_another_base_under_the_same_name_is_refused(inputs, interrupted):
    generation = inputs / "llm" / "generation_config.json"
    generation.write_text("{}")
    try:
        ended = mmqa(*flags_of(inputs, interrupted))
    finally:
        generation.unlink()
    assert ended.code == 2, ended.err
    assert "another" in ended.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.optimizer.trainable": None}, r"optimizer\.trainable=None: with model\.lora=\.\.\. "),
        ({"train.optimizer.trainable": "nothing"}, r"optimizer\.trainable=nothing: with model\.lora"),
        ({"model.lora.targets": "('q', 'w')"}, r"model\.lora\.targets=.*some of q, k, v"),
        ({"model.lora.rank": 0}, r"model\.lora\.rank=0"),
        ({"batches.targets": 192}, r"batches\.targets=192: 1 to batches\.length - 1 = 191"),
        ({"batches.length": 400}, r"batches\.length=400: the model reads at most 192"),
        ({"batches.length": 40, "batches.targets": 20}, r"no training example fits a row"),
        ({"init": "nowhere"}, r"config key init=nowhere: no such file or folder"),
        ({"data.split": "none"}, r"data\.split=none"),
        ({"examples.templates": "('rmr.text_rationale',)"}, r"does not begin with its query"),
        ({"examples.with_shots": 2.0}, r"examples\.with_shots=2\.0: a share in 0\.\.1"),
        ({"library.folds": 0.5}, r"library\.folds"),
    ],
)  # fmt: skip
def test_wrong_configs_leave_nothing(inputs, tmp_path, refused, changes, message):
    refused(*flags_of(inputs, tmp_path / "run", **changes), message=message)
    assert not (tmp_path / "run").exists()


def test_data_without_rationales(inputs, tmp_path, refused):
    data = prepare_science(tmp_path, rationales=False)
    message = r"examples\.templates: rmr\.rationale writes a rationale, but no training question"
    refused(*flags_of(inputs, tmp_path / "run", **{"data.dir": data}), message=message)
