"""BART checkpoints in every published layout, and what is said of those that do not fit."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bart.keys import bart_key_map
from mmqa_jax.models.bart.network import BartConfig
from mmqa_jax.weights.keymap import export
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

VOCAB = 102


@pytest.fixture(scope="module")
def large_cnn(tmp_path_factory):
    """A state dict with all names of the word table, and config.json in a folder of others'."""
    folder = tmp_path_factory.mktemp("bart")
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=20,
    )
    tensors = {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformers.BartForConditionalGeneration(config)
        with torch.no_grad():  # fresh norms and biases are all alike
            for tensor in (*model.parameters(), model.final_logits_bias):
                tensor.add_(torch.randn_like(tensor))
        tensors = dict(model.state_dict())
        if seed == 0:
            model.save_pretrained(folder)
    return tensors, folder / "config.json"


def same(model, state_dict):
    """Whether our model holds these tensors, bit for bit."""
    for key, got in export(nnx.state(model), bart_key_map()):
        np.testing.assert_array_equal(got, state_dict[key].numpy(), err_msg=key)
    return True


def test_torch_layouts(large_cnn, tmp_path):
    tensors, config = large_cnn
    assert {k for k in tensors if "embed_tokens" in k or "shared" in k or "lm_head" in k} == {
        "model.shared.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    }
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    # BARTScore's file over a folder with other weights, then over the bare config.
    pth = tmp_path / "bart.pth"
    torch.save(tensors, pth)
    shutil.copy(pth, config.parent / "bart.pth")
    assert same(load_published("bart", config.parent / "bart.pth"), tensors)
    assert same(load_published("bart", pth), tensors)
    # The format before torch 1.6, with fairseq's version.
    old = tensors | {"model.encoder.version": torch.tensor([3.0])}
    torch.save(old, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(load_published("bart", tmp_path), tensors)
    # bart-base is a BartModel: without `model.` and without the head's bias.
    bare = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    torch.save(bare, tmp_path / "pytorch_model.bin")
    zeros = {"final_logits_bias": torch.zeros(1, VOCAB)}
    assert same(load_published("bart", tmp_path), tensors | zeros)
    # Under only one name of the embedding table, and not the usual one.
    few = {k: v for k, v in tensors.items() if "embed_tokens" not in k and "shared" not in k}
    torch.save(few, pth)
    assert same(load_published("bart", pth), tensors)


def test_a_state_dict_that_does_not_fit_is_named(large_cnn, tmp_path):
    tensors, config = large_cnn
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    pth = tmp_path / "bart.pth"

    def message(content):
        torch.save(content, pth)
        with pytest.raises(UserError) as caught:
            load_published("bart", pth)
        assert str(pth) in str(caught.value)
        return str(caught.value)

    gone = "model.decoder.layers.1.encoder_attn.q_proj.bias"
    less = {k: v for k, v in tensors.items() if k != gone}
    assert "decoder/layers/cross/query/bias, layers [1]" in message(less)
    less = {k: v for k, v in tensors.items() if k != "final_logits_bias"}
    assert "parameters without a tensor: final_logits_bias" in message(less)
    extra = "model.encoder.layers.0.encoder_attn.q_proj.bias"
    assert f"keys without a rule: {extra}" in message(tensors | {extra: tensors[gone]})
    deep = "model.encoder.layers.3.fc1.bias"
    more = tensors | {deep: tensors["model.encoder.layers.0.fc1.bias"]}
    assert f"layers the model lacks: {deep}" in message(more)
    other = tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}
    assert "tensors that should be equal: lm_head.weight and model.shared.weight" in message(other)
    wide = tensors | {"final_logits_bias": torch.zeros(2, VOCAB)}
    assert "shapes that differ: final_logits_bias (2, 102)" in message(wide)
    for key in ("state_dict", "model"):  # a training state is taken
        torch.save({key: tensors, "epoch": 3}, pth)
        assert same(load_published("bart", pth), tensors)
    assert "not a state dict" in message({"weights": tensors})
    assert "not a state dict" in message(tensors | {"epoch": 3})


def test_a_config_that_does_not_fit_is_named(large_cnn, tmp_path):
    config = json.loads(large_cnn[1].read_text())
    for change, said in [
        ({"model_type": "mbart"}, "model_type is 'mbart'"),
        ({"normalize_before": True}, "normalize_before True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ({"decoder_layerdrop": 0.1}, r"decoder_layerdrop 0\.1"),
        ({"activation_function": "mish"}, "activation_function is 'mish'"),
        ({"decoder_attention_heads": 5}, r"model\.decoder_heads is 5"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        refuses(said, load_published, "bart", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(r"neither model\.safetensors", load_published, "bart", tmp_path)
    refuses("activation_dropout is 1", BartConfig, activation_dropout=1.0)
