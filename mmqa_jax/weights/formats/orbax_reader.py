"""Orbax checkpoints, read block by block by TensorStore alone, and written slice by slice.

Orbax reads all of a checkpoint at once, twice its size in memory for a while, and takes longer to
import than a small model to read. Its files are arrays of TensorStore (zarr, mostly in one OCDBT
database) and `_METADATA`, the tree of their names.

Orbax saves arrays that are in memory. Here an array can be one that is made while it is written.
The files are those of any Orbax checkpoint.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import COMPRESSION, check_claim
from mmqa_jax.core.paths import absolute, scheme_of, teach_orbax_s3
from mmqa_jax.core.trees import nest
from mmqa_jax.weights.keymap import aligned_empty

# Of a chunk in the file: a shard of a mesh reads its own chunks only.
_CHUNK_BYTES = 16 << 20
_WRITE_BYTES = 1 << 26  # encoded at a time


@dataclasses.dataclass(frozen=True)
class StreamedArray:
    """An array that is made slice by slice while it is written."""

    # shape, dtype: of the whole.
    shape: tuple[int, ...]
    dtype: np.dtype
    # Its slices are those of the first axis (a stack of layers); else it is one slice.
    stacked: bool
    # Yields (index of the first axis, or () for the whole; the slice), in any order.
    slices: Callable[[], Iterable[tuple[Any, np.ndarray]]]

    @property
    def nbytes(self) -> int:
        """Size of the whole in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _StreamHandler(ocp.type_handlers.NumpyHandler):
    """Writes StreamedArrays as Orbax writes numpy arrays."""

    async def serialize(self, values, infos, args=None):
        """Writes one slice after the other; all is written when this returns."""
        writes: list[tensorstore.Future] = []
        try:
            await self._write(values, infos, writes)
        finally:  # of an interrupted save too: its folder is removed, and no write may go on there
            await asyncio.gather(*writes, return_exceptions=True)
        return []

    async def _write(self, values: Any, infos: Any, writes: list[tensorstore.Future]) -> None:
        """Starts all writes and waits for them; `writes` has those that may be unfinished."""
        size = 0
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = ocp.type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=info.is_ocdbt_checkpoint,
                global_shape=value.shape,
                local_shape=(1, *value.shape[1:]) if value.stacked else value.shape,
                dtype=value.dtype,
                process_index=0,
                arg=ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES),
            )
            store = await tensorstore.open(
                tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
            )
            for index, part in value.slices():
                writes.append(store[index].write(part))
                size += part.nbytes
                if size >= _WRITE_BYTES:  # small ones together: each wait makes new files
                    await asyncio.gather(*writes)
                    writes.clear()
                    size = 0
        await asyncio.gather(*writes)


def write_weights(folder: str | os.PathLike, arrays: Mapping[str, StreamedArray]) -> None:
    """Writes an Orbax checkpoint; of each array one slice is in memory at a time.

    Args:
      folder: the checkpoint; must not exist.
      arrays: by name (`layers/query/kernel`), which becomes a path of the checkpoint's tree.
    """
    registry = ocp.type_handlers.create_type_handler_registry((StreamedArray, _StreamHandler()))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(Path(folder).absolute(), args=ocp.args.PyTreeSave(nest(arrays)))


def save_arrays(folder: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
    """Writes arrays that are in memory, each process its own shards; replaces an older checkpoint.

    Args:
      folder: the checkpoint.
      arrays: by name, as in `write_weights`.
    """
    folder = absolute(folder)
    if scheme_of(folder) == "s3":
        teach_orbax_s3()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, nest(arrays), force=True)


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
