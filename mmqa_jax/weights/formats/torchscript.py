"""TorchScript archives (OpenAI's CLIP) as tensors that are mappings of the file.

`torch.jit.load` would read the whole archive into memory, and run code that it holds. The archive
is a zip of storages `data/*` as they are in memory and of `data.pkl`: the module as nested objects
of classes `__torch__.*` (pytorch torch/csrc/jit/docs/serialization.md).
"""

from __future__ import annotations

import collections
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
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
        mapping = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
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
            return _STORAGES[name]
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
    return torch.empty(0, dtype=dtype).set_(data, offset, tuple(size), tuple(stride))


def _tensors(module: _Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, _Module):
            yield from _tensors(value, f"{prefix}{name}.")
