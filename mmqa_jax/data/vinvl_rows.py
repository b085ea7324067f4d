"""VinVL's detections row by row: the pictures of a TSV with a lineidx, whatever their numbers.

Each row is a picture's name and, in the last column, the JSON object that data.regions reads. A
TSV of sizes (VinVL's hw.tsv) has rows `name TAB [{"height": h, "width": w}]`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_text
from mmqa_jax.core.json_text import parse_json
from mmqa_jax.data.indexed_tsv import CutLine, IndexedTsv
from mmqa_jax.data.regions import Detections, RegionError, VinVLFeatures


class PictureRow(NamedTuple):
    """A picture of the TSV.

    Attributes:
      found: its regions, or why there are none.
      size: height and width in pixels; None where the row does not hold them.
    """

    name: str
    found: Detections | RegionError
    size: tuple[int, int] | None


class VinVLRows:
    """The rows of a TSV of VinVL's detections.

    Args:
      path: the TSV; its lineidx lies beside it.
    """

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
            found: Detections | RegionError = VinVLFeatures.detections(objects, where)
        except RegionError as error:
            return PictureRow(name, error, None)
        except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = RegionError(f"{where}: holds no JSON object with a list `objects` ({error}).")
            return PictureRow(name, reason, None)
        return PictureRow(name, found, size if all(type(n) is int for n in size) else None)


def read_sizes(path: Path) -> dict[str, tuple[int, int]]:
    """name -> height and width, of VinVL's hw.tsv.

    Raises:
      UserError: the line that is malformed.
    """
    found = {}
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
        found[name.strip()] = height, width
    return found
