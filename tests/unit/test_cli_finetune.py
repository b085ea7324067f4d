"""`mmqa train` of a language model, and the verbs that use the run."""

import json
import shutil

import jax
import numpy as np
import pytest
from cli_runs import (
    ENGINE,
    assert_export_is_the_run,
    done,
    flags_with,
    killed_after,
    mmqa,
    of_engine,
    quietly,
    rows_of,
    weights_of,
    write_rows,
)
from flax import nnx
from science import prepare_science
from tiny_llm import letters, llama_config, write_folder

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.formats.orbax_reader import stored_specs
from mmqa_jax.weights.formats.safetensors import SafetensorsSource
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


def test_a_run_holds_its_additions_alone_and_opens_as_a_plain_llama(inputs):
    """Weights, best weights, checkpoints and moments: nothing of the base."""
    run = inputs / "run"
    record = read_metadata(run)
    assert (record["model"], record["task"], record["step"]) == ("llama", "language_model", 12)
    assert record["adapter"]["base"] == str(inputs / "llm")
    for folder in ("weights", "best/weights", "checkpoints/12/params"):
        names = stored_specs(run / folder)
        assert names
        assert all("/lora_" in name for name in names), folder
    moments = [name for name in stored_specs(run / "checkpoints/12/train") if "/mu/" in name]
    assert moments
    assert all("/lora_" in name for name in moments)
    model, base = load_converted(run), load_published("llama", inputs / "llm")
    assert model.config.vocab_size == llama_config(letters().get_vocab_size()).vocab_size
    ours, theirs = (flatten_named(nnx.state(one, nnx.Param)) for one in (model, base))
    assert ours.keys() == theirs.keys()
    changed = {name for name in ours if (np.asarray(ours[name]) != theirs[name]).any()}
    assert changed == {f"layers/{name}/kernel" for name in model.config.linears}


@pytest.mark.parametrize(("base", "within"), [("float32", 0), ("int8", 0.02), ("int4", 0.1)])
def test_a_base_that_is_held_otherwise(inputs, tmp_path, base, within):
    """The losses of the first steps but for the rounding, whose effect grows with the steps; the
    run answers by the base as it was published."""
    changes = {"model.lora.base": base, "train.evaluate_every": 0}
    done(*flags_of(inputs, tmp_path / "run", **changes))
    got, want = (
        [row["loss"] for row in rows_of(run / "metrics.jsonl") if "loss" in row]
        for run in (tmp_path / "run", inputs / "run")
    )
    rows = len(want) if base == "float32" else 1
    np.testing.assert_allclose(got[:rows], want[:rows], rtol=within)
    assert got[-1] < got[0]
    load_converted(tmp_path / "run")


def test_peft_reads_a_run_and_its_folder_is_a_source(inputs, tmp_path):
    """The merged model is PEFT's, in float32; and the folder converted back holds the same."""
    import peft
    import transformers

    out, run = tmp_path / "peft", inputs / "run"
    done("convert", "--model=llama", f"--source={run}", f"--out={out}", "--export=peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(inputs / "llm")
    theirs = peft.PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
    done("convert", "--model=llama", f"--source={run}", f"--out={tmp_path / 'hf'}", "--export=hf")
    ours = SafetensorsSource(tmp_path / "hf")
    for key in ours.specs():
        np.testing.assert_allclose(ours.read(key), theirs[key].numpy(), rtol=0, atol=1e-6)
    done("convert", "--model=llama", f"--source={out}", f"--out={tmp_path / 'back'}")
    for name, x in weights_of(run).items():
        np.testing.assert_array_equal(weights_of(tmp_path / "back")[name], x)
    state = nnx.state(load_converted(tmp_path / "back"))
    jax.tree.map(np.testing.assert_array_equal, state, nnx.state(load_converted(run)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, r"use_dora is True, and plain LoRA with False is read"),
        ({"peft_type": "IA3"}, r"peft_type is 'IA3'"),
        ({"r": 0}, r"r, lora_alpha and base_model_name_or_path were expected"),
        ({"base_model_name_or_path": "gone"}, r"is an adapter of gone, which is not there"),
    ],
)
def test_adapters_of_another_kind_are_refused(inputs, tmp_path, refused, changes, message):
    out = tmp_path / "peft"
    done("convert", "--model=llama", f"--source={inputs / 'run'}", f"--out={out}", "--export=peft")
    config = json.loads((out / "adapter_config.json").read_text()) | changes
    (out / "adapter_config.json").write_text(json.dumps(config))
    command = ("convert", "--model=llama", f"--source={out}", f"--out={tmp_path / 'back'}")
    refused(*command, message=message)
    assert not (tmp_path / "back").exists()


def test_another_base_than_the_adapters_is_refused(inputs, tmp_path, refused):
    base, run = tmp_path / "llm", tmp_path / "run"
    shutil.copytree(inputs / "llm", base)
    done(*flags_of(inputs, run, init=base, **{"train.steps": 1, "train.evaluate_every": 0}))
    (base / "generation_config.json").write_text("{}")
    message = r"is an adapter of another model than .*llm holds"
    command = ("convert", "--model=llama", f"--source={run}", f"--out={tmp_path / 'hf'}")
    refused(*command, "--export=hf", message=message)


def test_prompts_are_answered_by_the_run(inputs, tmp_path):
    asked = {"id": "a", "prompt": "Which word", "choices": [" is one", " is two"]}
    prompts = write_rows(tmp_path / "prompts.jsonl", [asked])
    sizes = [f"--config.engine.{key}={value}" for key, value in ENGINE.items()]
    out = tmp_path / "answers.jsonl"
    done("prompt", f"--prompts={prompts}", f"--out={out}", f"--model={inputs / 'run'}", *sizes)
    (answer,) = rows_of(out)
    assert all(score["logprob"] < 0 for score in answer["scores"])


def test_the_exported_run_is_the_same_model(inputs, tmp_path):
    assert_export_is_the_run("llama", inputs / "run", tmp_path / "hf")
    own, of_base = (open_text_tokenizer(inputs / name) for name in ("run", "llm"))
    assert own.fingerprint == of_base.fingerprint


def test_a_row_with_the_run(inputs, tmp_path):
    values = {"data.dir": inputs / "data", "parts.llm.model": inputs / "run" / "best",
              "parts.library.text_model": "", "options.similarity": "random"}  # fmt: skip
    values |= of_engine()
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


@pytest.mark.parametrize("offload", ["", "parameters"])
def test_an_interrupted_run_resumes_to_the_same_weights(inputs, interrupted, offload):
    """Also with a base that lies on the host from then on."""
    done(*flags_of(inputs, interrupted, **{"train.offload": offload}))
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
        ({"model.lora.base": "int3"}, r"model\.lora\.base"),
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
