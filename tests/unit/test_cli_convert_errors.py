"""`mmqa convert` refuses what it cannot convert: one sentence, exit 2, nothing written."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cli_runs import done, mmqa, succeeded
from safetensors.numpy import save_file
from tiny_checkpoints import make_source

from mmqa_jax.weights.registry import architectures

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    found = {model: make_source(model, folder / model) for model in ("bert", "llama", "vlp")}
    done(*found["bert"].flags("bert"), f"--out={folder / 'converted'}")
    return {**found, "converted": folder / "converted"}


@pytest.fixture
def bert(sources, tmp_path):
    return sources["bert"]._replace(path=shutil.copytree(sources["bert"].path, tmp_path / "bert"))


def test_help_names_every_model_and_its_layouts():
    ended = succeeded("convert", "--help")
    for entry in architectures().values():
        assert f"\n  {entry.name:<16}{entry.title}\n" in ended.out
        assert all(f"reads   {layout}\n" in ended.out for layout in entry.layouts)
    example = ended.out.partition("example:\n")[2].split()
    assert example[:3] == ["mmqa", "convert", "--source=downloads/SmolLM2-135M"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=brt"], r"choice: 'brt' .*clip.*bert.*mcan"),
        (["--model=bert", "--dtype=float16"], r"--dtype: invalid"),
        (["--model=bert", "--export=onnx"], r"--export: invalid"),
        (["--model=bert", "--clip={path}"], r"a bert takes no CLIP"),
        (["--model=bert", "--set=heads"], r"--set heads: write it as FIELD=VALUE"),
        (["--model=bert", "--set=head=3"], r"--set head: unknown field 'head'; use one of vocab"),
        (["--model=bert", "--set=heads=many"], r"--set heads is 'many': expected int"),
        (["--model=bert", "--set=heads.x=3"], r"--set heads\.x: 'heads' has no fields"),
        (
            ["--model=bert", "--set=heads=5"],
            r"heads is 5: expected a divisor of model\.hidden = 12",
        ),
        (["--model=bert", "--set=mlp=20"], r"shapes that differ: .*intermediate\.dense\.weight"),
        (["--model=llama", "--source={converted}", "--export=hf"], r"llama: .* holds a bert; name"),
        (["--model=bert", "--source={converted}"], r"is converted already; .*--export=hf"),
    ],
)
def test_wrong_flags(flags, message, sources, refused, tmp_path):
    path = sources["bert"].path
    flags = [flag.format(path=path, converted=sources["converted"]) for flag in flags]
    refused("convert", f"--source={path}", f"--out={tmp_path / 'out'}", *flags, message=message)


def test_no_place_for_the_result(sources, refused):
    source = f"--source={sources['bert'].path}"
    refused("convert", "--model=bert", source, message=r"required: --out")


def test_wrong_paths(refused, tmp_path, bert):
    def wrong(message, source=bert.path, out=tmp_path / "out", *more):
        flags = ("convert", "--model=bert", f"--source={source}", f"--out={out}", *more)
        refused(*flags, message=message)

    wrong(r"--source=.*/nowhere: no such file or folder", tmp_path / "nowhere")
    wrong(r"--out=.*/bert/out: is in --source=", out=bert.path / "out")
    wrong(r"--out=.*/bert: is in --source=", out=bert.path)
    wrong(r"--source=.* is in it; name another", out=tmp_path)
    wrong(r"--source=.* is in it", bert.path / "model.safetensors", bert.path, "--overwrite")
    file = tmp_path / "file"
    file.write_text("x")
    wrong(r"--out=.*/file: is a file; name a folder", out=file)
    wrong(r"file/out: Not a directory|file: File exists|Not a directory", out=file / "out")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    wrong(r"--out=.*/mine: exists; name a new folder, or add --overwrite", out=mine)
    message = r"--out=.*/mine: is not a folder of `mmqa convert`, so --overwrite does not"
    wrong(message, bert.path, mine, "--overwrite")
    (mine / "config.json").write_text(json.dumps({"model_type": "bert"}))
    wrong(message, bert.path, mine, "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "file", "mine"]


def test_files_that_are_not_whole(bert, refused, tmp_path):
    flags = (*bert.flags("bert"), f"--out={tmp_path / 'out'}")
    weights = bert.path / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        refused(*flags, message=r"model\.safetensors: not a whole safetensors file .*again")
    weights.unlink()
    refused(*flags, message=r"bert: holds neither model\.safetensors nor pytorch_model\.bin")
    index = bert.path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    refused(*flags, message=r"lacks model-00002-of-00002\.safetensors, which its index names")
    index.unlink()
    torch.save({"weights": np.ones(3)}, bert.path / "pytorch_model.bin")
    refused(*flags, message=r"pytorch_model\.bin: not a torch file of plain tensors")
    weights.write_bytes(whole)
    (bert.path / "config.json").write_text("{")
    refused(*flags, message=r"config\.json, line 1, column 2: not valid JSON")
    (bert.path / "config.json").unlink()
    refused(*flags, message=r"config\.json: no such file; the config\.json of transformers must")


def test_files_that_may_not_be_read(bert, refused, tmp_path, monkeypatch):
    def denied(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    flags = (*bert.flags("bert"), f"--out={tmp_path / 'out'}")
    with monkeypatch.context() as patch:
        patch.setattr("mmqa_jax.weights.formats.safetensors.safe_open", denied)
        refused(*flags, message=r"model\.safetensors: .*Permission denied")
    monkeypatch.setattr("pathlib.Path.mkdir", denied)
    refused(*flags, message=rf"{tmp_path}: Permission denied; check the path and its permissions")


def test_keys_and_shapes_that_do_not_fit(bert, refused, tmp_path):
    flags = (*bert.flags("bert"), f"--out={tmp_path / 'out'}")
    key = "encoder.layer.1.output.dense.bias"

    def wrong(arrays, message):
        save_file(arrays, bert.path / "model.safetensors")
        refused(*flags, message=message)

    fewer = {name: array for name, array in bert.arrays.items() if name != key}
    wrong(fewer, r"1 parameters without a tensor: layers/down/bias, layers \[1\]")
    wrong(bert.arrays | {"extra.weight": np.ones(2, "f4")}, r"1 keys without a rule: extra\.weight")
    wrong(bert.arrays | {key: np.ones(3, "f4")}, rf"1 shapes that differ: {key} \(3,\)")


@pytest.mark.parametrize(
    ("model", "other", "message"),
    [
        ("bert", "llama", r"config\.json: model_type is 'llama', expected 'bert'"),
        ("llama", "bert", r"config\.json: model_type is 'bert', expected 'llama'"),
        ("clip", "bert", r"config\.json: model_type is 'bert', expected 'clip'"),
        ("bart", "bert", r"config\.json: model_type is 'bert', expected 'bart'"),
        ("llava", "bert", r"config\.json: has neither `text_config`"),
        ("oscar", "bert", r"no checkpoint of Oscar: it lacks bert\.img_embedding\.weight, and"),
        ("vlp", "bert", r"no checkpoint of VLP: it lacks vis_embed\.0\.weight, vis_pe_embed\.0"),
        ("mcan", "vlp", r"no checkpoint of Prophet's MCAN: it lacks lang_adapt\.0\.weight, img_f"),
        ("mcan_openvqa", "vlp", r"no checkpoint of openvqa's MCAN: it lacks embedding\.weight"),
        ("modified_resnet", "vlp", r"has no 'visual\.layer1\.0\.conv1\.weight'"),
        ("bart", "vlp", r"keys without a rule: bert\.embeddings\.word_embeddings\.weight, .* more"),
        ("llama", "vlp", r"config\.json: no such file; the config\.json of transformers must"),
    ],
)
def test_a_checkpoint_of_another_model(model, other, message, sources, refused, tmp_path):
    flags = (f"--model={model}", f"--source={sources[other].path}", f"--out={tmp_path / 'out'}")
    refused("convert", *flags, message=message)


def test_llama_layouts_are_known_by_their_content(refused, tmp_path):
    two = tmp_path / "two"
    two.mkdir()
    for name in ("x.gguf", "y.gguf"):
        (two / name).write_bytes(b"GGUF")
    for name, data, message in (
        ("a.bin", b"GGUF" + bytes(40), r"a\.bin: not a whole GGUF file"),
        ("b.bin", bytes(64), r"b\.bin: not a llama2\.c file"),
        ("c.bin", b"PK\x03\x04" + bytes(40), r"config\.json: no such file; the config\.json of"),
        ("d.dat", b"hello, world", r"d\.dat: not a checkpoint that is known \(GGUF, llama2\.c"),
        ("two", None, r"two: holds 2 \.gguf files; give one of them"),
        ("two", b"one of them", r"x\.gguf: not a whole GGUF file"),
    ):
        path = tmp_path / name
        if name != "two":
            path.write_bytes(data)
        elif data:
            (two / "y.gguf").unlink()
        flags = ("convert", "--model=llama", f"--source={path}", f"--out={tmp_path / 'out'}")
        refused(*flags, message=message)


def test_rotary_tables_that_contradict_the_config(refused, tmp_path):
    source = make_source("mcan", tmp_path / "mcan")
    flags = [flag for flag in source.flags("mcan") if "rope_base" not in flag]
    message = r"rotary positions of shape \(9, 16\) that are not those of a grid of 3 x 3"
    refused(*flags, f"--out={tmp_path / 'out'}", message=message)


def test_a_disk_without_room(bert, refused, tmp_path, monkeypatch):
    out = tmp_path / "new" / "out"
    flags = (*bert.flags("bert"), f"--out={out}")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        ended = mmqa(*flags)
        assert ended.code == 1  # the run failed, the input is right
        assert "0.0 GiB will be written, the disk has 0.0 GiB left" in ended.err

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mmqa_jax.weights.convert.write_weights", full)
    ended = mmqa(*flags)
    assert ended.code == 1
    assert ended.err.startswith(f"mmqa: {out}: cannot be written, because the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]
