"""The child of `core.box` that reads documents and pictures: parsers run nowhere else."""

import dataclasses
import hashlib
from typing import Any

from mmqa_jax.data.documents.document import (
    LINED,
    READERS,
    Document,
    DocumentError,
    decoded,
    with_lines,
)
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.pictures.decode import verify

# What is kept of a file, as JSON with the keys of its pictures in order, and these.
Read = tuple[dict[str, Any], list[bytes]]


def text(data: bytes, ending: str, least_pixels: int, scans: bool = False) -> Read:
    """Returns a document's text and figures; `bad` says why it cannot be read.

    `scans`: of a PDF, whether pages that are pictures are read (documents/ocr.py).
    """
    try:
        if ending == ".pdf":
            from mmqa_jax.data.documents.pdf import read_pdf

            document = read_pdf(data, least_pixels, scans)
        else:
            document = READERS[ending].read(data)
            if ending in LINED:
                lined = with_lines(document.paragraphs, decoded(data))
                document = dataclasses.replace(document, paragraphs=tuple(lined))
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
        figures.append([figure.caption, figure.heading, figure.page, key, figure.link, figure.box])
    content = {
        **_paragraphs(document),
        "figures": figures,
        "scanned_pages": list(document.scanned_pages),
        "page_sizes": {
            str(page): [round(side, 1) for side in size]
            for page, size in document.page_sizes.items()
        },
        "broken_figures": broken,
        "title": document.title,
        "letters": document.letters_read,
        "held": document.letters,
        "left_out": dict(document.left_out),
        "missing": document.missing,
    }
    return content | {"pictures": list(pictures)}, list(pictures.values())


def pages(data: bytes) -> Read:
    """Returns a PDF's pages as figures without a caption."""
    from mmqa_jax.data.documents.pdf import page_pictures

    pictures: dict[str, bytes] = {}
    figures, broken = [], []
    try:
        for page in page_pictures(data):
            if page.picture is None:
                broken.append(page.problem)
            else:
                figures.append(["", "", page.number, _add(pictures, page.picture), "", None])
    except DocumentError as error:
        return _bad(error)
    content = {"figures": figures, "broken_figures": broken, "pictures": list(pictures)}
    return content, list(pictures.values())


def scans(data: bytes, numbers: list[int]) -> Read:
    """Returns `sizes`, in points, of pages that can be drawn, by their numbers, and their pictures.

    `numbers`: of pages, from 1.
    """
    from mmqa_jax.data.documents.pdf import page_pictures

    try:
        drawn = [page for page in page_pictures(data, numbers) if page.picture is not None]
    except DocumentError as error:
        return _bad(error)
    sizes = [[page.number, *page.size] for page in drawn]
    return {"sizes": sizes, "pictures": []}, [page.picture for page in drawn]


def picture(data: bytes) -> Read:
    """Returns the entry of a picture, once it is known to be one."""
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
    """The paragraphs; headings of sections and of tables are written once, and named by number."""
    numbers: dict[str, int] = {"": 0}
    rows = []
    for paragraph in document.paragraphs:
        heading, header = (
            numbers.setdefault(text, len(numbers)) for text in (paragraph.heading, paragraph.header)
        )
        places = [dataclasses.astuple(place) for place in paragraph.places]
        about = [heading, paragraph.page, paragraph.is_row, header]
        rows.append([paragraph.text, *about, places])
    return {"paragraphs": rows, "headings": list(numbers)}


def _add(pictures: dict[str, bytes], encoded: bytes) -> str:
    """Adds an encoded picture under its key."""
    key = f"picture {hashlib.sha256(encoded).hexdigest()}"
    pictures[key] = encoded
    return key
