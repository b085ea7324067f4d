"""What regions show as words: names of their classes, alone or behind an attribute.

Oscar reads them as its text (run_captioning.py, `get_od_labels`), PICa as a picture's tags.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, read_text
from mmqa_jax.data.region_records import DetectedRegions, RegionFacts

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
        found = [by_number.get(number, "") for number in range(1, len(by_number) + 1)]
    else:
        lines = read_text(path).rstrip("\n").split("\n")
        found = [line.split(",")[0].strip().lower() for line in lines]
    if len(found) != count or not all(found):
        raise UserError(
            f"{path}: {len(found)} names, {sum(map(bool, found))} of them not empty; the detector "
            f"has {count} {kind} names without the first, which stands for none."
        )
    return tuple(found)


def region_words(
    found: DetectedRegions, facts: RegionFacts, least: float | None = None
) -> list[str]:
    """A word for every region, in their order.

    Args:
      least: with this probability the most probable attribute stands before the class; None: it
        never does. bottom-up attention's demo has 0.1.
    """
    check_words(facts, least)
    words = [facts.class_names[label] for label in found.named]
    if least is None:
        return words
    best = found.attributes[:, 1:].argmax(axis=1)
    certain = found.attributes[np.arange(len(found)), best + 1] >= least
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
