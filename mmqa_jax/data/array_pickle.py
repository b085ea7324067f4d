"""Foreign pickles of arrays, read without running their code.

A pickle names functions and classes for the reader to call. Those that make numpy arrays, torch
tensors (read as numpy arrays, torch is not needed) and OrderedDicts are replaced by functions of
this file; any other is refused by name. Plain containers, numbers and strings need none.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError

# A storage inside a pickle is a stream of torch.save's format before 1.6: four pickles (this
# number, the version, the machine, the object), the storage's name, its length, its values.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}


class ForeignObject(UserError):
    """The pickle contains something other than arrays; it may be an attack."""


def load_arrays(path: str | os.PathLike) -> Any:
    """Reads a pickle of plain containers, numbers, strings, numpy arrays and torch tensors.

    Tensors become numpy arrays, whatever device they were on.

    Raises:
      ForeignObject: it names any other class or function.
      UserError: no such file, or not a complete pickle.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check the path.") from error
    except _Refused as error:
        raise ForeignObject(
            f"{path}: contains {error}, which is not an array; only arrays, numbers, strings and "
            "plain containers of them are read, write the file again with only these."
        ) from error
    # A broken pickle can raise nearly any error.
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(
            f"{path}: not a complete pickle of arrays ({reason}); fetch it again."
        ) from error


class _Refused(pickle.UnpicklingError):
    """Names what was refused."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


class _StorageUnpickler(pickle.Unpickler):
    """The object of a legacy stream: a storage, named by its type, its key and its length."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.cuda") and name in _STORAGES:
            return _STORAGES[name]
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, count, *view = pid
        if kind != "storage" or dtype not in _STORAGES.values() or view not in ([], [None]):
            raise pickle.UnpicklingError("a tensor's storage is not in torch's format")
        return np.dtype(dtype), key, count


def _storage(data: bytes) -> np.ndarray:
    """torch.storage._load_from_bytes: the values of a storage, one-dimensional."""
    file = io.BytesIO(data)
    magic, _version, _machine = (_StorageUnpickler(file).load() for _ in range(3))
    if magic != _LEGACY_MAGIC:
        raise pickle.UnpicklingError("a tensor's storage is not in torch's format")
    dtype, key, count = _StorageUnpickler(file).load()
    keys = _StorageUnpickler(file).load()
    length = int.from_bytes(file.read(8), "little", signed=True)
    values = file.read()
    if keys != [key] or length != count or len(values) != count * dtype.itemsize:
        raise pickle.UnpicklingError(f"a tensor's storage has {len(values)} bytes, not {count}")
    return np.frombuffer(values, dtype)


def _tensor(storage: np.ndarray, offset: int, size: tuple, stride: tuple, *_: Any) -> np.ndarray:
    """torch._utils._rebuild_tensor_v2: a copy of a strided view of its storage."""
    sizes, strides = np.array(size, np.int64), np.array(stride, np.int64)
    last = offset + int(((sizes - 1) * strides).sum())
    valid = sizes.shape == strides.shape and (strides >= 0).all() and (sizes >= 0).all()
    if not valid or offset < 0 or (sizes.all() and last >= len(storage)):
        raise pickle.UnpicklingError(f"a tensor of size {tuple(size)} overlaps its storage")
    if not sizes.all():
        return np.zeros(tuple(size), storage.dtype)
    start = storage[offset:]
    bytes_ = tuple(int(step) * storage.itemsize for step in strides)
    view = np.lib.stride_tricks.as_strided(start, tuple(map(int, sizes)), bytes_, writeable=False)
    return view.copy()


def _empty_array(kind: type, shape: tuple, _dtype: Any) -> np.ndarray:
    """numpy's _reconstruct: an array whose contents follow in the pickle."""
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise pickle.UnpicklingError("an array is not in numpy's format")
    return np.ndarray((0,), "b")


def _array(data: Any, dtype: np.dtype, shape: tuple, order: str) -> np.ndarray:
    """numpy's _frombuffer (pickle protocol 5)."""
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def _scalar(dtype: np.dtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype)[0]


def _bytes(text: str, encoding: str) -> bytes:
    """_codecs.encode, by which pickles of protocol 2 write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written as {encoding}")
    return text.encode("latin1")


_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): _bytes,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
}
for _core in ("numpy.core", "numpy._core"):  # before numpy 2, and since
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = _empty_array
    _ALLOWED[f"{_core}.multiarray", "scalar"] = _scalar
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = _array
