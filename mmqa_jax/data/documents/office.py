"""Reads what files of Office have in common: a zip of XML parts, tables, drawings.

The readers walk over the XML themselves: the libraries of the field that were tried leave out text
boxes, tracked insertions, notes and formulas (tests/bench/parsers). Elements are known by their
local names alone, because strict and transitional files differ in their namespaces.
"""

import functools
import io
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from mmqa_jax.data.documents import document
from mmqa_jax.data.documents.document import CELL, DocumentError, letters, one_line
from mmqa_jax.data.pictures.bounds import MOST_BYTES

# What XML may unpack to. Word's packs 10 to 30 times; its tree takes some ten times its bytes.
_FREE_XML, _XML_PER_BYTE, _MOST_XML = 2**23, 100, 2**26
MOST_TEXT = 2**26  # characters of a document: cells that share a string repeat it
MOST_REPEATED = 2**24  # characters that merged cells repeat
MOST_CELLS = 2**21  # of a workbook; one takes some 200 bytes
_MOST_HEADER = 1000  # characters of a table's header, which every row repeats
_MOST_COLUMNS = 100  # up to which empty cells keep their place in a row
_OLE = b"\xd0\xcf\x11\xe0"  # what Office encrypts, and its old formats, are files of this kind
_YEAR = re.compile(r"\b(?:19|20)\d\d\b")
DUBLIN_CORE = "{http://purl.org/dc/elements/"  # who wrote a text, when, and its title
# Nothing is fetched or expanded; elements may be deep and long.
PARSING: Mapping[str, bool] = {
    "resolve_entities": False, "no_network": True, "load_dtd": False, "huge_tree": True,
    "remove_comments": True, "remove_pis": True,
}  # fmt: skip


class Related(NamedTuple):
    """A relationship of a part: its type's last word, and the part's name ("" outside the file)."""

    kind: str
    part: str


class Package:
    """The parts of a file of Office; how much they may unpack to is bounded first."""

    def __init__(self, data: bytes, ending: str) -> None:
        self._ending = ending
        if data.startswith(_OLE):
            raise DocumentError(
                f"encrypted, or Office's old format; save it as {ending} without a password"
            )
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise DocumentError(f"no {ending}: {one_line(str(error))}") from error
        members = self._zip.infolist()
        if any(member.flag_bits & 1 for member in members):
            raise DocumentError("encrypted; save it without a password")
        whole = sum(member.file_size for member in members)
        if whole > MOST_BYTES:
            raise DocumentError(f"unpacks to {whole:,} bytes, more than {MOST_BYTES:,}; split it")
        self._members = {member.filename: member for member in members}
        self._size = len(data)
        self._xml = 0  # bytes that were parsed

    def __contains__(self, part: str) -> bool:
        return part in self._members

    def read(self, part: str) -> bytes:
        """A part's bytes. zipfile never unpacks more of a member than it claims."""
        try:
            return self._zip.read(self._members[part])
        except KeyError as error:
            raise DocumentError(f"no {self._ending}: it holds no {part}") from error
        except Exception as error:  # zlib's errors, checksums, unknown compression
            raise DocumentError(f"no {self._ending}: {part}: {one_line(str(error))}") from error

    def open(self, part: str) -> IO[bytes]:
        """A part as a file, for XML that is never in memory as a whole."""
        self._check(part)
        return self._zip.open(self._members[part])

    def xml(self, part: str) -> Any:
        """The root element of a part, with tags that have no namespace but Dublin Core's.

        Of alternate content the first choice is there, or else what programs fall back on.
        """
        from lxml import etree

        if part in self._members:
            self._check(part)
        root = etree.fromstring(self.read(part), etree.XMLParser(**PARSING))
        dtd = root.getroottree().docinfo.internalDTD
        if dtd is not None and any(True for _ in dtd.iterentities()):
            raise DocumentError(f"{part} declares entities, which Office never does; save it anew")
        for element in root.iter("{*}*"):
            if not element.tag.startswith(DUBLIN_CORE):
                element.tag = element.tag.rpartition("}")[2]
        for alternate in list(root.iter("AlternateContent")):
            choice = alternate.find("Choice")
            choice = alternate.find("Fallback") if choice is None else choice
            if (above := alternate.getparent()) is not None:
                for element in () if choice is None else list(choice):
                    alternate.addprevious(element)
                above.remove(alternate)
        return root

    def _check(self, part: str) -> None:
        """DocumentError where the XML that was parsed, with this part, is worth a zip bomb."""
        self._xml += self._members[part].file_size
        most = min(_FREE_XML + _XML_PER_BYTE * self._size, _MOST_XML)
        if self._xml > most:
            raise DocumentError(
                f"unpacks to {self._xml:,} bytes of text, more than the {most:,} that "
                f"{self._size:,} bytes may hold"
            )

    def related(self, part: str) -> Mapping[str, Related]:
        """The relationships of a part by their ids; of the whole file for the part ""."""
        folder, name = posixpath.split(part)
        file = posixpath.join(folder, "_rels", f"{name}.rels")
        if file not in self._members:
            return {}
        related = {}
        for element in self.xml(file):
            kind = element.get("Type", "").rpartition("/")[2]
            target = posixpath.normpath(posixpath.join("/", folder, element.get("Target", "")))[1:]
            outside = element.get("TargetMode") == "External" or target not in self._members
            related[element.get("Id", "")] = Related(kind, "" if outside else target)
        return related

    def main(self) -> str:
        """The name of the part that is the document itself."""
        for kind, part in self.related("").values():
            if kind == "officeDocument" and part:
                return part
        raise DocumentError(f"no {self._ending} that can be read: it names no document")

    def title(self, part: str = "docProps/core.xml") -> str:
        """The title that the file's properties state."""
        if part not in self:
            return ""
        return next((one_line(e.text or "") for e in self.xml(part).iter("{*}title")), "")


def read(reader: Callable[[Package], Any], data: bytes, ending: str) -> document.Document:
    """Reads a file of Office; `reader` makes what reads it of its parts."""
    from lxml import etree

    with document.naming_damage(ending, etree.LxmlError, ValueError):
        return reader(Package(data, ending)).read()


def attribute(element: Any, name: str, default: str = "") -> str:
    """The attribute of an element by its name without a namespace."""
    for key, value in element.attrib.items():
        if key[key.rfind("}") + 1 :] == name:
            return value
    return default


def value(element: Any, path: str) -> str:
    """The `val` of the element at the end of a path; "" where there is none."""
    holder = None if element is None else element.find(path)
    return "" if holder is None else attribute(holder, "val")


def reference(element: Any, *names: str) -> str:
    """The id of a relationship that one of an element's attributes holds; "" without one."""
    ends = tuple(f"/relationships}}{name}" for name in names)
    return next((value for key, value in element.attrib.items() if key.endswith(ends)), "")


def is_on(element: Any) -> bool:
    """Tells whether an element switches its property on: it is there, and not by the value "0"."""
    return element is not None and attribute(element, "val", "1") not in ("0", "false", "off")


def number(text: str, default: int = 0) -> int:
    """A count that a file states, never negative; the default where it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else default


def held_letters(root: Any, *tags: str) -> int:
    """Letters of all elements of these tags."""
    return sum(letters(one_line(element.text or "")) for element in root.iter(*tags))


class Row(NamedTuple):
    """A row of a table."""

    cells: Mapping[int, str]  # column, from 0 -> its text; a merged cell stands in its first column
    place: str = ""  # where the row stands, as a name
    # Called to add what stands in the row beside its text: nested tables, notes, pictures.
    after: Sequence[Callable[[], None]] = ()


# Row, from 1 -> column, from 0, and what adds that which stands in the cell beside its text.
Beside = dict[int, list[tuple[int, Callable[[], None]]]]


class Reading(document.Content):
    """The content of a document, with its tables, its pictures and the places of programs.

    Args:
      package: that it is read from; None: a file of text.

    Attributes:
      place: where stands what is added next, as a name; "" where the format has no places.
    """

    def __init__(self, package: Package | None = None) -> None:
        super().__init__()
        self.package, self.place = package, ""
        self.related: Mapping[str, Related] = {}  # the relationships of the part that is being read
        self._pictures: set[str] = set()  # parts that were added
        self._uncaptioned: list[int] = []  # figures that wait for a caption
        self._characters = 0
        self._repeated = 0  # characters that merged cells repeat

    def begin(self, level: float, heading: str) -> None:
        """Begins a section; no caption for the pictures before it follows."""
        self._uncaptioned = []
        self.enter(level, heading)

    def part(self, heading: str, page: int | None = None, place: str = "") -> None:
        """Begins a sheet or a slide: no heading of the one before stands above it."""
        self.restart()
        self.page, self.place = page, place
        self.begin(0, one_line(heading))

    def say(self, text: str, *, is_row: bool = False, header: str = "", style: str = "") -> None:
        """Adds a paragraph, unless it is empty; a caption belongs to the pictures before it."""
        text = one_line(text)
        if not text:
            return
        self._characters += len(text)
        if self._characters > MOST_TEXT:
            raise DocumentError(f"says more than {MOST_TEXT:,} characters; split it")
        places = (document.Place(0, len(text), self.place),) if self.place else ()
        self.add(text, is_row=is_row, header=header, places=places)
        if style == "caption" or document.is_caption(text):
            for figure in self._uncaptioned:
                self.caption(figure, text)
        self._uncaptioned = []

    def hold(self, text: str, is_row: bool = False) -> None:
        """Adds a paragraph whose letters are yet to be counted."""
        self.held += letters(one_line(text))
        self.say(text, is_row=is_row)

    def edge(self, text: str, held: int, known: set[str], add: Callable[[], None]) -> None:
        """Adds a header or a footer: each text once, and none that is a page's number alone."""
        if text in known:
            self.left_out["repeated headers and footers"] += held
        elif not any(map(str.isalpha, text)):
            self.left_out["page numbers"] += held
        else:
            add()
        known.add(text)

    def targets(self, *kinds: str) -> list[Related]:
        """The parts of the file to which the part that is being read is related so."""
        return [target for target in self.related.values() if target.part and target.kind in kinds]

    def target(self, element: Any, *names: str) -> str:
        """The part to which an element's attribute refers; "" where it is not in the file."""
        related = self.related.get(reference(element, *names))
        return related.part if related is not None else ""

    # Tables

    def table(self, rows: Sequence[Row], headers: int | None = None) -> None:
        """Adds the rows of a table, each with the header.

        `headers`: how many rows are headers; None: the first one, if it looks like one.
        """
        columns = sorted({column for row in rows for column in row.cells})
        rows = [row for row in rows if any(row.cells.values())]
        # A line above the table that stands alone in its row is a title of it.
        while (
            len(columns) > 1
            and headers is None
            and rows
            and sum(map(bool, rows[0].cells.values())) == 1
        ):
            self._add_row(rows.pop(0), columns, "", is_row=False)
        count = _header_rows(rows, columns) if headers is None else headers
        header = "; ".join(_row_text(row.cells, columns) for row in rows[:count])
        if count >= len(rows) or len(header) > _MOST_HEADER:
            count, header = 0, ""
        self.begin_table(header)
        for row in rows[:count]:
            self._at(row.place, row.after)
        for row in rows[count:]:
            self._add_row(row, columns, header, is_row=True)

    def _add_row(self, row: Row, columns: Sequence[int], header: str, is_row: bool) -> None:
        text = _row_text(row.cells, columns)
        say = functools.partial(self.say, text, is_row=is_row, header=header)
        self._at(row.place, [say, *row.after])

    def _at(self, place: str, adding: Iterable[Callable[[], None]]) -> None:
        """Adds what stands at a place."""
        outer, self.place = self.place, place or self.place
        for add in adding:
            add()
        self.place = outer

    def merged(self, merged: str, inside: str) -> str:
        """Returns a merged cell's text in a row that it covers; `inside` is the row's text there.

        Programs hide that; it is read all the same, without a copy of a long text in each row.
        """
        if inside and len(merged) > _MOST_HEADER:
            return inside
        self._repeated += len(merged)
        if self._repeated > MOST_REPEATED:
            raise DocumentError(
                f"its merged cells repeat more than {MOST_REPEATED:,} characters; split it"
            )
        self.held += letters(merged)
        return f"{merged} {inside}" if inside and merged else merged or inside

    def sheet(self, name: str, rows: Mapping[int, Mapping[int, str]], beside: Beside) -> None:
        """Adds the tables of a sheet, which empty rows divide, with the places of their cells.

        Args:
          name: of the sheet; "" where a file has one sheet without a name.
          rows: row, from 1 -> column, from 0 -> text.
        """
        quoted = name if name.isidentifier() else "'" + name.replace("'", "''") + "'"
        prefix = f"{quoted}!" if name else ""
        after = {
            row: [
                functools.partial(self._at, f"{prefix}{column_name(column)}{row}", [add])
                for column, add in items
            ]
            for row, items in beside.items()
        }
        for block in _blocks(rows):
            lines = []
            for row in block:
                columns = sorted(column for column, text in rows[row].items() if text)
                ends = (f"{column_name(column)}{row}" for column in (columns[0], columns[-1]))
                place = prefix + ":".join(dict.fromkeys(ends))
                lines.append(Row(rows[row], place, after.pop(row, ())))
            self.table(lines)
        for _, adding in sorted(after.items()):
            self._at("", adding)

    # Drawings: slides, the drawings of sheets, and what stands in Word's documents as such

    def picture(self, part: str, alt: str) -> None:
        """Adds a picture, once; one that the file does not hold leaves its alternative text."""
        alt = one_line(alt)
        self.held += letters(alt)
        if not part:
            self.say(alt)
        elif part in self._pictures:
            self.left_out["alternative texts"] += letters(alt)
        else:
            self._pictures.add(part)
            self._uncaptioned.append(self.add_figure(alt, self.package.read(part)))

    def shapes(
        self, shapes: Iterable[Any], is_left_out: Callable[[Any], str] = lambda shape: ""
    ) -> None:
        """Adds the text, pictures, tables, charts and diagrams of shapes, in the order of the file.

        `is_left_out`: of a shape, why it is left out on purpose; "" where it is not.
        """
        for shape in shapes:
            tag = shape.tag
            if tag in ("sp", "cxnSp", "pic", "graphicFrame", "grpSp"):
                about = next(shape.iter("cNvPr"), None)
                is_hidden = about is not None and about.get("hidden") in ("1", "true")
                if cause := "hidden shapes" if is_hidden else is_left_out(shape):
                    self.left_out[cause] += held_letters(shape, "t")
                    continue
                alt = about.get("descr", "") if about is not None else ""
            if tag == "pic":
                blip = next(shape.iter("blip"), None)
                self.picture(self.target(blip, "embed") if blip is not None else "", alt)
            elif tag in ("sp", "cxnSp"):
                lines = [drawn_text(paragraph) for paragraph in shape.iter("p")]
                for line in lines:
                    self.say(line)
                if alt and not "".join(lines).strip():
                    self.picture("", alt)
            elif tag == "graphicFrame":
                for element in shape.iter("tbl", "pic", "chart", "relIds"):
                    if element.tag == "tbl":
                        self._drawn_table(element)
                    elif element.tag == "pic":  # of an embedded file
                        self.shapes([element])
                    else:
                        self.chart(element)
            elif not tag.endswith("Pr"):  # groups, anchors
                self.shapes(shape, is_left_out)

    def _drawn_table(self, table: Any) -> None:
        """Adds a table of DrawingML; merged cells in each row that they cover."""
        above: dict[int, str] = {}
        rows = []
        for row in table.iter("tr"):
            texts: dict[int, str] = {}
            for column, cell in enumerate(row.iterfind("tc")):
                text = one_line(" ".join(drawn_text(paragraph) for paragraph in cell.iter("p")))
                if attribute(cell, "vMerge") in ("1", "true"):
                    text = self.merged(above.get(column, ""), text)
                elif number(attribute(cell, "rowSpan"), 1) > 1:
                    above[column] = text
                texts[column] = text
            rows.append(Row(texts))
        self.table(rows)

    def chart(self, element: Any) -> None:
        """Adds the chart, or the diagram (SmartArt), to which an element refers.

        A chart is its titles, and its values as a table: a row for each category.
        """
        if not (part := self.target(element, "id", "dm")):
            return
        root = self.package.xml(part)
        if element.tag == "relIds":
            self.held += held_letters(root, "t")
            for paragraph in (p for point in root.iter("pt") for p in point.iter("p")):
                self.say(drawn_text(paragraph))
            return
        for paragraph in root.iter("p"):
            self.hold(drawn_text(paragraph))
        names: dict[int, str] = {}
        rows: dict[int, dict[int, str]] = {}
        for column, series in enumerate(root.iter("ser"), start=1):
            names[column] = " ".join(_points(series.find("tx")).values())
            for kind in ("cat", "xVal"):
                for row, text in _points(series.find(kind)).items():
                    rows.setdefault(row, {}).setdefault(0, text)
            for kind in ("val", "yVal"):
                for row, text in _points(series.find(kind)).items():
                    rows.setdefault(row, {})[column] = text
        header = [Row(names)] if any(names.values()) else []
        lines = [*header, *(Row(cells) for _, cells in sorted(rows.items()))]
        self.held += sum(letters(text) for row in lines for text in row.cells.values())
        self.table(lines, len(header))


def _row_text(cells: Mapping[int, str], columns: Sequence[int]) -> str:
    """A line for a row; empty cells keep their place in tables that are not too wide."""
    if len(columns) <= _MOST_COLUMNS:
        return one_line(CELL.join(cells.get(column, "") for column in columns)).rstrip("| ")
    return CELL.join(filter(None, (cells[column] for column in sorted(cells))))


def _header_rows(rows: Sequence[Row], columns: Sequence[int]) -> int:
    """Returns 1 if the first row names the columns: at most one of its cells is empty, and all
    differ.

    A first column of names mostly has no name itself. A cell that is merged with the one below it
    names no column.
    """
    if len(rows) < 2 or len(columns) < 2:
        return 0
    names = {column: name for column, name in rows[0].cells.items() if name}
    is_full = len(names) >= max(2, len(columns) - 1) and len(set(names.values())) == len(names)
    goes_on = any(rows[1].cells.get(column) == name for column, name in names.items())
    return int(is_full and not goes_on and not any(map(_is_figure, names.values())))


def _is_figure(text: str) -> bool:
    """Tells whether a cell holds a figure or a date. A year alone may well name a column."""
    rest = _YEAR.sub("", text)
    return 2 * sum(map(str.isdigit, rest)) > letters(rest)


def _blocks(rows: Mapping[int, Any]) -> Iterator[list[int]]:
    """The numbers of rows that follow each other."""
    block: list[int] = []
    for row in sorted(rows):
        if block and row != block[-1] + 1:
            yield block
            block = []
        block.append(row)
    if block:
        yield block


def column_name(column: int) -> str:
    """A column's letters by its number, from 0."""
    name = ""
    while column >= 0:
        name = chr(ord("A") + column % 26) + name
        column = column // 26 - 1
    return name


def drawn_text(paragraph: Any) -> str:
    """The text of a paragraph of DrawingML; formulas by their letters."""
    pieces = paragraph.iter("t", "br", "tab")
    return "".join((piece.text or "") if piece.tag == "t" else " " for piece in pieces)


def _points(values: Any) -> dict[int, str]:
    """The cached values of a chart's series by their places; figures as a sheet shows them."""
    if values is None:
        return {}
    points = {}
    for count, point in enumerate(values.iter("v")):
        text, above = one_line(point.text or ""), point.getparent()
        if above.tag == "pt" and "numCache" in above.getparent().tag:
            text = shown_number(text)
        points[number(attribute(above, "idx"), count)] = text
    return points


def shown_number(text: str) -> str:
    """A figure as a sheet shows it without a format: 4.2999999999999998 is 4.3."""
    try:
        return f"{float(text):.15g}".upper()
    except ValueError:
        return text
