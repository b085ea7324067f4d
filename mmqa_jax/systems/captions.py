"""Descriptions of pictures from side files, for prompts to a model that does not see.

captions TSV     name TAB [{"caption", "conf"}, ...]              VinVL's and Oscar+'s (PICa)
captions JSON    {name: {"pred_captions": [...]}} or {name: text} PromptCap's, Prophet's
tags TSV         name TAB [{"class", "conf"}, ...]                object tags (PICa)

A name is the id of a question (PromptCap describes a picture for a question), of a picture
(image_id: VinVL and Prophet) or of a source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmqa_jax.data.datasets.coco import read_captions, read_named_captions, read_scored_tsv
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.systems.part import OpenParts


class Captions:
    """Captions and tags by name.

    Args:
      captions: name -> caption.
      tags: name -> tags.
      by_picture: whether a question's caption has the name of its picture, not its own.
    """

    def __init__(
        self,
        captions: Mapping[str, str],
        tags: Mapping[str, tuple[str, ...]] | None = None,
        *,
        by_picture: bool = False,
    ):
        self._captions, self._tags, self._by_picture = captions, tags or {}, by_picture

    def of_question(self, question: Question) -> str | None:
        """The caption of a question's picture; None where there is none."""
        return self._captions.get(_picture(question) if self._by_picture else question.id)

    def of_source(self, source: Source) -> tuple[str, tuple[str, ...]]:
        """Caption and tags of a source's picture; empty where there are none."""
        return self._captions.get(source.id, ""), self._tags.get(source.id, ())


@dataclasses.dataclass(frozen=True)
class CaptionsSpec:
    """Side files that describe pictures, see this file's beginning.

    Attributes:
      captions: file of captions, by the id of a question, a picture (image_id) or a source.
      tags: file of tags; "": none.
    """

    captions: str
    tags: str = ""

    def paths(self) -> list[str]:
        """The files that it reads."""
        return [self.captions, self.tags]

    def open(self, row: OpenParts) -> Captions:
        """Captions and tags by name."""
        return open_captions(self.captions, self.tags, row.corpus.questions())


def open_captions(captions: str, tags: str = "", questions: Sequence[Question] = ()) -> Captions:
    """Reads the files; UserError names the one that is malformed.

    Args:
      questions: that are asked. Whether captions have the names of questions or of pictures is told
        by which of the two are more often in the file, since some numbers are of both kinds: those
        of 30 questions of OK-VQA are also of other questions' pictures.
    """
    path = Path(captions)
    if path.suffix == ".json":
        found = read_named_captions(path)
    else:
        found = {str(name): text for name, text in read_captions(path).items()}
    names: dict[str, tuple[str, ...]] = {}
    if tags:
        for name, rows in read_scored_tsv(Path(tags), "class").items():
            names[str(name)] = tuple(row["class"] for row in rows)
    own = sum(question.id in found for question in questions)
    pictures = sum(_picture(question) in found for question in questions)
    return Captions(found, names, by_picture=pictures > own)


def _picture(question: Question) -> str:
    """The number of a question's picture in COCO; "" where it has none."""
    return str(question.extra.get("image_id", ""))
