"""What a document says, whatever its format: paragraphs under headings, and figures."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

from mmqa_jax.core.errors import UserError

# No text, though files hold them: control characters, halves of a character (surrogates), soft
# hyphens, and what is no character at all.
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\xad\ud800-\udfff\ufffe\uffff]")
_CAPTION = re.compile(r"(?:fig(?:ure|\.)?|plate|chart|diagram|scheme|photo)\s*\d", re.IGNORECASE)


class DocumentError(UserError):
    """A document that cannot be read: the message says why, without the file's name."""


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A paragraph, an item of a list, or a row of a table.

    Attributes:
      text: on one line, never empty.
      heading: the headings above it, outermost first, joined by " > "; "" above the first one.
      page: from 1; None where the format has no pages.
    """

    text: str
    heading: str = ""
    page: int | None = None


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
      scanned_pages: pages that are pictures without text, from 1.
      broken_figures: figures that are no pictures, and why.
    """

    paragraphs: tuple[Paragraph, ...]
    figures: tuple[Figure, ...] = ()
    scanned_pages: tuple[int, ...] = ()
    broken_figures: tuple[str, ...] = ()


class Outline:
    """The headings that stand above a place of a document."""

    def __init__(self) -> None:
        self._open: list[tuple[float, str]] = []

    def enter(self, level: float, text: str) -> None:
        """Begins a section; it ends those of the same and of deeper levels (larger numbers)."""
        self._open = [heading for heading in self._open if heading[0] < level]
        self._open.append((level, text))

    @property
    def path(self) -> str:
        """The headings, outermost first."""
        return " > ".join(text for _, text in self._open)


def one_line(text: str) -> str:
    """Text without control characters, composed (NFC), its white space single spaces."""
    return unicodedata.normalize("NFC", " ".join(_NO_TEXT.sub("", text).split()))


def is_caption(text: str) -> bool:
    """Whether a paragraph begins as captions do: `Figure 3`, `Fig. 3`."""
    return bool(_CAPTION.match(text))
