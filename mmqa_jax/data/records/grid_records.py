"""Grid features in ArrayRecord (record_shards.py), and features as the MCANs read them.

A record holds a picture's grid as float16.
"""

from __future__ import annotations

import abc
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from mmqa_jax.core.array_pickle import read_npz
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.decode import BrokenPictures, PictureError
from mmqa_jax.data.records import record_shards
from mmqa_jax.data.region_records import REGIONS, RegionRecords

GRIDS = record_shards.RecordKind(
    "grid features of pictures", "grid features", "grids", "grid", "mmqa embed", "data.grid_records"
)


class GridRecords:
    """Grid features by image id, of a folder that `write_grids` finished."""

    def __init__(self, folder: str | os.PathLike):
        self._files = record_shards.RecordFiles(folder, GRIDS)
        manifest = self._files.manifest
        self._shape = tuple(manifest["shape"])
        self._number = {image_id: number for number, image_id in enumerate(manifest["pictures"])}

    def __len__(self) -> int:
        return len(self._number)

    def read(self, image_id: Any) -> tuple[Float[np.ndarray, "g g F"], str]:
        """The grid of a picture, and the folder's name for messages; FeatureError where it has
        none.
        """
        folder, number = self._files.folder, self._number.get(image_id)
        if number is None:
            raise record_shards.FeatureError(f"{folder}: no grid features of picture {image_id}.")
        _, content = self._files.read(number)
        try:
            return np.frombuffer(content, "<f2").reshape(self._shape), str(folder)
        except ValueError as error:
            raise self._files.unreadable(error) from error


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
    """Runs a job or the rest of it; a finished job stays as it is.

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

    def records(names: Sequence[str]) -> list[bytes | PictureError]:
        grids = encode(names)
        advance(len(names))
        return [grid if isinstance(grid, PictureError) else packed(grid) for grid in grids]

    def packed(grid: np.ndarray) -> bytes:
        assert grid.shape == shape
        return np.ascontiguousarray(grid, "<f2").tobytes()

    record_shards.write_records(
        folder,
        GRIDS,
        pictures,
        records,
        about={"shape": list(shape), "model": model},
        broken=broken,
        facts=[model, shape],
        shard=shard,
        advance=advance,
    )


# Features of pictures by image id, as the MCANs read them: CLIP's grid, or a detector's regions.
#
#     Prophet   COCO_train2014_000000123456.npz, key x: float [16, 16, 4096], the grid row by row
#               (tools/extract_img_feats.py)
#     openvqa   COCO_train2014_000000123456.jpg.npz, key x: float [2048, regions]
#               (vqa_loader.py, `load_img_feats`)
#     MILVLG    COCO_train2014_000000123456.npz, key x: float [regions, 2048]
#               (bottom-up-attention.pytorch utils/extract_utils.py, `save_roi_features`)
#     ours      the folder of `mmqa embed` with an image tower, or of `mmqa features`
#
# One picture is read at a time; nothing is cached.

_ID = re.compile(r"(?<!\d)(\d{1,19})(\.jpg)?\.npz$")


class NpzFiles:
    """The npz files at any depth below `root` (train2014_feats/ and so on), by the number that ends
    their name.
    """

    def __init__(self, root: str | os.PathLike):
        self._paths: dict[int, Path] = {}
        for path in sorted(Path(root).rglob("*.npz")):
            if match := _ID.search(path.name):
                self._paths[int(match[1])] = path
        if not self._paths:
            raise UserError(
                f"config key features.root={root}: no npz files that end in an image id were found "
                "there; give the folder of the features, or one of `mmqa embed` or `mmqa features`."
            )

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, image_id: Any) -> tuple[np.ndarray, str]:
        """The array `x` of a picture, and the name of its file for messages.

        Raises FeatureError for no file, a broken one, or one without `x`.
        """
        path = self._paths.get(image_id)
        if path is None:
            raise record_shards.FeatureError(f"picture {image_id}: no features; extract them.")
        try:
            array = read_npz(Path(path), "x")
        except UserError as error:  # which names the file
            raise record_shards.FeatureError(str(error)) from error
        except Exception as error:  # a broken archive or header can raise nearly any
            raise record_shards.FeatureError(f"{path}, key x: cannot be read ({error}).") from error
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
            except record_shards.FeatureError as error:
                self.missing.add(str(image_id), str(error))
                continue
            vectors = self._vectors(array, where)
            made[row, : len(vectors)] = vectors
        return made

    def warn_missing(self) -> None:
        """Says on stderr how many pictures had no features."""
        self.missing.warn("pictures without features, read as zeros")

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
    """The first N regions of a detector, whose arrays are [F, regions], or [regions, F]."""

    def _vectors(self, array: np.ndarray, where: str) -> Float32[np.ndarray, "n F"]:
        slots, size = self._shape
        if array.ndim == 2 and len(array) != size == array.shape[1]:
            array = array.T
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
    """
    root = section.root
    files: GridRecords | RegionRecords | NpzFiles
    if REGIONS.is_at(root):
        files = RegionRecords(root)
        read = files.read_features
        if model.image == "grid":
            raise UserError(
                f"config key features.root={root}: holds regions, model.image=grid reads a grid; "
                "give a folder of `mmqa embed`."
            )
    else:
        files = GridRecords(root) if GRIDS.is_at(root) else NpzFiles(root)
        read = files.read
    missing = BrokenPictures(
        len(files),
        section.max_missing,
        "extract their features or raise features.max_missing",
        "have no features",
    )
    if model.image == "grid":
        shape = model.grid**2, model.image_features
        return GridFeatures(read, shape, missing)
    shape = section.slots, model.region_features
    return RegionFeatures(read, shape, missing)


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
