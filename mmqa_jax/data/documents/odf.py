"""Documents of OpenDocument, as LibreOffice writes them: texts, sheets and presentations."""

import bisect
import functools
from collections.abc import Callable, Iterator
from typing import Any

from mmqa_jax.data.documents import office
from mmqa_jax.data.documents.document import Document, DocumentError, letters, one_line
from mmqa_jax.data.documents.office import attribute, number

_SPACES = ("s", "tab", "line-break")
_NOT_SHOWN = ("date-string", "creator-initials", "sender-initials", "note-citation",
              "index-title-template")  # fmt: skip
_SHAPES = ("frame", "g", "custom-shape", "rect", "ellipse", "circle", "line", "polyline", "polygon",
           "path", "connector", "caption", "regular-polygon", "measure")  # fmt: skip
_EDGES = ("page-number", "footer", "date-time", "header", "page")
_CAPTIONS = ("Caption", "Illustration", "Figure", "Drawing")
_REPEATED = 1_000  # characters that a cell may repeat to the right
_OBJECTS_DEPTH = 5
_HIDDEN = ("collapse", "filter")  # rows and columns


def read_odf(data: bytes, ending: str) -> Document:
    """A text, the sheets of a workbook (`Fees!A2:C2`), or the slides of a presentation.

    Notes, comments and text boxes follow the paragraph in which they are anchored. Hidden sheets,
    rows, columns, slides and sections, and what is deleted, are left out and counted.

    `ending`: `.odt`, `.ods` or `.odp`.
    """
    return office.read(functools.partial(_OpenDocument, has_edges=ending == ".odt"), data, ending)


class _OpenDocument(office.Reading):
    """One reading of a file."""

    def __init__(self, package: office.Package, has_edges: bool) -> None:
        super().__init__(package)
        manifest = "META-INF/manifest.xml"
        if manifest in package and b"encryption-data" in package.read(manifest):
            raise DocumentError("encrypted; save it without a password")
        self._has_edges = has_edges and "styles.xml" in package
        self._folder = ""  # of the object whose content is read
        self._pages = 0
        self._hidden: set[str] = set()  # styles of the part that is read
        self._parents: dict[str, str] = {}  # style -> the one that it is based on

    def read(self) -> Document:
        root = self.package.xml("content.xml")
        if self._has_edges:
            self._add_edges("header")
        self._content(root)
        if self._has_edges:
            self._add_edges("footer")
        self.set_title(self.package.title("meta.xml"))
        return self.document()

    def _use_styles(self, root: Any) -> None:
        """Knows the styles of a part."""
        self._hidden, self._parents = set(), {}
        for style in root.iter("style"):
            name = attribute(style, "name")
            self._parents[name] = attribute(style, "parent-style-name")
            for properties in style:
                states = attribute(properties, "display"), attribute(properties, "visibility")
                if states[0] in ("none", "false") or states[1] == "hidden":
                    self._hidden.add(name)

    def _add_edges(self, kind: str) -> None:
        """Adds the headers or footers of all kinds of pages."""
        root = self.package.xml("styles.xml")
        self._use_styles(root)
        known: set[str] = set()
        for edge in (edge for page in root.iter("master-page") for edge in page):
            if edge.tag.startswith(kind):
                text = one_line(" ".join(edge.itertext()))
                self.held += letters(text)
                self.edge(text, letters(text), known, functools.partial(self._blocks, edge))

    def _content(self, root: Any) -> None:
        """Adds the body of the file, or of an object in it."""
        if (body := root.find("body")) is None:
            raise DocumentError("no document that can be read: it has no body")
        self._use_styles(root)
        self.held += _held(body)
        for content in body:
            for element in content:
                if content.tag == "spreadsheet" and element.tag == "table":
                    self._sheet(element)
                else:
                    self._block(element)

    def _leave_out(self, cause: str, element: Any) -> None:
        self.left_out[cause] += _held(element)

    def _is_hidden(self, element: Any) -> bool:
        return attribute(element, "style-name") in self._hidden

    # Blocks

    def _blocks(self, container: Any) -> None:
        """Adds the paragraphs, tables and shapes of an element."""
        for element in container:
            self._block(element)

    def _block(self, element: Any) -> None:
        tag = element.tag
        if tag in ("p", "h"):
            self._paragraph(element)
        elif tag == "table":
            self._table(element)
        elif tag == "page":
            self._slide(element)
        elif tag in _SHAPES:
            self._shape(element)
        elif tag == "tracked-changes":
            self._leave_out("deleted text", element)
        elif tag == "section" and attribute(element, "display") in ("none", "condition"):
            self._leave_out("hidden sections", element)
        elif _is_shown(element):
            self._blocks(element)

    def _paragraph(self, paragraph: Any) -> None:
        after: list[Callable[[], None]] = []
        text = one_line("".join(self._inline(paragraph, after)))
        style = attribute(paragraph, "style-name")
        styles = (style, self._parents.get(style, ""))
        if text and paragraph.tag == "h":
            self.begin(number(attribute(paragraph, "outline-level"), 1), text)
        elif text and "Title" in styles:
            self.begin(0, text)
        else:
            is_caption = any(name in _CAPTIONS for name in styles)
            self.say(text, style="caption" if is_caption else "")
        for add in after:
            add()

    def _inline(self, container: Any, after: list[Callable[[], None]]) -> Iterator[str]:
        """Returns the text of an element, followed by the text anchored in it."""
        yield container.text or ""
        for element in container:
            tag = element.tag
            if tag in _SPACES:
                yield " "
            elif tag in ("note", "annotation"):
                after.append(functools.partial(self._blocks, element))
            elif tag in _SHAPES:
                after.append(functools.partial(self._shape, element))
            elif tag in ("hidden-text", "hidden-paragraph") or (
                tag == "span" and self._is_hidden(element)
            ):
                self._leave_out("hidden text", element)
            elif tag == "ruby-text":
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
        names = (shape.find(tag) for tag in ("title", "desc"))
        alt = " ".join(one_line(name.text or "") for name in names if name is not None)
        for element in shape:  # the kinds of content of a frame stand for each other, best first
            tag = element.tag
            if tag == "object" and self._object(element):
                return
            if tag == "image":
                part, held = attribute(element, "href").removeprefix("./"), self.held
                self.picture(part if part in self.package else "", alt)
                self.held = held  # it is in the text of the file
                return
            if tag not in ("title", "desc"):
                self._block(element)
            if tag in ("text-box", "table"):
                break
        if self._folder:  # the cells that a chart refers to
            self.left_out["references of charts"] += letters(alt)
        elif alt and shape.find("text-box") is None:
            self.say(alt)

    def _object(self, element: Any) -> bool:
        """Adds a formula or a chart; False where it is of another program."""
        part = attribute(element, "href").removeprefix("./")
        folder = f"{self._folder}{part}/"
        if f"{folder}content.xml" not in self.package or folder.count("/") > _OBJECTS_DEPTH:
            return False
        root = self.package.xml(f"{folder}content.xml")
        if root.tag == "math":
            letters_of = (e for e in root.iter() if not e.tag.startswith("annotation"))
            self.hold("".join(e.text or "" for e in letters_of))
        else:
            outer = self._folder, self._pages, self._hidden, self._parents
            self._folder, self._pages = folder, 0
            self._content(root)
            self._folder, self._pages, self._hidden, self._parents = outer
        return True

    def _slide(self, slide: Any) -> None:
        self._pages += 1
        if self._is_hidden(slide):
            self._leave_out("hidden slides", slide)
            return
        title = next((e for e in slide if attribute(e, "class") == "title"), None)
        lines = [] if title is None else title.iter("p")
        text = " ".join("".join(self._inline(line, [])) for line in lines)
        self.part(text, self._pages, f"slide {self._pages}")
        self._blocks(element for element in slide if element is not title)

    # Tables and sheets

    def _table(self, table: Any) -> None:
        rows, beside, headers = self._grid(table)
        lines = []
        for row in sorted({*rows, *beside}):
            after = [add for _, add in beside.get(row, ())]
            lines.append(office.Row(rows.get(row, {}), after=after))
        self.table(lines, headers or None)

    def _sheet(self, table: Any) -> None:
        name = attribute(table, "name")
        if self._is_hidden(table):
            self._leave_out("hidden sheets", table)
            return
        self.part(name)
        self.held += letters(name)
        rows, beside, _ = self._grid(table)
        self.sheet(name, rows, beside)
        for shapes in table.iter("shapes"):
            self._blocks(shapes)

    def _grid(self, table: Any) -> tuple[dict[int, dict[int, str]], office.Beside, int]:
        """Row, from 1 -> column, from 0 -> text; what stands beside it; how many rows are headers.

        A row that is repeated is read once, a merged cell in each row that it covers.
        """
        rows: dict[int, dict[int, str]] = {}
        beside: office.Beside = {}
        above: dict[int, tuple[str, int]] = {}  # column -> merged text, and its last row
        hidden = _hidden_columns(table)
        place, headers = 1, 0

        def cells_of(row: Any) -> Iterator[tuple[int, str]]:
            column = 0
            for cell in row.iterchildren("table-cell", "covered-table-cell"):
                count = _repeated(cell, "columns")
                if bisect.bisect(hidden, column) % 2:
                    self._leave_out("hidden columns", cell)
                elif len(cell) or column in above:
                    after: list[Callable[[], None]] = []
                    text = one_line(" ".join(self._cell_texts(cell, after)))
                    if after:
                        beside.setdefault(place, []).extend((column, add) for add in after)
                    merged, last = above.get(column, ("", 0))
                    if cell.tag == "covered-table-cell" and last >= place:
                        text = self.merged(merged, text)
                    elif (span := number(attribute(cell, "number-rows-spanned"), 1)) > 1:
                        above[column] = text, place + span - 1
                    if text:
                        for repeated in range(min(count, 1 + _REPEATED // len(text))):
                            yield column + repeated, text
                column += count

        for row in _rows(table):
            if attribute(row, "visibility") in _HIDDEN:
                self._leave_out("hidden rows", row)
            else:
                if cells := dict(cells_of(row)):
                    rows[place] = cells
                if headers == len(rows) - 1 and row.getparent().tag == "table-header-rows":
                    headers += 1
            place += _repeated(row, "rows")
        return rows, beside, headers

    def _cell_texts(self, cell: Any, after: list[Callable[[], None]]) -> Iterator[str]:
        for element in cell:
            tag = element.tag
            if tag in ("p", "h"):
                yield "".join(self._inline(element, after))
            elif tag in ("table", "annotation", *_SHAPES):
                add = self._blocks if tag == "annotation" else self._block
                after.append(functools.partial(add, element))
            elif _is_shown(element):
                yield from self._cell_texts(element, after)


def _is_shown(element: Any) -> bool:
    """False of what names the writer and the date of a comment, or numbers a note."""
    return element.tag not in _NOT_SHOWN and not element.tag.startswith(office.DUBLIN_CORE)


def _held(element: Any) -> int:
    """Letters of all of an element that is shown."""
    held = sum(letters(one_line(text)) for text in element.itertext())
    return held - sum(letters(one_line(e.text or "")) for e in element.iter() if not _is_shown(e))


def _rows(table: Any) -> Iterator[Any]:
    for element in table:
        if element.tag == "table-row":
            yield element
        elif element.tag in ("table-header-rows", "table-rows", "table-row-group"):
            yield from _rows(element)


def _hidden_columns(table: Any) -> list[int]:
    """Returns, in turn, the columns where hidden ranges begin and end."""
    column, ends = 0, []
    for element in table.iterfind("table-column"):
        count = _repeated(element, "columns")
        if attribute(element, "visibility") in _HIDDEN:
            ends += [column, column + count]
        column += count
    return ends


def _repeated(element: Any, what: str) -> int:
    return max(1, number(attribute(element, f"number-{what}-repeated"), 1))
