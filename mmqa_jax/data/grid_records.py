"""Grid features in ArrayRecord: written shard by shard, resumable after a kill, read by image id.

    <folder>/manifest.json   shape, model, pictures by record, once all are written
    <folder>/grids/          the TFDS dataset: shards, and its metadata
    <folder>/shards/         while the job runs: what each complete shard holds (core.store)

A record holds a picture's grid as float16. A kill loses only the shard that was being written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from mmqa_jax.core.checksums import read_sealed, write_sealed
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.images import BrokenPictures, PictureError
from mmqa_jax.data.picture_records import (
    ShardNotes,
    finish_folder,
    inputs_signature,
    unfinished_folder,
)
from mmqa_jax.data.tfds_files import DatasetFiles, ShardSize

MANIFEST = "manifest.json"

_WHAT = "grid features of pictures"
_SPLIT = "pictures"
_AGAIN = "delete the folder and run `mmqa embed` again"


class FeatureError(UserError):
    """This picture has no readable features; others may have."""


def is_grid_records(folder: str | os.PathLike) -> bool:
    """Whether a folder holds finished grid features of ours."""
    file = Path(folder) / MANIFEST
    if not file.is_file():
        return False
    found = read_json(file)
    return isinstance(found, dict) and found.get("what") == _WHAT


class GridRecords:
    """Grid features by image id.

    Args:
      folder: as `write_grids` finished it.
    """

    def __init__(self, folder: str | os.PathLike):
        self._folder = Path(folder)
        manifest = read_sealed(self._folder / MANIFEST, _AGAIN)
        self._shape = tuple(manifest["shape"])
        self._number = {image_id: number for number, image_id in enumerate(manifest["pictures"])}
        self._source: Any = None

    def __len__(self) -> int:
        return len(self._number)

    def read(self, image_id: Any) -> tuple[Float[np.ndarray, "g g F"], str]:
        """The grid of a picture, and the folder's name for messages.

        Raises:
          FeatureError: the picture has none.
          UserError: damaged files.
        """
        number = self._number.get(image_id)
        if number is None:
            raise FeatureError(f"{self._folder}: no grid features of picture {image_id}.")
        try:
            if self._source is None:
                import tensorflow_datasets as tfds

                builder = tfds.builder_from_directory(self._folder / "grids")
                self._source = builder.as_data_source(split=_SPLIT)
            record = self._source[number]
            grid = np.frombuffer(record["grid"], "<f2").reshape(self._shape)
            found = record["id"].decode()
        except Exception as error:  # TFDS and ArrayRecord have no common error
            raise UserError(
                f"{self._folder}: its grid features cannot be read "
                f"({' '.join(str(error).split())}); run `mmqa embed` again."
            ) from error
        if found != str(image_id):
            raise UserError(
                f"{self._folder}: holds picture {found} in place of {image_id}: its files "
                f"are damaged; {_AGAIN}."
            )
        return grid, str(self._folder)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}


def write_grids(
    folder: Path,
    pictures: Mapping[Any, str],
    encode: Callable[[Sequence[str]], Sequence[np.ndarray | PictureError]],
    *,
    shape: tuple[int, int, int],
    model: str,
    broken: BrokenPictures,
    shard: int = 64,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Runs a job, or what remains of it; a finished one is left as it is.

    Args:
      pictures: image id (a number or name) -> name of its picture.
      encode: names -> a grid of `shape` each, or why there is none; called once a shard.
      shape: [grid, grid, features].
      model: fingerprint of what `encode` does; with another one the job starts over.
      broken: counts the pictures that cannot be decoded.
      shard: pictures per file.
      advance: called with the number of pictures done.

    Raises:
      RunError: too many broken pictures.
    """
    ids = list(pictures)
    signature = inputs_signature([str(i) for i in ids], model, shape, shard)
    if is_grid_records(folder) and read_sealed(folder / MANIFEST, _AGAIN)["inputs"] == signature:
        advance(len(ids))
        return
    with unfinished_folder(folder, signature):
        files = DatasetFiles(folder / "grids", "grid", text=False, module=__name__)
        kept, notes = ShardNotes(folder), []
        for number, start in enumerate(range(0, len(ids), shard)):
            part = ids[start : start + shard]
            path = files.path(_SPLIT, number)
            note = kept.read(number, path)
            if note is None:
                note = _write_shard(files, number, part, pictures, encode, shape)
                kept.write(number, path, note)
            for name, reason in note["broken"].items():
                broken.add(name, reason)
            notes.append(note)
            advance(len(part))
        files.finish({_SPLIT: [ShardSize(len(n["pictures"]), n["bytes"]) for n in notes]})
        manifest = {
            "what": _WHAT,
            "shape": list(shape),
            "model": model,
            "inputs": signature,
            "broken": broken.reasons,
            "pictures": [image_id for note in notes for image_id in note["pictures"]],
        }
        write_sealed(folder / MANIFEST, manifest)
        finish_folder(folder)


def _write_shard(
    files: DatasetFiles,
    number: int,
    ids: Sequence[Any],
    pictures: Mapping[Any, str],
    encode: Callable[[Sequence[str]], Sequence[np.ndarray | PictureError]],
    shape: tuple[int, int, int],
) -> dict[str, Any]:
    kept, broken = [], {}
    with files.open_shard(_SPLIT, number) as out:
        for image_id, grid in zip(ids, encode([pictures[i] for i in ids]), strict=True):
            if isinstance(grid, PictureError):
                broken[pictures[image_id]] = str(grid)
                continue
            assert grid.shape == shape
            out.add(str(image_id), np.ascontiguousarray(grid, "<f2").tobytes())
            kept.append(image_id)
    return {"pictures": kept, "broken": broken, "bytes": out.size.bytes}
