"""Foreign pickles of arrays, read without running their code.

A pickle names functions and classes for the reader to call. Those that make numpy arrays, torch
tensors (read as numpy arrays, torch is not needed) and OrderedDicts are replaced by functions of
this file; any other is refused by name. Plain containers, numbers and strings need none.
"""

import collections
import functools
import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import COMPRESSION, SHARED, check_claim

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


# Stands for numpy.ndarray, which would make an array of any size if it could be called.
_NDARRAY = object()
Copy = Callable[[int], None]  # is told the bytes of a copy before it is made


class ForeignObject(UserError):
    """The pickle contains something other than arrays; it may be an attack."""


def load_arrays(path: str | os.PathLike, *, encoding: str = "ASCII") -> Any:
    """Reads a pickle of plain containers, numbers, strings, numpy arrays and torch tensors.

    Tensors become numpy arrays, whatever device they were on.

    Args:
      path: the pickle.
      encoding: of Python 2's strings, arrays' bytes among them: `latin1` for a pickle that Python 2
        wrote.

    Raises:
      ForeignObject: it names any other class or function.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return _Unpickler(file, path, encoding).load()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check the path.") from error
    except OSError as error:  # such as a folder, or no permission
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path.") from error
    except _Refused as error:
        raise ForeignObject(
            f"{path}: contains {error}, which is not an array; only arrays, numbers, strings and "
            "plain containers of them are read, write the file again with only these."
        ) from error
    except UserError:
        raise
    # A broken pickle can raise nearly any error.
    except Exception as error:
        reason = str(error)
        if isinstance(error, EOFError):
            reason = "it ends too early"
        elif isinstance(error, LookupError) or not reason:
            reason = "its instructions are damaged"
        raise UserError(
            f"{path}: not a complete pickle of arrays ({reason}); fetch it again."
        ) from error


class _Refused(pickle.UnpicklingError):
    """The name of something refused."""


class _Reader:
    """A pickle's bytes; a length that is beyond them is refused before memory is taken for it."""

    def __init__(self, file: BinaryIO, held: int):
        self._file, self._held = file, held

    def read(self, count: int) -> bytes:
        if count > self._held:
            raise pickle.UnpicklingError(f"it claims {count:,} bytes of its {self._held:,}")
        if len(data := self._file.read(count)) < count:
            raise EOFError
        return data

    def readline(self) -> bytes:
        if not (line := self._file.readline()).endswith(b"\n"):
            raise EOFError
        return line


# In Python: C's takes memory for 2^28 objects where nine bytes number one so, and builds arrays
# without asking.
class _BoundedUnpickler(pickle._Unpickler):
    """Takes no more memory than the pickle is worth, whatever it claims.

    Args:
      file: the pickle.
      held: its bytes.
      encoding: see `load_arrays`.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: BinaryIO, held: int, encoding: str = "ASCII"):
        super().__init__(_Reader(file, held), encoding=encoding)

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))

    def load_build(self) -> None:
        *_, made, state = self.stack
        if isinstance(made, np.dtype):  # version, byte order; what a plain type does not have; size
            if tuple(state[2:5]) != (None, None, None) or state[5] not in (-1, made.itemsize):
                raise pickle.UnpicklingError("a dtype is not in numpy's format")
        elif isinstance(made, np.ndarray):
            _, shape, dtype, _, data = state
            if not isinstance(dtype, np.dtype):
                raise pickle.UnpicklingError("an array is not in numpy's format")
            if dtype.hasobject and len(data) != math.prod(shape):
                raise pickle.UnpicklingError(f"an array of shape {shape} has {len(data)} objects")
        super().load_build()

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.BUILD[0]] = load_build


class _Unpickler(_BoundedUnpickler):
    """Knows what arrays consist of, and counts the bytes of all that it copies."""

    def __init__(self, file: BinaryIO, path: Path, encoding: str):
        self._path, self._held, self._copied = path, path.stat().st_size, 0
        super().__init__(file, self._held, encoding)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _COPYING:  # from what the pickle may name again and again
            return functools.partial(_COPYING[module, name], self._copy)
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def _copy(self, size: int) -> None:
        self._copied += size
        check_claim(f"{self._path}, its arrays", self._copied, self._held, times=SHARED)


class _StorageUnpickler(_BoundedUnpickler):
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


def _storage(copy: Copy, data: bytes) -> np.ndarray:
    """torch.storage._load_from_bytes: the values of a storage, one-dimensional."""
    copy(len(data))
    file = io.BytesIO(data)
    magic, _version, _machine = (_StorageUnpickler(file, len(data)).load() for _ in range(3))
    if magic != _LEGACY_MAGIC:
        raise pickle.UnpicklingError("a tensor's storage is not in torch's format")
    dtype, key, count = _StorageUnpickler(file, len(data)).load()
    keys = _StorageUnpickler(file, len(data)).load()
    length = int.from_bytes(file.read(8), "little", signed=True)
    values = file.read()
    if keys != [key] or length != count or len(values) != count * dtype.itemsize:
        raise pickle.UnpicklingError("a tensor's storage is not as long as it says")
    return np.frombuffer(values, dtype)


def _tensor(
    copy: Copy, storage: np.ndarray, offset: int, size: tuple, stride: tuple, *_: Any
) -> np.ndarray:
    """torch._utils._rebuild_tensor_v2: a copy of a strided view of its storage."""
    sizes, strides = tuple(map(int, size)), tuple(map(int, stride))
    valid = len(sizes) == len(strides) and min((0, offset, *sizes, *strides)) == 0
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=False))
    if not valid or (all(sizes) and last >= len(storage)):
        raise pickle.UnpicklingError(f"a tensor of size {sizes} overlaps its storage")
    if not all(sizes):
        return np.zeros(sizes, storage.dtype)
    copy(math.prod(sizes) * storage.itemsize)
    start = storage[offset:]
    steps = tuple(step * storage.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(start, sizes, steps, writeable=False).copy()


def _empty_array(kind: object, shape: tuple, _dtype: Any) -> np.ndarray:
    """numpy's _reconstruct: an array whose contents follow in the pickle."""
    if kind is not _NDARRAY or tuple(shape) != (0,):
        raise pickle.UnpicklingError("an array is not in numpy's format")
    return np.ndarray((0,), "b")


def _array(data: Any, dtype: np.dtype, shape: tuple, order: str) -> np.ndarray:
    """numpy's _frombuffer (pickle protocol 5)."""
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def _scalar(dtype: np.dtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype)[0]


def _bytes(copy: Copy, text: str, encoding: str) -> bytes:
    """_codecs.encode, by which pickles of protocol 2 write bytes."""
    copy(len(text))
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written as {encoding}")
    return text.encode("latin1")


_COPYING = {
    ("_codecs", "encode"): _bytes,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
}
_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): np.dtype,
    ("torch", "Size"): tuple,
}
for _core in ("numpy.core", "numpy._core"):  # before numpy 2, and since
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = _empty_array
    _ALLOWED[f"{_core}.multiarray", "scalar"] = _scalar
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = _array


# Arrays of .npz files, whose headers are compared with the file before anything is allocated.

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(path: Path, key: str) -> np.ndarray:
    """One array of a file as np.savez and np.savez_compressed write it.

    Raises:
      Exception: of nearly any kind, for a broken archive or header, or one without the array.
    """
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{key}.npy")
        held = path.stat().st_size
        check_claim(f"{path}, {key}", member.file_size, held, times=COMPRESSION)
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in _HEADERS:
                raise ValueError(f"format version {version}")
            shape, _, dtype = _HEADERS[version](file)
            check_claim(f"{path}, {key}", math.prod(shape) * dtype.itemsize, member.file_size)
    with np.load(path, allow_pickle=False) as opened:
        return opened[key]
