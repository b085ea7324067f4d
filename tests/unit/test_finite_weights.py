"""Checkpoints that answer all the same: NaN or infinity are refused, nothing but zeros is told."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from cli_runs import done, mmqa, succeeded
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import make_source
from tiny_llm import write_folder

from mmqa_jax.weights.keymap import all_finite, all_zero

pytestmark = pytest.mark.slow

KINDS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_value_among_many(kind, bad, monkeypatch):
    monkeypatch.setattr("mmqa_jax.weights.keymap._BLOCK", 10)
    values = np.linspace(-3, 3, 60).reshape(5, 4, 3).astype(kind)
    values[0, 0, 0], values[0, 0, 1] = 0, np.array(ml_dtypes.finfo(kind).max).astype(kind)
    for part in (values, values.T, values[:, ::2], values[:0], values[4, 3, 2:].reshape(())):
        assert all_finite(part)
    values[4, 3, 2] = bad
    for part in (values, values.T, values[..., 2], values[4, 3, 2:].reshape(())):
        assert not all_finite(part)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros(kind, monkeypatch):
    monkeypatch.setattr("mmqa_jax.weights.keymap._BLOCK", 10)
    values = np.zeros((5, 7), kind)
    assert all_zero(values)
    assert all_zero(values.T)
    values[4, 5] = 1e-4
    assert not all_zero(values)
    assert not all_zero(values[4:, 5:])


@pytest.mark.parametrize("export", [[], ["--export=hf"]])
def test_convert_tells_of_matrices_that_were_never_filled(export, tmp_path):
    source = make_source("llama", tmp_path / "source")
    whole = done(*source.flags("llama"), f"--out={tmp_path / 'whole'}", *export)
    assert whole["zero_tensors"] == []
    keys = ["model.layers.0.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"]
    for key in (*keys, "model.layers.2.self_attn.q_proj.bias"):  # a bias may be zero
        source.arrays[key][:] = 0
    save_file(source.arrays, source.path / "model.safetensors")
    ended = succeeded(*source.flags("llama"), f"--out={tmp_path / 'out'}", *export, "--json")
    assert sorted(ended.value["zero_tensors"]) == keys
    assert "source: 2 tensors hold nothing but zeros (" in ended.err


def test_integers_are_finite():
    assert all_finite(np.array([0, -1, 2**31 - 1], np.int32))


@pytest.mark.parametrize("export", [[], ["--export=hf"]])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_convert_names_the_tensor(export, dtype, tmp_path):
    source = make_source("llama", tmp_path / "source", dtype)
    key = "model.layers.1.mlp.down_proj.weight"
    source.arrays[key][3, 2] = math.nan
    save_file(source.arrays, source.path / "model.safetensors")
    ended = mmqa(*source.flags("llama"), f"--out={tmp_path / 'out'}", *export)
    assert ended.code == 2
    assert f"source: {key} holds NaN or infinity" in ended.err
    assert not (tmp_path / "out").exists()


def test_no_answers_from_such_a_model(tmp_path):
    folder = write_folder(tmp_path / "llm")
    arrays = load_file(folder / "model.safetensors")
    arrays["model.norm.weight"][5] = math.inf
    save_file(arrays, folder / "model.safetensors")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "q", "prompt": "The", "choices": [" a", " b"]}))
    ended = mmqa(
        "prompt", f"--prompts={prompts}", f"--model={folder}", f"--out={tmp_path / 'out.jsonl'}",
        "--no_cache", "--config.engine.slots=2", "--config.engine.length=64",
    )  # fmt: skip
    assert ended.code == 2
    assert "model.norm.weight holds NaN or infinity" in ended.err
    assert not (tmp_path / "out.jsonl").exists()
