"""transformers -> `mmqa convert` -> Orbax -> `--export=hf` -> transformers: the same model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from compare import reloaded
from safetensors import safe_open

from mmqa_jax.weights.convert import convert
from mmqa_jax.weights.formats.safetensors import SafetensorsSource

# Nothing at its default: a value that is lost on the way changes the logits.
CONFIGS = {
    "llama": transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, max_position_embeddings=600,
        rms_norm_eps=1e-3, attention_bias=True, mlp_bias=True, hidden_act="gelu",
        rope_theta=333.0, tie_word_embeddings=False, bos_token_id=5, eos_token_id=6,
        rope_scaling={
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "bert": transformers.BertConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=3,
        intermediate_size=20, max_position_embeddings=40, type_vocab_size=3, layer_norm_eps=1e-2,
        hidden_act="relu", pad_token_id=3,
    ),
    "clip": transformers.CLIPConfig(
        text_config={
            "vocab_size": 50, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 12, "hidden_act": "gelu",
            "layer_norm_eps": 1e-2, "eos_token_id": 7, "bos_token_id": 8, "pad_token_id": 1,
        },
        vision_config={
            "hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 3,
            "num_attention_heads": 3, "image_size": 20, "patch_size": 5, "hidden_act": "gelu",
            "layer_norm_eps": 1e-2,
        },
        projection_dim=14,
    ),
    "bart": transformers.BartConfig(
        vocab_size=70, d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=3,
        decoder_attention_heads=2, encoder_ffn_dim=28, decoder_ffn_dim=36,
        max_position_embeddings=50, activation_function="relu", scale_embedding=True,
        pad_token_id=4, bos_token_id=5, eos_token_id=6, decoder_start_token_id=9,
        forced_eos_token_id=6,
    ),
}  # fmt: skip
CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "bert": transformers.BertModel,
    "clip": transformers.CLIPModel,
    "bart": transformers.BartForConditionalGeneration,
}


def run(name: str, model: torch.nn.Module) -> list[torch.Tensor]:
    """What the model computes of a fixed batch with padding."""
    generator = torch.Generator().manual_seed(3)

    def ids(high, *shape):
        return torch.randint(10, high, shape, generator=generator)

    with torch.no_grad():
        if name == "llama":
            return [model(input_ids=ids(97, 2, 513)).logits]
        if name == "clip":
            text = ids(50, 2, 12)
            text[:, 5] = 7  # the end of the text, not the largest id
            pixels = torch.randn(2, 3, 20, 20, generator=generator)
            out = model(input_ids=text, pixel_values=pixels)
            return [out.logits_per_image, out.text_embeds, out.image_embeds]
        mask = torch.ones(3, 30, dtype=torch.long)
        mask[1, 17:] = 0
        if name == "bert":
            types = ids(13, 3, 30) - 10
            out = model(input_ids=ids(61, 3, 30), attention_mask=mask, token_type_ids=types)
            return [out.last_hidden_state, out.pooler_output]
        out = model(input_ids=ids(70, 3, 30), attention_mask=mask, labels=ids(70, 3, 11))
        return [out.logits, out.loss]


@pytest.mark.parametrize(
    ("name", "sharded"), [("llama", True), ("bert", False), ("clip", False), ("bart", True)]
)
def test_transformers_reloads_what_it_saved(name, sharded, tmp_path):
    torch.manual_seed(0)
    model = CLASSES[name](CONFIGS[name]).eval()
    with torch.no_grad():  # fresh biases are 0 and norms 1
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape))
        if name == "bart":
            model.final_logits_bias.add_(torch.randn(1, 70))
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB" if sharded else "5GB")
    assert (len(list((tmp_path / "source").glob("*.safetensors"))) > 1) == sharded

    facts = convert(name, tmp_path / "source", tmp_path / "ours")
    assert facts["layout"] == "transformers"
    convert(name, tmp_path / "ours", tmp_path / "back", export="hf")

    theirs, ours = SafetensorsSource(tmp_path / "source"), SafetensorsSource(tmp_path / "back")
    assert ours.specs() == theirs.specs()
    for key in theirs.specs():
        np.testing.assert_array_equal(ours.read(key), theirs.read(key), err_msg=key)
    with safe_open(tmp_path / "back" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}

    again = reloaded(CLASSES[name], tmp_path / "back")
    assert again.dtype == torch.float32
    for got, want in zip(run(name, again.eval()), run(name, model), strict=True):
        assert torch.equal(got, want)
        assert want.numel() == 1 or want.std() > 1e-3
    for key, value in token_ids(tmp_path / "source").items():
        assert token_ids(tmp_path / "back").get(key) == value, key


def token_ids(folder: Path) -> dict[str, int | None]:
    """Token ids of config.json; what generation needs."""
    content = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in content.items() if key.endswith("_token_id")}
