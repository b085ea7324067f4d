"""Pictures with the boxes of their regions, and a page that shows them: for a person to look at."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmqa_jax.core.files import atomic_write
from mmqa_jax.data.images import PictureError, decode_upright
from mmqa_jax.data.region_records import DetectedRegions, RegionFacts, RegionRecords
from mmqa_jax.data.region_words import check_words, region_words
from mmqa_jax.data.regions import RegionError
from mmqa_jax.data.schema import Material
from mmqa_jax.runs.region_features import NamedPictures

PAGE = "index.html"

_LARGEST = 1000  # side of a drawn picture in pixels
_BOXES = 15  # of a picture, the most certain; all of them hide it
_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


def draw_regions(
    records: RegionRecords,
    pictures: NamedPictures,
    folder: Path,
    count: int,
    least: float | None = None,
) -> list[str]:
    """Draws the first pictures that records and pictures both have.

    Args:
      folder: for a PNG each and PAGE; made if missing.
      count: of pictures.
      least: see `region_words`.

    Returns:
      The ids of the pictures drawn.
    """
    if least is not None:
        check_words(records.facts, least)
    folder.mkdir(parents=True, exist_ok=True)
    shown: list[tuple[str, str, list[str]]] = []
    for picture in records.pictures:
        if len(shown) == count:
            break
        if picture not in pictures.names:
            continue
        name = pictures.names[picture]
        try:
            image = decode_upright(pictures.read(name), name)
            found = records.read(picture)
        except (PictureError, RegionError):
            continue
        titles = region_titles(found, records.facts, least)
        file = f"{len(shown):04d}.png"
        with atomic_write(folder / file, "wb") as out:
            out.write(_png(drawn(image, found, titles)))
        shown.append((picture, file, titles))
    with atomic_write(folder / PAGE) as out:
        out.write(_page(records.facts, shown, pictures.materials))
    return [picture for picture, _, _ in shown]


def region_titles(
    found: DetectedRegions, facts: RegionFacts, least: float | None = None
) -> list[str]:
    """`dog 0.93` for each region; without names the class's number."""
    if facts.class_names:
        words = region_words(found, facts, least)
    else:
        words = [f"class {label + 1}" for label in found.named]
    return [f"{word} {score:.2f}" for word, score in zip(words, found.scores, strict=True)]


def drawn(image: Image.Image, found: DetectedRegions, titles: Sequence[str]) -> Image.Image:
    """The RGB picture with the boxes of its most certain regions; small ones are enlarged."""
    scale = min(_LARGEST / max(image.size), 8.0)
    image = image.resize([max(1, round(side * scale)) for side in image.size])
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=14)
    best = np.argsort(-found.scores, kind="stable")[:_BOXES]
    for n in reversed(best):  # the most certain on top
        left, top, right, bottom = (found.boxes[n] * scale).tolist()
        color = _COLORS[n % len(_COLORS)]
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=color, width=2)
        place = left + 2, max(0.0, top - 16)
        draw.rectangle(draw.textbbox(place, titles[n], font=font), fill=color)
        draw.text(place, titles[n], fill="white", font=font)
    return image


def _png(image: Image.Image) -> bytes:
    made = io.BytesIO()
    image.save(made, "png")
    return made.getvalue()


def _page(
    facts: RegionFacts,
    shown: Sequence[tuple[str, str, list[str]]],
    materials: Sequence[Material],
) -> str:
    random = " with random weights, which find nothing" if facts.random else ""
    figures = "\n".join(
        f'<figure><img src="{file}" alt=""><figcaption><b>{html.escape(picture)}</b>: '
        f"{len(titles)} regions: {html.escape(', '.join(titles))}</figcaption></figure>"
        for picture, file, titles in shown
    )
    credits = "\n".join(f"<p>{html.escape(str(material))}</p>" for material in materials)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Regions</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        "<style>body{font:15px sans-serif;margin:1em}figure{display:inline-block;"
        "vertical-align:top;width:min(480px,100%);margin:8px 0}img{width:100%}"
        "figcaption{font-size:12px;max-height:9em;overflow:auto}</style>\n"
        f"<h1>Regions of {html.escape(facts.detector)}{random}</h1>\n"
        f"<p>Of each picture the {_BOXES} most certain are drawn.</p>\n{figures}\n"
        f"{credits}\n</html>\n"
    )
