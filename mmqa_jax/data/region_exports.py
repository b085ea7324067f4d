"""Records of regions in the formats of the originals, for their code and for others'.

    vinvl       features.tsv, labels.tsv, hw.tsv with lineidx            scene_graph_benchmark
                engine/inference.py (`convert_predictions_to_tsv`); labels where names are known
    tags        tags.tsv                      PICa's tags of pictures

Each file is written whole or not at all.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.data import region_records

Advance = Callable[[int], None]

_NUMBER = re.compile(r"(?<!\d)\d{1,19}$")
# Of VinVL's attributes: sgg_configs/vgattr/vinvl_x152c4.yaml, config/sg_defaults.py.
_LEAST_ATTRIBUTE, _MOST_ATTRIBUTES = 0.05, 16


def export_regions(
    records: region_records.RegionRecords,
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


def _read(
    records: region_records.RegionRecords, advance: Advance
) -> Iterator[tuple[str, region_records.DetectedRegions]]:
    for number, name in enumerate(records.pictures):
        yield name, records.record(number)
        advance(1)


def _vinvl(
    records: region_records.RegionRecords, folder: Path, least: float | None, advance: Advance
) -> None:
    facts = records.facts
    named = bool(facts.class_names)
    tables = ["features", "hw", *(["labels"] if named else [])]
    with contextlib.ExitStack() as stack:
        write = {table: stack.enter_context(_indexed(folder / f"{table}.tsv")) for table in tables}
        for name, regions in _read(records, advance):
            words = region_records.region_words(regions, facts, least) if named else None
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
    regions: region_records.DetectedRegions,
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


def _tags(
    records: region_records.RegionRecords, folder: Path, least: float | None, advance: Advance
) -> None:
    def rows() -> Iterable[tuple[int, list[dict]]]:
        for name, regions in _read(records, advance):
            words = region_records.region_words(regions, records.facts, least)
            yield _number_of(name, "tags"), region_records.tags(words, regions.scores)

    with atomic_write(folder / "tags.tsv") as file:
        for number, objects in rows():
            file.write(f"{number}\t{json.dumps(objects, ensure_ascii=False)}\n")


EXPORTS: dict[str, Callable[[region_records.RegionRecords, Path, float | None, Advance], None]] = {
    "vinvl": _vinvl,
    "tags": _tags,
}


def check_held(
    kinds: Iterable[str],
    facts: region_records.RegionFacts,
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
            region_records.check_words(facts, least)


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
