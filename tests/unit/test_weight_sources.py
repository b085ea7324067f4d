"""One reader for every published file format: the same tensors, little memory, clear refusals."""

import json
import pickle
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from mmqa_jax.weights.formats.safetensors import SafetensorsSource
from mmqa_jax.weights.formats.torch import TorchSource
from mmqa_jax.weights.layouts import gguf_file, open_source
from tests.refusals import refuses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript's

_STATUS = Path("/proc/self/status")


def tensors():
    rng = np.random.default_rng(0)
    return {
        "layers.0.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "layers.1.weight": rng.normal(size=(4, 2)).astype(np.float16),
        "layers.2.weight": rng.normal(size=(2, 3, 2)).astype(ml_dtypes.bfloat16),
        "layers.2.steps": np.array(7, np.int64),
        "layers.2.mask": np.array([True, False]),
        "empty": np.zeros((0, 4), np.float32),
    }


def to_torch(arrays):
    """Torch's tensors, one of them a transposed view: what torch saves need not be contiguous."""
    found = {}
    for key, array in arrays.items():
        if array.dtype == ml_dtypes.bfloat16:
            found[key] = torch.tensor(array.astype(np.float32)).bfloat16()
        else:
            found[key] = torch.tensor(array)
    turned = "layers.0.weight"
    return found | {key: found[key].T.contiguous().T for key in found.keys() & {turned}}


def torchscript(arrays):
    root = torch.nn.Module()
    for key, tensor in to_torch(arrays).items():
        module, (*parts, name) = root, key.split(".")
        for part in parts:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_buffer(name, tensor)
    return torch.jit.script(root)


def sharded(folder, stem, suffix, save):
    arrays = tensors()
    names = list(arrays)
    parts = {f"{stem}-1{suffix}": names[:2], f"{stem}-2{suffix}": names[2:]}
    for name, keys in parts.items():
        save({key: arrays[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return folder


def saved(layout, folder):
    """Writes the tensors in a layout and returns what to open."""
    plain = to_torch(tensors())
    if layout == "safetensors":
        save_file(tensors(), folder / "x.safetensors")
        return folder / "x.safetensors"
    if layout == "safetensors folder":
        save_file(tensors(), folder / "model.safetensors")
        (folder / "pytorch_model.bin").write_bytes(b"read neither by transformers")
        return folder
    if layout == "safetensors shards":
        return sharded(folder, "model", ".safetensors", save_file)
    if layout == "safetensors index":
        return saved("safetensors shards", folder) / "model.safetensors.index.json"
    if layout == "torch folder":
        torch.save(plain, folder / "pytorch_model.bin")
        return folder
    if layout == "torch shards":
        return sharded(
            folder, "pytorch_model", ".bin", lambda part, path: torch.save(to_torch(part), path)
        )
    if layout == "torch index":
        return saved("torch shards", folder) / "pytorch_model.bin.index.json"
    if layout == "torchscript":
        torch.jit.save(torchscript(tensors()), str(folder / "RN50.pt"))
        return folder / "RN50.pt"
    if layout == "training state":
        content = {"state_dict": plain, "epoch": 3, "optimizer": {"param_groups": [{"lr": 0.1}]}}
        torch.save(content, folder / "epoch3.pkl")
        return folder / "epoch3.pkl"
    old = layout == "old torch"
    torch.save(plain, folder / "x.pth", _use_new_zipfile_serialization=not old)
    return folder / "x.pth"


LAYOUTS = (
    "safetensors",
    "safetensors folder",
    "safetensors shards",
    "safetensors index",
    "torch",
    "old torch",
    "training state",
    "torchscript",
    "torch folder",
    "torch shards",
    "torch index",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_the_same(layout, tmp_path):
    source = open_source(saved(layout, tmp_path))
    specs = source.specs()
    want = tensors()
    assert specs.keys() == want.keys()
    for key, array in want.items():
        got = source.read(key)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert (specs[key].dtype, specs[key].shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes(), key
        np.testing.assert_array_equal(source.read(key), got)  # a second time


@pytest.mark.parametrize("layout", ["safetensors", "torch", "old torch", "torchscript"])
def test_files_cut_short_are_named(layout, tmp_path):
    path = saved(layout, tmp_path)
    data = path.read_bytes()
    said = "whole safetensors file" if layout == "safetensors" else "torch file of plain tensors"
    for size in (*range(0, len(data), 61), len(data) - 1):
        path.write_bytes(data[:size])
        refuses(f"{path.name}: not a {said}", open_source, path)


def test_a_file_cut_short_after_it_was_opened_is_named(tmp_path):
    path = saved("safetensors", tmp_path)
    source = open_source(path)
    last = max(source.specs(), key=lambda key: source._locations[key].offset)
    path.write_bytes(path.read_bytes()[:-1])
    refuses(rf"x\.safetensors, tensor '{last}': \d+ bytes are left", source.read, last)
    path.unlink()
    refuses(r"x\.safetensors: cannot be read any more", source.read, last)


def test_folders_without_a_checkpoint_and_broken_indices(tmp_path):
    refuses(r"neither model\.safetensors nor pytorch_model\.bin", open_source, tmp_path)
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = tmp_path / f"{name}.index.json"
        for content in ("[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'):
            index.write_text(content)
            for path in (index, tmp_path):
                refuses(rf"{name}\.index\.json: has no `weight_map`", open_source, path)
        index.unlink()
        refuses(rf"{name}\.index\.json: no such file", open_source, index)


@pytest.mark.filterwarnings("ignore")  # tracing warns of its own batch norm
def test_a_torchscript_archive_has_the_names_that_torch_reads(tmp_path):
    """Of parameters, buffers and a module under two names; other attributes are none of them."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 2)
            self.norm = torch.nn.BatchNorm2d(4)
            self.again = self.norm
            self.sizes = [1, 2]

        def forward(self, x):
            return self.again(self.norm(self.conv(x))) * self.sizes[1]

    path = tmp_path / "net.pt"
    for net in (torch.jit.script(Net().half()), torch.jit.trace(Net(), torch.ones(1, 3, 4, 4))):
        torch.jit.save(net, str(path))
        want = torch.jit.load(path).state_dict()
        source = open_source(path)
        assert source.specs().keys() == want.keys()
        for key, tensor in want.items():
            np.testing.assert_array_equal(source.read(key), tensor.numpy())


def test_a_torchscript_archive_with_other_objects_is_refused(tmp_path):
    class Run:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    path = tmp_path / "net.pt"
    for content, reason in ((Run(), "holds a"), ({}, "holds no module")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("net/constants.pkl", b"")
            archive.writestr("net/data.pkl", pickle.dumps(content, protocol=2))
        refuses(rf"net\.pt: not a torch file .* \({reason}.*; fetch", open_source, path)
    assert not (tmp_path / "touched").exists()


def test_a_compressed_torchscript_archive_is_refused(tmp_path):
    """torch stores tensors as they are; their bytes are mapped where they lie."""
    path = tmp_path / "net.pt"
    torch.jit.save(torchscript(tensors()), str(path))
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    refuses(r"net\.pt, net/data.*: is compressed, .*; save", open_source, path)


def test_a_torch_file_without_torch(tmp_path, monkeypatch):
    path = saved("torch", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    refuses(r"x\.pth: reading a torch file .* `pip install torch`, or", open_source, path)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    folder = sharded(tmp_path, "model", ".safetensors", save_file)
    save_file(tensors(), folder / "model-1.safetensors")
    refuses(r"tensor 'l.*' is in two of its files; keep one of them", open_source, folder)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    folder = sharded(tmp_path, "model", ".safetensors", save_file)
    (folder / "model-1.safetensors").unlink()
    missing = r"lacks model-1\.safetensors, which its index names; fetch the missing files, or give"
    refuses(missing, open_source, folder)
    refuses(missing, open_source, folder / "model.safetensors.index.json")


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    refuses(r"absent: cannot be read .*; check the path", gguf_file, tmp_path / "absent")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    refuses(rf"{tmp_path}: holds 2 \.gguf files; give one .*a\.gguf", gguf_file, tmp_path)


@pytest.mark.filterwarnings("ignore")  # torch calls these kinds of tensors unfinished
def test_tensors_that_numpy_cannot_hold_are_named(tmp_path):
    path = tmp_path / "x.pt"
    odd = (
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.complex64),
    )
    for tensor in odd:
        torch.save({"a": torch.ones(2), "odd": tensor}, path)
        refuses(r"x\.pt, tensor 'odd': type torch\..* not supported", open_source, path)


def test_a_torch_archive_with_a_part_that_is_too_short_is_refused(tmp_path):
    """torch maps the file and reads what follows the part."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(4), "same": torch.ones(4)[:2], "negative": -torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data[:8] if name.endswith("data/0") else data)
    refuses(r"x\.pt: a part of it should hold 16 bytes .* has 8", open_source, path)
    torch.save({1: torch.ones(4)}, path)
    refuses("not a state dict", open_source, path)
    torch.save({"a": torch.ones(3)._neg_view()}, path)
    np.testing.assert_array_equal(open_source(path).read("a"), [-1, -1, -1])


@pytest.mark.skipif(not _STATUS.exists(), reason="Linux counts resident pages there")
@pytest.mark.parametrize("layout", ["safetensors", "torch", "torchscript"])
def test_what_was_read_does_not_stay_in_memory(layout, tmp_path, monkeypatch):
    """Of a file of 64 MiB at most a few stay resident, as tensors or as pages of a mapping."""
    monkeypatch.setattr("mmqa_jax.weights.formats.torch._MAPPED_BYTES", 8 << 20)
    arrays = {f"w{n}": np.full((1 << 20,), n, np.float32) for n in range(16)}
    path = tmp_path / "x"
    if layout == "torch":
        torch.save({key: torch.from_numpy(a) for key, a in arrays.items()}, path)
        source = TorchSource([path])
    elif layout == "torchscript":
        torch.jit.save(torchscript(arrays), str(path))
        source = TorchSource([path])
    else:
        save_file(arrays, path)
        source = SafetensorsSource(path)
    before = resident()
    for key, array in arrays.items():
        assert source.read(key)[-1] == array[-1]
    assert resident() - before < 20 << 20


def resident():
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) << 10
