"""A document's content in any format: paragraphs under headings, and figures; where they stand in
the file, and the readers by its ending."""

import bisect
import contextlib
import dataclasses
import difflib
import importlib.util
import itertools
import math
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mmqa_jax.core.box import Budget
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import decode_text

# No text, though files hold them: control characters, halves of a character (surrogates), soft
# hyphens, and what is no character at all.
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\xad\ud800-\udfff\ufffe\uffff]")
BELOW = " > "  # between a heading and the one below it
CELL = " | "  # between the cells of a row
_LONGEST_HEADING, _MOST_HEADINGS = 300, 10  # characters; headings above a paragraph
_CAPTION = re.compile(r"(?:fig(?:ure|\.)?|plate|chart|diagram|scheme|photo)\s*\d", re.IGNORECASE)

Box = tuple[float, float, float, float]  # left, top, right, bottom


class DocumentError(UserError):
    """A document that cannot be read: the message says why, without the file's name.

    Every reader of documents raises it where a file is encrypted, damaged, of another kind, or
    unpacks to too much.
    """


@contextlib.contextmanager
def naming_damage(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns a library's errors at a broken document into DocumentErrors."""
    try:
        yield
    except UserError:
        raise
    except RecursionError as error:
        raise DocumentError("its parts are nested too deep; save it anew") from error
    except errors as error:
        reason = one_line(f"{type(error).__name__}: {error}")[:120]
        raise DocumentError(f"no {what} that can be read ({reason})") from error


@dataclasses.dataclass(frozen=True)
class Place:
    """A place says where a stretch of a paragraph stands in its file."""

    # start, end: the stretch, in characters of the paragraph's text.
    start: int
    end: int
    # A place as its program writes it: `Sheet1!B2:D2`, `slide 3`; "" where the others say it.
    name: str = ""
    # Left, top, right, bottom on the page, in points from its top left corner.
    box: Box | None = None
    line: int | None = None  # of a text file, from 1


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A paragraph, an item of a list, a row of a table, or a line of code."""

    text: str  # on one line, never empty; of code with its indentation
    # The headings above it, outermost first, joined by " > "; "" above the first one.
    heading: str = ""
    # From 1 (of a presentation, its slide); None where the format has no pages.
    page: int | None = None
    is_row: bool = False  # it is a row of a table or a line of code, which no passage cuts
    # Of a row, the table's header, with which every passage of such rows begins; or "".
    header: str = ""
    # Where its stretches stand in the file, in order; () where the format has no places.
    places: tuple[Place, ...] = ()


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture of a document."""

    caption: str  # its caption, or else the text that stands for it; "" without either
    # heading, page: as a Paragraph's.
    heading: str = ""
    page: int | None = None
    picture: bytes | None = None  # its encoded bytes; None where it is a file of its own
    link: str = ""  # where that file lies, as the document writes it
    # Where it stands on its page, as a Place's; None where the format does not say.
    box: Box | None = None


@dataclasses.dataclass(frozen=True)
class Document:
    """A document's content in its order."""

    paragraphs: tuple[Paragraph, ...]
    figures: tuple[Figure, ...] = ()
    scanned_pages: tuple[int, ...] = ()  # pages that are pictures without text, from 1
    broken_figures: tuple[str, ...] = ()  # figures that are no pictures, and why
    title: str = ""  # as the file states it (front matter, properties); "" where it states none
    # That the file holds (`letters`), counted apart from the reading, by a walk over all text of
    # the file that has no limits.
    letters: int = 0
    # That were read; a heading, and the header of a table, count where they begin.
    letters_read: int = 0
    # Cause -> letters that are left out on purpose (running heads, deleted text, ...).
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Page -> width and height in points, as it is shown; {} of other formats than PDF.
    page_sizes: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Letters that the file holds and that were neither read nor left out on purpose."""
        return max(0, self.letters - self.letters_read - sum(self.left_out.values()))


def decoded(data: bytes) -> str:
    """The text of UTF-8 bytes; DocumentError for others."""
    try:
        return decode_text(data, "")
    except UserError as error:
        raise DocumentError(str(error).removeprefix(": ")) from error


class Heading(NamedTuple):
    """A heading of a section that is open; `is_left`: the container that holds it has ended."""

    level: float
    text: str
    is_left: bool = False


class Content:
    """Collects what a document says in its order, and the ledger of its letters.

    Attributes:
      title: that the file states.
      page: of what is added next; None where the format has no pages.
      held: letters that the file holds, which a reader counts apart; what is read again by intent
        counts again.
    """

    def __init__(self) -> None:
        self.title, self.page, self.held = "", None, 0
        self.left_out: Counter[str] = Counter()  # cause -> letters that are left out on purpose
        # scanned_pages, broken_figures: as a Document's.
        self.scanned_pages: list[int] = []
        self.broken_figures: list[str] = []
        # The same, joined.
        self.path = ""  # which the paragraphs below a heading share
        # The headings that stand above what is added next, outermost first.
        self.open: list[Heading] = []  # these headings
        self._read = 0
        self._bare: tuple[float, Paragraph] | None = None  # a heading with nothing below it so far
        self._paragraphs: list[Paragraph] = []
        self._figures: list[Figure] = []

    def set_title(self, title: str) -> None:
        """The title that the file states beside its text; a later one counts no more."""
        if not self.title:
            self.title = one_line(title)
            self.held += letters(self.title)

    def enter(
        self, level: float, text: str, places: Sequence[Place] = (), around: Sequence[Heading] = ()
    ) -> None:
        """Begins a section, and ends open sections of the same and of deeper levels (larger
        numbers).

        A heading that is too long, or too deep, for each passage to repeat it is a paragraph; so is
        one that ends with nothing below it.

        `around`: headings of containers around its own, which it does not end before they end.
        """
        if not text:
            return
        if self._bare is not None and level <= self._bare[0]:
            self._end_heading()
        above = [h for h in self.open if h.level < level or (h in around and not h.is_left)]
        if len(text) > _LONGEST_HEADING or len(above) >= _MOST_HEADINGS:
            self.add(text, places=places)
        else:
            self._read += letters(text)
            self._set_open(above)
            self._bare = level, Paragraph(text, self.path, self.page, places=tuple(places))
            self._set_open([*above, Heading(level, text)])

    def leave(self, before: list[Heading], is_box: bool = False) -> None:
        """Ends what stands in a container, with a heading or without.

        A heading in it ends where the container is a box apart (a note), as it is where its heading
        ranks with the one around it, or above. Any other heading goes on: a page may put each
        heading with its first lines into a container.

        `before`: `open` when the container began.
        """
        inside = [heading for heading in self.open if heading not in before]
        if not inside or self._bare is not None:
            return
        around = [heading for heading in self.open if heading in before]
        if is_box or (around and inside[0].level <= around[-1].level):
            self._set_open(around)
        else:
            self._set_open([*around, *(element._replace(is_left=True) for element in inside)])

    def _set_open(self, headings: list[Heading]) -> None:
        self.open, self.path = headings, BELOW.join(heading.text for heading in headings)

    def restart(self) -> None:
        """Ends all sections."""
        self._end_heading()
        self._set_open([])

    def add(
        self, text: str, *, is_row: bool = False, header: str = "", places: Sequence[Place] = ()
    ) -> None:
        """Adds a paragraph, on one line, unless it is empty."""
        if text:
            self._read += letters(text)
            self._bare = None
            row = Paragraph(text, self.path, self.page, is_row, header, tuple(places))
            self._paragraphs.append(row)

    def begin_table(self, header: str) -> None:
        """Counts the header of the rows that are added next."""
        self._read += letters(header)

    def add_figure(
        self,
        caption: str,
        picture: bytes | None = None,
        link: str = "",
        *,
        box: Box | None = None,
        is_said: bool = False,
    ) -> int:
        """Adds a picture and returns its number; `is_said`: its caption is a paragraph, too."""
        self._read += 0 if is_said else letters(caption)
        self._bare = None
        self._figures.append(Figure(caption, self.path, self.page, picture, link, box))
        return len(self._figures) - 1

    def caption(self, number: int, text: str) -> None:
        """Gives a picture a paragraph as its caption, in place of its alternative text."""
        before = self._figures[number]
        self._figures[number] = dataclasses.replace(
            before, caption=text, heading=self.path, page=self.page
        )
        self._read -= letters(before.caption)
        self.left_out["alternative texts"] += letters(before.caption)

    def document(self) -> Document:
        """All that was added."""
        self._end_heading()
        return Document(
            tuple(self._paragraphs),
            tuple(self._figures),
            tuple(self.scanned_pages),
            tuple(self.broken_figures),
            title=self.title,
            letters=self.held,
            letters_read=self._read + letters(self.title),
            left_out={cause: count for cause, count in self.left_out.items() if count},
        )

    def _end_heading(self) -> None:
        if self._bare is not None:
            self._paragraphs.append(self._bare[1])
            self._bare = None


def letters(text: str) -> int:
    """Counts how many letters and digits a text has: what the ledger of a file counts."""
    return sum(map(str.isalnum, text))


def one_line(text: str) -> str:
    """Text without control characters, composed (NFC), its white space single spaces."""
    return unicodedata.normalize("NFC", " ".join(_NO_TEXT.sub("", text).split()))


def around(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds all of these."""
    left, top, right, bottom = zip(*boxes, strict=True)
    return min(left), min(top), max(right), max(bottom)


def is_caption(text: str) -> bool:
    """Tells whether a paragraph begins as captions do: `Figure 3`, `Fig. 3`."""
    return bool(_CAPTION.match(text))


# Where a passage, or a quote from it, stands in its file: rectangles, lines, cells.


CODE = (
    ".py", ".js", ".ts", ".java", ".c", ".h", ".cpp", ".cs", ".go", ".rs", ".rb", ".php", ".sh",
    ".sql", ".r", ".jl", ".swift", ".kt", ".css", ".yaml", ".yml", ".toml", ".ini", ".cfg",
)  # fmt: skip
# Formats that people read by lines.
LINED = (".txt", ".md", ".rst", ".tex", ".json", ".jsonl", *CODE)
_WORD = re.compile(r"\w+")
_LEAST_QUOTE = 5  # words in a row that a longer answer shares with a passage, to quote it
_FAR, _NEAR = 20_000, 400  # letters of a file in which the next paragraph, or word, is looked for


def place_of(extra: Mapping[str, Any], start: int = 0, end: int | None = None) -> dict[str, Any]:
    """Where a source's text, or a stretch of it, stands in the source's file.

    Args:
      extra: of the source.
      start, end: the stretch, in characters of the source's text; None: to its end.

    Returns:
      `boxes`: one [left, top, right, bottom] a line of text, in points from the top left corner of
      the page as it is shown; `lines`: the first and the last line of the file, from 1, or None;
      `cells`: places as their program writes them (`Fees!A2:C2`, `slide 3`).
    """
    boxes: list[list[float]] = []
    lines: list[int] = []
    cells: list[str] = []
    for place in extra.get("places", ()):
        first, last = place["start"], place["end"]
        begin, stop = max(first, start), last if end is None else min(last, end)
        if begin >= stop and first < last:
            continue
        if "box" in place:
            boxes.append(_part(place["box"], first, last, begin, stop))
        elif "line" in place:
            lines.append(place["line"])
        else:
            cells.append(place["name"])
    return {
        "boxes": boxes,
        "lines": [min(lines), max(lines)] if lines else None,
        "cells": list(dict.fromkeys(cells)),
    }


def _part(box: Sequence[float], first: int, last: int, begin: int, stop: int) -> list[float]:
    """The part of a line's box that some of its characters take, were they equally wide."""
    left, top, right, bottom = box
    width = (right - left) / max(last - first, 1)
    ends = (right if stop == last else left + width * (stop - first)), bottom
    return [round(edge, 2) for edge in (left + width * (begin - first), top, *ends)]


def quote_of(text: str, answer: str) -> tuple[int, int] | None:
    """The stretch of a passage that an answer quotes, in characters; None where it quotes none.

    It is the whole answer where that stands in the passage word by word, or else the longest run
    of at least five words that both have. Case and punctuation do not count.
    """
    words = list(_WORD.finditer(text))
    ours = [word[0].casefold() for word in words]
    theirs = [word.casefold() for word in _WORD.findall(answer)]
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    run = matcher.find_longest_match()
    if not run.size or run.size < min(len(theirs), _LEAST_QUOTE):
        return None
    return words[run.a].start(), words[run.a + run.size - 1].end()


def cited_place(text: str, extra: Mapping[str, Any], answer: str = "") -> dict[str, Any]:
    """The place of a source, and its `quote`: text and place of what an answer quotes, or None."""
    stretch = quote_of(text, answer) if answer else None
    quote = (
        None if stretch is None else {"text": text[slice(*stretch)], **place_of(extra, *stretch)}
    )
    return {**place_of(extra), "quote": quote}


def shown_place(extra: Mapping[str, Any]) -> str:
    """A source's file, page and lines or cells, for people; "" of a source without a file."""
    if not (file := extra.get("file")):
        return ""
    place = place_of(extra)
    parts = [str(file)]
    if extra.get("page") is not None:
        parts.append(f"page {extra['page']}")
    if lines := place["lines"]:
        parts.append(f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]}-{lines[1]}")
    if cells := [cell for cell in place["cells"] if not cell.startswith("slide ")]:
        parts.append(cells[0] if len(cells) == 1 else f"{cells[0]} to {cells[-1]}")
    return ", ".join(parts)


def with_lines(paragraphs: Sequence[Paragraph], text: str) -> Iterator[Paragraph]:
    """Paragraphs with the lines of the text file that they were read from.

    Markup says the same letters in the same order, mostly: a paragraph is found by its letters
    alone, or else word by word.
    """
    lines = unicodedata.normalize("NFC", text).split("\n")
    begins = list(itertools.accumulate(map(_count, lines), initial=0))
    letters, cursor = "".join(filter(str.isalnum, "".join(lines))), 0
    for paragraph in paragraphs:
        words = [(word.span(), _squashed(word[0])) for word in _WORD.finditer(paragraph.text)]
        whole = "".join(squashed for _, squashed in words)
        at = letters.find(whole, cursor, cursor + len(whole) + _FAR)
        is_whole, here = at >= 0, max(at, cursor)
        places: list[Place] = []
        for (start, end), word in words:
            if not is_whole:
                at = letters.find(word, here, here + len(word) + _NEAR)
            if at < 0 or not word:
                continue
            line = bisect.bisect_right(begins, at)
            at = here = at + len(word)
            if places and places[-1].line == line:
                places[-1] = Place(places[-1].start, end, line=line)
            else:
                places.append(Place(start, end, line=line))
        cursor = here
        yield (
            paragraph if paragraph.places else dataclasses.replace(paragraph, places=tuple(places))
        )


def _squashed(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def _count(line: str) -> int:
    return sum(map(str.isalnum, line))


# The readers of documents, by the ending of the file.


VERSION = 8  # of what the readers make of a file; raised when that changes
PAGES_VERSION = 1  # of what is made of a page as a picture; raised when that changes
_SECONDS, _MOST_SECONDS = 3, 1800  # of processor time for a file of no bytes, and for any file
_RATE = 200_000  # bytes that are worth a second, of formats that say nothing else
_MEMORY = 768 << 20  # bytes of memory for a file of no bytes
_OUTPUT, _OUTPUT_PER_BYTE = 128 << 20, 8  # bytes of text and figures
# A page takes some 3 seconds, and its networks map more than they hold (850 MiB).
_FIRST_SCANS = 60  # seconds of them that any file may have
_SECONDS_OF_SCAN, _RATE_OF_SCANS, _MEMORY_OF_SCANS = 15, 2_000, 2 << 30


class Reader(NamedTuple):
    """How documents of one ending are read."""

    read: Callable[[bytes], Document]  # the file's bytes -> the document
    # module, package: the library that it needs, and its name on PyPI; "": none.
    module: str = ""
    package: str = ""
    # Bytes of a file that are worth a second of processor time: fewer than are read.
    rate: int = _RATE


def _by(module: str, name: str, **about: str) -> Callable[[bytes], Document]:
    """A reader by its module, which is imported where documents are parsed and nowhere else."""

    def read(data: bytes) -> Document:
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(data, **about)

    return read


def _office(module: str, **about: str) -> Reader:
    return Reader(_by(module, f"read_{module}", **about), "lxml", "lxml", 50_000)


_HTML = Reader(_by("html", "read_html"), "turbohtml", "turbohtml")
READERS: Mapping[str, Reader] = {
    ".txt": Reader(_by("plain", "read_plain")),
    ".md": Reader(_by("plain", "read_markdown"), "pyromark", "pyromark"),
    ".html": _HTML,
    ".htm": _HTML,
    ".pdf": Reader(_by("pdf", "read_pdf"), "pypdfium2", "pypdfium2", 20_000),
    ".docx": _office("docx"),
    ".pptx": _office("pptx"),
    ".xlsx": _office("xlsx"),
    ".csv": Reader(_by("plain", "read_delimited")),
    ".tsv": Reader(_by("plain", "read_delimited", delimiter="\t")),
    ".odt": _office("odf", ending=".odt"),
    ".ods": _office("odf", ending=".ods"),
    ".odp": _office("odf", ending=".odp"),
    ".rst": Reader(_by("plain", "read_rst"), "docutils", "docutils", 50_000),
    ".tex": Reader(_by("tex", "read_tex"), "pylatexenc", "pylatexenc", 20_000),
    ".json": Reader(_by("plain", "read_json")),
    ".jsonl": Reader(_by("plain", "read_json_lines")),
    ".ipynb": Reader(_by("plain", "read_notebook"), "nbformat", "nbformat"),
    ".epub": Reader(_by("html", "read_epub"), "turbohtml", "turbohtml", rate=50_000),
    ".eml": Reader(_by("plain", "read_eml"), "turbohtml", "turbohtml"),
    ".msg": Reader(_by("plain", "read_msg"), "oxmsg", "python-oxmsg"),
    **dict.fromkeys(CODE, Reader(_by("plain", "read_code"))),
}


def budget_of(ending: str, size: int) -> Budget:
    """Returns what a file of so many bytes may take in the box, by what it is worth."""
    rate = READERS[ending].rate if ending in READERS else _RATE
    seconds = min(_SECONDS + math.ceil(size / rate), _MOST_SECONDS)
    return Budget(seconds, _MEMORY, _OUTPUT + _OUTPUT_PER_BYTE * size)


def budget_of_scans(pages: int, size: int) -> Budget:
    """The budget for reading a file's pages as pictures, beside that of the file itself."""
    seconds = math.ceil(min(_SECONDS_OF_SCAN * pages, _FIRST_SCANS + size / _RATE_OF_SCANS))
    return Budget(min(_SECONDS + seconds, _MOST_SECONDS), _MEMORY_OF_SCANS, _OUTPUT)


def check_libraries(names: Iterable[str]) -> None:
    """UserError with the remedy where documents of these names need a library that is missing."""
    for ending in sorted({ending_of(name) for name in names} & set(READERS)):
        reader = READERS[ending]
        if reader.module and importlib.util.find_spec(reader.module) is None:
            raise UserError(
                f"{ending}: needs the package {reader.package}; install it with "
                "`pip install 'mmqa-jax[documents]'`."
            )


def ending_of(name: str) -> str:
    """The ending by which a file is read: `.pdf` of `Manual.PDF`."""
    return posixpath.splitext(name)[1].lower()
