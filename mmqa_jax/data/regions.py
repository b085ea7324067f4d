"""Regions found by a detector: X101-FPN pickles and VinVL TSVs, as VLP and Oscar read them.

Formats: WebQnA/WebQA_Baseline vlp/webqa_loader.py and vlp/ImgDataTsv.py; zdxdsw/WebQA_x101fpn
featureExtraction.py. One picture is read at a time; nothing is cached.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int

from mmqa_jax.core.array_pickle import ForeignObject, load_arrays
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json, read_text
from mmqa_jax.data.batches.packing import RawSource
from mmqa_jax.data.formats.tables import CutLine, IndexedTsv
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.pictures.resize import patch_boxes, patches
from mmqa_jax.data.schema import Source

FEATURES = 2048  # values of a region, for both detectors
BOX = 6  # values of a box, in VLP's positions and in Oscar's regions
# A features file covers one range of image ids; its rows are image_id % ID_RANGE.
ID_RANGE = 10_000_000

_EPS = 1e-5
_ID = re.compile("[0-9]{1,19}")
_NONE = "holds no regions; run the detector on that picture."


class RegionError(UserError):
    """This picture has no readable regions; others may have."""


class Detections(NamedTuple):
    """The N regions that a detector found in one picture, in the order of the file."""

    features: Float[np.ndarray, "N F"]
    boxes: Float[np.ndarray, "N 4"]  # x1, y1, x2, y2 in pixels
    scores: Float[np.ndarray, " N"]
    classes: Float[np.ndarray, "N C"]  # of every class, background included
    labels: Int[np.ndarray, " N"]  # each region's class, background not counted
    words: tuple[str, ...] | None = None  # the labels' names, where the file has them
    image_size: tuple[int, int] | None = None  # height, width, where the file has it


class RegionReader(Protocol):
    """Detections by image id; `foreground` slices the classes without the background."""

    classes: int
    foreground: slice

    def read(self, image_id: Any) -> Detections: ...


def vlp_positions(detections: Detections) -> Float[np.ndarray, "N P"]:
    """VLP's region positions, P = 6 + C (webqa_loader.py l.611-623).

    x and y relative to the largest of this picture's boxes, area, score; then the classes; each
    of the two parts layer-normalized without parameters.
    """
    boxes = detections.boxes.astype(np.float32)
    width, height = (boxes[:, axes].max() + _EPS for axes in ([0, 2], [1, 3]))
    x1, y1, x2, y2 = (boxes / np.array([width, height] * 2, np.float32)).T
    area = np.maximum((y2 - y1) * (x2 - x1), 0)
    box = np.stack([x1, y1, x2, y2, area, detections.scores], axis=1)  # [N, 6]
    return np.concatenate([_normalized(box), _normalized(detections.classes)], axis=1).astype(
        np.float32
    )


def oscar_regions(
    detections: Detections, image_size: tuple[int, int] | None = None
) -> Float[np.ndarray, "N 2054"]:
    """Oscar's regions: features, then x1, y1, x2, y2, width and height relative to the picture.

    Li et al. 2020, section 4 (six values of position); their order as in the released features
    (microsoft/Oscar issue 33). `image_size` (height, width) in pixels; None: the file's.
    """
    size = image_size or detections.image_size
    if size is None:
        raise UserError(
            "regions for Oscar need the picture's height and width, which these features do not "
            "hold; give image_size."
        )
    height, width = size
    corners = detections.boxes / np.array([width, height] * 2, np.float32)
    sides = corners[:, 2:] - corners[:, :2]
    return np.concatenate([detections.features, corners, sides], axis=1).astype(np.float32)


def _normalized(x: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N D"]:
    centered = x - x.mean(axis=1, keepdims=True)
    return centered / np.sqrt(np.square(centered).mean(axis=1, keepdims=True) + _EPS)


class X101Features:
    """X101-FPN features as WebQA released them: one pickle per picture.

    `fc1_features` are read before their ReLU and `cls_features` as logits, as in the baseline
    (zdxdsw/WebQA_x101fpn). The folder has `{dev|test|train}/{id % 10,000,000 // 1000}/{id}.pkl`.
    """

    classes = 1601
    foreground = slice(0, 1600)  # detectron2 has the background last

    _SPLITS = ("dev", "test", "train")  # the baseline's order

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)
        if not any((self.root / split).is_dir() for split in self._SPLITS):
            raise UserError(
                f"{self.root}: has none of the folders {', '.join(self._SPLITS)}; give the folder "
                "where the X101-FPN features were unpacked."
            )

    def read(self, image_id: int) -> Detections:
        """Detections of a picture by its id in the released files (40,000,000 and up).

        Raises:
          RegionError: no file, a broken one, or arrays of other shapes.
          ForeignObject: the file contains an object that is not an array.
        """
        name = Path(str(image_id % ID_RANGE // 1000), f"{image_id}.pkl")
        files = [self.root / split / name for split in self._SPLITS]
        path = next((file for file in files if file.is_file()), None)
        if path is None:
            raise RegionError(
                f"{self.root}: none of {', '.join(self._SPLITS)} has {name}; fetch the features "
                f"of picture {image_id}."
            )
        try:
            content = load_arrays(path)
        except ForeignObject:
            raise
        except UserError as error:
            raise RegionError(str(error)) from error
        if not isinstance(content, dict):
            raise RegionError(f"{path}: holds no dictionary; fetch it again.")
        boxes = _values(content, "pred_boxes", path, (None, 4))
        count = len(boxes)
        size = content.get("image_size")
        if not (
            isinstance(size, tuple) and len(size) == 2 and all(isinstance(n, int) for n in size)
        ):
            size = None
        detections = Detections(
            features=_values(content, "fc1_features", path, (count, FEATURES)),
            boxes=boxes,
            scores=_values(content, "scores", path, (count,)),
            classes=_values(content, "cls_features", path, (count, self.classes)),
            labels=_values(content, "pred_classes", path, (count,)).astype(np.int64),
            image_size=size,
        )
        return _checked(detections, str(path), self.foreground)


def _values(
    content: Mapping[Any, Any], key: str, path: Path, shape: tuple[int | None, ...]
) -> np.ndarray:
    """One entry as float32; None in `shape` is any number of regions."""
    value = content.get(key)
    wanted = ", ".join("number" if size is None else str(size) for size in shape)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise RegionError(
            f"{path}, {key}: an array of shape ({wanted}) was expected; fetch the file again."
        )
    fits = len(shape) == value.ndim and all(
        size is None or size == length for size, length in zip(shape, value.shape, strict=True)
    )
    if not fits:
        raise RegionError(
            f"{path}, {key}: shape {value.shape}, expected ({wanted}); give features of the "
            "detector that the model was made for."
        )
    return value.astype(np.float32)


class VinVLFeatures:
    """VinVL features: TSVs with a lineidx, a picture per line, regions as JSON in the last column.

    {"objects": [{"rect": [x1, y1, x2, y2], "conf": score, "feature": base64 of 2048 float32,
    "scores_all": base64 of 1595 float32, "class": name (may be absent)}]}

    `files` has a TSV for each range of ids: image_id // 10,000,000 -> file. The baseline's are 0
    (gold), 1 (negative) and 2 (negatives of the other modality).
    """

    classes = 1595
    foreground = slice(1, 1595)  # maskrcnn_benchmark has the background first

    def __init__(self, files: Mapping[int, str | os.PathLike]):
        self._files = {number: IndexedTsv(path) for number, path in files.items()}

    def read(self, image_id: int) -> Detections:
        """Detections of a picture: row image_id % 10,000,000 of its range's file.

        Raises:
          RegionError: no file or no regions for it, a broken line, values of other lengths.
        """
        number, row = divmod(image_id, ID_RANGE)
        if number not in self._files:
            ranges = ", ".join(map(str, self._files))
            raise RegionError(
                f"picture {image_id}: features of pictures {number * ID_RANGE} and up were not "
                f"given (given: {ranges}); name their TSV."
            )
        tsv = self._files[number]
        where = f"{tsv.path}, row {row}"
        try:
            columns = tsv.columns(row)
        except CutLine as error:
            raise RegionError(str(error)) from error
        name = columns[0].strip().decode("ascii", "replace")
        if name == "None":  # how the baseline's files mark a picture without regions
            raise RegionError(f"{where}: {_NONE}")
        if not _ID.fullmatch(name) or int(name) % ID_RANGE != row:
            raise UserError(
                f"{where}: holds {name[:20]!r} and not picture {image_id}; TSV and lineidx do not "
                "belong together or are those of another data set, fetch them again."
            )
        try:
            objects = parse_json(columns[-1], where)["objects"]
            return self.detections(objects, where)
        except (UserError, ValueError, KeyError, TypeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise RegionError(
                f"{where}: the last column is not a JSON object with a list `objects` of regions "
                f"({reason}); fetch the file again."
            ) from error

    @classmethod
    def detections(cls, objects: Sequence[Mapping[str, Any]], where: str) -> Detections:
        """A picture's regions from the list `objects`; RegionError where they are malformed."""
        if not objects:
            raise RegionError(f"{where}: {_NONE}")
        boxes = np.array([o["rect"] for o in objects], np.float32).reshape(len(objects), -1)
        if boxes.shape[1] != 4:
            raise RegionError(f"{where}: boxes of {boxes.shape[1]} values, expected 4.")
        vectors = {"feature": FEATURES, "scores_all": cls.classes}
        features, classes = (
            np.array(
                [
                    _floats(o[key], size, f"{where}, region {n}, {key}")
                    for n, o in enumerate(objects)
                ]
            ).reshape(len(objects), size)
            for key, size in vectors.items()
        )
        words = [o.get("class") for o in objects]
        named = all(isinstance(word, str) for word in words)
        detections = Detections(
            features=features,
            boxes=boxes,
            scores=np.array([o["conf"] for o in objects], np.float32),
            classes=classes,
            labels=classes[:, cls.foreground].argmax(axis=1),
            words=tuple(words) if named else None,
        )
        return _checked(detections, where, cls.foreground)


def _floats(text: Any, size: int, where: str) -> Float[np.ndarray, " size"]:
    """`size` little-endian float32 from base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise RegionError(f"{where}: broken base64 ({error}); fetch the file again.") from error
    if len(data) != 4 * size:
        raise RegionError(
            f"{where}: {len(data) / 4:g} values, expected {size}; give features of the detector "
            "that the model was made for, or fetch the file again if it is cut."
        )
    return np.frombuffer(data, "<f4")


def _checked(detections: Detections, where: str, foreground: slice) -> Detections:
    if len(detections.boxes) == 0:
        raise RegionError(f"{where}: {_NONE}")
    for name in ("features", "boxes", "scores", "classes"):
        if not np.isfinite(getattr(detections, name)).all():
            raise RegionError(f"{where}: {name} hold NaN or infinity; fetch the file again.")
    last = foreground.stop - foreground.start - 1
    if detections.labels.min() < 0 or detections.labels.max() > last:
        raise RegionError(f"{where}: classes beyond 0 to {last}; fetch the file again.")
    return detections


def read_id_map(path: str | os.PathLike) -> dict[int, int]:
    """The baseline's image_id_map_0328.pkl: WebQA's image id -> id in the released features."""
    content = load_arrays(path)
    if not isinstance(content, dict) or not all(
        type(number) is int for pair in content.items() for number in pair
    ):
        raise UserError(
            f"{path}: a dictionary of image id to image id was expected; fetch "
            "misc/image_id_map_0328.pkl of WebQA_Baseline."
        )
    return content


def read_class_names(path: str | os.PathLike, reader: RegionReader) -> tuple[str, ...]:
    """Names of the detector's classes, one per line, without the background."""
    names = tuple(line.strip() for line in read_text(path).splitlines())
    count = reader.foreground.stop - reader.foreground.start
    if len(names) != count or not all(names):
        raise UserError(
            f"{path}: {len(names)} lines, {sum(map(bool, names))} of them not empty; expected the "
            f"names of the detector's {count} classes, one per line, without the background."
        )
    return names


def tag_words(detections: Detections, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """A tag for every region: the file's own, or the name of its class in `names`.

    Joined by spaces they are the labels that Oscar reads (run_captioning.py, get_od_labels).
    """
    if detections.words is not None:
        return detections.words
    if names is None:
        raise UserError(
            "these features do not name their classes; give a file with the detector's class "
            "names, one per line."
        )
    return tuple(names[label] for label in detections.labels)


def feature_ids(
    sources: Sequence[Source], id_map: Mapping[int, int] | None = None
) -> list[int | None]:
    """Each source's id in the feature files; None for snippets.

    A picture's id in a WebQA corpus is its image id in decimal; without `id_map` (`read_id_map`)
    the files use it, too.
    """
    ids: list[int | None] = []
    for source in sources:
        if source.modality != "image":
            ids.append(None)
            continue
        if not _ID.fullmatch(source.id):
            raise UserError(
                f"source {source.id}: a picture whose id is a number was expected, since "
                "features are found by it; prepare the corpus from WebQA's files."
            )
        number = int(source.id)
        if id_map is not None and number not in id_map:
            raise UserError(
                f"source {source.id}: the map of image ids lacks it; give the map of this release."
            )
        ids.append(number if id_map is None else id_map[number])
    return ids


class Tags(NamedTuple):
    """Words for what a picture shows, as the object tags of Oscar (Li et al. 2020)."""

    regions: tuple[str, ...]  # one tag per region
    picture: tuple[str, ...]  # tags of the whole picture, the most visible first
    parts: tuple[str, ...] = ()  # tags of the picture's parts; read where only one picture is shown


class FeatureRegions:
    """A source's regions for VLP from a detector's files, with the interface of PatchRegions.

    Args:
      reader: X101Features, VinVLFeatures or region_records.RecordDetections.
      ids: each source's id in its files (see feature_ids), or in the records.
      slots: how many regions of a picture are read, the first ones.
      names: class names, for `tags`.
      missing: counts pictures whose regions cannot be read and which therefore have none; None:
        the first one raises.
      find: makes ready the regions of pictures by their ids, all together, where a detector has
        to find them first.

    Attributes:
      slots, dim, position_dim: as PatchRegions.
      missing: as given.
    """

    def __init__(
        self,
        reader: RegionReader,
        ids: Sequence[int | str | None],
        *,
        slots: int = 100,
        names: Sequence[str] | None = None,
        missing: BrokenPictures | None = None,
        find: Callable[[Sequence[Any]], None] | None = None,
    ):
        self._reader, self._ids, self._names, self.missing = reader, ids, names, missing
        self._find = find
        self.slots, self.dim, self.position_dim = slots, FEATURES, BOX + reader.classes

    def __call__(
        self, source: RawSource
    ) -> tuple[Float[np.ndarray, "R F"], Float[np.ndarray, "R P"]] | None:
        """Features and positions; None for a snippet, and for a picture without a row."""
        image_id = None if source.row is None else self._ids[source.row]
        if image_id is None:
            return None
        try:
            detections = self._reader.read(image_id)
        except RegionError as error:
            if self.missing is None:
                raise
            self.missing.add(str(image_id), str(error))
            return None
        return detections.features[: self.slots], vlp_positions(detections)[: self.slots]

    def look_ahead(self, rows: Iterable[int]) -> None:
        """Makes the regions of the sources in these rows ready, before they are asked for."""
        if self._find is not None:
            ids = (self._ids[row] for row in rows)
            self._find([image_id for image_id in ids if image_id is not None])

    def tags(self, positions: Float[np.ndarray, "R P"]) -> Tags:
        """The most probable class of regions with these `positions`, by name."""
        if self._names is None:
            raise UserError(
                "tags of regions need the detector's class names; give a file of them, one "
                "per line."
            )
        classes = positions[:, BOX:][:, self._reader.foreground]  # normalized, same order
        tags = tuple(self._names[label] for label in classes.argmax(axis=1))
        return Tags(tags, tuple(dict.fromkeys(tags)))


# Regions of a picture without a detector: its patches.


class PatchRegions:
    """Regions = the patches of the picture, their raw pixels scaled to [-1, 1].

    Args:
      size: side of the pixels, a multiple of `patch`.
      patch: side of a patch.

    Attributes:
      slots: regions of a picture.
      dim: values of a region, patch * patch * 3.
    """

    def __init__(self, size: int, patch: int):
        self._patch, self._boxes = patch, patch_boxes(size, patch)  # [R, 6]
        self.slots, self.dim = len(self._boxes), patch * patch * 3
        self.position_dim = self._boxes.shape[1]  # values of a region's position, the 6 of its box

    def __call__(
        self, source: RawSource
    ) -> tuple[Float[np.ndarray, "R F"], Float[np.ndarray, "R P"]] | None:
        """Features and positions; None for a snippet."""
        if source.pixels is None:
            return None
        pixels = source.pixels.astype(np.float32)
        return self._values(pixels) * np.float32(1 / 127.5) - 1, self._positions(pixels)

    def _values(self, pixels: Float[np.ndarray, "S S 3"]) -> Float[np.ndarray, "R F"]:
        """The pixels of every region, 0 to 255."""
        return patches(pixels, self._patch)

    def _positions(self, pixels: Float[np.ndarray, "S S 3"]) -> Float[np.ndarray, "R P"]:
        return self._boxes


# VinVL's detections row by row: the pictures of a TSV with a lineidx, whatever their numbers.
#
# Each row is a picture's name and, in the last column, the JSON object that data.regions reads. A
# TSV of sizes (VinVL's hw.tsv) has rows `name TAB [{"height": h, "width": w}]`.


class PictureRow(NamedTuple):
    """A picture of the TSV: its regions, or why there are none, and height and width in pixels.

    Of rows that do not hold the size it is None.
    """

    name: str
    detections: Detections | RegionError
    size: tuple[int, int] | None


class VinVLRows:
    """The rows of a TSV of VinVL's detections, beside which its lineidx lies."""

    def __init__(self, path: str | os.PathLike):
        self._tsv = IndexedTsv(path)

    def __len__(self) -> int:
        return len(self._tsv)

    def __getitem__(self, row: int) -> PictureRow:
        where = f"{self._tsv.path}, row {row}"
        try:
            columns = self._tsv.columns(row)
        except CutLine as error:
            return PictureRow(f"row {row}", RegionError(str(error)), None)
        name = columns[0].strip().decode("utf-8", "replace")
        try:
            content = parse_json(columns[-1], where)
            objects = content["objects"]
            size = content.get("image_h"), content.get("image_w")
            detections: Detections | RegionError = VinVLFeatures.detections(objects, where)
        except RegionError as error:
            return PictureRow(name, error, None)
        except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = RegionError(f"{where}: holds no JSON object with a list `objects` ({error}).")
            return PictureRow(name, reason, None)
        return PictureRow(name, detections, size if all(type(n) is int for n in size) else None)


def read_sizes(path: Path) -> dict[str, tuple[int, int]]:
    """name -> height and width, of VinVL's hw.tsv."""
    sizes = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        name, _, text = line.partition("\t")
        try:
            [size] = parse_json(text, f"{path}, line {number}")
            height, width = int(size["height"]), int(size["width"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(
                f'{path}, line {number}: a name, a tab and [{{"height": h, "width": w}}] were '
                f"expected ({error}); fetch the file again."
            ) from error
        sizes[name.strip()] = height, width
    return sizes
