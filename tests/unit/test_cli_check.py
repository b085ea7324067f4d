"""`mmqa convert --check`: every kind of model that transformers has, and a fault that is found."""

import json
import sys

import numpy as np
import pytest
import torch
from cli_runs import done, mmqa
from safetensors.numpy import save_file
from tiny_checkpoints import make_source
from tiny_encoders import save_plain

from mmqa_jax.models.check import Compared, _layers, check, compare
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.comparison import TOKENS, Outputs, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

# What is compared, without the numbers of layers.
EMBEDDED = {"embeddings", "layer"}
KINDS = {
    "llama": {*EMBEDDED, "logits"},
    "bert": {*EMBEDDED, "output"},
    "clip": {*(f"{side} {part}" for side in ("text", "picture") for part in (*EMBEDDED, "vector"))},
    "llava": {*EMBEDDED, "picture embeddings", "picture layer", "logits"},
    "onevision": {*EMBEDDED, "picture embeddings", "picture layer", "logits"},
    "bart": {*(f"{side} {part}" for side in ("encoder", "decoder") for part in EMBEDDED), "logits"},
}


@pytest.mark.parametrize("model", KINDS)
def test_every_kind_is_compared(model, tmp_path):
    source = make_source(model, tmp_path / model)
    # Smaller than they come: states of some hundred would leave logits of ten with their rounding.
    arrays = {key: np.asarray(0.3 * x, np.float32) for key, x in source.arrays.items()}
    save_file(arrays, source.path / "model.safetensors")
    rows = check(None, source.path)
    assert {row.name.rstrip("0123456789 ") for row in rows} == KINDS[model]
    assert all(row.passed for row in rows), rows
    assert all(row.size > 0.01 for row in rows)


@pytest.mark.parametrize(("name", "classifier"), [("modernbert", False), ("xlm-roberta", True)])
def test_encoders_and_rerankers_are_compared(name, classifier, tmp_path):
    save_plain(name, tmp_path, classifier=classifier, **({"num_labels": 1} if classifier else {}))
    rows = check(None, tmp_path)
    assert rows[-1].name == ("logit" if classifier else "output")
    assert all(row.passed for row in rows), rows


def test_the_verb(tmp_path, monkeypatch):
    folder = tmp_path / "bert"
    save_plain("bert", folder)
    source, out = f"--source={folder}", f"--out={tmp_path / 'converted'}"
    made = done("convert", "--model=bert", source, out, "--check")
    names = [row["name"] for row in made["check"]["compared"]]
    assert names == ["embeddings", "layer 1", "layer 2", "layer 3", "output"]
    assert made["layout"] == "transformers"
    # A converted folder by itself is exported for transformers.
    by_itself = done("convert", f"--source={tmp_path / 'converted'}", "--check")
    assert [row["name"] for row in by_itself["check"]["compared"]] == names
    monkeypatch.setitem(ACTIVATIONS, "gelu_new", ACTIVATIONS["relu"])
    wrong = mmqa("convert", source, "--check")
    assert wrong.code == 1
    assert "FAIL" in wrong.out
    assert "4 of 5 layers and outputs deviate from transformers" in wrong.err
    assert "the first is layer 1" in wrong.err


def test_what_cannot_be_checked_is_refused(tmp_path, monkeypatch):
    def refused(message, *flags):
        ended = mmqa("convert", "--check", *flags)
        assert (ended.code, message in ended.err) == (2, True), ended.err

    source = make_source("mcan", tmp_path / "mcan")
    refused("transformers does not have the model mcan", *source.flags("mcan")[1:3])
    refused("add --model=", f"--source={source.path}")
    refused("no such file or folder", f"--source={tmp_path / 'nothing'}")
    bert = make_source("bert", tmp_path / "bert").path
    refused("holds no clip (it is read as: encoder)", "--model=clip", f"--source={bert}")
    refused("leave --dtype out", f"--source={bert}", "--dtype=bfloat16")
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    refused("model_type is 'mamba', which is not known", f"--source={bert}")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused("torch is not installed", f"--source={bert}")


def test_the_input_and_the_bound():
    ids = tokens(1000, 4096)
    assert ids.shape == (1, TOKENS)
    np.testing.assert_array_equal(ids, tokens(1000, 9999))
    assert tokens(1000, 77).shape == (1, 77)
    assert Compared("x", 1e-4, 5.0).passed
    assert not Compared("x", 1.1e-4, 5.0).passed
    assert Compared("x", 3e-4, 42.0).passed
    assert Compared("x", 3e-3, 42.0, rounding=1e-3).passed
    assert not Compared("x", float("nan"), 42.0).passed


def test_sides_that_are_not_of_one_model():
    state, vector = np.zeros((2, 3)), np.zeros(3)
    ours, theirs = Outputs({"": [state]}, {"vector": vector}), Outputs({"": [state]}, {})
    with pytest.raises(ValueError, match=r"ours gives .*'vector': \(3,\)}, transformers {'embed"):
        compare(ours, theirs)
    with pytest.raises(ValueError, match=r"'vector': \(3,\)}, transformers .*'vector': \(4,\)}"):
        compare(ours, Outputs({"": [state]}, {"vector": np.zeros(4)}))
    with pytest.raises(ValueError, match="Linear has no stack of layers"):
        _layers(torch.nn.Linear(1, 1))
