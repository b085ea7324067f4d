"""PowerPoint's presentations (.pptx): what its slides show, and the notes below them."""

from __future__ import annotations

from typing import Any

from mmqa_jax.data.documents.document import Document, DocumentError, letters
from mmqa_jax.data.documents.office import (
    Package,
    Reading,
    add_shapes,
    attribute,
    child,
    children,
    drawn_text,
    held_letters,
    local,
    naming_damage,
    reference,
)

_TITLES = ("title", "ctrTitle")
_EDGES = ("dt", "ftr", "sldNum", "hdr")  # placeholders that every slide repeats


def read_pptx(data: bytes) -> Document:
    """The slides of a presentation, whose titles are headings: text, tables, notes and comments.

    Hidden slides, footers, dates and numbers of slides are left out and counted.

    Raises:
      DocumentError: encrypted, damaged, not a .pptx, or it unpacks to too much.
    """
    package = Package(data, ".pptx")
    with naming_damage(".pptx"):
        return _read(package)


def _read(package: Package) -> Document:
    main = package.main()
    related = package.related(main)
    slides = children(package.xml(main), "sldIdLst")
    reading = Reading()
    for page, slide in enumerate(slides, start=1):
        target = related.get(reference(slide, "id"))
        if target is None or not target.part:
            raise DocumentError(f"no .pptx that can be read: slide {page} is not in the file")
        _slide(reading, package, target.part, page)
    reading.set_title(package.title())
    return reading.document()


def _slide(reading: Reading, package: Package, part: str, page: int) -> None:
    root, related = package.xml(part), package.related(part)
    reading.held += held_letters(root, ["t"])
    if root.get("show") in ("0", "false"):
        reading.left_out["hidden slides"] += held_letters(root, ["t"])
        return
    shapes = children(root, "cSld", "spTree")
    title = next((s for s in root.iter("{*}sp") if _placeholder(s) in _TITLES), None)
    lines = [] if title is None else [drawn_text(line) for line in title.iter("{*}p")]
    reading.part(" ".join(lines), page, f"slide {page}")
    add_shapes(reading, package, related, [s for s in shapes if s is not title], _edge)
    for kind, target in related.values():
        if target and kind == "notesSlide":
            notes = package.xml(target)
            reading.held += held_letters(notes, ["t"])
            add_shapes(reading, package, package.related(target), notes, _edge)
        elif target and kind == "comments":
            for comment in package.xml(target).iter("{*}text", "{*}p"):
                text = comment.text if local(comment) == "text" else drawn_text(comment)
                reading.held += letters(text or "")
                reading.say(text or "")


def _placeholder(shape: Any) -> str:
    """Returns what a shape is a placeholder of; "" where it is none."""
    place = child(shape, "nvSpPr", "nvPr", "ph")
    return attribute(place, "type", "obj") if place is not None else ""


def _edge(shape: Any) -> str:
    return "footers and numbers of slides" if _placeholder(shape) in _EDGES else ""
