"""Regions of a detector in ArrayRecord: written by `mmqa features`, read by VLP, MCAN and Oscar,
and exported in the formats of the originals.

A record is the bytes of a safetensors file, so that reading it executes nothing:

    size        int32[2]       height and width of the picture
    boxes       float32[N, 4]  left, top, right and bottom in its pixels; of 1,000 pixels float16
                               would know halves only
    scores      float32[N]
    labels      int32[N]       the detector's class, 0 is the background: kept in no class
    features    [N, F]         float16 or float32
    peaks       float32[N]     the largest class logit of a region
    logits      [N, C]         how far the others lie below it, the background first
    attributes  [N, A]         probabilities, "nothing" first; missing: the detector has none

The last three large ones are float16 by default, a relative error of 5e-4 at most for half of the
disk: 0.8 MB for 100 regions of 2,048 values and 1,601 classes. VLP's own features of Conceptual
Captions are float16, too. Below its peak a logit's error grows with the distance, where the
probability is small. Values that float16 cannot hold are refused.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import safetensors.numpy
from jaxtyping import Float, Float32, Int32
from safetensors import SafetensorError

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_json, read_text
from mmqa_jax.data.records.record_shards import FeatureError, RecordFiles, RecordKind
from mmqa_jax.data.regions import FEATURES, Detections, RegionError

REGIONS = RecordKind(
    "regions of pictures", "regions", "regions", "regions", "mmqa features", "data.region_records"
)
Precision = Literal["float16", "float32"]
Layout = Literal["x101", "vinvl"]

_CLASSES = {"x101": 1601, "vinvl": 1595}
_LARGE = ("features", "logits", "attributes")
_NUMBER = re.compile(r"(?<!\d)(\d{1,19})$")


@dataclasses.dataclass(frozen=True)
class DetectedRegions:
    """The N regions that a detector found in one picture, the best first or as it ordered them."""

    size: tuple[int, int]  # height and width of the picture in pixels
    boxes: Float32[np.ndarray, "N 4"]  # left, top, right and bottom in these pixels
    features: Float32[np.ndarray, "N F"]  # of the regions
    scores: Float32[np.ndarray, " N"]  # confidence; 0: kept in no class
    labels: Int32[np.ndarray, " N"]  # the class, where 0 is the background
    logits: Float32[np.ndarray, "N C"]  # of the classes, the background first
    # Probabilities, "nothing" first; None: the detector knows none.
    attributes: Float32[np.ndarray, "N A"] | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def probabilities(self) -> Float32[np.ndarray, "N C"]:
        """The probabilities of the classes, the background first."""
        powers = np.exp(self.logits - self.logits.max(axis=1, keepdims=True, initial=-np.inf))
        return powers / powers.sum(axis=1, keepdims=True)

    @property
    def named(self) -> Int32[np.ndarray, " N"]:
        """Classes without the background, from 0; the likeliest of a region kept in none."""
        return np.where(self.labels > 0, self.labels, self.logits[:, 1:].argmax(axis=1) + 1) - 1


@dataclasses.dataclass(frozen=True)
class RegionFacts:
    """The facts that all records of a folder share."""

    detector: str  # `vlp_x101`, `vinvl_x152c4` or `bottom_up_r101`, whose rules found the regions
    model: str  # fingerprint of its weights, rules and pictures
    # features, classes, attributes: sizes, of classes with the background, of attributes with
    # "nothing"; 0: none.
    features: int
    classes: int
    attributes: int = 0
    rectified: bool = True  # whether features were taken behind a ReLU (see DetectorConfig)
    random: bool = False  # whether the weights were random, which proves only the plumbing
    precision: Precision = "float16"  # of the large arrays
    # class_names, attribute_names: without background and "nothing"; empty: not known.
    class_names: tuple[str, ...] = ()
    attribute_names: tuple[str, ...] = ()


def pack_regions(regions: DetectedRegions, precision: Precision) -> bytes:
    """A picture's record; see the module."""
    peaks = regions.logits.max(axis=1, initial=-np.inf).astype("<f4")
    arrays = {
        "size": np.array(regions.size, "<i4"),
        "boxes": regions.boxes.astype("<f4"),
        "scores": regions.scores.astype("<f4"),
        "labels": regions.labels.astype("<i4"),
        "features": regions.features,
        "peaks": peaks,
        "logits": regions.logits - peaks[:, None],
    }
    if regions.attributes is not None:
        arrays["attributes"] = regions.attributes
    for name, array in arrays.items():
        if name in _LARGE:
            with np.errstate(over="ignore"):
                arrays[name] = array.astype("<f2" if precision == "float16" else "<f4")
        if not np.isfinite(arrays[name]).all():
            raise UserError(
                f"{name} of regions: up to {np.abs(array).max():.4g}, numbers that {precision} "
                "holds were expected; give --precision=float32 (in a config, features.detection."
                "precision), or other weights if they are not finite."
            )
    return safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in arrays.items()})


def unpack_regions(record: bytes, facts: RegionFacts) -> DetectedRegions:
    """The regions of a record, all in float32.

    Raises:
      ValueError: it is damaged, or not of these sizes.
    """
    try:
        arrays = safetensors.numpy.load(record)
        count = len(arrays["boxes"])
        shapes: dict[str, tuple[int, ...]] = {
            "size": (2,),
            "boxes": (count, 4),
            "scores": (count,),
            "labels": (count,),
            "features": (count, facts.features),
            "peaks": (count,),
            "logits": (count, facts.classes),
        }
        if facts.attributes:
            shapes["attributes"] = (count, facts.attributes)
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} of shape {arrays[name].shape}, expected {shape}")
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"no record of regions: {type(error).__name__} {error}") from error
    height, width = map(int, arrays["size"])
    attributes = arrays.get("attributes")
    return DetectedRegions(
        (height, width),
        arrays["boxes"],
        arrays["features"].astype(np.float32),
        arrays["scores"],
        arrays["labels"],
        arrays["logits"].astype(np.float32) + arrays["peaks"][:, None],
        None if attributes is None else attributes.astype(np.float32),
    )


class RegionRecords:
    """The regions of pictures by id.

    A number finds the picture of that name, and else the one whose name ends in it, as
    COCO_val2014_000000000042 ends in 42.

    Args:
      folder: as `mmqa features` finished it.

    Attributes:
      pictures: ids in order.
    """

    def __init__(self, folder: str | os.PathLike):
        self._files = RecordFiles(folder, REGIONS)
        manifest = self._files.manifest
        names = {field.name for field in dataclasses.fields(RegionFacts)}
        try:
            facts = {name: manifest["facts"][name] for name in names}
            self.pictures: tuple[str, ...] = tuple(manifest["pictures"])
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{folder}: its manifest lacks {error}, as of another version; {REGIONS.again}."
            ) from error
        for name in ("class_names", "attribute_names"):
            facts[name] = tuple(facts[name])
        self.facts = RegionFacts(**facts)  # what is known of all of them
        self._number = {name: number for number, name in enumerate(self.pictures)}
        self._ending: dict[int, list[int]] = {}
        for number, name in enumerate(self.pictures):
            if ending := _NUMBER.search(name):
                self._ending.setdefault(int(ending[1]), []).append(number)

    @property
    def folder(self) -> Path:
        return self._files.folder

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, image_id: Any) -> DetectedRegions:
        """The regions of a picture.

        Raises:
          RegionError: no picture of that id, or several that end in the number.
        """
        return self.record(self._find(image_id))

    def record(self, number: int) -> DetectedRegions:
        """The regions of the picture `pictures[number]`; UserError for damaged files."""
        _, content = self._files.read(number)
        try:
            return unpack_regions(content, self.facts)
        except ValueError as error:
            raise self._files.unreadable(error) from error

    def read_features(self, image_id: Any) -> tuple[Float[np.ndarray, "F N"], str]:
        """Features as openvqa's files hold them, and the folder's name for messages.

        Raises:
          FeatureError: the picture has none.
        """
        try:
            return self.read(image_id).features.T, str(self.folder)
        except RegionError as error:
            raise FeatureError(str(error)) from error

    def _find(self, image_id: Any) -> int:
        number = self._number.get(str(image_id))
        if number is not None:
            return number
        ending = self._ending.get(image_id, []) if isinstance(image_id, int) else []
        if len(ending) > 1:
            raise RegionError(
                f"{self.folder}: {len(ending)} pictures end in {image_id}, such as "
                f"{self.pictures[ending[0]]} and {self.pictures[ending[1]]}; name the picture."
            )
        if not ending:
            raise RegionError(
                f"{self.folder}: no regions of picture {image_id}; run `mmqa features` on it."
            )
        return ending[0]


class DetectedPictures(Protocol):
    """Regions by a picture's id: RegionRecords, or what a detector finds when it is asked."""

    @property
    def facts(self) -> RegionFacts: ...

    @property
    def folder(self) -> Path: ...

    def read(self, image_id: Any) -> DetectedRegions:
        """The regions of a picture; RegionError where there are none."""


class RecordDetections:
    """Records as VLP's reader takes the files of a frontend: a RegionReader.

    Args:
      records: of the detector that the frontend's files come from.
      layout: the frontend. `x101`: WebQA's, features in front of fc6's ReLU, and logits with the
        background last. `vinvl`: probabilities with the background first.
    """

    def __init__(self, records: DetectedPictures, layout: Layout):
        facts = records.facts
        self.classes = _CLASSES[layout]
        self._records, self._layout = records, layout
        last = layout == "x101"
        self.foreground = slice(0, self.classes - 1) if last else slice(1, self.classes)
        if (facts.features, facts.classes) != (FEATURES, self.classes):
            raise UserError(
                f"{records.folder}: regions of {facts.features} features and {facts.classes} "
                f"classes, model.frontend={layout} takes {FEATURES} and {self.classes}; give "
                f"records of its detector, or the frontend of {facts.detector}."
            )
        if last and facts.rectified:
            raise UserError(
                f"{records.folder}: features behind the ReLU of fc6, WebQA's VLP reads those in "
                "front of it; run `mmqa features --unrectified`."
            )

    def read(self, image_id: Any) -> Detections:
        """A picture's regions as the frontend's files hold them.

        Raises:
          RegionError: there are none.
        """
        regions = self._records.read(image_id)
        if not len(regions):
            place = f"{self._records.folder}, picture {image_id}"
            raise RegionError(f"{place}: the detector found no regions.")
        class_names, named = self._records.facts.class_names, regions.named.astype(np.int64)
        if self._layout == "x101":
            classes, labels = np.roll(regions.logits, -1, axis=1), named
        else:  # VinVL's files tell classes by their probabilities, and words by the confidence
            classes = regions.probabilities
            labels = classes[:, 1:].argmax(axis=1)
        return Detections(
            features=regions.features,
            boxes=regions.boxes,
            scores=regions.scores,
            classes=classes,
            labels=labels,
            words=tuple(class_names[label] for label in named) if class_names else None,
            image_size=regions.size,
        )


# What regions show as words: names of their classes, alone or behind an attribute.
#
# Oscar reads them as its text (run_captioning.py, `get_od_labels`), PICa as a picture's tags.


# Keys of VinVL's VG-SGG-dicts-vgoi6-clipped.json: name -> number, from 1.
_KEYS = {"class": "label_to_idx", "attribute": "attribute_to_idx"}


def read_names(
    path: str | os.PathLike, kind: Literal["class", "attribute"], count: int
) -> tuple[str, ...]:
    """Names of a detector's classes or attributes, without background and "nothing".

    Args:
      path: one a line, of several spellings between commas the first (bottom-up attention's
        objects_vocab.txt and attributes_vocab.txt, as its demo reads them); or VinVL's JSON.
      kind: which of the two; JSON holds both.
      count: how many the detector has.
    """
    path = Path(path)
    if path.suffix == ".json":
        content = read_json(path)
        table = content.get(_KEYS[kind]) if isinstance(content, dict) else None
        if not isinstance(table, dict):
            raise UserError(
                f"{path}: has no {_KEYS[kind]}; give VinVL's VG-SGG-dicts-vgoi6-clipped.json, or a "
                "text file of a name a line."
            )
        by_number = {number: str(name) for name, number in table.items()}
        names = [by_number.get(number, "") for number in range(1, len(by_number) + 1)]
    else:
        lines = read_text(path).rstrip("\n").split("\n")
        names = [line.split(",")[0].strip().lower() for line in lines]
    if len(names) != count or not all(names):
        raise UserError(
            f"{path}: {len(names)} names, {sum(map(bool, names))} of them not empty; the detector "
            f"has {count} {kind} names without the first, which stands for none."
        )
    return tuple(names)


def region_words(
    regions: DetectedRegions, facts: RegionFacts, least: float | None = None
) -> list[str]:
    """A word for every region, in their order.

    With a probability of `least` the most probable attribute stands before the class; None: it
    never does. bottom-up attention's demo has 0.1.
    """
    check_words(facts, least)
    words = [facts.class_names[label] for label in regions.named]
    if least is None:
        return words
    best = regions.attributes[:, 1:].argmax(axis=1)
    certain = regions.attributes[np.arange(len(regions)), best + 1] >= least
    return [
        f"{facts.attribute_names[attribute]} {word}" if sure else word
        for word, attribute, sure in zip(words, best, certain, strict=True)
    ]


def check_words(facts: RegionFacts, least: float | None = None) -> None:
    """UserError if records do not name what `region_words` says."""
    if not facts.class_names:
        raise UserError(
            f"{'--export=tags' if least is None else '--attributes'}: these records do not name "
            "the detector's classes; run `mmqa features` with --names, into another folder or with "
            "--overwrite."
        )
    if least is not None and not (facts.attributes and facts.attribute_names):
        raise UserError(
            "--attributes: these records do not name attributes; give --attribute_names, with a "
            "detector that knows some (VLP's does not)."
        )


def tags(words: Sequence[str], scores: np.ndarray) -> list[dict[str, str | float]]:
    """`{"class", "conf"}` of the regions, the most certain first, as PICa's tags TSV has them."""
    order = np.argsort(-scores, kind="stable")
    return [{"class": words[n], "conf": float(scores[n])} for n in order]


# Records of regions in the formats of the originals, for their code and for others'.


Advance = Callable[[int], None]

# Of VinVL's attributes: sgg_configs/vgattr/vinvl_x152c4.yaml, config/sg_defaults.py.
_LEAST_ATTRIBUTE, _MOST_ATTRIBUTES = 0.05, 16


def export_regions(
    records: RegionRecords,
    kind: str,
    folder: Path,
    *,
    least: float | None = None,
    advance: Advance = lambda count: None,
) -> None:
    """Writes records in an original's format; each file is written whole or not at all.

    Args:
      kind: of EXPORTS; see the module.
      folder: made if missing.
      least: see `region_words`, for `vinvl` and `tags`.
      advance: called with the number of pictures written.
    """
    check_exports([kind])
    check_held([kind], records.facts, records.pictures, least)
    folder.mkdir(parents=True, exist_ok=True)
    EXPORTS[kind](records, folder, least, advance)


def _read(records: RegionRecords, advance: Advance) -> Iterator[tuple[str, DetectedRegions]]:
    for number, name in enumerate(records.pictures):
        yield name, records.record(number)
        advance(1)


def _vinvl(records: RegionRecords, folder: Path, least: float | None, advance: Advance) -> None:
    facts = records.facts
    named = bool(facts.class_names)
    tables = ["features", "hw", *(["labels"] if named else [])]
    with contextlib.ExitStack() as stack:
        write = {table: stack.enter_context(_indexed(folder / f"{table}.tsv")) for table in tables}
        for name, regions in _read(records, advance):
            words = region_words(regions, facts, least) if named else None
            objects = list(_objects(regions, words, facts.attribute_names))
            height, width = regions.size
            sizes = {"image_h": height, "image_w": width}  # not the original's: mmqa caption's
            write["features"](name, {"objects": objects, "relations": None, **sizes})
            write["hw"](name, [{"height": height, "width": width}])
            if named:
                keys = ("class", "conf", "rect", "attributes", "attr_scores")
                short = [{key: box[key] for key in keys if key in box} for box in objects]
                write["labels"](name, short)


def _objects(
    regions: DetectedRegions,
    words: list[str] | None,
    attribute_names: tuple[str, ...],
) -> Iterator[dict[str, Any]]:
    probabilities = regions.probabilities
    for n in range(len(regions)):
        entry: dict[str, Any] = {"rect": regions.boxes[n].tolist(), "bbox_id": n}
        if words is not None:
            entry["class"] = words[n]
        entry |= {
            "conf": float(regions.scores[n]),
            "feature": _base64(regions.features[n]),
            "scores_all": _base64(probabilities[n]),
        }
        if regions.attributes is not None and attribute_names:
            values = regions.attributes[n, 1:]
            best = np.argsort(-values, kind="stable")[:_MOST_ATTRIBUTES]
            best = best[values[best] > _LEAST_ATTRIBUTE]
            entry["attributes"] = [attribute_names[attribute] for attribute in best]
            entry["attr_scores"] = values[best].tolist()
        yield entry


@contextlib.contextmanager
def _indexed(path: Path) -> Iterator[Callable[[str, Any], None]]:
    """Writes rows `name TAB JSON`, and where they begin into the lineidx (`tsv_writer`)."""
    with atomic_write(path, "wb") as file, atomic_write(path.with_suffix(".lineidx")) as offsets:
        offset = 0

        def write(name: str, value: Any) -> None:
            nonlocal offset
            offsets.write(f"{offset}\n")
            offset += file.write(f"{name}\t{json.dumps(value)}\n".encode())

        yield write


def _tags(records: RegionRecords, folder: Path, least: float | None, advance: Advance) -> None:
    def rows() -> Iterable[tuple[int, list[dict]]]:
        for name, regions in _read(records, advance):
            words = region_words(regions, records.facts, least)
            yield _number_of(name, "tags"), tags(words, regions.scores)

    with atomic_write(folder / "tags.tsv") as file:
        for number, objects in rows():
            file.write(f"{number}\t{json.dumps(objects, ensure_ascii=False)}\n")


EXPORTS: dict[str, Callable[[RegionRecords, Path, float | None, Advance], None]] = {
    "vinvl": _vinvl,
    "tags": _tags,
}


def check_held(
    kinds: Iterable[str],
    facts: RegionFacts,
    pictures: Sequence[str],
    least: float | None = None,
) -> None:
    """UserError for a format that cannot hold records of these pictures, by id.

    It can be asked before they are made; see `region_words` on `least`.
    """
    for kind in kinds:
        if kind == "tags":
            _check_numbers(kind, pictures)
        if kind == "tags" or (kind == "vinvl" and (facts.class_names or least is not None)):
            check_words(facts, least)


def _check_numbers(kind: str, pictures: Iterable[str]) -> None:
    known: dict[int, str] = {}
    for name in pictures:
        other = known.setdefault(_number_of(name, kind), name)
        if other != name:
            raise UserError(
                f"--export={kind}: pictures {other!r} and {name!r} end in the same number, by "
                "which this format knows pictures; rename one."
            )


def _number_of(name: str, kind: str) -> int:
    """The number that a picture's name ends in: COCO's image id."""
    number = _NUMBER.search(name)
    if number is None:
        raise UserError(
            f"--export={kind}: picture {name!r} does not end in a number, by which this format "
            "knows pictures; export another one, or rename the pictures."
        )
    return int(number[0])


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()


def check_exports(kinds: Iterable[str]) -> None:
    """UserError for a format that is not known."""
    for kind in kinds:
        if kind not in EXPORTS:
            raise UserError(f"--export={kind}: use one of {', '.join(EXPORTS)}.")


def export_folder(out: str | os.PathLike, kind: str) -> Path:
    """The folder of an export of the records in `out`."""
    return Path(out) / "exports" / kind
