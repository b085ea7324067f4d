"""Records of regions in the formats of the originals, for their code and for others'.

    vlp         regions_bbox.h5, regions_feat042.h5, regions_cls042.h5  VLP: seq2seq_loader.py reads
                by the picture's name and its last three characters (detectron-vlp
                tools/extract_features.py); boxes are left, top, right, bottom, class, score
    webqa       train/1/40001234.pkl          WebQA_Baseline: webqa_loader.py (WebQA_x101fpn
                featureExtraction.py); torch tensors
    vinvl       features.tsv, labels.tsv, hw.tsv with lineidx            scene_graph_benchmark
                engine/inference.py (`convert_predictions_to_tsv`); labels where names are known
    bottom_up   features.tsv                  bottom-up-attention tools/generate_tsv.py, read_tsv.py
    npz         NAME.npz                      MILVLG/bottom-up-attention.pytorch utils/
                extract_utils.py (`save_roi_features`); its `info`, a pickled dictionary, as arrays
    tags        tags.tsv                      PICa's tags of pictures

Each file is written whole or not at all.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import importlib.util
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.data.region_records import (
    DetectedRegions,
    RegionFacts,
    RegionRecords,
    as_detections,
)
from mmqa_jax.data.region_words import check_words, region_words, tags
from mmqa_jax.data.regions import ID_RANGE

Advance = Callable[[int], None]

_NUMBER = re.compile(r"(?<!\d)\d{1,19}$")
# Of VinVL's attributes: sgg_configs/vgattr/vinvl_x152c4.yaml, config/sg_defaults.py.
_LEAST_ATTRIBUTE, _MOST_ATTRIBUTES = 0.05, 16
_VLP = "vlp_x101"
# The package that a format needs besides, and how the sentence about it ends.
_PACKAGES = {
    "vlp": ("h5py", '; run `pip install "mmqa-jax[hdf5]"`'),
    "webqa": ("torch", ", whose tensors its files hold; run `pip install torch`"),
}


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


def _vlp(records: RegionRecords, folder: Path, least: float | None, advance: Advance) -> None:
    import h5py

    by_ending: dict[str, list[int]] = {}
    names = _plain_names(records.pictures)
    for number, name in enumerate(names):
        by_ending.setdefault(name[-3:], []).append(number)

    @contextlib.contextmanager
    def written(name: str) -> Iterator[Any]:
        with atomic_write(folder / name, "w+b") as file, h5py.File(file, "w") as opened:
            yield opened

    with written("regions_bbox.h5") as boxes:
        for ending, numbers in sorted(by_ending.items()):
            with (
                written(f"regions_feat{ending}.h5") as features,
                written(f"regions_cls{ending}.h5") as classes,
            ):
                for number in numbers:
                    name, found = names[number], records.record(number)
                    more = [found.labels[:, None], found.scores[:, None]]
                    boxes.create_dataset(
                        name, data=np.concatenate([found.boxes, *more], axis=1, dtype="<f4")
                    )
                    features.create_dataset(name, data=found.features)
                    classes.create_dataset(name, data=found.probabilities)
                    advance(1)


def _webqa(records: RegionRecords, folder: Path, least: float | None, advance: Advance) -> None:
    import torch

    for name, found in _read(records, advance):
        number = _number_of(name, "webqa")
        read = as_detections(found, "x101")
        tensors = {
            "pred_boxes": read.boxes,
            "scores": read.scores,
            "pred_classes": read.labels,
            "fc1_features": read.features,
            "cls_features": read.classes,
        }
        content = {"image_size": found.size, "num_instances": len(found)}
        content |= {key: torch.from_numpy(np.array(array)) for key, array in tensors.items()}
        path = folder / "train" / str(number % ID_RANGE // 1000) / f"{number}.pkl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "wb") as file:
            pickle.dump(content, file, protocol=3)


def _vinvl(records: RegionRecords, folder: Path, least: float | None, advance: Advance) -> None:
    facts = records.facts
    named = bool(facts.class_names)
    tables = ["features", "hw", *(["labels"] if named else [])]
    with contextlib.ExitStack() as stack:
        write = {table: stack.enter_context(_indexed(folder / f"{table}.tsv")) for table in tables}
        for name, found in _read(records, advance):
            words = region_words(found, facts, least) if named else None
            objects = list(_objects(found, words, facts.attribute_names))
            height, width = found.size
            sizes = {"image_h": height, "image_w": width}  # not the original's: mmqa caption's
            write["features"](name, {"objects": objects, "relations": None, **sizes})
            write["hw"](name, [{"height": height, "width": width}])
            if named:
                keys = ("class", "conf", "rect", "attributes", "attr_scores")
                short = [{key: one[key] for key in keys if key in one} for one in objects]
                write["labels"](name, short)


def _objects(
    found: DetectedRegions, words: list[str] | None, attribute_names: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    probabilities = found.probabilities
    for n in range(len(found)):
        one: dict[str, Any] = {"rect": found.boxes[n].tolist(), "bbox_id": n}
        if words is not None:
            one["class"] = words[n]
        one |= {
            "conf": float(found.scores[n]),
            "feature": _base64(found.features[n]),
            "scores_all": _base64(probabilities[n]),
        }
        if found.attributes is not None and attribute_names:
            values = found.attributes[n, 1:]
            best = np.argsort(-values, kind="stable")[:_MOST_ATTRIBUTES]
            best = best[values[best] > _LEAST_ATTRIBUTE]
            one["attributes"] = [attribute_names[attribute] for attribute in best]
            one["attr_scores"] = values[best].tolist()
        yield one


@contextlib.contextmanager
def _indexed(path: Path) -> Iterator[Callable[[str, Any], None]]:
    """Writes rows `name TAB JSON`, and where they begin into the lineidx (`tsv_writer`)."""
    with (
        atomic_write(path, "wb") as file,
        atomic_write(path.with_suffix(".lineidx")) as offsets,
    ):
        offset = 0

        def write(name: str, value: Any) -> None:
            nonlocal offset
            offsets.write(f"{offset}\n")
            offset += file.write(f"{name}\t{json.dumps(value)}\n".encode())

        yield write


def _bottom_up(records: RegionRecords, folder: Path, least: float | None, advance: Advance) -> None:
    with atomic_write(folder / "features.tsv") as file:
        rows = csv.writer(file, delimiter="\t", lineterminator="\r\n")
        for name, found in _read(records, advance):
            number, (height, width) = _number_of(name, "bottom_up"), found.size
            arrays = _base64(found.boxes), _base64(found.features)
            rows.writerow((number, width, height, len(found), *arrays))


def _npz(records: RegionRecords, folder: Path, least: float | None, advance: Advance) -> None:
    for name, found in _read(records, advance):
        path = folder / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        classes = found.probabilities[:, 1:]
        arrays = {
            "x": found.features,
            "bbox": found.boxes,
            "num_bbox": len(found),
            "image_h": found.size[0],
            "image_w": found.size[1],
            "objects_id": classes.argmax(axis=1),
            "objects_conf": classes.max(axis=1, initial=0),
        }
        if found.attributes is not None:
            attributes = found.attributes[:, 1:]
            arrays["attrs_id"] = attributes.argmax(axis=1)
            arrays["attrs_conf"] = attributes.max(axis=1, initial=0)
        with atomic_write(path, "wb") as file:
            np.savez_compressed(file, **arrays)


def _tags(records: RegionRecords, folder: Path, least: float | None, advance: Advance) -> None:
    def rows() -> Iterable[tuple[int, list[dict]]]:
        for name, found in _read(records, advance):
            words = region_words(found, records.facts, least)
            yield _number_of(name, "tags"), tags(words, found.scores)

    with atomic_write(folder / "tags.tsv") as file:
        for number, objects in rows():
            file.write(f"{number}\t{json.dumps(objects, ensure_ascii=False)}\n")


EXPORTS: dict[str, Callable[[RegionRecords, Path, float | None, Advance], None]] = {
    "vlp": _vlp,
    "webqa": _webqa,
    "vinvl": _vinvl,
    "bottom_up": _bottom_up,
    "npz": _npz,
    "tags": _tags,
}


def check_held(
    kinds: Iterable[str], facts: RegionFacts, pictures: Sequence[str], least: float | None = None
) -> None:
    """UserError for a format that cannot hold such records; it can be asked before they are made.

    Args:
      pictures: ids.
      least: see `region_words`.
    """
    for kind in kinds:
        if kind in ("vlp", "webqa"):
            _check_vlp(kind, facts)
        if kind == "vlp" and len(set(_plain_names(pictures))) < len(pictures):
            raise UserError(
                "--export=vlp: two pictures of one name in different folders; rename one."
            )
        if kind in ("webqa", "bottom_up", "tags"):
            _check_numbers(kind, pictures)
        if kind == "npz" and (outside := [name for name in pictures if _leads_out(name)]):
            raise UserError(
                f"--export=npz: picture {outside[0]!r} would be written outside of the export's "
                "folder; rename it."
            )
        if kind == "tags" or (kind == "vinvl" and (facts.class_names or least is not None)):
            check_words(facts, least)


def _leads_out(path: str) -> bool:
    return os.path.isabs(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir


def _check_numbers(kind: str, pictures: Iterable[str]) -> None:
    known: dict[int, str] = {}
    for name in pictures:
        other = known.setdefault(_number_of(name, kind), name)
        if other != name:
            raise UserError(
                f"--export={kind}: pictures {other!r} and {name!r} end in the same number, by "
                "which this format knows pictures; rename one."
            )


def _check_vlp(kind: str, facts: RegionFacts) -> None:
    if facts.detector != _VLP:
        raise UserError(
            f"--export={kind}: the detector is {facts.detector}, and these are files of {_VLP}; "
            "export another format."
        )
    if kind == "vlp" and not facts.rectified:
        raise UserError(
            "--export=vlp: its files hold fc6 behind the ReLU, these records in front of it; run "
            "`mmqa features` without --unrectified, or export webqa."
        )
    if kind == "webqa" and facts.rectified:
        raise UserError(
            "--export=webqa: its files hold fc1 in front of the ReLU, these records behind it; run "
            "`mmqa features --unrectified`, or export vlp."
        )


def _plain_names(pictures: Iterable[str]) -> list[str]:
    """Without the folders."""
    return [name.rpartition("/")[2] for name in pictures]


def _number_of(name: str, kind: str) -> int:
    """The number that a picture's name ends in: COCO's image id."""
    found = _NUMBER.search(name)
    if found is None:
        raise UserError(
            f"--export={kind}: picture {name!r} does not end in a number, by which this format "
            "knows pictures; export another one, or rename the pictures."
        )
    return int(found[0])


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()


def check_exports(kinds: Iterable[str]) -> None:
    """UserError for a format that is not known, or whose package is missing."""
    for kind in kinds:
        if kind not in EXPORTS:
            raise UserError(f"--export={kind}: use one of {', '.join(EXPORTS)}.")
        package, advice = _PACKAGES.get(kind, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            raise UserError(f"--export={kind}: needs the package {package}{advice}.")


def export_folder(out: str | os.PathLike, kind: str) -> Path:
    """Where an export of the records in `out` lies."""
    return Path(out) / "exports" / kind
