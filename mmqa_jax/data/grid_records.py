"""Grid features in ArrayRecord: written shard by shard, resumable after a kill, read by image id.

    <folder>/manifest.json   shape, model, pictures by record, once all are written
    <folder>/grids/          the TFDS dataset: shards, and its metadata
    <folder>/shards/         while the job runs: what each complete shard holds (core.store)

A record holds a picture's grid as float16. A kill loses only the shard that was being written.
"""

from __future__ import annotations

import abc
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from mmqa_jax.core.array_pickle import read_npz
from mmqa_jax.core.checksums import read_sealed, write_sealed
from mmqa_jax.core.errors import UserError, first_names
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


# Features of pictures by image id, as the MCANs read them: CLIP's grid, or a detector's regions.
#
#     Prophet   COCO_train2014_000000123456.npz, key x: float [16, 16, 4096], the grid row by row
#               (tools/extract_img_feats.py)
#     openvqa   COCO_train2014_000000123456.jpg.npz, key x: float [2048, regions]
#               (vqa_loader.py, `load_img_feats`)
#     ours      the folder of `mmqa embed` with an image tower (data/grid_records.py)
#
# One picture is read at a time; nothing is cached.

_ID = re.compile(r"(\d+)(\.jpg)?\.npz$")


class NpzFiles:
    """The npz files below a folder by the number that ends their name.

    Args:
      root: the folder; files may lie in folders below it (train2014_feats/ and so on).

    Raises:
      UserError: no such files.
    """

    def __init__(self, root: str | os.PathLike):
        self._paths: dict[int, Path] = {}
        for path in sorted(Path(root).rglob("*.npz")):
            if found := _ID.search(path.name):
                self._paths[int(found[1])] = path
        if not self._paths:
            raise UserError(
                f"config key features.root={root}: no npz files that end in an image id were found "
                "there; give the folder of the features, or one of `mmqa embed`."
            )

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, image_id: Any) -> tuple[np.ndarray, str]:
        """The array `x` of a picture, and the name of its file for messages.

        Raises:
          FeatureError: no file, a broken one, or one without `x`.
        """
        path = self._paths.get(image_id)
        if path is None:
            raise FeatureError(f"picture {image_id}: no features; extract them.")
        try:
            array = read_npz(Path(path), "x")
        except UserError as error:  # which names the file
            raise FeatureError(str(error)) from error
        except Exception as error:  # a broken archive or header can raise nearly any
            raise FeatureError(f"{path}, key x: cannot be read ({error}).") from error
        return array, str(path)


class PictureFeatures(abc.ABC):
    """Feature vectors of pictures; zeros for a picture that has none.

    Args:
      read: image id -> its array and a name for messages; FeatureError where there is none.
      shape: [N, F], of a picture's vectors.
      missing: counts the pictures without features.
    """

    def __init__(
        self,
        read: Callable[[Any], tuple[np.ndarray, str]],
        shape: tuple[int, int],
        missing: BrokenPictures,
    ):
        self._read, self._shape, self.missing = read, shape, missing

    def batch(self, image_ids: Sequence[Any]) -> Float32[np.ndarray, "B N F"]:
        """Features of pictures; UserError where a picture's have another shape."""
        made = np.zeros((len(image_ids), *self._shape), np.float32)
        for row, image_id in enumerate(image_ids):
            try:
                array, where = self._read(image_id)
            except FeatureError as error:
                self.missing.add(str(image_id), str(error))
                continue
            vectors = self._vectors(array, where)
            made[row, : len(vectors)] = vectors
        return made

    def warn_missing(self) -> None:
        """Says on stderr how many pictures had no features."""
        if self.missing.count:
            print(
                f"pictures without features, read as zeros: {self.missing.count} "
                f"({first_names(self.missing.names)}).",
                file=sys.stderr,
            )

    @abc.abstractmethod
    def _vectors(self, array: np.ndarray, where: str) -> Float32[np.ndarray, "n F"]:
        """The vectors in a picture's array, at most N; UserError for another shape."""


class GridFeatures(PictureFeatures):
    """A square grid's cells, row by row; N is their number."""

    def _vectors(self, array: np.ndarray, where: str) -> Float32[np.ndarray, "n F"]:
        cells, size = self._shape
        side = math.isqrt(cells)
        if array.shape != (side, side, size):
            raise UserError(
                f"{where}: features of shape {_sizes(array.shape)}, the model takes "
                f"{_sizes((side, side, size))}; extract them again with the image tower that it "
                "was trained on, or set model.grid and model.image_features."
            )
        return array.reshape(cells, size)


class RegionFeatures(PictureFeatures):
    """The first N regions of a detector, whose arrays are [F, regions]."""

    def _vectors(self, array: np.ndarray, where: str) -> Float32[np.ndarray, "n F"]:
        slots, size = self._shape
        if array.ndim != 2 or len(array) != size:
            raise UserError(
                f"{where}: features of shape {_sizes(array.shape)}, {size} x a number of regions "
                "was expected; give the features that the model was trained on, or set "
                "model.region_features."
            )
        return array.T[:slots]


def open_features(section: Any, model: Any) -> PictureFeatures:
    """The features that a config names.

    Args:
      section: tasks.vqa.PictureFeaturesSection.
      model: `image` (grid or regions) and the sizes of what the model takes.

    Raises:
      UserError: no features there.
    """
    root = section.root
    files = GridRecords(root) if is_grid_records(root) else NpzFiles(root)
    missing = BrokenPictures(
        len(files),
        section.max_missing,
        "extract their features or raise features.max_missing",
        "have no features",
    )
    if model.image == "grid":
        shape = model.grid**2, model.image_features
        return GridFeatures(files.read, shape, missing)
    shape = section.slots, model.region_features
    return RegionFeatures(files.read, shape, missing)


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
