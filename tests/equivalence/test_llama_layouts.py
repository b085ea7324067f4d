"""LLaMA checkpoints in every published layout, against the layouts' own models and libraries."""

import dataclasses
import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import WHOLE, compiled, forward, random_model, same_parameters
from flax import nnx
from safetensors.numpy import load_file, save_file

from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.keys import llama_key_map, open_llama, publish_llama
from mmqa_jax.models.llama.network import Llama, unstack_layers
from mmqa_jax.weights.formats.safetensors import DerivedSource
from mmqa_jax.weights.keymap import abstract_model, export
from mmqa_jax.weights.published import load_published, write_published
from tests.refusals import refuses

LENGTH = 512
# params.json of LLaMA-3 in small; 256 * ceil(1.3 * 2 / 3 * 4 * 64 / 16) = 224 hidden units.
PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "multiple_of": 16,
    "ffn_dim_multiplier": 1.3,
    "norm_eps": 3e-4,
    "rope_theta": 3000.0,
    "vocab_size": -1,
}
VOCAB, MLP = 96, 224


def meta_tensors(tied=False, seed=0):
    """A state dict under Meta's names, at random."""
    rng = np.random.default_rng(seed)
    shapes = {"tok_embeddings.weight": (VOCAB, 64), "norm.weight": (64,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, 64)
    for n in range(2):
        shapes |= {
            f"layers.{n}.attention.wq.weight": (64, 64),
            f"layers.{n}.attention.wk.weight": (32, 64),
            f"layers.{n}.attention.wv.weight": (32, 64),
            f"layers.{n}.attention.wo.weight": (64, 64),
            f"layers.{n}.feed_forward.w1.weight": (MLP, 64),
            f"layers.{n}.feed_forward.w2.weight": (64, MLP),
            f"layers.{n}.feed_forward.w3.weight": (MLP, 64),
            f"layers.{n}.attention_norm.weight": (64,),
            f"layers.{n}.ffn_norm.weight": (64,),
        }
    # Norms about 1, as trained ones are: logits then are of size 1 and more.
    return {
        key: (rng.normal(size=s) * 0.15 + (len(s) == 1)).astype(np.float32)
        for key, s in shapes.items()
    }


def meta_logits(tensors, ids, *, theta, eps, heads=4, kv_heads=2):
    """Meta's Transformer restated (llama/model.py): complex rotation of neighboring pairs."""
    weights = {key: torch.from_numpy(np.array(a)) for key, a in tensors.items()}

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    size, length = 64 // heads, ids.shape[1]
    angles = torch.outer(
        torch.arange(length).float(), 1 / theta ** (torch.arange(0, size, 2).float() / size)
    )
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None, :]

    def rotate(x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3)

    closed = torch.full((length, length), float("-inf")).triu(1)
    x = weights["tok_embeddings.weight"][torch.from_numpy(ids)]
    for n in range(2):
        at = f"layers.{n}."
        y = norm(x, f"{at}attention_norm")
        q, k, v = (
            linear(y, f"{at}attention.{name}").unflatten(-1, (count, size))
            for name, count in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
        )
        q, k = rotate(q), rotate(k)
        k, v = (z.repeat_interleave(heads // kv_heads, dim=2) for z in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5 + closed
        attended = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        x = x + linear(attended, f"{at}attention.wo")
        y = norm(x, f"{at}ffn_norm")
        gate = torch.nn.functional.silu(linear(y, f"{at}feed_forward.w1"))
        x = x + linear(gate * linear(y, f"{at}feed_forward.w3"), f"{at}feed_forward.w2")
    head = weights.get("output.weight", weights["tok_embeddings.weight"])
    return (norm(x, "norm") @ head.T).numpy()


def split(tensors, count, vocab_parallel):
    """Meta's model-parallel shards (fairscale's column, row and embedding layers)."""
    shards = [{} for _ in range(count)]
    for key, array in tensors.items():
        axis = 0
        if key.endswith((".wo.weight", ".w2.weight")):
            axis = 1
        elif key == "tok_embeddings.weight":
            axis = 0 if vocab_parallel else 1
        parts = [array] * count if array.ndim == 1 else np.split(array, count, axis)
        for shard, part in zip(shards, parts, strict=True):
            shard[key] = part
    return shards


def write_meta(folder: Path, shards, params=PARAMS, dtype=torch.float32):
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    for number, shard in enumerate(shards):
        saved = {key: torch.tensor(array).to(dtype) for key, array in shard.items()}
        saved["rope.freqs"] = torch.zeros(8)  # a buffer of LLaMA-1 and 2
        torch.save(saved, folder / f"consolidated.{number:02d}.pth")
    return folder


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(5).integers(0, VOCAB, (2, LENGTH))


def test_meta_files_whole_and_sharded(tmp_path, ids):
    tensors = meta_tensors()
    model = load_published("llama", write_meta(tmp_path / "one", [tensors]), unroll=1)
    want = meta_logits(tensors, ids, theta=3000.0, eps=3e-4)
    np.testing.assert_allclose(compiled(model, forward)(ids), want, **WHOLE)
    assert np.abs(want).max() > 1
    assert model.config == LlamaConfig(
        vocab_size=VOCAB,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp=MLP,
        eps=3e-4,
        rope_theta=3000.0,
        unroll=1,
    )
    for name, vocab_parallel in (("llama2", False), ("llama3", True)):
        folder = write_meta(tmp_path / name, split(tensors, 2, vocab_parallel))
        same_parameters(load_published("llama", folder, unroll=1), model)
    # And back: our parameters under Meta's names are the given tensors.
    back = dict(export(nnx.state(model), llama_key_map(model.config, "meta")))
    assert back.keys() == tensors.keys()
    for key, array in tensors.items():
        np.testing.assert_array_equal(back[key], array, err_msg=key)


def test_meta_file_becomes_transformers(tmp_path, ids):
    import transformers

    tensors = meta_tensors(seed=1)
    model = load_published("llama", write_meta(tmp_path / "meta", split(tensors, 2, False)))
    write_published(tmp_path / "hf", publish_llama(model.config, nnx.state(model)))
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    )
    with torch.no_grad():
        got = theirs.eval()(torch.from_numpy(ids)).logits.numpy()
    want = meta_logits(tensors, ids, theta=3000.0, eps=3e-4)
    np.testing.assert_allclose(got, want, **WHOLE)


def test_bfloat16_stays_bfloat16(tmp_path):
    """Meta's files are bfloat16; they are neither widened in the source nor rounded twice."""
    folder = write_meta(tmp_path / "half", [meta_tensors()], dtype=torch.bfloat16)
    source = open_llama(folder).source
    assert {str(spec.dtype) for key, spec in source.specs().items() if "rope" not in key} == {
        "bfloat16"
    }
    half = load_published("llama", folder, param_dtype="bfloat16")
    whole = load_published("llama", folder)
    assert half.norm.scale[...].dtype == jnp.bfloat16
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), b),
        nnx.state(half),
        nnx.state(whole),
    )
    np.testing.assert_array_equal(
        whole.norm.scale[...],
        torch.tensor(meta_tensors()["norm.weight"]).to(torch.bfloat16).float().numpy(),
    )


def llama2c_bytes(tensors, *, version, tied):
    """A file as export.py's legacy_export and version1_export write it."""

    def each(name):
        return [tensors[f"layers.{n}.{name}.weight"] for n in range(2)]

    table, norm = [tensors["tok_embeddings.weight"]], [tensors["norm.weight"]]
    head = [] if tied else [tensors["output.weight"]]
    attention = [a for name in ("wq", "wk", "wv", "wo") for a in each(f"attention.{name}")]
    mlp = [a for name in ("w1", "w2", "w3") for a in each(f"feed_forward.{name}")]
    attention_norm, ffn_norm = each("attention_norm"), each("ffn_norm")
    sizes = (64, MLP, 2, 4, 2)
    if version == 0:
        header = struct.pack("<7i", *sizes, VOCAB if tied else -VOCAB, LENGTH)
        freqs = [np.zeros((LENGTH, 8), np.float32)] * 2
        order = [*table, *attention_norm, *attention, *ffn_norm, *mlp, *norm, *freqs, *head]
    else:
        header = struct.pack("<Ii7iB", 0x616B3432, version, *sizes, VOCAB, LENGTH, tied)
        header = header.ljust(256, b"\0")
        order = [*attention_norm, *ffn_norm, *norm, *table, *attention, *mlp, *head]
    return header + b"".join(array.tobytes() for array in order)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_files(tmp_path, ids, version, tied):
    tensors = meta_tensors(tied=tied, seed=2)
    file = tmp_path / "model.bin"
    file.write_bytes(llama2c_bytes(tensors, version=version, tied=tied))
    model = load_published("llama", file, unroll=1)
    assert model.config.tied == tied
    assert model.config.positions == LENGTH
    want = meta_logits(tensors, ids, theta=10000.0, eps=1e-5)
    np.testing.assert_allclose(compiled(model, forward)(ids), want, **WHOLE)


def test_llama2c_files_that_are_not_whole(tmp_path):
    data, later = (llama2c_bytes(meta_tensors(), version=n, tied=False) for n in (0, 1))
    file = tmp_path / "model.bin"
    for broken, match in (
        (data[:-4], r"model\.bin: \d+ bytes, its header requires \d+"),
        (data + b"\0" * 4, "its header requires"),
        (data[:20], "not a llama2.c file"),
        (b"", "not a llama2.c file"),
        (b"\x7fELF" + data[4:], "bytes, its header requires|not a llama2.c file"),
        (struct.pack("<Ii", 0x616B3432, 2) + data, "version 2 .int8 weights. is not supported"),
        # Version 1, cut within its sizes, before the byte that says whose the head is, after it.
        (later[:20], "not a llama2.c file"),
        (later[:36], r"model\.bin: "),
        (later[:-4], r"model\.bin: \d+ bytes, its header requires \d+"),
    ):
        file.write_bytes(broken)
        refuses(match, load_published, "llama", file)
    refuses(r"absent\.bin: no such file", load_published, "llama", tmp_path / "absent.bin")


TINY = LlamaConfig(vocab_size=20, hidden=16, layers=2, heads=2, kv_heads=1, mlp=24, positions=64)


@pytest.fixture(scope="module")
def tiny():
    rng = np.random.default_rng(11)
    graphdef, state = abstract_model(lambda: Llama(TINY, rngs=nnx.Rngs()))
    return nnx.merge(
        graphdef,
        jax.tree.map(lambda p: jax.device_put(rng.normal(size=p.shape).astype("f4")), state),
    )


def save(model: Llama, folder: Path, **options):
    write_published(folder, publish_llama(model.config, nnx.state(model)), **options)
    return folder


def test_sharded_safetensors(tmp_path, tiny):
    folder = save(tiny, tmp_path, shard_bytes=4000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 4000 + 1500 for file in files)  # header included
    same_parameters(load_published("llama", folder), tiny)
    missing = files[1].name
    files[1].unlink()
    refuses(rf"lacks {missing}, which its index names", load_published, "llama", folder)


@pytest.mark.parametrize("layout", ["meta", "transformers"])
def test_layers_read_apart_are_those_of_the_stack(tmp_path, layout):
    """Meta's has rows that change places; every linear of the other has a bias."""
    if layout == "meta":
        write_meta(tmp_path / layout, [meta_tensors()])
    else:
        config = dataclasses.replace(TINY, attention_bias=True, mlp_bias=True)
        save(random_model(Llama, config), tmp_path / layout)
    want = load_published("llama", tmp_path / layout)
    unstack_layers(want)
    got = load_published("llama", tmp_path / layout, layers_apart=True)
    assert nnx.graphdef(got) == nnx.graphdef(want)
    same_parameters(got, want)


def test_torch_shards_of_transformers(tmp_path, tiny):
    """Vicuna-1.5 is published so."""
    tensors = dict(export(nnx.state(tiny), llama_key_map(TINY)))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf()))
    whole = {key: torch.tensor(array) for key, array in tensors.items()}
    torch.save(whole, tmp_path / "pytorch_model.bin")
    same_parameters(load_published("llama", tmp_path), tiny)
    (tmp_path / "pytorch_model.bin").unlink()
    keys = list(tensors)
    parts = {
        "pytorch_model-00001-of-00002.bin": keys[:7],
        "pytorch_model-00002-of-00002.bin": keys[7:],
    }
    for name, part in parts.items():
        torch.save({key: whole[key] for key in part}, tmp_path / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    same_parameters(load_published("llama", tmp_path), tiny)
    torch.save({key: whole[key] for key in keys[6:]}, tmp_path / "pytorch_model-00002-of-00002.bin")
    refuses(f"tensor '{keys[6]}' is in another file", load_published, "llama", tmp_path)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    refuses(r"00002-of-00002\.bin: no such file", load_published, "llama", tmp_path)


def test_keys_and_shapes_that_do_not_fit(tmp_path, tiny):
    folder = save(tiny, tmp_path)
    tensors = load_file(folder / "model.safetensors")

    def refused(match, arrays, **config):
        save_file(arrays, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(TINY.to_hf() | config))
        refuses(match, load_published, "llama", folder)

    norm = "model.norm.weight"
    refused(
        "1 parameters without a tensor: norm/scale", {k: a for k, a in tensors.items() if k != norm}
    )
    refused(
        r"1 keys without a rule: model\.layers\.0\.mlp\.router\.weight",
        tensors | {"model.layers.0.mlp.router.weight": np.zeros(3, np.float32)},
    )
    refused(
        r"model\.norm\.weight \(17,\) \(model: norm/scale \(16,\)",
        tensors | {norm: np.zeros(17, np.float32)},
    )
    refused(
        r"keys without a rule: model\.layers\.0\.self_attn\.q_proj\.bias",
        tensors | {"model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32)},
    )
    refused("layers the model lacks", tensors, num_hidden_layers=1)
    refused(
        "tensors that should be equal: lm_head.weight and model.embed_tokens.weight",
        tensors,
        tie_word_embeddings=True,
    )
    refused("model_type is 'gpt2', expected 'llama'", tensors, model_type="gpt2")
    (folder / "config.json").unlink()
    refuses(r"config\.json: no such file", load_published, "llama", folder)
    refuses("neither a folder nor", load_published, "llama", tmp_path / "absent")


def test_a_folder_is_whole_once_it_has_its_config(tmp_path, tiny, monkeypatch):
    """An export that is cut off leaves nothing that loads."""
    reads = []
    read = DerivedSource.read

    def failing(self, key):
        reads.append(key)
        if len(reads) == 9:
            raise OSError("disk full")
        return read(self, key)

    monkeypatch.setattr(DerivedSource, "read", failing)
    refuses("disk full", save, tiny, tmp_path, shard_bytes=4000, error=OSError)
    refuses(r"config\.json: no such file", load_published, "llama", tmp_path)
    assert not [*tmp_path.glob(".*")]


def test_meta_files_that_do_not_fit(tmp_path):
    tensors = meta_tensors()
    shards = split(tensors, 2, False)
    folder = write_meta(tmp_path / "gap", shards)
    (folder / "consolidated.01.pth").unlink()
    refuses(r"holds 1 consolidated.*their shapes require 2; fetch", load_published, "llama", folder)

    folder = write_meta(tmp_path / "keys", shards)
    odd = {key: torch.tensor(a) for key, a in shards[1].items() if key != "norm.weight"}
    torch.save(odd, folder / "consolidated.01.pth")
    refuses(r"01\.pth: its tensors are not those of", load_published, "llama", folder)

    # A missing head is not taken for a tied one: Meta always writes it.
    folder = write_meta(tmp_path / "headless", [meta_tensors(tied=True)])
    refuses("1 parameters without a tensor: head/kernel", load_published, "llama", folder)

    folder = write_meta(tmp_path / "params", [tensors], {"dim": 64, "n_layers": 2})
    refuses(r"params\.json: lacks n_heads, norm_eps", load_published, "llama", folder)

    folder = write_meta(tmp_path / "none", [])
    refuses(r"holds no consolidated\.00\.pth", load_published, "llama", folder)

    folder = write_meta(tmp_path / "broken", [tensors])
    file = folder / "consolidated.00.pth"
    data = file.read_bytes()
    for cut in (0, 100, len(data) // 2, len(data) - 30):
        file.write_bytes(data[:cut])
        refuses(r"00\.pth: not a torch file of plain tensors", load_published, "llama", folder)
    for content, match in (
        ({"model": object}, "not a torch file of plain tensors"),
        ({"step": 3}, "not a state dict"),
        ([torch.zeros(2)], "not a state dict"),
    ):
        torch.save(content, file)
        refuses(rf"00\.pth: {match}", load_published, "llama", folder)


def test_renewed_mappings_read_the_same(tmp_path, monkeypatch):
    """The mapping of a torch file is made anew as it is read, here after every few tensors."""
    folder = write_meta(tmp_path / "meta", split(meta_tensors(), 2, False))
    model = load_published("llama", folder)
    monkeypatch.setattr("mmqa_jax.weights.formats.torch._MAPPED_BYTES", 20_000)
    opened = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: opened.append(a) or load(*a, **k))
    same_parameters(load_published("llama", folder), model)
    assert len(opened) > 6


def test_old_torch_files_are_read(tmp_path):
    """torch before 1.6 wrote no zip archive; such a file cannot be memory-mapped."""
    tensors = meta_tensors()
    folder = write_meta(tmp_path / "old", [tensors])
    saved = {key: torch.tensor(array) for key, array in tensors.items()}
    torch.save(saved, folder / "consolidated.00.pth", _use_new_zipfile_serialization=False)
    model = load_published("llama", folder)
    np.testing.assert_array_equal(model.norm.scale[...], tensors["norm.weight"])
