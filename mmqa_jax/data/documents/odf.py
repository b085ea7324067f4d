"""Documents of OpenDocument, as LibreOffice writes them: texts, sheets and presentations."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mmqa_jax.data.documents.document import Document, DocumentError, letters, one_line
from mmqa_jax.data.documents.office import (
    Beside,
    Package,
    Reading,
    Row,
    Table,
    add_sheet,
    attribute,
    child,
    local,
    naming_damage,
    number,
)

_SPACES = ("s", "tab", "line-break")
_NOT_SHOWN = ("date-string", "creator-initials", "sender-initials", "note-citation",
              "index-title-template")  # fmt: skip
_ABOUT = "{http://purl.org/dc/elements/"  # the writer and the date of a comment
_SHAPES = ("frame", "g", "custom-shape", "rect", "ellipse", "circle", "line", "polyline", "polygon",
           "path", "connector", "caption", "regular-polygon", "measure")  # fmt: skip
_EDGES = ("page-number", "footer", "date-time", "header", "page")
_CAPTIONS = ("Caption", "Illustration", "Figure", "Drawing")
_REPEATED = 1_000  # characters that a cell may repeat to the right
_OBJECTS_DEPTH = 5


def read_odf(data: bytes, ending: str) -> Document:
    """A text, the sheets of a workbook (`Fees!A2:C2`), or the slides of a presentation.

    Notes, comments and text boxes follow the paragraph in which they are anchored. Hidden sheets,
    rows, columns, slides and sections, and what is deleted, are left out and counted.

    Args:
      ending: `.odt`, `.ods` or `.odp`.

    Raises:
      DocumentError: encrypted, damaged, not of this kind, or it unpacks to too much.
    """
    package = Package(data, ending)
    manifest = "META-INF/manifest.xml"
    if manifest in package and b"encryption-data" in package.read(manifest):
        raise DocumentError("encrypted; save it without a password")
    with naming_damage(ending):
        reading = Reading()
        root = package.xml("content.xml")
        if ending == ".odt" and "styles.xml" in package:
            _edges(reading, package, "header")
        _Content(reading, package, root).read()
        if ending == ".odt" and "styles.xml" in package:
            _edges(reading, package, "footer")
        reading.set_title(package.title("meta.xml"))
        return reading.document()


def _edges(reading: Reading, package: Package, kind: str) -> None:
    """The headers or footers of all kinds of pages: each text once, none without a word."""
    root = package.xml("styles.xml")
    known: set[str] = set()
    for page in root.iter("{*}master-page"):
        for edge in page:
            if not local(edge).startswith(kind):
                continue
            text = one_line(" ".join(edge.itertext()))
            reading.held += letters(text)
            if text in known or not any(map(str.isalpha, text)):
                reading.left_out["repeated headers and footers"] += letters(text)
            else:
                _Content(reading, package, root).blocks(edge)
            known.add(text)


class _Content:
    """One reading of the content of a file, or of an object in it."""

    def __init__(self, reading: Reading, package: Package, root: Any, folder: str = "") -> None:
        self._reading, self._package, self._root = reading, package, root
        self._folder = folder
        self._pages = 0
        self._hidden: set[str] = set()  # styles
        self._parents: dict[str, str] = {}  # style -> the one that it is based on
        for style in root.iter("{*}style"):
            name = attribute(style, "name")
            self._parents[name] = attribute(style, "parent-style-name")
            for properties in style:
                states = attribute(properties, "display"), attribute(properties, "visibility")
                if states[0] in ("none", "false") or states[1] == "hidden":
                    self._hidden.add(name)

    def read(self) -> None:
        body = child(self._root, "body")
        if body is None:
            raise DocumentError("no document that can be read: it has no body")
        self._reading.held += _held(body)
        for content in body:
            if local(content) == "spreadsheet":
                for element in content:
                    if local(element) == "table":
                        self._sheet(element)
                    else:
                        self._block(element)
            else:
                self.blocks(content)

    def _leave_out(self, cause: str, element: Any) -> None:
        self._reading.left_out[cause] += _held(element)

    def _is_hidden(self, element: Any) -> bool:
        return attribute(element, "style-name") in self._hidden

    # Blocks

    def blocks(self, container: Any) -> None:
        """Adds the paragraphs, tables and shapes of an element."""
        for element in container:
            self._block(element)

    def _block(self, element: Any) -> None:
        name = local(element)
        if name in ("p", "h"):
            self._paragraph(element)
        elif name == "table":
            self._table(element)
        elif name == "page":
            self._slide(element)
        elif name in _SHAPES:
            self._shape(element)
        elif name == "tracked-changes":
            self._leave_out("deleted text", element)
        elif name == "section" and attribute(element, "display") in ("none", "condition"):
            self._leave_out("hidden sections", element)
        elif _is_shown(element):
            self.blocks(element)

    def _paragraph(self, paragraph: Any) -> None:
        after: list[Callable[[], None]] = []
        text = one_line("".join(self._inline(paragraph, after)))
        style = attribute(paragraph, "style-name")
        styles = (style, self._parents.get(style, ""))
        if text and local(paragraph) == "h":
            self._reading.begin(number(attribute(paragraph, "outline-level"), 1), text)
        elif text and "Title" in styles:
            self._reading.begin(0, text)
        else:
            is_caption = any(name in _CAPTIONS for name in styles)
            self._reading.say(text, style="caption" if is_caption else "")
        for add in after:
            add()

    def _inline(self, container: Any, after: list[Callable[[], None]]) -> Iterator[str]:
        """The text of an element; what is anchored in it is added after it."""
        yield container.text or ""
        for element in container:
            name = local(element)
            if name in _SPACES:
                yield " "
            elif name == "note" or name == "annotation":
                after.append(functools.partial(self.blocks, element))
            elif name in _SHAPES:
                after.append(functools.partial(self._shape, element))
            elif name in ("hidden-text", "hidden-paragraph") or (
                name == "span" and self._is_hidden(element)
            ):
                self._leave_out("hidden text", element)
            elif name == "ruby-text":
                yield "("
                yield from self._inline(element, after)
                yield ")"
            else:
                yield from self._inline(element, after)
            yield element.tail or ""

    # Shapes and slides

    def _shape(self, shape: Any) -> None:
        if attribute(shape, "class") in _EDGES:
            self._leave_out("footers and numbers of slides", shape)
            return
        kinds = {local(element): element for element in reversed(list(shape))}
        alt = " ".join(one_line(kinds[k].text or "") for k in ("title", "desc") if k in kinds)
        for element in shape:  # the kinds of content of a frame stand for each other, best first
            name = local(element)
            if name == "object" and self._object(element):
                return
            if name == "image":
                part = attribute(element, "href").removeprefix("./")
                held = self._reading.held
                self._reading.picture(self._package, part if part in self._package else "", alt)
                self._reading.held = held  # it is in the text of the file
                return
            if name in ("title", "desc"):
                continue
            self._block(element)
            if name in ("text-box", "table"):
                break
        if self._folder:  # the cells that a chart refers to
            self._reading.left_out["references of charts"] += letters(alt)
        elif alt and "text-box" not in kinds:
            self._reading.say(alt)

    def _object(self, element: Any) -> bool:
        """Adds a formula or a chart; False where it is of another program."""
        part = attribute(element, "href").removeprefix("./")
        folder = f"{self._folder}{part}/"
        if f"{folder}content.xml" not in self._package or folder.count("/") > _OBJECTS_DEPTH:
            return False
        root = self._package.xml(f"{folder}content.xml")
        if local(root) == "math":
            text = "".join(
                e.text or "" for e in root.iter() if not local(e).startswith("annotation")
            )
            self._reading.held += letters(text)
            self._reading.say(text)
        else:
            _Content(self._reading, self._package, root, folder).read()
        return True

    def _slide(self, slide: Any) -> None:
        self._pages += 1
        if self._is_hidden(slide):
            self._leave_out("hidden slides", slide)
            return
        title = next((e for e in slide if attribute(e, "class") == "title"), None)
        text = "" if title is None else " ".join(
            "".join(self._inline(line, [])) for line in title.iter("{*}p")
        )  # fmt: skip
        self._reading.part(text, self._pages, f"slide {self._pages}")
        for element in slide:
            if element is not title:
                self._block(element)

    # Tables and sheets

    def _table(self, table: Any) -> None:
        rows, beside, headers = self._grid(table)
        lines = []
        for row in sorted({*rows, *beside}):
            after = [add for _, add in beside.get(row, ())]
            lines.append(Row(rows.get(row, {}), after=after))
        self._reading.table(Table(lines, headers or None))

    def _sheet(self, table: Any) -> None:
        name = attribute(table, "name")
        if self._is_hidden(table):
            self._leave_out("hidden sheets", table)
            return
        self._reading.part(name)
        self._reading.held += letters(name)
        rows, beside, _ = self._grid(table)
        add_sheet(self._reading, name, rows, beside)
        for shapes in table.iter("{*}shapes"):
            self.blocks(shapes)

    def _grid(self, table: Any) -> tuple[dict[int, dict[int, str]], Beside, int]:
        """Row, from 1 -> column, from 0 -> text; what stands beside it; how many rows are headers.

        A row that is repeated is read once, a merged cell in each row that it covers.
        """
        rows: dict[int, dict[int, str]] = {}
        beside: Beside = {}
        above: dict[int, tuple[str, int]] = {}  # column -> merged text, and its last row
        hidden = _hidden_columns(table)
        row, headers = 1, 0
        for element in _rows(table):
            if attribute(element, "visibility") in ("collapse", "filter"):
                self._leave_out("hidden rows", element)
            else:
                cells = dict(self._cells(element, row, above, hidden, beside))
                if cells:
                    rows[row] = cells
                if headers == len(rows) - 1 and local(element.getparent()) == "table-header-rows":
                    headers += 1
            row += max(1, number(attribute(element, "number-rows-repeated"), 1))
        return rows, beside, headers

    def _cells(
        self,
        row: Any,
        place: int,
        above: dict[int, tuple[str, int]],
        hidden: Sequence[int],
        beside: Beside,
    ) -> Iterator[tuple[int, str]]:
        column = 0
        for cell in row:
            name = local(cell)
            if name not in ("table-cell", "covered-table-cell"):
                continue
            count = max(1, number(attribute(cell, "number-columns-repeated"), 1))
            if bisect.bisect(hidden, column) % 2:
                self._leave_out("hidden columns", cell)
            elif len(cell) or column in above:
                after: list[Callable[[], None]] = []
                text = one_line(" ".join(self._cell_texts(cell, after)))
                for add in after:
                    beside.setdefault(place, []).append((column, add))
                merged, last = above.get(column, ("", 0))
                if name == "covered-table-cell" and last >= place:
                    text = self._reading.merged(merged, text)
                elif (span := number(attribute(cell, "number-rows-spanned"), 1)) > 1:
                    above[column] = text, place + span - 1
                if text:
                    for repeated in range(min(count, 1 + _REPEATED // len(text))):
                        yield column + repeated, text
            column += count

    def _cell_texts(self, cell: Any, after: list[Callable[[], None]]) -> Iterator[str]:
        for element in cell:
            name = local(element)
            if name in ("p", "h"):
                yield "".join(self._inline(element, after))
            elif name in ("table", "annotation", *_SHAPES):
                add = self.blocks if name == "annotation" else self._block
                after.append(functools.partial(add, element))
            elif _is_shown(element):
                yield from self._cell_texts(element, after)


def _is_shown(element: Any) -> bool:
    return local(element) not in _NOT_SHOWN and not str(element.tag).startswith(_ABOUT)


def _held(element: Any) -> int:
    """Letters of an element, without those that name a comment's writer or number a note."""
    held = sum(letters(one_line(text)) for text in element.itertext())
    return held - sum(letters(one_line(e.text or "")) for e in element.iter() if not _is_shown(e))


def _rows(table: Any) -> Iterator[Any]:
    for element in table:
        if local(element) == "table-row":
            yield element
        elif local(element) in ("table-header-rows", "table-rows", "table-row-group"):
            yield from _rows(element)


def _hidden_columns(table: Any) -> list[int]:
    """The columns at which those that are hidden begin and end, in turn."""
    column, ends = 0, []
    for element in table:
        if local(element) == "table-column":
            count = max(1, number(attribute(element, "number-columns-repeated"), 1))
            if attribute(element, "visibility") in ("collapse", "filter"):
                ends += [column, column + count]
            column += count
    return ends
