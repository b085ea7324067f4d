"""Orbax checkpoints written slice by slice; orbax_reader.py reads them.

Orbax saves arrays that are in memory. Here an array can be one that is made while it is written.
The files are those of any Orbax checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from mmqa_jax.core.paths import absolute, scheme_of, teach_orbax_s3
from mmqa_jax.core.trees import nest

# Of a chunk in the file: a shard of a mesh reads its own chunks only.
_CHUNK_BYTES = 16 << 20
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
