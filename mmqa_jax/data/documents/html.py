"""HTML by turbohtml, which builds the tree that browsers build: what a person sees of a page.

Books in EPUB are such pages in an archive.

Nothing in a page is executed, and nothing is fetched.
"""

import base64
import binascii
import dataclasses
import html
import io
import itertools
import posixpath
import re
import unicodedata
import urllib.parse
import zipfile
from collections.abc import Callable
from typing import Any

from mmqa_jax.core.errors import decimal_number
from mmqa_jax.data.documents import document
from mmqa_jax.data.documents.document import CELL, DocumentError, letters, one_line

# What no person sees, and why.
_LEFT_OUT = {
    **dict.fromkeys(("script", "style"), "scripts and styles"),
    **dict.fromkeys(("template", "iframe", "audio", "video", "canvas"), "what browsers show if "
                    "they cannot show another thing"),
    "nav": "navigation",
    "datalist": "options not chosen",
    "annotation": "sources of formulas",
    "annotation-xml": "sources of formulas",
}  # fmt: skip
# Elements that end a paragraph (HTML's standard, section 15.3); tables are looked after apart.
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "center", "dd", "details", "dialog", "dir",
    "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4",
    "h5", "h6", "header", "hgroup", "hr", "legend", "li", "listing", "main", "menu", "ol", "p",
    "plaintext", "pre", "search", "section", "summary", "svg", "ul", "xmp",
})  # fmt: skip
_BOXES = frozenset({"aside", "blockquote", "dd", "details", "dialog", "li"})  # end their headings
_SPACED = frozenset({"br", "textarea", "button", "text", "desc", "title"})  # words end at them
_BETWEEN = re.compile(r"\n\s*\n|\n(?=[ \t]*(?:[-*+•]|\d{1,3}[.)])[ \t])")  # paragraphs and items
_LINED = frozenset({"pre", "listing", "plaintext", "xmp"})  # whose lines stay
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_NO_VALUE = frozenset({"hidden", "password", "file", "image", "color", "range"})  # types of <input>
# A table with one of these is a layout of the page: its cells are no cells.
_LAYOUT = "table, h1, h2, h3, h4, h5, h6, figure, pre, blockquote, form"
_DATA_URI = re.compile(r"\s*data:image/[\w.+-]+;base64,", re.IGNORECASE)
_MOST_HEADER = 400  # characters of a table's header, which every passage of its rows repeats
_MOST_HEADER_ROWS, _MOST_HEADER_CELLS = 4, 100
_MOST_COLUMNS, _MOST_ROWS = 1000, 65534  # that a cell spans, by HTML's standard
_MOST_COPIES = 2**20  # characters of merged cells that are written again in the rows they cover


def read_html(data: bytes) -> document.Document:
    """A page's paragraphs, items of lists and rows of tables, and its pictures with their captions.

    A caption is the figcaption, or else the text that stands for the picture (alt). Pictures with
    neither are decoration and left out. The encoding is found as browsers find it (the WHATWG's
    standard); a page that declares none is UTF-8, or what its bytes look like.
    """
    page = Page()
    page.add_bytes(data)
    return page.document()


def parsed(data: bytes, encoding: str | None) -> Any:
    """Parses HTML in an encoding that browsers know, or else in the declared one."""
    import turbohtml

    try:
        return turbohtml.parse(data, encoding=encoding, detect_encoding=True, positions=False)
    except LookupError:
        return turbohtml.parse(data, detect_encoding=True, positions=False)


@dataclasses.dataclass
class _Cell:
    """A cell: its columns, and how many more rows it covers."""

    text: str
    columns: int
    rows: int
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + self.columns


class _Table:
    """The rows of a table that is open."""

    def __init__(self, text_around: list[str]) -> None:
        self.text_around = text_around  # of the cell that this table stands in
        self.rows: list[list[_Cell]] = []
        self.header_rows = 0
        self.cells: list[_Cell] = []  # of the row that is open
        self.headings_only = True  # the open row's cells are headings
        self._covering: list[_Cell] = []  # cells from above that reach into the next row

    def end_section(self) -> None:
        """Ends the head, a body or the foot: no cell reaches beyond."""
        self._covering = []

    def end_row(self, in_head: bool, most_copies: int) -> int:
        """Ends the row that is open; returns the characters that are copied from rows above."""
        row: list[_Cell] = []
        column = copied = 0
        covering = iter(self._covering)
        above = next(covering, None)
        for cell in self.cells:
            while above is not None and above.start <= column:
                row.append(above)
                column, above = max(column, above.end), next(covering, None)
            cell.start = column
            row.append(cell)
            column = cell.end
        while above is not None:
            row.append(above)
            above = next(covering, None)
        copied = sum(len(cell.text) + 1 for cell in self._covering)
        for cell in row:
            cell.rows -= 1
        is_whole = copied <= most_copies
        self._covering = [cell for cell in row if cell.rows > 0] if is_whole else []
        is_header = (in_head or self.headings_only) and len(row) <= _MOST_HEADER_CELLS
        if is_header and self.header_rows == len(self.rows) < _MOST_HEADER_ROWS and self.cells:
            self.header_rows += 1
        if row:
            self.rows.append(row)
        self.cells, self.headings_only = [], True
        return copied

    def header(self) -> str:
        """The texts above each column, joined; "" for a table without a header."""
        if not 0 < self.header_rows < len(self.rows):
            return ""
        *above, last = self.rows[: self.header_rows]
        columns = []
        for cell in last:
            over = [c.text for row in above for c in row if c.start <= cell.start < c.end]
            columns.append(" ".join(filter(None, dict.fromkeys((*over, cell.text)))))
        text = CELL.join(columns)
        return text if letters(text) and len(text) <= _MOST_HEADER else ""

    def lines(self) -> tuple[str, list[str]]:
        """The header, and a line for every other row."""
        header = self.header()
        rows = self.rows[self.header_rows if header else 0 :]
        return header, [one_line(CELL.join(cell.text for cell in row)) for row in rows]


class Page(document.Content):
    """The text of HTML trees that a person sees, one text after another."""

    def __init__(self) -> None:
        super().__init__()
        # The picture that a link names within the file; None where it is outside.
        self.open_link: Callable[[str], bytes | None] = lambda link: None
        self._text: list[str] = []  # of the paragraph or the cell that is open
        self._heading = 0  # level of the heading that is open
        self._around: list[
            document.Heading
        ] = []  # headings that were open when its container began
        self._before: list[
            list[document.Heading]
        ] = []  # headings that were open when each element began
        self._marker = ""  # number of the item that begins
        self._numbers: list[int | None] = []  # next number of each list that is open
        self._lined = 0  # elements that are open and keep their lines
        self._tables: list[_Table | None] = []  # that are open; None for a layout
        self._data_tables = 0  # of them, that are no layouts
        # Of each <figure> that is open: its pictures (alt, link), and its captions.
        self._open_figures: list[tuple[list[tuple[str, str]], list[str]]] = []
        self._in_caption = False
        self._copies = _MOST_COPIES

    def add_bytes(self, data: bytes, encoding: str | None = None) -> None:
        """Adds HTML in the encoding that is stated beside it, or else that it declares."""
        import turbohtml

        tree = parsed(data, encoding)
        if tree.encoding_confidence != "certain":
            if b"\0" in data[:1024]:
                raise DocumentError("no HTML that can be read (it holds bytes of no text)")
            text = data.decode("utf-8", "replace")
            damaged = text.count("\ufffd")
            if damaged < sum(character > "\x7f" for character in text) - damaged:
                tree = turbohtml.parse(text, positions=False)  # UTF-8 but for a few bytes
        self.add_tree(tree)
        self.add_left_out("bytes that are no characters", tree.text.count("\ufffd"))

    def add_markup(self, markup: str) -> None:
        """Adds HTML."""
        import turbohtml

        self.add_tree(turbohtml.parse(markup, positions=False))

    def add_tree(self, root: Any) -> None:
        """Adds a tree of turbohtml's, whose text nodes are all counted."""
        import turbohtml

        begun = self.open
        self.held += _letters(root)
        if (title := root.select_one("head > title")) is not None:
            if self.title:
                self.left_out["titles of parts"] += _letters(title)
            else:
                self.title = one_line(title.text)
            title.decompose()
        stack: list[tuple[Any, bool]] = [(root, False)]
        while stack:
            node, is_end = stack.pop()
            if is_end:
                self._end(node)
                self.leave(self._before.pop(), node.tag in _BOXES)
            elif isinstance(node, turbohtml.Element):
                before = self.open
                if cause := _cause(node):
                    self.left_out[cause] += _letters(node)
                elif self._begin(node):
                    self._before.append(before)
                    stack.append((node, True))
                    stack += [(child, False) for child in reversed(node.children)]
            elif isinstance(node, (turbohtml.Text, turbohtml.CData)):
                self._text.append(node.data)
            elif isinstance(node, turbohtml.Comment):
                self.add_left_out("comments", letters(node.data))
            elif isinstance(node, turbohtml.Document):
                stack += [(child, False) for child in reversed(node.children)]
        self._flush()
        self.leave(begun)

    def add_text(self, text: str) -> None:
        """Adds paragraphs between blank lines, and items of lists, whose letters are yet to be
        counted."""
        for paragraph in _BETWEEN.split(text):
            self.add(one_line(paragraph))

    def add_picture(self, caption: str, link: str) -> bool:
        """Adds the picture that a link names; returns False where its base64 is damaged."""
        encoded, caption = _DATA_URI.match(link), one_line(caption)
        if encoded is None:
            picture = self.open_link(link)
            self.hold_figure(caption, picture, link if picture is None else "")
            return True
        try:
            picture = base64.b64decode(link[encoded.end() :], validate=False)
        except (binascii.Error, ValueError) as error:
            self.broken_figures.append(f"{caption[:60]!r}: its base64 is damaged ({error})")
            return False
        self.hold_figure(caption, picture)
        return True

    def hold_figure(self, caption: str, picture: bytes | None, link: str = "") -> None:
        """Adds a picture whose caption the file holds beside the text that was counted."""
        self.held += letters(caption)
        self.add_figure(caption, picture, link)

    def add_left_out(self, cause: str, count: int) -> None:
        """Counts letters that the file holds and that its reader left out on purpose."""
        self.held += count
        self.left_out[cause] += count

    def _begin(self, element: Any) -> bool:
        """Begins an element; returns whether what it holds is to be read."""
        tag = element.tag
        table = self._tables[-1] if self._tables else None
        if tag in _BLOCKS or "-" in tag:
            self._flush()
        elif tag in _SPACED:
            self._text.append(" ")
        if tag in _HEADINGS and not self._data_tables:
            self._heading = _HEADINGS[tag]
            depth, container = 1, element
            while depth < len(self._before) and _is_alone(container):
                depth, container = depth + 1, container.parent
            self._around = self._before[-depth] if self._before else []
        elif tag in _LINED:
            self._lined += 1
        elif tag == "figure":
            self._open_figures.append(([], []))
        elif tag == "figcaption" and self._open_figures and not self._data_tables:
            self._in_caption = True
        elif tag in ("ol", "ul", "menu", "dir"):
            self._numbers.append(_number(element, "start", 1) if tag == "ol" else None)
        elif tag == "li" and self._numbers and self._numbers[-1] is not None:
            number = _number(element, "value", self._numbers[-1])
            self._numbers[-1] = number + 1
            self._marker = f"{number}. "
        elif tag == "img":
            self._add_picture(element)
        elif tag == "br" and self._lined:
            self._text.append("\n")
        elif tag == "input":
            self._add_input(element)
        elif tag == "select":
            self._add_chosen(element)
            return False
        elif tag == "math":
            return self._add_formula(element)
        elif tag == "sup" and element.has_class("footnote-definition-label"):
            self._marker = f"{element.text} "  # pyromark's, before the footnote's paragraph
            self.held -= _letters(element)
            return False
        elif tag == "a" and self._heading:  # "¶", which links to the heading itself
            return not (element.attr("href") or "").startswith("#") or letters(element.text) > 0
        elif tag == "table":
            self._begin_table(element)
        elif tag in ("td", "th", "caption") and table is not None:
            self._text = []
        elif tag in ("td", "th", "tr", "caption", "thead", "tbody", "tfoot"):
            self._flush()
        return True

    def _end(self, element: Any) -> None:
        tag = element.tag
        table = self._tables[-1] if self._tables else None
        if tag == "figcaption" and self._in_caption and not self._data_tables:
            self._in_caption = False
            self._open_figures[-1][1].append(one_line("".join(self._text)))
            self._text = []
        elif tag in _BLOCKS or "-" in tag:
            self._flush()
        elif tag in _SPACED:
            self._text.append(" ")
        if tag in _HEADINGS:
            self._heading = 0
        elif tag in _LINED:
            self._lined -= 1
        elif tag in ("ol", "ul", "menu", "dir"):
            self._numbers.pop()
        elif tag == "figure":
            self._end_figure()
        elif tag == "table":
            self._end_table()
        elif table is None:
            if tag in ("td", "th", "tr", "caption"):
                self._flush()
        elif tag == "caption":
            self.add(one_line("".join(self._text)))
            self._text = []
        elif tag in ("td", "th"):
            columns = min(_number(element, "colspan", 1) or 1, _MOST_COLUMNS)
            rows = min(_number(element, "rowspan", 1) or _MOST_ROWS, _MOST_ROWS)
            table.cells.append(_Cell(one_line("".join(self._text)), columns, rows))
            table.headings_only &= tag == "th"
            self._text = []
        elif tag == "tr":
            in_head = element.parent is not None and element.parent.tag == "thead"
            self._copies -= table.end_row(in_head, self._copies)
        elif tag in ("thead", "tbody", "tfoot"):
            table.end_section()

    def _flush(self) -> None:
        """Ends the paragraph or heading that is open; in a cell or a caption, a word."""
        if self._data_tables or self._in_caption:
            self._text.append(" ")
            return
        whole = "".join(self._text)
        self._text = []
        blocks = whole.split("\n") if self._lined else [whole]
        for text in filter(None, map(one_line, blocks)):
            if self._heading:
                self.enter(self._heading, text, around=self._around)
            else:
                self.held += letters(self._marker)
                self.add(self._marker + text)
                self._marker = ""

    def _begin_table(self, element: Any) -> None:
        is_layout = element.attr("role") in ("presentation", "none") or (
            element.select_one(_LAYOUT) is not None and element.select_one("th") is None
        )
        if is_layout:
            self._flush()
            self._tables.append(None)
        else:
            self._flush()
            self._tables.append(_Table(self._text))
            self._data_tables += 1
            self._text = []

    def _end_table(self) -> None:
        table = self._tables.pop()
        if table is None:
            self._flush()
            return
        self._data_tables -= 1
        header, lines = table.lines()
        rows = list(filter(letters, lines))
        if rows:
            self.begin_table(header)
        else:  # of a table without content
            self.add(header, is_row=True)
        for text in rows:
            self.add(text, is_row=True, header=header)
        # Merged cells are read in each row that they cover, and the file holds them once.
        cells = {id(cell): cell.text for row in table.rows for cell in row}
        self.held += sum(map(letters, (header, *lines))) - sum(map(letters, cells.values()))
        self._text = table.text_around

    def _add_formula(self, element: Any) -> bool:
        """Adds a formula's alttext, or returns True: its letters are to be read."""
        text = element.attr("alttext") or ""
        if not letters(text):
            return True
        self._text.append(f" {text} ")
        self.held += letters(text)
        self.left_out["formulas read by their alttext"] += _letters(element)
        return False

    def _add_input(self, element: Any) -> None:
        kind = (element.attr("type") or "text").lower()
        if kind in ("checkbox", "radio"):
            self._text.append("[x] " if element.attr("checked") is not None else "[ ] ")
            self.held += element.attr("checked") is not None
        elif kind not in _NO_VALUE:
            value = element.attr("value") or ""
            self._text.append(f" {value} ")
            self.held += letters(one_line(value))

    def _add_chosen(self, element: Any) -> None:
        options = list(element.find_all("option"))
        chosen = [option for option in options if option.attr("selected") is not None]
        text = " ".join(option.text for option in chosen or options[:1])
        self._text.append(f" {text} ")
        rest = _letters(element) - letters(one_line(text))
        self.left_out["options not chosen"] += rest

    def _add_picture(self, element: Any) -> None:
        alt = element.attr("alt") or element.attr("title") or ""
        link = element.attr("src") or element.attr("data-src") or ""
        if self._open_figures:
            self._open_figures[-1][0].append((alt, link))
        elif alt.strip():
            self.add_picture(alt, link)

    def _end_figure(self) -> None:
        pictures, captions = self._open_figures.pop()
        caption = " ".join(filter(None, captions))
        were_added = [
            self.add_picture(caption or alt, link)
            for alt, link in pictures
            if caption or alt.strip()
        ]
        if caption and any(were_added):
            self.held -= letters(caption)  # `add_picture` counts what it adds
        elif caption:  # of a table, or of what is not read
            self.add(caption)
        if caption:
            alts = sum(letters(one_line(alt)) for alt, _ in pictures)
            self.add_left_out("alternative texts beside captions", alts)


def _is_alone(element: Any) -> bool:
    """Tells whether nothing else stands in an element's parent: it is there for the layout."""
    import turbohtml

    beside = itertools.chain(element.previous_siblings, element.next_siblings)
    visible = (node for node in beside if not isinstance(node, turbohtml.Comment))
    return not any(isinstance(node, turbohtml.Element) or node.text.strip() for node in visible)


def _cause(element: Any) -> str:
    """Tells why no person sees an element; "" where one does."""
    if (cause := _LEFT_OUT.get(element.tag)) is not None:
        return cause
    if element.attr("role") == "navigation":
        return "navigation"
    hides = "display:none" in (element.attr("style") or "").replace(" ", "").lower()
    hidden = element.attr("hidden")
    if element.tag not in ("html", "body") and (hides or hidden not in (None, "until-found")):
        return "hidden"
    return ""


def _letters(node: Any) -> int:
    """Counts how many letters a part of a tree has."""
    return letters(unicodedata.normalize("NFC", node.text))


def _number(element: Any, name: str, default: int) -> int:
    """A whole number that an attribute holds."""
    number = decimal_number((element.attr(name) or "").strip())
    return default if number is None else number


# Books (EPUB 2 and 3)

_CONTAINER = "META-INF/container.xml"
_XML_ENTITIES = ("amp", "lt", "gt", "quot", "apos")


def read_epub(data: bytes) -> document.Document:
    """A book's chapters (EPUB 2 and 3) with their pictures."""
    import turbohtml

    page, of_content = Page(), (KeyError, AttributeError, ValueError, turbohtml.HTMLParseError)
    errors = zipfile.BadZipFile, RuntimeError, OSError, *of_content
    with document.naming_damage("EPUB", *errors), zipfile.ZipFile(io.BytesIO(data)) as archive:
        if "META-INF/rights.xml" in archive.namelist():
            raise DocumentError("encrypted; save it without its protection")
        name = _xml(archive.read(_CONTAINER)).find("rootfile").attr("full-path")
        package = _xml(archive.read(name))
        chapters = {
            item.attr("id"): _resolved(name, item.attr("href") or "")
            for item in package.find_all("item")
            if item.attr("media-type") in ("application/xhtml+xml", "text/html")
        }
        page.set_title(title.text if (title := package.find("dc:title")) else "")
        order = [item.attr("idref") for item in package.find_all("itemref")]
        for number in dict.fromkeys(order):
            if chapter := chapters.pop(number, ""):
                _add_chapter(page, archive, chapter)
        rest = sum(letters(one_line(_xml(archive.read(c)).text)) for c in chapters.values())
        page.add_left_out("parts outside the reading order", rest)
    return page.document()


def _add_chapter(page: Page, archive: zipfile.ZipFile, name: str) -> None:
    def open_link(link: str) -> bytes | None:
        try:
            return archive.read(_resolved(name, link))
        except KeyError:  # no file of the book
            return None

    page.open_link = open_link
    page.add_tree(_xml(archive.read(name)))


def _xml(data: bytes) -> Any:
    """The tree of XML; of HTML that is none, as browsers read it."""
    import turbohtml

    declared = re.match(rb"\s*<\?xml[^>]*encoding=[\"']([\w.-]+)", data)
    try:
        text = data.decode(declared[1].decode() if declared else "utf-8-sig").removeprefix("\ufeff")
        # Books name characters as HTML does, which XML alone does not know.
        text = re.sub(
            r"&(\w+);", lambda m: m[0] if m[1] in _XML_ENTITIES else html.unescape(m[0]), text
        )
        return turbohtml.parse_xml(text)
    except (turbohtml.HTMLParseError, UnicodeError, LookupError):
        return turbohtml.parse(data, positions=False)


def _resolved(document: str, link: str) -> str:
    """The member of the archive that a link of another one names."""
    path = urllib.parse.unquote(link.partition("#")[0])
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
