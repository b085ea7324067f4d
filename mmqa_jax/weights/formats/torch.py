"""Torch checkpoint files read one tensor at a time, without running any of their code."""

from __future__ import annotations

import collections
import itertools
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import SHARED, check_claim

if TYPE_CHECKING:
    import torch  # an extra: plain installations lack it

TORCH_SUFFIXES = (".bin", ".pkl", ".pt", ".pth")

_STORAGE = re.compile(r"(^|/)data/\d+$")
_TENSORS = re.compile(r"(^|/)data(\.pkl$|/)")  # of an archive
_MAPPED_BYTES = 1 << 28  # read from a mapping before it is mapped again


class TorchFile:
    """One torch file of named tensors, memory-mapped where its format allows it.

    The file holds a state dict, a training state whose `state_dict` or `model` is one (beside
    optimizer and counters, as research code saves it), or a TorchScript archive (OpenAI's CLIP).

    Pages of a mapping count as resident memory once they are read, so the mapping is renewed
    after every 256 MiB: reading a whole model does not keep it in memory. Only the format before
    torch 1.6 is no zip archive and cannot be mapped; it is in memory while it is read.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"{path}: no such file; check the path.")
        self._tensors, self._mapped = _read_tensors(self.path)
        self._bytes = 0
        for key, tensor in self._tensors.items():
            if _numpy_dtype(tensor) is None or tensor.is_complex() or not _in_storage(tensor):
                raise UserError(
                    f"{path}, tensor {key!r}: type {tensor.dtype}, {tensor.layout}, on the device "
                    f"{tensor.device.type} is not "
                    "supported; convert it to a plain float32, float16 or bfloat16 tensor."
                )
        self._check_claims()

    def _check_claims(self) -> None:
        """Refuses tensors that repeat their values (strides of 0) to more than the file holds."""
        held, total = self.path.stat().st_size, 0
        for key, tensor in self._tensors.items():
            size = tensor.numel() * tensor.element_size()
            check_claim(f"{self.path}, tensor {key!r}", size, held)
            total += size
        check_claim(f"{self.path}, all of its tensors", total, held, times=SHARED)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        return {
            key: jax.ShapeDtypeStruct(tuple(tensor.shape), _numpy_dtype(tensor))
            for key, tensor in self._tensors.items()
        }

    def read(self, key: str) -> np.ndarray:
        """One tensor, a copy: nothing depends on the file afterwards."""
        array = _to_numpy(self._tensors[key])
        self._bytes += array.nbytes
        if self._mapped and self._bytes > _MAPPED_BYTES:
            self._tensors, self._mapped = _read_tensors(self.path)
            self._bytes = 0
        return array


class TorchSource:
    """Tensors of torch files, read one at a time.

    Args:
      files: each holds tensors under other names (one file, or transformers' shards).
      name: what messages call them; the first file by default.
    """

    def __init__(self, files: Sequence[str | os.PathLike], name: str | None = None):
        self.name = name or str(files[0])
        self._files: dict[str, TorchFile] = {}
        for path in files:
            file = TorchFile(path)
            for key in file.specs():
                if key in self._files:
                    raise UserError(
                        f"{path}: tensor {key!r} is in another file of {self.name} too; "
                        "keep one of them."
                    )
                self._files[key] = file

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        specs = {}
        for file in dict.fromkeys(self._files.values()):
            specs |= file.specs()
        return specs

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from its file."""
        return self._files[key].read(key)


def _read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """The named tensors of a file, and whether they are a mapping of it."""
    torch = _torch(path)
    _check_archive(path)

    try:
        mapped = zipfile.is_zipfile(path)
        if mapped and is_torchscript(path):
            content = torchscript_tensors(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    # Instructions of a broken pickle end in errors of nearly any kind.
    except Exception as error:
        reason = getattr(error, "strerror", None) or re.split(r"[.\n]", str(error), maxsplit=1)[0]
        raise UserError(
            f"{path}: not a torch file of plain tensors ({reason}); fetch it again or convert it "
            "to safetensors."
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    named = isinstance(content, dict) and all(isinstance(key, str) for key in content)
    if not named or not all(torch.is_tensor(t) for t in content.values()):
        raise UserError(
            f"{path}: not a state dict (names and tensors), nor a training state that holds one "
            "as `state_dict` or `model`; give only the weights."
        )
    if mapped and not is_torchscript(path):
        _check_parts(path, content)
    return content, mapped


def _check_parts(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses an archive with a part that is too short: torch would read what follows it."""
    stored = (t.untyped_storage() for t in tensors.values() if _in_storage(t))
    storages = {storage.data_ptr(): storage.nbytes() for storage in stored}
    with zipfile.ZipFile(path) as archive:
        parts = [p.file_size for p in archive.infolist() if _STORAGE.search(p.filename)]
    sizes = (sorted(side, reverse=True) for side in (storages.values(), parts))
    for wanted, size in itertools.zip_longest(*sizes, fillvalue=0):
        if wanted > size:
            raise UserError(
                f"{path}: a part of it should hold {wanted:,} bytes of tensors, and has {size:,}; "
                "it is damaged, fetch it again."
            )


def _in_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are in the file one by one."""
    return tensor.layout is _torch().strided and tensor.device.type == "cpu"


def _check_archive(path: Path) -> None:
    """Refuses a zip archive whose tensors claim more than it holds; torch stores them as they are.

    (It compresses the code of a TorchScript archive, which is not read.)
    """
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            parts = [part for part in archive.infolist() if _TENSORS.search(part.filename)]
    except (OSError, ValueError, zipfile.BadZipFile):
        return  # torch says what is wrong with it
    for part in parts:
        if part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size:
            raise UserError(
                f"{path}, {part.filename}: is compressed, which torch never does; save the tensors "
                "with torch.save, or fetch the file again."
            )
    check_claim(str(path), sum(part.file_size for part in parts), path.stat().st_size)


def _torch(path: Path | None = None):
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"{path}: reading a torch file needs torch; run `pip install torch`, or convert "
            "the file to safetensors."
        ) from error
    return torch


def _numpy_dtype(tensor: torch.Tensor) -> np.dtype | None:
    try:
        return np.dtype(str(tensor.dtype).removeprefix("torch."))
    except TypeError:  # torch's quantized types
        return None


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy as numpy, with ml_dtypes' bfloat16 and float8 for torch's."""
    tensor, dtype = tensor.detach().resolve_neg(), _numpy_dtype(tensor)
    if dtype.kind == "V":  # numpy does not know it of itself, nor torch how to hand it over
        same_size = {1: _torch().uint8, 2: _torch().int16}[dtype.itemsize]
        return tensor.contiguous().view(same_size).numpy().view(dtype).copy()
    return tensor.numpy().copy()


# TorchScript archives (OpenAI's CLIP) as tensors that are mappings of the file.
#
# `torch.jit.load` would read the whole archive into memory, and run code that it holds. The
# archive is a zip of storages `data/*` as they are in memory and of `data.pkl`: the module as
# nested objects of classes `__torch__.*` (pytorch torch/csrc/jit/docs/serialization.md).


_STORAGES = {  # name of a class -> dtype, an attribute of torch
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: lengths of name and extra field


def is_torchscript(path: Path) -> bool:
    """Whether a zip archive is TorchScript's rather than of `torch.save`."""
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def torchscript_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a module under the names of its `state_dict`; no code of the file is run.

    Raises:
      Exception: of nearly any kind, where the file is broken.
    """
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        entry = next(n for n in archive.namelist() if n.count("/") == 1 and n.endswith("/data.pkl"))
        mapping = _torch(path).UntypedStorage.from_file(str(path), False, path.stat().st_size)
        storages = {}
        for info in archive.infolist():
            folder, _, key = info.filename.rpartition("/")
            if f"{folder}.pkl" != entry:
                continue
            file.seek(info.header_offset)
            lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            start = info.header_offset + _LOCAL_HEADER.size + sum(lengths)
            storages[key] = mapping[start : start + info.file_size]
        with archive.open(entry) as data:
            module = _Unpickler(data, storages).load()
    if not isinstance(module, _Module):
        raise ValueError("holds no module")
    return dict(_tensors(module))


class _Module:
    """Stands for any class of an archive: its attributes are parameters, buffers and modules."""


class _Unpickler(pickle.Unpickler):
    """Knows what a TorchScript module consists of, and refuses everything else."""

    def __init__(self, file: Any, storages: dict[str, torch.UntypedStorage]):
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "__torch__":
            return type(name, (_Module,), {})
        if module == "torch.jit._pickle":  # a list or dict with the type of its items
            return lambda value, *types: value
        if module == "torch" and name in _STORAGES:
            return getattr(_torch(), _STORAGES[name])
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise pickle.UnpicklingError(f"holds a {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[torch.UntypedStorage, torch.dtype]:
        _, dtype, key, *_ = pid
        return self._storages[key], dtype


def _tensor(storage, offset, size, stride, *_) -> torch.Tensor:
    data, dtype = storage
    return _torch().empty(0, dtype=dtype).set_(data, offset, tuple(size), tuple(stride))


def _tensors(module: _Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(module).items():
        if _torch().is_tensor(value):
            yield f"{prefix}{name}", value
        elif isinstance(value, _Module):
            yield from _tensors(value, f"{prefix}{name}.")
