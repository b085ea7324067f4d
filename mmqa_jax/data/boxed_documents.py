"""The child of `core.box` that reads documents and pictures: parsers run nowhere else."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from mmqa_jax.data.documents.document import BELOW, Document, DocumentError
from mmqa_jax.data.documents.read import READERS
from mmqa_jax.data.picture_bounds import PictureError

_LONGEST, _DEEPEST = 300, 10  # characters of a heading; headings above a paragraph

# What is kept of a file, as JSON with the keys of its pictures in order, and these.
Read = tuple[dict[str, Any], list[bytes]]


def text(data: bytes, ending: str, least_pixels: int) -> Read:
    """What is kept of a document's text and figures; `bad`: why it cannot be read."""
    from mmqa_jax.data.images import verify

    try:
        document = READERS[ending].read(data, least_pixels)
    except DocumentError as error:
        return _bad(error)
    pictures: dict[str, bytes] = {}
    figures, broken = [], list(document.broken_figures)
    for number, figure in enumerate(document.figures, start=1):
        key = ""
        if figure.picture is not None:
            try:
                verify(figure.picture, f"figure {number}")
            except PictureError as error:
                broken.append(_reason(error))
                continue
            key = _add(pictures, figure.picture)
        heading = _shortened(figure.heading)
        figures.append([figure.caption, heading, figure.page, key, figure.link])
    kept = {
        **_paragraphs(document),
        "figures": figures,
        "scanned_pages": list(document.scanned_pages),
        "broken_figures": broken,
        "title": document.title,
        "letters": document.letters_read,
        "held": document.letters,
        "left_out": dict(document.left_out),
        "missing": document.missing,
    }
    return kept | {"pictures": list(pictures)}, list(pictures.values())


def pages(data: bytes) -> Read:
    """What is kept of a PDF's pages, as of figures without a caption."""
    from mmqa_jax.data.documents.pages import page_pictures

    pictures: dict[str, bytes] = {}
    figures, broken = [], []
    try:
        for page in page_pictures(data):
            if page.picture is None:
                broken.append(page.problem)
            else:
                figures.append(["", "", page.number, _add(pictures, page.picture), ""])
    except DocumentError as error:
        return _bad(error)
    kept = {"figures": figures, "broken_figures": broken, "pictures": list(pictures)}
    return kept, list(pictures.values())


def picture(data: bytes) -> Read:
    """What is kept of a picture: that it is one."""
    from mmqa_jax.data.images import verify

    try:
        verify(data, "")
    except PictureError as error:
        return _bad(error)
    return {"pictures": []}, []


def _bad(error: DocumentError | PictureError) -> Read:
    return {"bad": _reason(error), "pictures": []}, []


def _reason(error: DocumentError | PictureError) -> str:
    """Why a document or picture is left out; MemoryError where a library ran into the limit."""
    if isinstance(error.__cause__, MemoryError):
        raise MemoryError from error
    return str(error).removeprefix(": ").rstrip(".")


def _paragraphs(document: Document) -> dict[str, Any]:
    """The paragraphs; headings of sections and of tables are written once, and named by number.

    A heading that is too long or too deep for each passage to repeat it is a paragraph.
    """
    numbers: dict[str, int] = {"": 0}
    short: dict[str, int] = {}  # path of headings -> number of what is kept of it
    moved: set[str] = set()
    rows = []
    for paragraph in document.paragraphs:
        path = paragraph.heading
        if path not in short:
            parts = path.split(BELOW)
            kept = BELOW.join(_shortened(part) for part in parts[:_DEEPEST])
            short[path] = numbers.setdefault(kept, len(numbers))
            for part in parts[_DEEPEST:] + [p for p in parts[:_DEEPEST] if len(p) > _LONGEST]:
                if part not in moved:
                    moved.add(part)
                    rows.append([part, short[path], paragraph.page, False, 0, []])
        header = numbers.setdefault(paragraph.header, len(numbers))
        places = [dataclasses.astuple(place) for place in paragraph.places]
        about = [short[path], paragraph.page, paragraph.is_row, header]
        rows.append([paragraph.text, *about, places])
    return {"paragraphs": rows, "headings": list(numbers)}


def _shortened(heading: str) -> str:
    return heading if len(heading) <= _LONGEST else f"{heading[: _LONGEST - 1]}…"


def _add(pictures: dict[str, bytes], encoded: bytes) -> str:
    """Adds an encoded picture under its key."""
    key = f"picture {hashlib.sha256(encoded).hexdigest()}"
    pictures[key] = encoded
    return key
