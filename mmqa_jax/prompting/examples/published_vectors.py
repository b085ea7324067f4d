"""Vectors of OK-VQA's questions and their pictures as PICa's authors published them.

    okvqa_qa_line2sample_idx_{train,val}2014.json                  {line: "image_id<->question_id"}
    coco_clip_vitb16_{train,val}2014_okvqa_question.npy            float[N, D], a row per line
    coco_clip_vitb16_{train,val}2014_okvqa_convertedidx_image.npy  the same of the picture

They are the folder coco_clip_new of github.com/microsoft/PICa, whose code takes plain dot products
of them, and nothing here normalizes them (gpt3_api_okvqa.py, get_context_keys).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.schema import Question

# Similarities that these vectors give.
SIMILARITIES = ("question", "image", "question_and_image")
_INDEX = "okvqa_qa_line2sample_idx_{}.json"
_FILES = {
    "question": "coco_clip_vitb16_{}_okvqa_question.npy",
    "image": "coco_clip_vitb16_{}_okvqa_convertedidx_image.npy",
}
_SPLITS = ("train2014", "val2014")


class PublishedVectors:
    """The vectors of one folder, read when they are first asked for.

    Args:
      folder: of these files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lines: dict[str, int] = {}  # split -> number of lines
        self._places: dict[str, tuple[int, str]] = {}  # question -> row in both splits, image_id
        for split in _SPLITS:
            before = len(self._places)
            for line, (image_id, name) in enumerate(_samples(folder / _INDEX.format(split))):
                if name in self._places:
                    raise UserError(
                        f"{folder / _INDEX.format(split)}, line {line}: question {name} is there "
                        "twice; fetch the file again."
                    )
                self._places[name] = (before + line, image_id)
            self._lines[split] = len(self._places) - before
        self._kept: dict[str, np.ndarray] = {}  # both splits' vectors, by kind

    def of(self, questions: Sequence[Question], kind: str) -> Float32[np.ndarray, "n D"]:
        """The vectors of questions or of their pictures.

        Args:
          kind: `question` or `image`.
        """
        if kind not in _FILES:
            raise UserError(
                f"similarity of the {kind}: {self.folder} has vectors of questions and pictures "
                f"alone; set similarity to one of {', '.join(SIMILARITIES)}, or leave "
                "parts.library.vectors empty and name models."
            )
        rows = [self._row(question) for question in questions]
        if kind not in self._kept:
            self._kept[kind] = self._read(kind)
        return self._kept[kind][rows]

    def _row(self, question: Question) -> int:
        if question.id not in self._places:
            raise UserError(
                f"{self.folder}: has no vector of question {question.id}; prepare the questions of "
                "OK-VQA's release, or leave parts.library.vectors empty and name models."
            )
        row, image_id = self._places[question.id]
        known = str(question.extra.get("image_id", image_id))
        if known != image_id:
            raise UserError(
                f"{self.folder}: question {question.id} is on picture {image_id} there, but on "
                f"{known} in the prepared data; take both from OK-VQA's release."
            )
        return row

    def _read(self, kind: str) -> Float32[np.ndarray, "N D"]:
        paths = [self.folder / _FILES[kind].format(split) for split in _SPLITS]
        found = [_array(path) for path in paths]
        for path, vectors, split in zip(paths, found, _SPLITS, strict=True):
            if len(vectors) != self._lines[split]:
                raise UserError(
                    f"{path}: has {len(vectors):,} rows, but {_INDEX.format(split)} has "
                    f"{self._lines[split]:,} lines; take both from one release."
                )
        train, val = (vectors.shape[1] for vectors in found)
        if train != val:
            raise UserError(
                f"{paths[1]}: its vectors have {val} dimensions, those of {paths[0].name} {train}; "
                "take both from one release."
            )
        return np.concatenate(found)


def _samples(path: Path) -> list[tuple[str, str]]:
    """(image_id, question_id) of every line of an index."""
    data = read_json(path)
    if not isinstance(data, dict) or not data:
        raise UserError(
            f'{path}: an object {{line: "image_id<->question_id"}} was expected; fetch it again.'
        )
    return [_sample(data.get(str(line)), f"{path}, line {line}") for line in range(len(data))]


def _sample(value: Any, where: str) -> tuple[str, str]:
    image_id, _, name = value.partition("<->") if isinstance(value, str) else ("", "", "")
    if not image_id.isdecimal() or not name:
        raise UserError(
            f'{where}: is {value!r}; "image_id<->question_id" was expected, of every line from 0; '
            "fetch the file again."
        )
    return image_id, name


def _array(path: Path) -> Float32[np.ndarray, "N D"]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file; fetch the folder coco_clip_new of github.com/microsoft/PICa."
        ) from error
    except Exception as error:  # numpy parses the header as Python, which can raise nearly any
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"{path}: cannot be read as an array of numbers ({reason:.150}); fetch it again."
        ) from error
    shape, kind = getattr(found, "shape", ()), getattr(found, "dtype", None)
    if len(shape) != 2 or not np.issubdtype(kind, np.floating):
        raise UserError(
            f"{path}: holds {'x'.join(map(str, shape)) or 'no array'} of {kind}; floats in rows "
            "and columns were expected; fetch it again."
        )
    vectors = np.asarray(found, np.float32)
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        raise UserError(
            f"{path}, row {broken[0]}: holds a value that is no finite number; fetch it again."
        )
    return vectors
