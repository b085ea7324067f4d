"""gpt-oss as it is published: experts in MXFP4, beside transformers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled
from decoder_pair import run_torch
from flax import nnx
from safetensors.torch import load_file, save_file
from test_decoder_families import layers_and_logits, tokens, whole_texts
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mmqa_jax.models.llama.config import PRESETS, LlamaConfig
from mmqa_jax.models.llama.keys import publish_llama
from mmqa_jax.models.llama.quantize import load_in_codes
from mmqa_jax.weights.formats.safetensors import ArraySource
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.quantization import read_rounding
from tests.refusals import refuses

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# What the config.json of openai/gpt-oss-20b has beside its sizes.
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
}


def test_every_byte_with_every_scale_is_transformers_number():
    """But the scale 255, which is NaN (OCP MX 1.0, section 5.4.1), and 2^128 there."""
    scales = np.repeat(np.arange(255, dtype=np.uint8), 16).reshape(1, 255, 16)
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8), (1, 255, 256)).reshape(1, 255, 16, 16)
    source = ArraySource({"a_blocks": blocks, "a_scales": scales})
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    got = read_rounding(settings, "config.json")[1](source).read("a")  # [1, 512, 255]
    want = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    got = np.ascontiguousarray(got)
    np.testing.assert_array_equal(got.view(np.int16), want.contiguous().view(torch.int16).numpy())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as OpenAI publishes them."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    plain = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES)).to(torch.bfloat16)
    tensors = {}
    for key, tensor in plain.state_dict().items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = torch.randn_like(tensor) * 0.3
            continue
        experts, inputs, outputs = tensor.shape
        groups = (experts, outputs, inputs // 32)
        tensors[f"{key}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(120, 127, groups, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(PUBLISHED | SIZES))
    return folder


def test_a_published_checkpoint_has_transformers_bits(folder):
    """And is published again without rounding."""
    theirs = transformers.GptOssForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours = load_published("llama", folder, unroll=1)
    published = publish_llama(ours.config, nnx.state(ours))
    assert "quantization_config" not in published.config
    want = theirs.state_dict()
    assert published.source.specs().keys() == want.keys()
    for key, tensor in want.items():
        got = published.source.read(key).astype("float32")
        np.testing.assert_array_equal(got, tensor.float().numpy(), err_msg=key)


def test_experts_in_codes_multiply_as_transformers_whole_ones(folder):
    ours = load_in_codes("llama", folder, unroll=1)
    assert ours.layers.experts.up.kernels.dtype == jnp.float4_e2m1fn
    theirs = transformers.GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = tokens(1, 60)
    _, got = compiled(ours, layers_and_logits)(*whole_texts(ids))
    np.testing.assert_allclose(got, run_torch(theirs.eval(), ids), **WHOLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.pop("model.layers.1.mlp.experts.down_proj_scales"),
            "down_proj_blocks has no tensor _scales",
        ),
        (lambda x: x.pop("model.layers.0.mlp.experts.down_proj_blocks"), "down_proj_scales"),
        (
            lambda x: x.update(
                {
                    "model.layers.0.mlp.experts.gate_up_proj_scales": torch.zeros(
                        (3, 64, 3), dtype=torch.uint8
                    )
                }
            ),
            r"gate_up_proj_scales has the shape \(3, 64, 3\)",
        ),
        (lambda x: x.pop("model.layers.0.self_attn.sinks"), "sinks"),
    ],
)
def test_what_is_not_whole_is_refused(folder, tmp_path, change, message):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    refuses(message, load_published, "llama", tmp_path, unroll=1)


def test_presets_are_the_published_configs():
    whole = {"quantization_config": None}
    sizes = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128}
    sizes |= {"num_experts_per_tok": 4, "layer_types": None}
    for name, layers, experts in (("gpt_oss_20b", 24, 32), ("gpt_oss_120b", 36, 128)):
        of_size = {"num_hidden_layers": layers, "num_local_experts": experts}
        assert LlamaConfig.from_hf(PUBLISHED | sizes | of_size | whole) == PRESETS[name]()
