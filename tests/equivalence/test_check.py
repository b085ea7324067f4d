"""`mmqa convert --check` of SigLIP, T5 and Qwen-VL: whole, and with one tensor damaged."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import qwen_vl_pair
import siglip_pair
from safetensors.numpy import load_file, save_file
from tiny_t5 import write_folder

from mmqa_jax.models.check import check
from mmqa_jax.models.common.comparison import TOKENS
from mmqa_jax.models.qwen_vl.keys import check_inputs
from mmqa_jax.weights.convert import convert

pytestmark = pytest.mark.slow

# A checkpoint of transformers, its name here, one of its tensors, and the layer that it is in.
CASES = {
    "siglip": ("siglip", "text_model.encoder.layers.1.mlp.fc1.weight", "text layer 2"),
    "siglip2": ("siglip", "vision_model.encoder.layers.0.self_attn.v_proj.bias", "picture layer 1"),
    "t5": ("t5", "decoder.block.0.layer.1.EncDecAttention.v.weight", "decoder layer 1"),
    "qwen2_5_vl": ("qwen_vl", "visual.blocks.1.attn.qkv.weight", "picture layer 2"),
    "qwen3_vl": ("qwen_vl", "layers.2.mlp.down_proj.weight", "layer 3"),
}


def _published(case: str, folder: Path) -> Path:
    if case == "t5":
        return write_folder(folder)
    if case.startswith("siglip"):
        siglip_pair.published(case, folder)
        return folder
    return qwen_vl_pair.make_pair(case, folder).folder


def _damaged(folder: Path, ending: str, into: Path) -> Path:
    """A copy of a checkpoint in which one number of one tensor is another."""
    shutil.copytree(folder, into)
    file = into / "model.safetensors"
    tensors = load_file(file)
    (key,) = (key for key in tensors if key.endswith(ending))
    tensors[key].reshape(-1)[3] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    return into


# Each kind is checked whole once; of the families of a kind, another has the damage: what is compared
# before it passes.
WHOLE = ("siglip2", "qwen2_5_vl", "t5")
DAMAGED = ("siglip", "qwen3_vl", "t5")


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_tensor_is_found_and_its_layer_named(case, tmp_path):
    name, ending, layer = CASES[case]
    folder = _published(case, tmp_path / "published")
    if case in WHOLE:
        whole = check(None, folder)
        assert all(row.passed and row.size > 0.01 for row in whole), whole
    if case not in DAMAGED:
        return
    made = tmp_path / "converted"
    convert(name, _damaged(folder, ending, tmp_path / "damaged"), made)
    rows = check(name, folder, made)
    assert case not in WHOLE or [row.name for row in rows] == [row.name for row in whole]
    assert next(row.name for row in rows if not row.passed) == layer


@pytest.mark.parametrize("taken", [[0, 2], [0, 1, 2]])
def test_deepstack_up_to_the_last_layer(taken, tmp_path, monkeypatch):
    """Of as many layers of the tower as the language model has: also to what the last one gives."""
    name, vision, text, both = qwen_vl_pair.CASES["qwen3_vl"]
    vision = vision | {"deepstack_visual_indexes": taken}
    case = name, vision, text | {"num_hidden_layers": len(taken)}, both
    monkeypatch.setitem(qwen_vl_pair.CASES, "qwen3_vl", case)
    qwen_vl_pair.make_pair("qwen3_vl", tmp_path)
    rows = check(None, tmp_path)
    assert all(row.passed for row in rows), rows


def test_inputs_are_long_and_have_a_picture(tmp_path):
    """Of a Qwen-VL: as many tokens as the others', the picture's among them."""
    ours = qwen_vl_pair.make_pair("qwen2_5_vl", tmp_path).ours
    given = check_inputs(ours.config)
    assert given["ids"].shape == (1, TOKENS)
    assert given["is picture"].sum() == 35
    np.testing.assert_array_equal(given["grid"], [[1, 10, 14]])
