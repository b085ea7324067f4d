"""Orbax checkpoints written slice by slice and read block by block.

Orbax saves arrays that are in memory, and reads all of a checkpoint at once, twice its size in
memory for a while. Here an array can be one that is made while it is written, and reading takes
little more than the arrays themselves. The files are those of any Orbax checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.trees import nest, unnest
from mmqa_jax.weights.host_memory import aligned_empty

# Of a chunk in the file: a shard of a mesh reads its own chunks only.
_CHUNK_BYTES = 16 << 20
_READ_BYTES = 1 << 26  # decoded at a time
_WRITE_BYTES = 1 << 26  # encoded at a time


@dataclasses.dataclass(frozen=True)
class StreamedArray:
    """An array that is made slice by slice while it is written.

    Attributes:
      shape, dtype: of the whole.
      stacked: its slices are those of the first axis (a stack of layers); else it is one slice.
      slices: yields (index of the first axis, or () for the whole; the slice), in any order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    stacked: bool
    slices: Callable[[], Iterable[tuple[Any, np.ndarray]]]

    @property
    def nbytes(self) -> int:
        """Size of the whole in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _StreamHandler(ocp.type_handlers.NumpyHandler):
    """Writes StreamedArrays as Orbax writes numpy arrays."""

    async def serialize(self, values, infos, args=None):
        """Writes one slice after the other; all is written when this returns."""
        writes, size = [], 0
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
                    writes, size = [], 0
        await asyncio.gather(*writes)
        return []


class _ShardHandler(ocp.type_handlers.ArrayHandler):
    """Reads jax.Arrays one after the other; Orbax's own reads all at once.

    Args:
      on_bytes: called with the size of each array that is read.
    """

    def __init__(self, on_bytes: Callable[[int], None] = lambda size: None):
        super().__init__()
        self._on_bytes = on_bytes

    async def deserialize(self, infos, args=None):
        """The arrays; each device's shard is read block by block."""
        arrays = []
        for info, arg in zip(infos, args, strict=True):
            await info.await_path_creation()
            spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
            store = await tensorstore.open(
                tensorstore.Spec(spec), open=True, context=info.ts_context
            )
            read = functools.partial(_read_shard, store, np.dtype(arg.dtype))
            arrays.append(jax.make_array_from_callback(store.shape, arg.sharding, read))
            self._on_bytes(arrays[-1].nbytes)
        return arrays


def _read_shard(
    store: tensorstore.TensorStore, dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """Reads a part of a stored array, some rows of its first axis at a time."""
    part = store[index].translate_to[(0,) * store.rank] if store.rank else store
    found = aligned_empty(part.shape, dtype)
    if not part.rank:
        found[...] = part.read().result()
        return found
    chunk = store.chunk_layout.read_chunk.shape[0]
    row = max(found.nbytes // max(part.shape[0], 1), 1)
    rows = max(_READ_BYTES // row // chunk, 1) * chunk
    for first in range(0, part.shape[0], rows):
        block = slice(first, min(first + rows, part.shape[0]))
        found[block] = part[block].read().result()
    return found


def write_weights(folder: str | os.PathLike, arrays: Mapping[str, StreamedArray]) -> None:
    """Writes an Orbax checkpoint; of each array one slice is in memory at a time.

    Args:
      folder: the checkpoint; must not exist.
      arrays: by name (`layers/query/kernel`), which becomes a path of the checkpoint's tree.
    """
    with _checkpointer(_ShardHandler()) as checkpointer:
        checkpointer.save(Path(folder).absolute(), args=ocp.args.PyTreeSave(nest(arrays)))


def save_arrays(folder: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
    """Writes arrays that are in memory, each process its own shards; replaces an older checkpoint.

    Args:
      folder: the checkpoint.
      arrays: by name, as in `write_weights`.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder).absolute(), nest(arrays), force=True)


def stored_specs(folder: str | os.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of the arrays of a checkpoint, by name.

    Raises:
      UserError: it is not a checkpoint, or its description is damaged.
    """
    folder = Path(folder).absolute()
    try:
        tree = ocp.StandardCheckpointHandler().metadata(folder).tree
        leaves = jax.tree_util.tree_flatten_with_path(dict(tree))[0]
        return {
            "/".join(key.key for key in path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in leaves
        }
    except Exception as error:  # Orbax and TensorStore have no common error
        raise _damaged(folder) from error


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
        the default device).
      on_bytes: called with the size of each array that is read.

    Raises:
      UserError: the checkpoint is truncated or damaged.
    """
    folder = Path(folder).absolute()
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arguments = {
        name: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding or default, dtype=leaf.dtype, global_shape=leaf.shape
        )
        for name, leaf in target.items()
    }
    with _checkpointer(_ShardHandler(on_bytes)) as checkpointer:
        restore = ocp.args.PyTreeRestore(nest(target), restore_args=nest(arguments))
        try:
            tree = checkpointer.restore(folder, args=restore)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # the files are not at fault
        except Exception as error:  # Orbax and TensorStore have no common error
            raise _damaged(folder) from error
    return unnest(tree, target)


def _checkpointer(reader: _ShardHandler) -> ocp.Checkpointer:
    registry = ocp.type_handlers.create_type_handler_registry(
        (StreamedArray, _StreamHandler()), (jax.Array, reader)
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))


def _damaged(folder: Path) -> UserError:
    return UserError(
        f"{folder}: files in it are missing, truncated or damaged; copy the folder again, or "
        "convert or train the model again."
    )
