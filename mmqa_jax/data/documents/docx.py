"""Reads Word's documents (.docx) in their final view: with insertions, without deletions."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mmqa_jax.data.documents import office
from mmqa_jax.data.documents.document import Document, DocumentError, letters, one_line
from mmqa_jax.data.documents.html import read_html
from mmqa_jax.data.documents.office import attribute, held_letters, is_on, number, value

_TEXT = ("t", "delText")
# Elements of a run that stand for characters.
_CHARACTERS = {"tab": " ", "ptab": " ", "br": " ", "cr": " ", "noBreakHyphen": "-"}
_DELETED = ("del", "moveFrom")
_NOTES = {"footnoteReference": "footnotes", "endnoteReference": "endnotes",
          "commentReference": "comments"}  # fmt: skip


def read_docx(data: bytes) -> Document:
    """A document's paragraphs, rows of tables, and pictures with their captions.

    Text boxes, notes and comments follow the paragraph in which they are anchored; headers stand
    first and footers last, each text once. A caption is the paragraph after the picture in Word's
    style Caption, or that begins with `Figure N`, or else the text that stands for it (alt).
    """
    return office.read(_Word, data, ".docx")


@dataclasses.dataclass
class _Line:
    """A paragraph that is being read."""

    text: list[str] = dataclasses.field(default_factory=list)  # its pieces so far
    # Called to add what is anchored in it.
    after: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    # Of each field that is open, whether its result has begun.
    fields: list[bool] = dataclasses.field(default_factory=list)


class _Word(office.Reading):
    """One reading of a document."""

    def __init__(self, package: office.Package) -> None:
        super().__init__(package)
        self._main = package.main()
        self.related = package.related(self._main)
        _, styles = self._related_root("styles")
        self._levels = _levels(styles)
        self._numbering = _Numbering(self._related_root("numbering")[1], styles)
        self._numbers: dict[Any, str] = {}  # paragraph -> its number in a list
        self._notes: dict[str, dict[str, tuple[str, Any]]] = {}  # kind -> id -> part, note
        for kind in _NOTES.values():
            part, root = self._related_root(kind)
            self._hold(root)
            self._notes[kind] = {attribute(note, "id"): (part, note) for note in root}
        self._foreign_parts: set[str] = set()  # that were taken in
        self._line = _Line()  # carries a paragraph whose end is deleted into the next one

    def read(self) -> Document:
        self._edges("header")
        root = self.package.xml(self._main)
        self._hold(root)
        if (body := root.find("body")) is None:
            raise DocumentError("no .docx that can be read: it has no body")
        self._apart(body)
        for notes in self._notes.values():
            for part, note in list(notes.values()):  # to which nothing refers
                self._in_part(part, note)
        self._edges("footer")
        self.set_title(self.package.title())
        return self.document()

    def _related_root(self, kind: str) -> tuple[str, Any]:
        """The name and the root of a part, which is empty where the file has none of this kind."""
        from lxml import etree

        part = next((part for _, part in self.targets(kind)), "")
        return part, self.package.xml(part) if part else etree.Element("none")

    def _hold(self, root: Any) -> None:
        self.held += held_letters(root, *_TEXT)
        self._numbers |= self._numbering.labels(root)

    def _edges(self, kind: str) -> None:
        known: set[str] = set()
        for part in dict.fromkeys(part for _, part in self.targets(kind)):
            root = self.package.xml(part)
            self._hold(root)
            text = one_line(" ".join(element.text or "" for element in root.iter("t")))
            add = functools.partial(self._in_part, part, root)
            self.edge(text, held_letters(root, *_TEXT), known, add)

    def _in_part(self, part: str, root: Any) -> None:
        """Adds blocks of another part, to whose relationships its elements refer."""
        outer, self.related = self.related, self.package.related(part)
        self._apart(root)
        self.related = outer

    def _apart(self, root: Any) -> None:
        """Adds blocks that stand apart from the paragraph in which they are anchored."""
        outer, self._line = self._line, _Line()
        self._blocks(root)
        self._end_line("")
        self._line = outer

    # Blocks

    def _blocks(self, container: Any) -> None:
        for element in container:
            tag = element.tag
            if tag == "p":
                self._paragraph(element)
            elif tag == "tbl":
                self._table(element)
            elif tag in _DELETED:
                self._leave_out("deleted text", element)
            elif tag == "altChunk":
                self._foreign(self.target(element, "id"))
            elif tag not in ("sdtPr", "sdtEndPr", "sectPr"):
                self._blocks(element)  # content controls, custom XML, insertions

    def _paragraph(self, paragraph: Any) -> None:
        self._inline(paragraph)
        # A field whose result does not begin in its paragraph is damaged, and hides nothing more.
        self._line.fields = [True for _ in self._line.fields]
        if any(paragraph.find(f"pPr/rPr/{tag}") is not None for tag in _DELETED):
            return  # the next paragraph goes on in the same line
        if one_line("".join(self._line.text)):
            self._add_number(paragraph)
        level = number(value(paragraph, "pPr/outlineLvl"), 9)
        if level < 9:
            self._end_line("", level + 1)
        else:
            self._end_line(*self._levels.get(value(paragraph, "pPr/pStyle"), ("", None)))

    def _add_number(self, paragraph: Any) -> None:
        """Puts a paragraph's number before its line, where it has one."""
        label = self._numbers.get(paragraph, "")
        self.held += letters(label)
        self._line.text.insert(0, label)

    def _end_line(self, style: str, level: int | None = None) -> None:
        text, after = one_line("".join(self._line.text)), self._line.after
        self._line = _Line(fields=self._line.fields)
        if text and level is not None:
            self.begin(level, text)
        else:
            self.say(text, style=style)
        for add in after:
            add()

    def _inline(self, container: Any) -> None:
        """Adds what a paragraph, a run or what holds runs says to the line."""
        line = self._line
        for element in container:
            tag = element.tag
            if tag == "t":
                if all(line.fields):
                    line.text.append(element.text or "")
                else:
                    self._leave_out("codes of fields", element)
            elif tag in _CHARACTERS:
                line.text.append(_CHARACTERS[tag])
            elif tag in _DELETED or tag == "delText":
                self._leave_out("deleted text", element)
            elif tag == "r" and is_on(element.find("rPr/vanish")):
                self._leave_out("hidden text", element)
            elif tag == "fldChar":
                self._field(attribute(element, "fldCharType"), element)
            elif tag in _NOTES:  # once, however often it is referred to
                if noted := self._notes[_NOTES[tag]].pop(attribute(element, "id"), None):
                    line.after.append(functools.partial(self._in_part, *noted))
            elif tag in ("drawing", "pict", "object"):
                self._drawing(element)
            elif tag == "rt":
                line.text.append("(")
                self._inline(element)
                line.text.append(")")
            elif not tag.endswith("Pr"):
                self._inline(element)

    def _field(self, kind: str, element: Any) -> None:
        fields = self._line.fields
        if kind == "begin":
            fields.append(False)
            choices = element.find("ffData/ddList")
            if choices is not None:  # what a form's list shows is no text of its own
                entries = [attribute(entry, "val") for entry in choices.iterfind("listEntry")]
                place = number(value(choices, "result"))
                if place < len(entries):
                    self.held += letters(entries[place])
                    self._line.text.append(entries[place])
        elif kind == "separate" and fields:
            fields[-1] = True
        elif kind == "end" and fields:
            fields.pop()

    def _drawing(self, drawing: Any) -> None:
        """Adds what a drawing shows: a picture, text boxes, a chart, a diagram."""
        alt, picture, after = "", "", self._line.after
        for element in drawing.iter("docPr", "cNvPr", "shape"):
            alt = attribute(element, "descr") or attribute(element, "alt") or alt
        for element in _outside_boxes(drawing):
            tag = element.tag
            if tag == "txbxContent":
                after.append(functools.partial(self._apart, element))
            elif tag in ("blip", "imagedata"):
                picture = picture or self.target(element, "embed", "id")
            elif tag == "textpath":  # letters as a drawing
                after.append(functools.partial(self.hold, attribute(element, "string")))
            elif tag in ("chart", "relIds"):
                after.append(functools.partial(self.chart, element))
        if picture or alt:
            after.insert(0, functools.partial(self.picture, picture, alt))

    def _foreign(self, part: str) -> None:
        """A page of HTML that the document takes in; of other formats, the bytes are counted."""
        if not part or part in self._foreign_parts:
            return
        self._foreign_parts.add(part)
        content = self.package.read(part)
        if not part.lower().endswith((".htm", ".html", ".xhtml")):
            self.left_out[f"bytes of {part}"] += len(content)
            self.held += len(content)
            return
        page = read_html(content)
        self.held += page.missing
        heading = ""
        for paragraph in page.paragraphs:
            if paragraph.heading != heading:
                heading = paragraph.heading
                self.held += letters(heading)
                self.begin(1, heading)
            line = f"{paragraph.header}: {paragraph.text}" if paragraph.header else paragraph.text
            self.hold(line, paragraph.is_row)

    def _leave_out(self, cause: str, element: Any) -> None:
        self.left_out[cause] += held_letters(element, *_TEXT)

    # Tables

    def _table(self, table: Any) -> None:
        rows = [(row, list(_below(row, "tc"))) for row in _below(table, "tr")]
        if len(rows) == 1 and len(rows[0][1]) == 1:  # a frame around text
            self._blocks(rows[0][1][0])
            return
        above: dict[int, str] = {}  # column -> the text of the merged cell that reaches this row
        lines: list[office.Row] = []
        headers = 0
        for row, cells in rows:
            if any(row.find(f"trPr/{tag}") is not None for tag in _DELETED):
                self._leave_out("deleted text", row)
                continue
            column = number(value(row, "trPr/gridBefore"))
            texts: dict[int, str] = {}
            merged: dict[int, str] = {}
            after: list[Callable[[], None]] = []
            for cell in cells:
                text = self._cell(cell, after)
                merge = cell.find("tcPr/vMerge")
                if merge is not None:
                    if attribute(merge, "val") != "restart" and column in above:
                        merged[column] = above[column]
                        text = self.merged(above[column], text)
                    else:
                        merged[column] = text
                texts[column] = text
                column += max(1, number(value(cell, "tcPr/gridSpan"), 1))
            above = merged
            if headers == len(lines) and is_on(row.find("trPr/tblHeader")):
                headers += 1
            lines.append(office.Row(texts, after=after))
        self.table(lines, headers or _without_header(table))

    def _cell(self, cell: Any, after: list[Callable[[], None]]) -> str:
        """A cell's text on one line; what stands in it beside its text is added after the row."""
        outer, texts = self._line, []
        for block in _cell_blocks(cell):
            self._line = _Line()
            if block.tag == "p":
                self._inline(block)
                self._add_number(block)
                texts.append("".join(self._line.text))
                after += self._line.after
            elif block.tag == "tbl":
                after.append(functools.partial(self._table, block))
            else:
                self._leave_out("deleted text", block)
        self._line = outer
        return one_line(" ".join(texts))


def _levels(styles: Any) -> dict[str, tuple[str, int | None]]:
    """Id of a paragraph's style -> its name, and the level of the heading that it makes."""
    known = {attribute(style, "styleId"): style for style in styles.iterfind("style")}
    return {identity: _style(identity, known) for identity in known}


def _style(identity: str, known: Mapping[str, Any], most: int = 20) -> tuple[str, int | None]:
    if identity not in known or not most:  # styles upon styles; damaged ones go in circles
        return "", None
    style = known[identity]
    name = value(style, "name").lower()
    kind, _, digits = name.partition(" ")
    if name == "title":
        return name, 0
    if style.find("pPr/outlineLvl") is not None:
        level = number(value(style, "pPr/outlineLvl"), 9) + 1
    elif kind == "heading" and digits.isdecimal():
        level = number(digits, 1)
    else:
        above, level = _style(value(style, "basedOn"), known, most - 1)
        name = name or above
    return name, level if level is None or level < 10 else None


def _below(container: Any, tag: str) -> Iterator[Any]:
    """The rows of a table, or the cells of a row, also in content controls around them."""
    for element in container:
        if element.tag == tag:
            yield element
        elif element.tag in ("sdt", "sdtContent", "customXml", "ins", "smartTag"):
            yield from _below(element, tag)


def _cell_blocks(cell: Any) -> Iterator[Any]:
    """Returns a cell's paragraphs, tables and deletions."""
    for element in cell:
        if element.tag in ("p", "tbl", *_DELETED):
            yield element
        elif not element.tag.endswith("Pr"):
            yield from _cell_blocks(element)


def _without_header(table: Any) -> int | None:
    """0 where Word's table says that its first row is no header; None: it may look like one."""
    look = table.find("tblPr/tblLook")
    if look is None:
        return None
    first = attribute(look, "firstRow") or str(int(attribute(look, "val") or "20", 16) & 0x20)
    return None if first not in ("0", "false", "off") else 0


def _outside_boxes(drawing: Any) -> Iterator[Any]:
    """The elements of a drawing in order, without those that stand in its text boxes."""
    for element in drawing:
        yield element
        if element.tag != "txbxContent":
            yield from _outside_boxes(element)


# The numbers of lists and headings, which files do not hold as text: `3.2.1`, `(a)`

_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"),
          (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))  # fmt: skip
_LEVELS = 9  # of a list
_LARGEST = 32767  # number of an item in Word


class _Numbering:
    """The lists of a document, counted paragraph by paragraph.

    `numbering`, `styles`: the roots of these parts.
    """

    def __init__(self, numbering: Any, styles: Any) -> None:
        self._styles = _by_id(styles, "style", "styleId")
        self._lists = _by_id(numbering, "num", "numId")
        self._kinds = _by_id(numbering, "abstractNum", "abstractNumId")
        self._counts: dict[Any, dict[int, int]] = {}  # of a kind: level -> its last number
        self._begun: set[str] = set()  # lists

    def labels(self, root: Any) -> dict[Any, str]:
        """Paragraphs of a part -> the number before each, with the space after it."""
        if not self._lists:
            return {}
        labels = ((paragraph, self._next(paragraph)) for paragraph in root.iter("p"))
        return {paragraph: label for paragraph, label in labels if label}

    def _next(self, paragraph: Any) -> str:
        style = value(paragraph, "pPr/pStyle")
        list_id, level = self._use(paragraph.find("pPr"), style)
        kind, mark = self._kind(list_id), "pPr/rPr/"
        if kind is None or any(paragraph.find(mark + tag) is not None for tag in _DELETED):
            return ""
        levels = {number(attribute(e, "ilvl")): e for e in kind.iterfind("lvl")}
        counts, starts = self._counts.setdefault(kind, {}), {}
        for override in self._lists[list_id]:
            replaced, start = override.find("lvl"), value(override, "startOverride")
            of = number(attribute(override, "ilvl"))
            levels |= {} if replaced is None else {of: replaced}
            starts |= {of: number(start, 1)} if start else {}
            if start and list_id not in self._begun:
                counts.pop(of, None)
        self._begun.add(list_id)
        if level < 0:  # the style's own level, or else the first
            level = next((n for n, e in levels.items() if value(e, "pStyle") == style != ""), 0)
        if level not in levels or level >= _LEVELS:
            return ""

        def start_of(of: int) -> int:
            return starts.get(of, number(value(levels.get(of), "start"), 1))

        for above in range(level):
            counts.setdefault(above, start_of(above))
        counts[level] = counts[level] + 1 if level in counts else start_of(level)
        for deeper in [n for n in counts if n > level]:
            after = value(levels.get(deeper), "lvlRestart")
            if not after or level < number(after):
                del counts[deeper]
        about = levels[level]
        if value(about, "numFmt") in ("bullet", "none") or is_on(about.find("rPr/vanish")):
            return ""

        def written(place: re.Match[str]) -> str:
            of = int(place[1]) - 1
            form, count = value(levels.get(of), "numFmt"), counts.get(of, start_of(of))
            is_decimal = is_on(about.find("isLgl")) and form != "decimalZero"
            write = _FORMS.get(form) if 0 < count <= _LARGEST and not is_decimal else None
            return write(count) if write else str(count)

        label = re.sub(r"%([1-9])", written, value(about, "lvlText"))
        return label + ("" if value(about, "suff") == "nothing" or not label else " ")

    def _use(self, properties: Any, style: str, most: int = 20) -> tuple[str, int]:
        """The list of a paragraph or of its styles, and the level; -1 where none is named."""
        list_id = value(properties, "numPr/numId")
        level = number(value(properties, "numPr/ilvl"), -1)
        if list_id or style not in self._styles or not most:  # damaged styles go in circles
            return list_id, level
        above = self._styles[style]
        list_id, inherited = self._use(above.find("pPr"), value(above, "basedOn"), most - 1)
        return list_id, inherited if level < 0 else level

    def _kind(self, list_id: str, is_linked: bool = False) -> Any:
        """The abstractNum of a list, also by way of the style that defines it; None without one."""
        kind = self._kinds.get(value(self._lists.get(list_id), "abstractNumId"))
        style = self._styles.get(value(kind, "numStyleLink"))
        if style is None or is_linked:
            return kind
        return self._kind(value(style, "pPr/numPr/numId"), is_linked=True)


def _by_id(root: Any, tag: str, key: str) -> dict[str, Any]:
    return {attribute(element, key): element for element in root.iter(tag)}


def _roman(count: int) -> str:
    text = ""
    for amount, sign in _ROMAN:
        text, count = text + sign * (count // amount), count % amount
    return text


def _letters(count: int) -> str:
    """Word's letters: a ... z, aa, bb ... zz, aaa."""
    return chr(ord("a") + (count - 1) % 26) * ((count - 1) // 26 + 1)


def _ordinal(count: int) -> str:
    last = count % 10 if count // 10 % 10 != 1 else 0
    return f"{count}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"


_FORMS: Mapping[str, Callable[[int], str]] = {  # the others are decimal here
    "lowerRoman": _roman, "upperRoman": lambda count: _roman(count).upper(),
    "lowerLetter": _letters, "upperLetter": lambda count: _letters(count).upper(),
    "decimalZero": "{:02}".format, "ordinal": _ordinal,
}  # fmt: skip
