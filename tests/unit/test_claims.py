"""Files whose headers promise more than the file holds: refused by name, fast, in little memory."""

import _codecs
import io
import json
import pickle
import resource
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch

from mmqa_jax.core.array_pickle import load_arrays, read_npz
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import COMPRESSION, SHARED, check_claim
from mmqa_jax.weights.formats.gguf import GGUFSource
from mmqa_jax.weights.formats.llama2c import Llama2cSource
from mmqa_jax.weights.formats.orbax_reader import stored_specs
from mmqa_jax.weights.formats.safetensors import SafetensorsSource
from mmqa_jax.weights.formats.torch import TorchSource
from tests.refusals import refuses

SECONDS, MIB = 2.0, 64  # generous to a busy machine; a second and a few MB elsewhere


def test_the_bound():
    check_claim("f", 100, 100)
    check_claim("f", 100 * SHARED, 100, times=SHARED)
    refuses(r"^f: claims 1,001 bytes, but the file has 1,000; ", check_claim, "f", 1_001, 1_000)
    # What deflate makes of zeros passes.
    zeros = io.BytesIO()
    np.savez_compressed(zeros, x=np.zeros(1 << 20, np.uint8))
    assert COMPRESSION * len(zeros.getvalue()) > 1 << 20


# GGUF: magic, version, numbers of tensors and of metadata, metadata, tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(pairs: bytes = b"", tensors: bytes = b"", count=None, pair_count=None) -> bytes:
    counts = int(bool(tensors)) if count is None else count
    head = struct.pack("<4sIQQ", b"GGUF", 3, counts, pair_count or int(bool(pairs)))
    return head + pairs + tensors + b"\0" * 64


def array(kind: int, count: int) -> bytes:
    return text(b"a") + struct.pack("<IIQ", 9, kind, count)


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(b"token_embd.weight") + axes + struct.pack("<IQ", kind, offset)


GGUF = {
    "array of 2^50 numbers": gguf(array(4, 1 << 50)),
    "array of 2^50 strings": gguf(array(8, 1 << 50)),
    "array of arrays": gguf(array(9, 1)),
    "name of 2^60 bytes": gguf(struct.pack("<Q", 1 << 60)),
    "string of 2^60 bytes": gguf(text(b"a") + struct.pack("<IQ", 8, 1 << 60)),
    "2^40 metadata": gguf(pair_count=1 << 40),
    "2^40 tensors": gguf(count=1 << 40),
    "tensor of 2^80 values": gguf(tensors=tensor((1 << 40, 1 << 40))),
    "tensor of 2^32 axes": gguf(tensors=text(b"t") + struct.pack("<I", 0xFFFFFFFF)),
    "tensor at 2^50": gguf(tensors=tensor((4,), offset=1 << 50)),
    "quantization that is none": gguf(tensors=tensor((4,), kind=999)),
    "alignment of 0": gguf(text(b"general.alignment") + struct.pack("<II", 4, 0)),
    "type of metadata that is none": gguf(text(b"a") + struct.pack("<I", 77)),
    "the other byte order": struct.pack(">4sIQQ", b"GGUF", 3, 1 << 40, 1 << 40),
    "nothing but its name": b"GGUF",
}


def test_gguf(tmp_path, refused):
    for name, content in GGUF.items():
        (tmp_path / "a.gguf").write_bytes(content)
        refused(name, GGUFSource, tmp_path / "a.gguf")


def test_where_a_gguf_files_tensors_start(tmp_path):
    """At the next multiple of its alignment, here behind the end of the file."""
    alignment = text(b"general.alignment") + struct.pack("<II", 4, 160)
    other = text(b"general.file_type") + struct.pack("<II", 4, 160)
    (tmp_path / "a.gguf").write_bytes(gguf(alignment, tensor((10,))))
    refuses(r"tensor 'token_embd\.weight'", GGUFSource, tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(gguf(other, tensor((10,))))
    GGUFSource(tmp_path / "b.gguf")


def test_safetensors(tmp_path, refused):
    def content(shape, end, length=None):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
        head = json.dumps({"a": entry}).encode()
        return struct.pack("<Q", length or len(head)) + head + b"\0" * 16

    cases = {
        "shape": content([1 << 40], 1 << 42),
        "shape with the file's offsets": content([1 << 40], 16),
        "shape that overflows": content([1 << 33, 1 << 33, 0x40000000], 16),
        "length of the header": content([4], 16, 1 << 60),
        "offset": content([4], 1 << 62),
    }
    for name, data in cases.items():
        (tmp_path / "a.safetensors").write_bytes(data)
        refused(name, SafetensorsSource, tmp_path / "a.safetensors")


def compressed(file: Path) -> None:
    """The same archive with its parts deflated, and 64 MiB of zeros in the pickle's place."""
    parts = {}
    with zipfile.ZipFile(file) as archive:
        for part in archive.namelist():
            parts[part] = archive.read(part)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, data in parts.items():
            archive.writestr(part, bytes(1 << 26) if part.endswith("data.pkl") else data)


def test_torch(tmp_path, refused):
    file = tmp_path / "a.pt"
    for legacy in (False, True):
        options = {"_use_new_zipfile_serialization": not legacy}
        torch.save({"a": torch.zeros(1).expand(1 << 29)}, file, **options)
        assert file.stat().st_size < 2_000
        refused(f"stride of 0, legacy {legacy}", TorchSource, [file])
        storage = torch.zeros(1 << 12)
        torch.save({str(n): storage for n in range(100)}, file, **options)
        refused(f"one storage 100 times, legacy {legacy}", TorchSource, [file])
        torch.save({"a": torch.zeros(123_457)}, file, **options)
        data = file.read_bytes()
        number = struct.pack("<i", 123_457)
        file.write_bytes(data.replace(number, struct.pack("<i", 0x7FFFFFFF))[:4096])
        refused(f"shape and storage, legacy {legacy}", TorchSource, [file])
    torch.save({"a": torch.zeros(4), "b": torch.zeros(4)}, file)
    compressed(file)
    refused("a compressed part", TorchSource, [file])
    # Several names of one storage are no harm, nor is a transposed tensor.
    table = torch.zeros(300, 20)
    torch.save({"a": table, "b": table, "c": table.T}, file)
    assert TorchSource([file]).specs()["c"].shape == (20, 300)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_torchscript(tmp_path, refused):
    class Repeats(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(1).expand(1 << 29))

    torch.jit.save(torch.jit.script(Repeats()), str(tmp_path / "a.pt"))
    assert (tmp_path / "a.pt").stat().st_size < 20_000
    refused("stride of 0", TorchSource, [tmp_path / "a.pt"])


def test_llama2c(tmp_path, refused):
    for version in (0, 1):
        magic = struct.pack("<Ii", 0x616B3432, 1) if version else b""
        most = 0x7FFFFFFF
        for name, numbers in {
            "layers": (4, 4, most, 2, 2, 3, 5),
            "vocabulary": (4, 4, 1, 2, 2, most, 5),
            "width": (most - 1, 4, 1, 1, 1, 3, 5),
            "all": (most - 1, most, most, 1, 1, most, most),
        }.items():
            content = magic + struct.pack("<7i", *numbers)
            (tmp_path / "a.bin").write_bytes(content.ljust(512, b"\0"))
            refused(f"{name}, version {version}", Llama2cSource, tmp_path / "a.bin")


@pytest.mark.parametrize("chunk", [1 << 20, 1 << 40])
def test_orbax(tmp_path, refused, chunk):
    shape = [16] if chunk == 1 << 40 else [1 << 40]
    metadata = {"shape": shape, "chunks": [chunk], "dtype": "<f4"}
    kvstore = {"driver": "file", "path": f"{tmp_path / 'kernel'}/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
    tensorstore.open(spec, create=True).result()
    tree = {"('kernel',)": {"key_metadata": [{"key": "kernel", "key_type": 2}]}}
    content = {"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": False}
    (tmp_path / "_METADATA").write_text(json.dumps(content))
    refused("zarr", stored_specs, tmp_path)


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_array_pickles(tmp_path, refused):
    file = tmp_path / "a.pkl"
    storage = torch.zeros(1).untyped_storage()
    rebuild = torch._utils._rebuild_tensor_v2
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    shared = torch.zeros(1 << 12).storage()
    encoded = "a" * (1 << 14)
    cases = {
        "stride of 0": Call(rebuild, typed, 0, (1 << 29,), (0,), False, {}),
        "strides that overflow": Call(rebuild, typed, 0, (1 << 40,), (1 << 40,), False, {}),
        "an array that is called": Call(np.ndarray, (1 << 28,), "f8"),
        "one text 100 times": [Call(_codecs.encode, encoded, "latin1") for _ in range(100)],
        "one storage of 100 tensors": [
            Call(rebuild, shared, 0, (1 << 12,), (1,), False, {}) for _ in range(100)
        ],
    }
    for name, value in cases.items():
        file.write_bytes(pickle.dumps({"x": value}))
        refused(name, load_arrays, file)


class Built(Call):
    """Pickled as the call of a function, and the state of what it returns."""

    def __init__(self, function, arguments, state):
        self.call = function, arguments, state


def objects(shape, values):
    state = 1, shape, np.dtype("O"), False, values
    return Built(*np.zeros(0).__reduce__()[:2], state)


def instructions(value):
    return pickle.dumps(value, 4)[2:-1]


def test_pickles_that_claim_much(tmp_path, refused):
    file = tmp_path / "a.pkl"
    begin, end = b"\x80\x04", b"."
    claims = {
        "a frame": pickle.FRAME + struct.pack("<Q", 1 << 40) + b"N",
        "bytes": pickle.BINBYTES8 + struct.pack("<Q", 1 << 33) + b"a",
        "text": pickle.BINUNICODE8 + struct.pack("<Q", 1 << 33) + b"a",
        "an array of bytes": pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 33) + b"a",
        "objects": instructions(objects((1 << 28,), [])),
        "a type beyond its size": instructions(
            Built(np.dtype, ("V8",), (3, "|", (np.dtype("f4"), (1 << 29,)), None, None, 8, 1, 0))
        ),
    }
    for name, content in claims.items():
        file.write_bytes(begin + content + end)
        refused(name, load_arrays, file)
    # The number that an object is remembered by costs nothing.
    file.write_bytes(begin + b"N" + pickle.LONG_BINPUT + struct.pack("<I", 1 << 28) + end)
    tracemalloc.start()
    assert load_arrays(file) is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    file.write_bytes(pickle.dumps(objects((2,), [1, "a"]), 4))
    assert load_arrays(file).tolist() == [1, "a"]
    file.write_bytes(pickle.dumps({"x": np.arange(3, dtype=">f4"), "y": bytearray(b"abc")}, 5))
    found = load_arrays(file)
    assert found["x"].tolist() == [0, 1, 2]
    assert found["y"] == b"abc"


def test_npz(tmp_path, refused):
    file = tmp_path / "a.npz"

    def write(shape, data=b"\0" * 16, compression=zipfile.ZIP_STORED):
        header = io.BytesIO()
        facts = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, facts)
        with zipfile.ZipFile(file, "w", compression) as archive:
            archive.writestr("x.npy", header.getvalue() + data)

    for shape in ((1 << 40,), (1 << 40, 1 << 40), (1 << 29,)):
        write(shape)
        refused(str(shape), lambda path: read_npz(path, "x"), file)
    write((4,))
    content = file.read_bytes()  # the archive's own size of the part
    size = struct.pack("<I", 128 + 16)
    assert size in content
    file.write_bytes(content.replace(size, struct.pack("<I", 0x7FFFFFFF)))
    refused("the archive's size", lambda path: read_npz(path, "x"), file)
    write((4,), np.arange(4, dtype="<f4").tobytes(), zipfile.ZIP_DEFLATED)
    np.testing.assert_array_equal(read_npz(file, "x"), [0, 1, 2, 3])


def test_npz_of_a_later_format(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", np.lib.format.magic(3, 0) + b"\0" * 64)
    refuses(r"^format version \(3, 0\)$", read_npz, tmp_path / "a.npz", "x", error=ValueError)


@pytest.fixture
def refused():
    """Checks that a reader refuses a file in one sentence, in a moment and in little memory."""

    def check(name: str, read, file) -> None:
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        with pytest.raises(UserError) as caught:
            read(file)
        took = time.monotonic() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        path = file[0] if isinstance(file, list) else file
        assert str(path) in str(caught.value), name
        assert took < SECONDS, f"{name}: {took:.1f} s"
        assert grown < MIB, f"{name}: {grown:.0f} MiB"

    return check
