"""COCO's pictures, and the descriptions of them that stand in for pixels.

captions TSV    image_id TAB [{"caption", "conf"}, ...]     VinVL's captions (PICa)
tags TSV        image_id TAB [{"class", "conf"}, ...]       object tags (PICa)
captions JSON   {"annotations": [{"image_id", "caption"}]}  COCO's five captions by people
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_text, read_json, read_text

# Folders that pictures may lie in, below the folder of the official files.
FOLDERS_2014 = (".", "train2014", "val2014", "images", "images/train2014", "images/val2014")
FOLDERS_2017 = (
    *(".", "train2017", "val2017", "test2017", "images"),
    *("images/train2017", "images/val2017", "images/test2017"),
)


def picture_of(split: str, image_id: int) -> str:
    """The file name of a picture of train2014, val2014 or test2015."""
    return f"COCO_{split}_{image_id:012d}.jpg"


def picture_2017(image_id: int) -> str:
    """COCO 2017's file name of a picture, in whatever split."""
    return f"{image_id:012d}.jpg"


def read_scored_tsv(path: Path, key: str) -> dict[int, list[dict[str, Any]]]:
    """image_id -> the objects of a captions or tags TSV, in the file's order.

    Args:
      key: of each object's text: `caption` or `class`.

    Raises:
      UserError: names the line that is malformed.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        name, _, text = line.partition("\t")
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise UserError(
                f"{where}: not a picture's number, a tab and a JSON list ({error}); repair that "
                "line or fetch the file again."
            ) from error
        valid = isinstance(rows, list) and all(
            isinstance(row, dict) and isinstance(row.get(key), str) for row in rows
        )
        if not name.isdecimal() or not valid:
            raise UserError(
                f"{where}: expected a picture's number, a tab and a JSON list of objects with \""
                f'{key}"; repair that line or fetch the file again.'
            )
        check_text(rows, where)
        found.setdefault(int(name), []).extend(rows)
    return found


def read_captions(path: Path) -> dict[int, str]:
    """image_id -> its most confident caption, of a captions TSV."""
    return {
        image_id: max(rows, key=lambda row: row.get("conf", 0.0))["caption"]
        for image_id, rows in read_scored_tsv(path, "caption").items()
        if rows
    }


def read_caption_annotations(path: Path) -> dict[int, list[str]]:
    """image_id -> its captions by people, of COCO's captions JSON."""
    data = read_json(path)
    rows = data.get("annotations") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise UserError(f'{path}: holds no list "annotations"; fetch COCO\'s captions again.')
    found: dict[int, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        image_id, caption = (
            (row.get("image_id"), row.get("caption")) if isinstance(row, dict) else (None, None)
        )
        if type(image_id) is not int or not isinstance(caption, str):
            raise UserError(
                f"{path}, annotation {number}: expected a number image_id and a text caption; "
                "fetch COCO's captions again."
            )
        found.setdefault(image_id, []).append(caption)
    return found
