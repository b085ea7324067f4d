"""PowerPoint's presentations (.pptx): what its slides show, and the notes below them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmqa_jax.data.documents.document import Document, DocumentError, letters
from mmqa_jax.data.documents.office import (
    Package,
    Reading,
    Related,
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
# Part -> its root and relationships, of the layouts and masters that were read.
_Behind = dict[str, tuple[Any, Mapping[str, Related]]]


def read_pptx(data: bytes) -> Document:
    """The slides of a presentation, whose titles are headings: text, tables, notes and comments.

    What layouts and masters show beside their placeholders follows the first slide that shows it.
    Hidden slides, footers, dates, numbers of slides and the prompts of placeholders are left out
    and counted.

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
    reading, behind = Reading(), _Behind()
    for page, slide in enumerate(slides, start=1):
        target = related.get(reference(slide, "id"))
        if target is None or not target.part:
            raise DocumentError(f"no .pptx that can be read: slide {page} is not in the file")
        _slide(reading, package, target.part, page, behind)
    reading.set_title(package.title())
    return reading.document()


def _slide(reading: Reading, package: Package, part: str, page: int, behind: _Behind) -> None:
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
    _add_behind(reading, package, root, related, behind)
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


def _add_behind(
    reading: Reading, package: Package, root: Any, related: Mapping[str, Related], behind: _Behind
) -> None:
    """Adds the text of a slide's layout, and of the layout's master, once in a presentation."""
    for kind in ("slideLayout", "slideMaster"):
        part = next((target.part for target in related.values() if target.kind == kind), "")
        if not part or root.get("showMasterSp") in ("0", "false"):
            return
        is_new = part not in behind
        if is_new:
            behind[part] = package.xml(part), package.related(part)
        root, related = behind[part]
        if is_new:
            reading.held += held_letters(root, ["t"])
            add_shapes(reading, package, related, children(root, "cSld", "spTree"), _prompt)


def _prompt(shape: Any) -> str:
    """Tells why a shape of a layout is left out; pictures are ornaments there."""
    if edge := _edge(shape):
        return edge
    if local(shape) == "sp" and next(shape.iter("{*}fld"), None) is not None:
        return "footers and numbers of slides"
    return "prompts of placeholders" if _placeholder(shape) or local(shape) == "pic" else ""


def _placeholder(shape: Any) -> str:
    """Returns what a shape is a placeholder of; "" where it is none."""
    place = child(shape, "nvSpPr", "nvPr", "ph")
    return attribute(place, "type", "obj") if place is not None else ""


def _edge(shape: Any) -> str:
    return "footers and numbers of slides" if _placeholder(shape) in _EDGES else ""
