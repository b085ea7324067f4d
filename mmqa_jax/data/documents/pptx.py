"""PowerPoint's presentations (.pptx): what its slides show, and the notes below them."""

from typing import Any

from mmqa_jax.data.documents import office
from mmqa_jax.data.documents.document import Document, DocumentError
from mmqa_jax.data.documents.office import drawn_text, held_letters

_TITLES = ("title", "ctrTitle")
_EDGES = ("dt", "ftr", "sldNum", "hdr")  # placeholders that every slide repeats


def read_pptx(data: bytes) -> Document:
    """The slides of a presentation, whose titles are headings: text, tables, notes and comments.

    What layouts and masters show beside their placeholders follows the first slide that shows it.
    Hidden slides, footers, dates, numbers of slides and the prompts of placeholders are left out
    and counted.
    """
    return office.read(_Slides, data, ".pptx")


class _Slides(office.Reading):
    """One reading of a presentation."""

    def __init__(self, package: office.Package) -> None:
        super().__init__(package)
        self._behind: dict[str, Any] = {}  # layouts and masters that were read -> their roots

    def read(self) -> Document:
        main = self.package.main()
        related = self.package.related(main)
        for page, slide in enumerate(self.package.xml(main).iterfind("sldIdLst/*"), start=1):
            self.related = related
            if not (part := self.target(slide, "id")):
                raise DocumentError(f"no .pptx that can be read: slide {page} is not in the file")
            self._slide(self._opened(part), page)
        self.set_title(self.package.title())
        return self.document()

    def _opened(self, part: str) -> Any:
        """The root of a part that is read from now on."""
        self.related = self.package.related(part)
        root = self.package.xml(part)
        self.held += held_letters(root, "t")
        return root

    def _slide(self, root: Any, page: int) -> None:
        if root.get("show") in ("0", "false"):
            self.left_out["hidden slides"] += held_letters(root, "t")
            return
        title = next((s for s in root.iter("sp") if _placeholder(s) in _TITLES), None)
        lines = [] if title is None else [drawn_text(line) for line in title.iter("p")]
        self.part(" ".join(lines), page, f"slide {page}")
        beside = self.targets("notesSlide", "comments")
        self.shapes((s for s in root.iterfind("cSld/spTree/*") if s is not title), _edge)
        self._add_behind(root)
        for kind, part in beside:
            if kind == "notesSlide":
                self.shapes(self._opened(part), _edge)
            else:
                for comment in self.package.xml(part).iter("text", "p"):
                    is_text = comment.tag == "text"
                    self.hold((comment.text or "") if is_text else drawn_text(comment))

    def _add_behind(self, root: Any) -> None:
        """Adds the text of a slide's layout, and of the layout's master, once in a presentation."""
        for kind in ("slideLayout", "slideMaster"):
            part = next((part for _, part in self.targets(kind)), "")
            if not part or root.get("showMasterSp") in ("0", "false"):
                return
            if part in self._behind:
                root, self.related = self._behind[part], self.package.related(part)
            else:
                root = self._behind[part] = self._opened(part)
                self.shapes(root.iterfind("cSld/spTree/*"), _prompt)


def _prompt(shape: Any) -> str:
    """Tells why a shape of a layout is left out; pictures are ornaments there."""
    if edge := _edge(shape):
        return edge
    if shape.tag == "sp" and next(shape.iter("fld"), None) is not None:
        return "footers and numbers of slides"
    return "prompts of placeholders" if _placeholder(shape) or shape.tag == "pic" else ""


def _placeholder(shape: Any) -> str:
    """Returns what a shape is a placeholder of; "" where it is none."""
    place = shape.find("nvSpPr/nvPr/ph")
    return office.attribute(place, "type", "obj") if place is not None else ""


def _edge(shape: Any) -> str:
    return "footers and numbers of slides" if _placeholder(shape) in _EDGES else ""
