"""What a document says, whatever its format: paragraphs under headings, and figures."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Mapping

from mmqa_jax.core.errors import UserError

# No text, though files hold them: control characters, halves of a character (surrogates), soft
# hyphens, and what is no character at all.
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\xad\ud800-\udfff\ufffe\uffff]")
BELOW = " > "  # between a heading and the one below it
_CAPTION = re.compile(r"(?:fig(?:ure|\.)?|plate|chart|diagram|scheme|photo)\s*\d", re.IGNORECASE)


class DocumentError(UserError):
    """A document that cannot be read: the message says why, without the file's name."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a stretch of a paragraph stands in its file.

    Attributes:
      start, end: the stretch, in characters of the paragraph's text.
      name: a place as its program writes it: `Sheet1!B2:D2`, `slide 3`; "" where `box` says it.
      box: left, top, right, bottom on the page, in points from its top left corner.
    """

    start: int
    end: int
    name: str = ""
    box: tuple[float, float, float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A paragraph, an item of a list, or a row of a table.

    Attributes:
      text: on one line, never empty.
      heading: the headings above it, outermost first, joined by " > "; "" above the first one.
      page: from 1 (of a presentation, its slide); None where the format has no pages.
      is_row: it is a row of a table, which no passage cuts.
      header: of a row, the table's header, with which every passage of such rows begins; or "".
      places: where its stretches stand in the file, in order; () where the format has no places.
    """

    text: str
    heading: str = ""
    page: int | None = None
    is_row: bool = False
    header: str = ""
    places: tuple[Place, ...] = ()


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture of a document.

    Attributes:
      caption: its caption, or else the text that stands for it; "" without either.
      heading, page: as a Paragraph's.
      picture: its encoded bytes; None where it is a file of its own.
      link: where that file lies, as the document writes it.
    """

    caption: str
    heading: str = ""
    page: int | None = None
    picture: bytes | None = None
    link: str = ""


@dataclasses.dataclass(frozen=True)
class Document:
    """A document's content in its order.

    Attributes:
      title: as the file states it (front matter, properties); "" where it states none.
      scanned_pages: pages that are pictures without text, from 1.
      broken_figures: figures that are no pictures, and why.
      letters: that the file holds (`letters`), counted apart from the reading, by a walk over all
        text of the file that has no limits.
      left_out: cause -> letters that are left out on purpose (running heads, deleted text, ...).
    """

    paragraphs: tuple[Paragraph, ...]
    figures: tuple[Figure, ...] = ()
    scanned_pages: tuple[int, ...] = ()
    broken_figures: tuple[str, ...] = ()
    title: str = ""
    letters: int = 0
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def letters_read(self) -> int:
        """Letters of all that was read; headings count once."""
        headings = dict.fromkeys(p.heading for p in (*self.paragraphs, *self.figures))
        parts = dict.fromkeys(part for path in headings for part in path.split(BELOW))
        read = [self.title, *parts, *(p.text for p in self.paragraphs)]
        read += dict.fromkeys(p.header for p in self.paragraphs)
        read += [figure.caption for figure in self.figures]
        return sum(map(letters, read))

    @property
    def missing(self) -> int:
        """Letters that the file holds and that were neither read nor left out on purpose."""
        return max(0, self.letters - self.letters_read - sum(self.left_out.values()))


class Outline:
    """The headings that stand above a place of a document.

    Attributes:
      path: the headings, outermost first; paragraphs below the same heading share it.
    """

    def __init__(self) -> None:
        self._open: list[tuple[float, str]] = []
        self.path = ""

    def enter(self, level: float, text: str) -> None:
        """Begins a section; it ends those of the same and of deeper levels (larger numbers)."""
        self._open = [heading for heading in self._open if heading[0] < level]
        self._open.append((level, text))
        self.path = BELOW.join(heading for _, heading in self._open)


def letters(text: str) -> int:
    """How many letters and digits a text has: what the ledger of a file counts."""
    return sum(map(str.isalnum, text))


def one_line(text: str) -> str:
    """Text without control characters, composed (NFC), its white space single spaces."""
    return unicodedata.normalize("NFC", " ".join(_NO_TEXT.sub("", text).split()))


def is_caption(text: str) -> bool:
    """Whether a paragraph begins as captions do: `Figure 3`, `Fig. 3`."""
    return bool(_CAPTION.match(text))
