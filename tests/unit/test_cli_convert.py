"""`mmqa convert`: every architecture to Orbax and back, bit by bit; memory, meshes, interruptions."""

import hashlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from cli_runs import done, mmqa, tree
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import CONFIGS, make_source, published_specs

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.keys import publish_llama
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.formats import orbax, orbax_reader
from mmqa_jax.weights.keymap import load_into
from mmqa_jax.weights.layouts import open_source, require_given
from mmqa_jax.weights.published import write_published
from mmqa_jax.weights.registry import architecture, architectures, model_of
from tests.fake_devices import fake_devices
from tests.forks import server
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    sources, results = {}, {}

    def make(model):
        if model not in sources:
            sources[model] = make_source(model, folder / model)
            out = folder / f"{model}-converted"
            results[model] = done(*sources[model].flags(model), f"--out={out}")
        return sources[model], results[model]

    return make


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    """Exports of the conversions, and the JSON of making them."""
    folder, results = tmp_path_factory.mktemp("exported"), {}

    def export(model):
        out = folder / model
        if model not in results:
            source = f"--source={made(model)[1]['out']}"
            results[model] = done("convert", source, "--export=hf", f"--out={out}")
        return out, results[model]

    return export


def test_every_architecture_is_tested():
    assert set(architectures()) == set(CONFIGS)


@pytest.mark.parametrize("model", CONFIGS)
def test_there_and_back(model, made, exported):
    source, result = made(model)
    out = Path(result["out"])
    loaded = load_converted(out)
    assert loaded.config == source.config
    got = flatten_named(nnx.state(loaded))
    # As the key map reads the checkpoint into a model.
    opened = architecture(model).open(source.path)
    key_map = opened.key_map(source.config)
    want = flatten_named(load_into(nnx.state(loaded), key_map, opened.source))
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
        assert isinstance(got[name], jax.Array)
    size = sum(array.size for array in want.values())
    assert (result["parameters"], result["bytes"]) == (size, 4 * size)
    assert sorted(path.name for path in out.iterdir()) == ["SHA256SUMS", "model.json", "weights"]

    folder, back = exported(model)
    assert back["source"] == result["source"]
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == source.arrays.keys()
    for key, array in source.arrays.items():
        assert stored[key].dtype == array.dtype
        assert stored[key].tobytes() == array.tobytes(), key
    # The export is a source of the same model; without --set, its config.json tells all.
    reopened = architecture(model).open(folder)
    require_given(reopened, ())
    assert reopened.config == source.config
    assert model_of(out) == model
    entry = architecture(model)
    assert model_of(folder) == (model if entry.model_types or entry.sign else None)


def fingerprint(arrays):
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        data = hashlib.sha256(array.tobytes()).digest()
        about = f"{name} {array.dtype} {array.shape}".encode()
        digest.update(hashlib.sha256(about + data).digest())
    return digest.hexdigest()


@pytest.mark.parametrize("model", ["llama", "vlp"])
def test_export_without_the_way_over_orbax(model, made, exported, tmp_path):
    source, result = made(model)
    direct, (over, _) = tmp_path / "direct", exported(model)
    done(*source.flags(model), f"--out={direct}", "--export=hf")
    for name in ("model.safetensors", "config.json"):
        assert (direct / name).read_bytes() == (over / name).read_bytes()
    again = done("convert", f"--model={model}", f"--source={over}", f"--out={tmp_path / 'again'}")
    assert again["source"]["sha256"] == result["source"]["sha256"] == fingerprint(source.arrays)
    assert read_record(tmp_path / "again").config == source.config


def test_orbax_itself_reads_the_weights(made):
    source, result = made("llama")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(Path(result["out"]) / "weights")
    kernel = restored["layers"]["gate"]["kernel"]
    for layer in range(3):
        theirs = source.arrays[f"model.layers.{layer}.mlp.gate_proj.weight"]
        np.testing.assert_array_equal(kernel[layer], theirs.T)


def test_types_of_the_parameters(tmp_path):
    for stored, flags, expected in (
        ("bfloat16", [], "bfloat16"),
        ("float16", [], "float32"),
        ("bfloat16", ["--dtype=float32"], "float32"),
        ("float32", ["--dtype=bfloat16"], "bfloat16"),
    ):
        name = f"{stored}-{expected}"
        source = make_source("bert", tmp_path / name, stored)
        out = tmp_path / f"{name}-converted"
        assert done(*source.flags("bert"), f"--out={out}", *flags)["dtype"] == expected
        state = flatten_named(nnx.state(load_converted(out)))
        assert {array.dtype.name for array in state.values()} == {expected}
        kernel = source.arrays["encoder.layer.1.output.dense.weight"].T.astype(expected)
        np.testing.assert_array_equal(state["layers/down/kernel"][1], kernel)
        wide = flatten_named(nnx.state(load_converted(out, param_dtype="float32")))
        np.testing.assert_array_equal(wide["layers/down/kernel"][1], kernel.astype(np.float32))
    hf = tmp_path / "hf"
    flags = ["--export=hf", "--dtype=bfloat16", f"--out={hf}"]
    done("convert", "--model=bert", f"--source={tmp_path / 'bfloat16-float32-converted'}", *flags)
    stored = load_file(tmp_path / "bfloat16-float32" / "model.safetensors")
    # bfloat16 -> float32 -> bfloat16 loses nothing.
    for key, array in load_file(hf / "model.safetensors").items():
        assert array.dtype == ml_dtypes.bfloat16
        assert array.tobytes() == stored[key].tobytes()
    assert json.loads((hf / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_tokenizer_and_token_ids_come_along(tmp_path):
    source = make_source("llama", tmp_path / "source")
    for name in ("tokenizer.json", "generation_config.json", "README.md"):
        (source.path / name).write_text(f'"{name}"')
    result = done(*source.flags("llama"), f"--out={tmp_path / 'out'}")
    assert result["files"] == ["tokenizer.json", "generation_config.json"]
    flags = ("convert", "--model=llama", f"--source={tmp_path / 'out'}", "--export=hf")
    done(*flags, f"--out={tmp_path / 'hf'}")
    for folder in ("out", "hf"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == '"tokenizer.json"'
        assert not (tmp_path / folder / "README.md").exists()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["bos_token_id"] == 11


def test_parameters_that_the_checkpoint_lacks(tmp_path):
    """Of VLP's own checkpoints the source head and four token types, of BartModel's the bias."""
    source = make_source("vlp", tmp_path / "vlp")
    types = "bert.embeddings.token_type_embeddings.weight"
    arrays = {k: v for k, v in source.arrays.items() if not k.startswith("context_classifier")}
    arrays[types] = arrays[types][:2]
    save_file(arrays, tmp_path / "vlp.safetensors")
    source = source._replace(path=tmp_path / "vlp.safetensors")
    done(*source.flags("vlp"), f"--out={tmp_path / 'v'}")
    state = flatten_named(nnx.state(load_converted(tmp_path / "v")))
    table = arrays[types][[0, 1, 0, 0, 0, 1]]
    np.testing.assert_array_equal(state["bert/embeddings/token_type/table"], table)
    head = np.asarray(state["source_head/kernel"])
    assert head.shape == (12, 2)
    assert head.std() > 0.05  # initialized as the model does
    assert np.abs(head).max() <= 12**-0.5

    source = make_source("bart", tmp_path / "bart")
    bare = {k.removeprefix("model."): v for k, v in source.arrays.items() if "logits" not in k}
    save_file(bare, source.path / "model.safetensors")
    done(*source.flags("bart"), f"--out={tmp_path / 'b'}")
    state = flatten_named(nnx.state(load_converted(tmp_path / "b")))
    np.testing.assert_array_equal(state["final_logits_bias"], np.zeros(31))
    np.testing.assert_array_equal(state["tokens/table"], bare["shared.weight"])


def test_llava_with_its_clip_beside_it(tmp_path):
    source, clip = (make_source(model, tmp_path / model) for model in ("llava", "clip"))
    rest = {k: v for k, v in source.arrays.items() if not k.startswith("vision_tower.")}
    save_file(rest, source.path / "model.safetensors")
    flags = (*source.flags("llava"), f"--out={tmp_path / 'out'}")
    assert "holds no vision tower" in mmqa(*flags).err
    done(*flags, f"--clip={clip.path}")
    state = flatten_named(nnx.state(load_converted(tmp_path / "out")))
    theirs = clip.arrays["vision_model.encoder.layers.2.mlp.fc1.weight"]
    np.testing.assert_array_equal(state["vision/layers/mlp_in/kernel"][2], theirs.T)


def test_large_models_are_split_into_shards(made, tmp_path):
    source, result = made("llama")
    state = nnx.state(load_converted(result["out"]))
    sizes = []
    published = publish_llama(source.config, state)
    write_published(tmp_path, published, more={}, shard_bytes=6000, on_bytes=sizes.append)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / name).stat().st_size < 8000 for name in files)
    whole = open_source(tmp_path)
    assert whole.specs().keys() == source.arrays.keys()
    for key, array in source.arrays.items():
        np.testing.assert_array_equal(whole.read(key), array)
    total = sum(array.nbytes for array in source.arrays.values())
    assert index["metadata"]["total_size"] == total == sum(sizes)


MESH = """
import sys, jax, numpy as np
from flax import nnx
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.weights.formats import orbax_reader
from mmqa_jax.weights.folder import load_converted
largest, read_shard = {}, orbax_reader._read_shard
def watched(store, dtype, index):
    part = read_shard(store, dtype, index)
    largest[tuple(store.shape)] = max(part.size, largest.get(tuple(store.shape), 0))
    return part
orbax_reader._read_shard = watched
mesh = make_mesh({"fsdp": 4, "tensor": 2})
spread = flatten_named(nnx.state(load_converted(sys.argv[1], mesh=mesh)))
pieces = dict(largest)
whole = flatten_named(nnx.state(load_converted(sys.argv[1])))
for name, array in spread.items():
    np.testing.assert_array_equal(array, whole[name])
kernel = spread["layers/gate/kernel"]
assert kernel.addressable_shards[0].data.shape == (3, 4, 12), kernel.sharding
assert pieces[kernel.shape] == kernel.size // 8, pieces
print("equal on", len(jax.devices()))
"""


def start(code, *arguments, **environment):
    return server().start(["-c", code, *map(str, arguments)], os.environ | environment)


def test_onto_a_mesh_each_device_reads_its_own_shard(made):
    _, result = made("llama")
    child = start(MESH, result["out"], **fake_devices(8))
    printed, _ = child.communicate(120)
    assert child.returncode == 0, printed
    assert "equal on 8" in printed


def test_a_large_array_is_read_in_blocks(tmp_path, monkeypatch):
    """Whatever the block and chunk sizes, the values are those that were written."""
    monkeypatch.setattr(orbax, "_CHUNK_BYTES", 256)
    monkeypatch.setattr(orbax_reader, "_READ_BYTES", 1000)
    rng = np.random.default_rng(0)
    values = {
        "stack": rng.normal(size=(5, 7, 9)).astype(np.float32),
        "table/rows": rng.normal(size=(101, 6)).astype(ml_dtypes.bfloat16),
        "scale": np.float32(2.5),
    }
    arrays = {
        name: orbax.StreamedArray(
            value.shape,
            value.dtype,
            name == "stack",
            lambda value=value, name=name: (
                [(n, value[n]) for n in reversed(range(5))] if name == "stack" else [((), value)]
            ),
        )
        for name, value in values.items()
    }
    orbax.write_weights(tmp_path / "x", arrays)
    specs = orbax_reader.stored_specs(tmp_path / "x")
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: value.shape for name, value in values.items()
    }
    for name, array in orbax_reader.read_weights(tmp_path / "x", specs).items():
        np.testing.assert_array_equal(array, values[name])


CONVERT_BOTH = """
import sys
from mmqa_jax.cli import main
for folder in sys.argv[1:]:
    code = main(["convert", "--model=llama", f"--source={folder}", f"--out={folder}-out", "--json"])
    assert code == 0
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    """A LLaMA of 12 layers, 157 MiB, is converted with less than a third of that more memory.

    More than one of a layer, which the same process converted before.
    """
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 8, "intermediate_size": 1536, "tie_word_embeddings": True,
    }  # fmt: skip
    folders, sizes = [], []
    for layers in (1, 12):
        folder = tmp_path / str(layers)
        folder.mkdir()
        config["num_hidden_layers"] = layers
        (folder / "config.json").write_text(json.dumps(config))
        specs = published_specs("llama", LlamaConfig.from_hf(config))
        folders.append(folder)
        sizes.append(write_zeros(folder / "model.safetensors", specs))
    child = start(CONVERT_BOTH, *folders, MMQA_PROGRESS="off")
    printed, _ = child.communicate(120)
    assert child.returncode == 0, printed
    one, many = (json.loads(x) for x in printed.splitlines() if x.startswith("{"))
    assert [one["bytes"], many["bytes"]] == sizes
    assert sizes[1] > 150 << 20
    assert (many["peak_rss_mib"] - one["peak_rss_mib"]) << 20 < sizes[1] / 3


def write_zeros(path, specs):
    """A safetensors file with zeros in it that takes no room on the disk."""
    header, size = {}, 0
    for key, spec in specs.items():
        end = size + 4 * spec.size
        header[key] = {"dtype": "F32", "shape": [*spec.shape], "data_offsets": [size, end]}
        size = end
    head = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    return size


SLOW = """
import sys, time
from mmqa_jax.weights.formats import safetensors as safetensors_io
read = safetensors_io.SafetensorsSource.read
count = open(sys.argv.pop(1), "ab", buffering=0)
def slow(self, key):
    count.write(b"r")
    time.sleep(0.2)
    return read(self, key)
safetensors_io.SafetensorsSource.read = slow
from mmqa_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_conversion_that_is_killed_leaves_nothing_half_written(
    how, made, tmp_path, tmp_path_factory
):
    source, _ = made("bert")
    flags = [*source.flags("bert"), f"--out={tmp_path / 'new' / 'out'}"]
    count = tmp_path_factory.mktemp("count") / "read"
    child = start(SLOW, count, *flags)
    while not count.exists() or count.stat().st_size < 8:
        assert child.poll() is None
        time.sleep(0.01)
    half_written = tree(tmp_path)
    assert half_written  # it was in the middle
    child.send_signal(how)
    err, _ = child.communicate(timeout=60)
    if how == signal.SIGKILL:
        assert child.returncode == -how
        assert all(name.startswith("new/.out.") for name in tree(tmp_path))
        done(*flags)  # removes what the killed one left
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    else:
        assert child.returncode == 130
        assert re.search(r"^mmqa: interrupted", err, re.MULTILINE), err
        assert list(tmp_path.iterdir()) == []


def test_overwriting_keeps_the_old_one_until_the_new_one_is_whole(made, tmp_path, monkeypatch):
    source, result = made("bert")
    out = tmp_path / "out"
    shutil.copytree(result["out"], out)
    before = tree(tmp_path)
    read = type(open_source(source.path)).read
    keys = []

    def interrupted(self, key):
        keys.append(key)
        if len(keys) == 5:
            raise KeyboardInterrupt
        return read(self, key)

    monkeypatch.setattr(type(open_source(source.path)), "read", interrupted)
    flags = [*source.flags("bert"), f"--out={out}", "--overwrite"]
    assert mmqa(*flags).code == 130
    assert tree(tmp_path) == before
    keys.extend(range(100))
    assert mmqa(*flags, "--dtype=bfloat16").code == 0
    assert read_record(out).dtype == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_damaged_conversion_is_named(made, tmp_path):
    _, result = made("bert")
    for number, damage in enumerate(("manifest.ocdbt", "_METADATA", "data", "config", "format")):
        out = tmp_path / str(number)
        shutil.copytree(result["out"], out)
        if damage == "data":
            for path in (out / "weights" / "ocdbt.process_0" / "d").iterdir():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif damage in ("config", "format"):
            content = json.loads((out / "model.json").read_text())
            if damage == "config":
                content["config"]["mlp"] = 20
            else:
                content["format"] = "mmqa_jax weights 9"
            (out / "model.json").write_text(json.dumps(content))
            (out / "SHA256SUMS").unlink()  # changed on purpose
        else:
            (out / "weights" / damage).unlink()
        expected = {
            "config": r"layers/up/kernel is \[2, 12, 16\], the model's is \[2, 12, 20\]",
            "format": r"model\.json: format is 'mmqa_jax weights 9', expected",
        }.get(damage, r"weights: \S+ is (missing|damaged \(.*\)); copy")
        refuses(expected, load_converted, out)
