"""Descriptions of pictures from side files, for prompts to a model that does not see.

captions TSV     name TAB [{"caption", "conf"}, ...]              VinVL's and Oscar+'s (PICa)
captions JSON    {name: {"pred_captions": [...]}} or {name: text} PromptCap's
tags TSV         name TAB [{"class", "conf"}, ...]                object tags (PICa)

A name is the id of a question (PromptCap describes a picture for a question) or of a source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_text, read_json
from mmqa_jax.data.datasets.coco import read_captions, read_scored_tsv
from mmqa_jax.data.schema import Question, Source


class Captions:
    """Captions and tags by name.

    Args:
      captions: name -> caption.
      tags: name -> tags.
    """

    def __init__(
        self, captions: Mapping[str, str], tags: Mapping[str, tuple[str, ...]] | None = None
    ):
        self._captions, self._tags = captions, tags or {}

    def of_question(self, question: Question) -> str | None:
        """The caption of a question's picture for this question; None where there is none."""
        return self._captions.get(question.id)

    def of_source(self, source: Source) -> tuple[str, tuple[str, ...]]:
        """Caption and tags of a source's picture; empty where there are none."""
        return self._captions.get(source.id, ""), self._tags.get(source.id, ())


def open_captions(captions: str, tags: str = "") -> Captions:
    """Reads the files; UserError names the one that is malformed."""
    path = Path(captions)
    if path.suffix == ".json":
        found = _promptcap(path)
    else:
        found = {str(name): text for name, text in read_captions(path).items()}
    names: dict[str, tuple[str, ...]] = {}
    if tags:
        for name, rows in read_scored_tsv(Path(tags), "class").items():
            names[str(name)] = tuple(row["class"] for row in rows)
    return Captions(found, names)


def _promptcap(path: Path) -> dict[str, str]:
    data = read_json(path)
    if not isinstance(data, dict) or not data:
        raise UserError(
            f'{path}: expected an object {{question_id: {{"pred_captions": [...]}}}} or '
            "{question_id: caption}; name a file of PromptCap's captions."
        )
    check_text(data, str(path))
    return {name: _first(value, f"{path}, {name}") for name, value in data.items()}


def _first(value: Any, where: str) -> str:
    listed = value.get("pred_captions") if isinstance(value, dict) else [value]
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
        raise UserError(f'{where}: holds no caption; expected "pred_captions" with one or a text.')
    return listed[0]
