"""Orbax checkpoints read block by block, by TensorStore alone.

Orbax reads all of a checkpoint at once, twice its size in memory for a while, and takes longer to
import than a small model to read. Its files are arrays of TensorStore (zarr, mostly in one OCDBT
database) and `_METADATA`, the tree of their names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import COMPRESSION, check_claim
from mmqa_jax.weights.keymap import aligned_empty

_METADATA = "_METADATA"
_READ_BYTES = 1 << 26  # decoded at a time


def stored_specs(folder: str | os.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of the arrays of a checkpoint, by name (`layers/query/kernel`)."""
    with _damage_named(Path(folder)):
        stores = _open(folder)
        specs = {
            name: jax.ShapeDtypeStruct(store.shape, store.dtype.numpy_dtype)
            for name, store in stores.items()
        }
        chunks = {name: store.chunk_layout.read_chunk.shape for name, store in stores.items()}
    held = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    for name, spec in specs.items():
        # A chunk is decoded whole, even where it is larger than the array.
        values = max(math.prod(spec.shape), math.prod(chunks[name] or ()))
        size = values * np.dtype(spec.dtype).itemsize
        check_claim(f"{folder}, array {name!r}", size, held, times=COMPRESSION)
    return specs


def read_weights(
    folder: str | os.PathLike,
    target: Mapping[str, jax.ShapeDtypeStruct],
    *,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, each device its own shards.

    Args:
      folder: the checkpoint.
      target: by name, with the dtype and the sharding that the array shall have (without one:
        this process's first device).
      on_bytes: called with the size of each array that is read.
    """
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    arrays = {}
    with _damage_named(Path(folder)):
        stores = _open(folder, target)
        for name, leaf in target.items():
            read = functools.partial(_read_shard, stores[name], np.dtype(leaf.dtype))
            sharding = leaf.sharding or default
            arrays[name] = jax.make_array_from_callback(stores[name].shape, sharding, read)
            on_bytes(arrays[name].nbytes)
    return arrays


def _open(
    folder: str | os.PathLike, names: Mapping[str, Any] | None = None
) -> dict[str, tensorstore.TensorStore]:
    """The arrays of a checkpoint, or those of some names, without their values."""
    folder = Path(folder).absolute()
    metadata = json.loads((folder / _METADATA).read_text())
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    context = tensorstore.Context()  # one cache of the database's nodes for all
    opened = {}
    for entry in metadata["tree_metadata"].values():
        path = [key["key"] for key in entry["key_metadata"]]
        name = "/".join(path)
        if names is not None and name not in names:
            continue
        file = {"driver": "file", "path": f"{folder / '.'.join(path)}/"}
        database = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{'.'.join(path)}/"}
        kvstore = database if metadata.get("use_ocdbt", True) else file
        opened[name] = tensorstore.open(
            {"driver": driver, "kvstore": kvstore}, open=True, read=True, context=context
        )
    return {name: future.result() for name, future in opened.items()}


def _read_shard(
    store: tensorstore.TensorStore, dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """Reads a part of a stored array, some rows of its first axis at a time."""
    part = store[index].translate_to[(0,) * store.rank] if store.rank else store
    array = aligned_empty(part.shape, dtype)
    if not part.rank:
        array[...] = part.read().result()
        return array
    chunk = store.chunk_layout.read_chunk.shape[0]
    row = max(math.prod(part.shape[1:]) * dtype.itemsize, 1)
    rows = max(_READ_BYTES // row // chunk, 1) * chunk
    for first in range(0, part.shape[0], rows):
        block = slice(first, min(first + rows, part.shape[0]))
        array[block] = part[block].read().result()
    return array


@contextlib.contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Turns what damaged files raise into a UserError."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # the files are not at fault
    except Exception as error:  # TensorStore raises all kinds
        raise UserError(
            f"{folder.absolute()}: files in it are missing, truncated or damaged; copy the folder "
            "again, or convert or train the model again."
        ) from error
