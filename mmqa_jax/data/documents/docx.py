"""Word's documents (.docx): its final view, in which what is inserted stands and what is deleted
does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mmqa_jax.data.documents.document import Document, DocumentError, letters, one_line
from mmqa_jax.data.documents.docx_numbers import Numbering
from mmqa_jax.data.documents.html import read_html
from mmqa_jax.data.documents.office import (
    Package,
    Reading,
    Related,
    Row,
    Table,
    add_chart,
    add_diagram,
    attribute,
    child,
    chosen,
    held_letters,
    is_on,
    local,
    naming_damage,
    number,
    reference,
)

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

    Raises:
      DocumentError: encrypted, damaged, not a .docx, or it unpacks to too much.
    """
    package = Package(data, ".docx")
    with naming_damage(".docx"):
        return _Word(package).read()


@dataclasses.dataclass
class _Line:
    """A paragraph that is being read.

    Attributes:
      text: its pieces so far.
      after: called to add what is anchored in it.
      fields: of each field that is open, whether its result has begun.
    """

    text: list[str] = dataclasses.field(default_factory=list)
    after: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    fields: list[bool] = dataclasses.field(default_factory=list)


class _Word:
    """One reading of a document."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._reading = Reading()
        self._main = package.main()
        self._part, self._related = self._main, package.related(self._main)
        styles = self._root_of("styles")
        self._levels = _levels(styles)
        self._numbering = Numbering(self._root_of("numbering"), styles)
        self._numbers: dict[Any, str] = {}  # paragraph -> its number in a list
        self._notes = {kind: self._notes_of(kind) for kind in _NOTES.values()}
        self._foreign_parts = {""}  # that were taken in
        self._line = _Line()  # carries a paragraph whose end is deleted into the next one

    def read(self) -> Document:
        edges: dict[str, dict[str, str]] = {"header": {}, "footer": {}}
        for kind, part in self._related.values():
            if kind in edges and part:
                edges[kind].setdefault(part, part)
        self._edges(edges["header"])
        root = self._package.xml(self._main)
        self._hold(root)
        body = child(root, "body")
        if body is None:
            raise DocumentError("no .docx that can be read: it has no body")
        self._blocks(body)
        self._end_line("")
        for notes in self._notes.values():
            for part, note in list(notes.values()):  # to which nothing refers
                self._in_part(part, note)
        self._edges(edges["footer"])
        self._reading.set_title(self._package.title())
        return self._reading.document()

    def _root_of(self, kind: str) -> Any:
        part = next((r.part for r in self._related.values() if r.kind == kind and r.part), "")
        return self._package.xml(part) if part else None

    def _hold(self, root: Any) -> None:
        self._reading.held += held_letters(root, _TEXT)
        self._numbers |= self._numbering.labels(root)

    def _notes_of(self, kind: str) -> dict[str, tuple[str, Any]]:
        """Notes by their ids, each with the name of its part."""
        part = next((r.part for r in self._related.values() if r.kind == kind and r.part), "")
        if not part:
            return {}
        root = self._package.xml(part)
        self._hold(root)
        return {attribute(note, "id"): (part, note) for note in root}

    def _edges(self, parts: Mapping[str, str]) -> None:
        """Headers or footers: each text once, and none that is a page's number alone."""
        known: set[str] = set()
        for part in parts:
            root = self._package.xml(part)
            self._hold(root)
            text = one_line(" ".join(e.text or "" for e in root.iter("{*}t")))
            if text in known:
                self._reading.left_out["repeated headers and footers"] += held_letters(root, _TEXT)
            elif not any(map(str.isalpha, text)):
                self._reading.left_out["page numbers"] += held_letters(root, _TEXT)
            else:
                self._in_part(part, root)
            known.add(text)

    def _in_part(self, part: str, root: Any) -> None:
        """Adds blocks of another part, to whose relationships its elements refer."""
        outer = self._part, self._related, self._line
        self._part, self._related = part, self._package.related(part)
        self._apart(root)
        self._part, self._related, self._line = outer

    def _apart(self, root: Any) -> None:
        """Adds blocks that stand apart from the paragraph in which they are anchored."""
        outer, self._line = self._line, _Line()
        self._blocks(root)
        self._end_line("")
        self._line = outer

    # Blocks

    def _blocks(self, container: Any) -> None:
        for element in container:
            name = local(element)
            if name == "p":
                self._paragraph(element)
            elif name == "tbl":
                self._table(element)
            elif name in _DELETED:
                self._leave_out("deleted text", element)
            elif name == "AlternateContent":
                if (kept := chosen(element)) is not None:
                    self._blocks(kept)
            elif name == "altChunk":
                self._foreign(self._related.get(reference(element, "id")))
            elif name not in ("sdtPr", "sdtEndPr", "sectPr"):
                self._blocks(element)  # content controls, custom XML, insertions

    def _paragraph(self, paragraph: Any) -> None:
        self._inline(paragraph)
        # A field whose result does not begin in its paragraph is damaged, and hides nothing more.
        self._line.fields = [True for _ in self._line.fields]
        mark = child(paragraph, "pPr", "rPr")
        if mark is not None and any(child(mark, name) is not None for name in _DELETED):
            return  # the next paragraph goes on in the same line
        if one_line("".join(self._line.text)):
            self._add_number(paragraph)
        style = attribute(child(paragraph, "pPr", "pStyle"), "val") if _has_style(paragraph) else ""
        level = child(paragraph, "pPr", "outlineLvl")
        if level is not None and number(attribute(level, "val"), 9) < 9:
            self._end_line("", number(attribute(level, "val")) + 1)
        else:
            self._end_line(*self._levels.get(style, ("", None)))

    def _add_number(self, paragraph: Any) -> None:
        """Puts a paragraph's number before its line, where it has one."""
        label = self._numbers.get(paragraph, "")
        self._reading.held += letters(label)
        self._line.text.insert(0, label)

    def _end_line(self, style: str, level: int | None = None) -> None:
        text, after = one_line("".join(self._line.text)), self._line.after
        self._line = _Line(fields=self._line.fields)
        if text and level is not None:
            self._reading.begin(level, text)
        else:
            self._reading.say(text, style=style)
        for add in after:
            add()

    def _inline(self, container: Any) -> None:
        """Adds what a paragraph, a run or what holds runs says to the line."""
        line = self._line
        for element in container:
            name = local(element)
            if name == "t":
                if all(line.fields):
                    line.text.append(element.text or "")
                else:
                    self._leave_out("codes of fields", element)
            elif name in _CHARACTERS:
                line.text.append(_CHARACTERS[name])
            elif name in _DELETED or name == "delText":
                self._leave_out("deleted text", element)
            elif name == "r" and is_on(child(element, "rPr", "vanish")):
                self._leave_out("hidden text", element)
            elif name == "fldChar":
                self._field(attribute(element, "fldCharType"), element)
            elif name in _NOTES:
                self._note(_NOTES[name], attribute(element, "id"))
            elif name in ("drawing", "pict", "object"):
                self._drawing(element)
            elif name == "AlternateContent":
                if (kept := chosen(element)) is not None:
                    self._inline(kept)
            elif name == "rt":
                line.text.append("(")
                self._inline(element)
                line.text.append(")")
            elif not name.endswith("Pr"):
                self._inline(element)

    def _field(self, kind: str, element: Any) -> None:
        fields = self._line.fields
        if kind == "begin":
            fields.append(False)
            choices = child(element, "ffData", "ddList")
            if choices is not None:  # what a form's list shows is no text of its own
                entries = [attribute(e, "val") for e in choices if local(e) == "listEntry"]
                result = child(choices, "result")
                place = number(attribute(result, "val")) if result is not None else 0
                if place < len(entries):
                    self._reading.held += letters(entries[place])
                    self._line.text.append(entries[place])
        elif kind == "separate" and fields:
            fields[-1] = True
        elif kind == "end" and fields:
            fields.pop()

    def _note(self, kind: str, identity: str) -> None:
        noted = self._notes[kind].pop(identity, None)  # once, however often it is referred to
        if noted is not None:
            self._line.after.append(lambda: self._in_part(*noted))

    def _drawing(self, drawing: Any) -> None:
        """Adds what a drawing shows: a picture, text boxes, a chart, a diagram."""
        related = self._related
        alt = ""
        for element in drawing.iter():
            name = local(element)
            if name in ("docPr", "cNvPr", "shape"):
                alt = attribute(element, "descr") or attribute(element, "alt") or alt
        has_picture = False
        for element in _shown(drawing):
            name = local(element)
            if name == "txbxContent":
                self._line.after.append(lambda element=element: self._apart(element))
            elif name in ("blip", "imagedata"):
                target = related.get(reference(element, "embed") or reference(element, "id"))
                if target is not None and target.part and not has_picture:
                    has_picture = True
                    self._line.after.insert(
                        0, lambda part=target.part: self._reading.picture(self._package, part, alt)
                    )
            elif name == "textpath" and attribute(element, "string"):  # letters as a drawing
                text = attribute(element, "string")
                self._reading.held += letters(text)
                self._line.after.append(lambda text=text: self._reading.say(text))
            elif name in ("chart", "relIds"):
                target = related.get(reference(element, "id") or reference(element, "dm"))
                if target is not None and target.part:
                    add = add_chart if name == "chart" else add_diagram
                    self._line.after.append(
                        lambda add=add, part=target.part: add(self._reading, self._package, part)
                    )
        if not has_picture and alt:
            self._line.after.insert(0, lambda: self._reading.picture(self._package, "", alt))

    def _foreign(self, target: Related | None) -> None:
        """A page of HTML that the document takes in; of other formats, the bytes are counted."""
        if target is None or target.part in self._foreign_parts:
            return
        self._foreign_parts.add(target.part)
        content = self._package.read(target.part)
        if not target.part.lower().endswith((".htm", ".html", ".xhtml")):
            self._reading.left_out[f"bytes of {target.part}"] += len(content)
            self._reading.held += len(content)
            return
        document = read_html(content)
        self._reading.held += document.missing
        heading = ""
        for paragraph in document.paragraphs:
            if paragraph.heading != heading:
                heading = paragraph.heading
                self._reading.held += letters(heading)
                self._reading.begin(1, heading)
            line = f"{paragraph.header}: {paragraph.text}" if paragraph.header else paragraph.text
            self._reading.held += letters(line)
            self._reading.say(line, is_row=paragraph.is_row)

    def _leave_out(self, cause: str, element: Any) -> None:
        self._reading.left_out[cause] += held_letters(element, _TEXT)

    # Tables

    def _table(self, table: Any) -> None:
        rows = list(_below(table, "tr"))
        cells = [list(_below(row, "tc")) for row in rows]
        if len(cells) == 1 and len(cells[0]) == 1:  # a frame around text
            self._blocks(cells[0][0])
            return
        above: dict[int, str] = {}  # column -> the text of the merged cell that reaches this row
        lines: list[Row] = []
        headers = 0
        for row, row_cells in zip(rows, cells, strict=True):
            properties = child(row, "trPr")
            if any(child(properties, name) is not None for name in _DELETED):
                self._leave_out("deleted text", row)
                continue
            before = child(properties, "gridBefore")
            column = number(attribute(before, "val")) if before is not None else 0
            texts: dict[int, str] = {}
            merged: dict[int, str] = {}
            after: list[Callable[[], None]] = []
            for cell in row_cells:
                text = self._cell(cell, after)
                merge = child(cell, "tcPr", "vMerge")
                if merge is not None:
                    if attribute(merge, "val") != "restart" and column in above:
                        merged[column] = above[column]
                        text = self._reading.merged(above[column], text)
                    else:
                        merged[column] = text
                texts[column] = text
                span = child(cell, "tcPr", "gridSpan")
                column += max(1, number(attribute(span, "val"), 1)) if span is not None else 1
            above = merged
            if headers == len(lines) and is_on(child(properties, "tblHeader")):
                headers += 1
            lines.append(Row(texts, after=after))
        self._reading.table(Table(lines, headers or _without_header(table)))

    def _cell(self, cell: Any, after: list[Callable[[], None]]) -> str:
        """A cell's text on one line; what stands in it beside its text is added after the row."""
        outer, texts = self._line, []
        for block in _cell_blocks(cell):
            name = local(block)
            self._line = _Line()
            if name == "p":
                self._inline(block)
                self._add_number(block)
                texts.append("".join(self._line.text))
                after += self._line.after
            elif name == "tbl":
                after.append(lambda block=block: self._table(block))
            else:
                self._leave_out("deleted text", block)
        self._line = outer
        return one_line(" ".join(texts))


def _has_style(paragraph: Any) -> bool:
    return child(paragraph, "pPr", "pStyle") is not None


def _levels(styles: Any) -> dict[str, tuple[str, int | None]]:
    """Id of a paragraph's style -> its name, and the level of the heading that it makes."""
    if styles is None:
        return {}
    known = {attribute(style, "styleId"): style for style in styles if local(style) == "style"}
    return {identity: _style(identity, known) for identity in known}


def _style(identity: str, known: Mapping[str, Any]) -> tuple[str, int | None]:
    first, level = "", None
    for _ in range(20):  # styles upon styles; damaged ones go in circles
        if identity not in known:
            break
        style = known[identity]
        name = child(style, "name")
        name = attribute(name, "val").lower() if name is not None else ""
        first = first or name
        kind, _, digits = name.partition(" ")
        outline = child(style, "pPr", "outlineLvl")
        if name == "title":
            level = 0
        elif outline is not None:
            level = number(attribute(outline, "val"), 9) + 1
        elif kind == "heading" and digits.isdecimal():
            level = number(digits, 1)
        if level is not None:
            break
        based = child(style, "basedOn")
        identity = attribute(based, "val") if based is not None else ""
    return first, level if level is None or level < 10 else None


def _below(container: Any, name: str) -> Iterator[Any]:
    """The rows of a table, or the cells of a row, also in content controls around them."""
    for element in container:
        if local(element) == name:
            yield element
        elif local(element) in ("sdt", "sdtContent", "customXml", "ins", "smartTag"):
            yield from _below(element, name)


def _cell_blocks(cell: Any) -> Iterator[Any]:
    """A cell's paragraphs, tables, and what is deleted."""
    for element in cell:
        if local(element) in ("p", "tbl", *_DELETED):
            yield element
        elif local(element) == "AlternateContent":
            if (kept := chosen(element)) is not None:
                yield from _cell_blocks(kept)
        elif not local(element).endswith("Pr"):
            yield from _cell_blocks(element)


def _without_header(table: Any) -> int | None:
    """0 where Word's table says that its first row is no header; None: it may look like one."""
    look = child(table, "tblPr", "tblLook")
    if look is None:
        return None
    first = attribute(look, "firstRow") or str(int(attribute(look, "val") or "20", 16) & 0x20)
    return None if first not in ("0", "false", "off") else 0


def _shown(drawing: Any) -> Iterator[Any]:
    """The elements of a drawing in order, without those that stand in its text boxes."""
    for element in drawing:
        yield element
        if local(element) == "AlternateContent":
            if (kept := chosen(element)) is not None:
                yield from _shown(kept)
        elif local(element) != "txbxContent":
            yield from _shown(element)
