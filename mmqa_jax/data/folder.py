"""A folder of documents and pictures as a corpus: chunks of text, figures and pictures as sources.

The pages of a PDF may be sources themselves, as pictures, in place of its text or beside it.

What was read of a file is kept under the checksum of its bytes, so that a later call reads only the
files that have changed:

    KEPT/files.json    name -> size, time and checksum: an unchanged file is not even opened
    KEPT/documents/    what was read of a file, and its figures, by checksum (core.store)

One bad file does not end the reading: it is named in the report with the reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.store import Store
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.documents.chunks import ChunkOptions, chunks
from mmqa_jax.data.documents.document import DocumentError, Paragraph
from mmqa_jax.data.documents.pages import VERSION as PAGES_VERSION
from mmqa_jax.data.documents.pages import page_pictures
from mmqa_jax.data.documents.read import READERS, VERSION, check_libraries, ending_of
from mmqa_jax.data.folder_files import FoundFile, Listing, list_folder, read_file
from mmqa_jax.data.images import verify
from mmqa_jax.data.picture_bounds import PictureError
from mmqa_jax.data.schema import Source

PICTURES = (".jpg", ".jpeg", ".png", ".webp")
WHOLE_PAGE = "whole_page"  # in `Source.extra` of a page that is a picture
Pages = Literal["text", "pictures", "both"]
_PDF = ".pdf"
_FILES, _DOCUMENTS = "files.json", "documents"
_SPARE = 100  # results that may be kept beyond twice those in use


@dataclasses.dataclass(frozen=True)
class FolderOptions:
    """How documents become sources.

    Attributes:
      chunk: how long a source's text is.
      least_pixels: the shorter side of a figure embedded in a PDF; smaller ones are ornaments.
      pages: what is taken of a PDF: its `text` and figures, its pages as `pictures`, or `both`.
    """

    chunk: ChunkOptions = dataclasses.field(default_factory=ChunkOptions)
    least_pixels: int = at_least(1, 64)
    pages: Pages = "text"

    def __post_init__(self):
        if self.pages not in get_args(Pages):
            raise UserError(
                f"--pages={self.pages}: one of {', '.join(get_args(Pages))} was expected; correct "
                "it."
            )


@dataclasses.dataclass
class FolderReport:
    """What became of a folder's files.

    Attributes:
      documents, pictures: files that are sources now.
      pages: of PDFs, that are sources as pictures.
      opened: files that were read in this call; the others are as they were.
      bad: file -> why it is left out.
      same_content: file -> the file of the same text or picture whose sources are kept.
      scanned_pages: file -> its pages that are pictures without text, from 1.
      broken_figures: file -> its figures that are no pictures.
      left_out: ending -> files of no known ending.
      hidden: files and folders whose names begin with `.` or `~$`.
    """

    documents: int = 0
    pictures: int = 0
    pages: int = 0
    opened: int = 0
    bad: dict[str, str] = dataclasses.field(default_factory=dict)
    same_content: dict[str, str] = dataclasses.field(default_factory=dict)
    scanned_pages: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    broken_figures: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    hidden: int = 0


@dataclasses.dataclass(frozen=True)
class FolderContent:
    """A folder's sources.

    Attributes:
      sources: their ids are FILE#3 (a chunk), FILE#figure2, FILE#page4 or FILE (a picture): the
        same in every run. `extra` holds `file`, `page` (of a PDF, from 1), `heading`, WHOLE_PAGE of
        a page that is a picture and, where other files have the same content, `same_as`.
      read_picture: encoded bytes of a `Source.image`.
      report: of the files.
      digest: of everything above.
    """

    sources: list[Source]
    read_picture: Callable[[str], bytes]
    report: FolderReport
    digest: str


def read_folder(
    folder: Path,
    kept: Path,
    options: FolderOptions,
    *,
    leave_out: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FolderContent:
    """Reads what has changed in a folder since the last call with the same `kept`.

    Args:
      kept: the folder of what was read of the files.
      leave_out: a folder in `folder` that is none of its content.
      progress: called with (files done, files).

    Raises:
      UserError: no documents and no pictures, none that can be read, or a library is missing.
    """
    listing = list_folder(folder, (*READERS, *PICTURES), leave_out)
    if not listing.files and not listing.bad:
        raise UserError(f"{folder}: {_nothing(listing)}.")
    check_libraries(file.name for file in listing.files)
    reading = _Reading(folder, kept, options, listing)
    for done, file in enumerate(listing.files):
        progress(done, len(listing.files))
        reading.add(file)
    progress(len(listing.files), len(listing.files))
    return reading.finish()


def _nothing(listing: Listing) -> str:
    there = ", ".join(f"{n} {ending or 'without an ending'}" for ending, n in
                      listing.other_endings.most_common(5))  # fmt: skip
    known = " ".join((*READERS, *PICTURES))
    return f"no documents and no pictures{f' (but {there})' if there else ''}; put {known} there"


class _Reading:
    """One call of `read_folder`."""

    def __init__(self, folder: Path, kept: Path, options: FolderOptions, listing: Listing):
        self._folder, self._kept, self._options = folder, kept, options
        self._report = FolderReport(
            bad=dict(listing.bad), left_out=dict(listing.other_endings), hidden=listing.hidden
        )
        what = {"documents": VERSION, "least_pixels": options.least_pixels}
        self._store = Store(kept / _DOCUMENTS, what, damage="drop", sync=False)
        self._known, self._in_use = _known_files(kept / _FILES)
        if (
            len(self._store) > 2 * self._in_use + _SPARE
        ):  # mostly of files that are gone or were changed
            self._store.remove()
        self._is_picture = {file.name: ending_of(file.name) in PICTURES for file in listing.files}
        self._files: dict[str, list[Any]] = {}  # name -> size, time, checksum
        self._documents: dict[str, Mapping[str, Any]] = {}  # name -> what is kept of it
        self._pages: dict[str, Sequence[list[Any]]] = {}  # PDF -> its pages, figures of their own
        self._pictures: dict[str, str] = {}  # name -> checksum
        self._shown: list[tuple[str, list[Any]]] = []  # document, its figure that is a file
        self._first: dict[str, str] = {}  # digest of a content -> the first file that has it
        self._used: set[str] = set()  # keys of the store
        self._opened: set[str] = set()  # files

    def add(self, file: FoundFile) -> None:
        """Reads a file, unless what is kept of it is of the same bytes."""
        try:
            data, checksum = self._identified(file)
            is_picture = self._is_picture[file.name]
            key, pages = f"{checksum}{ending_of(file.name)}", None
            kept = self._read(file.name, data, key, self._content)
            if self._options.pages != "text" and ending_of(file.name) == _PDF:
                drawn = f"{key} pages {PAGES_VERSION}"
                pages = kept if kept.get("bad") else self._read(file.name, data, drawn, _drawn)
                kept = {**kept, **_with_pages(kept, pages)}
            has_content = is_picture or (pages is not None and bool(pages.get("figures")))
            if bad := kept.get("bad") or ("" if has_content else _without_content(kept)):
                raise DocumentError(bad)
        except DocumentError as error:
            self._report.bad[file.name] = str(error)
            return
        if is_picture:
            content = checksum
        else:
            self._shown += [(file.name, figure) for figure in kept["figures"] if figure[4]]
            content = _digest(
                [p[0] for p in kept["paragraphs"]], _figure_keys(kept), _figure_keys(pages or {})
            )
        first = self._first.setdefault(content, file.name)
        if first != file.name:
            self._report.same_content[file.name] = first
        elif is_picture:
            self._pictures[file.name] = checksum
        else:
            self._documents[file.name] = kept
            if pages is not None:
                self._pages[file.name] = pages["figures"]

    def finish(self) -> FolderContent:
        """The sources of all files, and the report."""
        report = self._report
        report.documents, report.pictures = len(self._documents), len(self._pictures)
        report.pages, report.opened = sum(map(len, self._pages.values())), len(self._opened)
        if not (self._documents or self._pictures):
            self._store.remove()  # as if nothing had been tried
            raise UserError(f"{self._folder}: {self._all_bad()}.")
        self._store.close()
        if (self._files, len(self._used)) != (self._known, self._in_use):
            write_json(self._kept / _FILES, {"files": self._files, "in_use": len(self._used)})
        for name, kept in self._documents.items():
            if kept["scanned_pages"]:
                report.scanned_pages[name] = kept["scanned_pages"]
            if kept["broken_figures"]:
                report.broken_figures[name] = kept["broken_figures"]
        figures: dict[str, str] = {}  # name of a figure -> key of its picture
        sources = [*self._document_sources(figures), *self._picture_sources()]
        rows = [dataclasses.asdict(source) for source in sources]
        facts = dataclasses.asdict(dataclasses.replace(report, opened=0))
        digest = _digest(rows, figures, self._pictures, facts)

        def read_picture(name: str) -> bytes:
            if name in figures:
                return self._store[figures[name]].tobytes()
            return read_file(self._folder, name)

        return FolderContent(sources, read_picture, report, digest)

    def _all_bad(self) -> str:
        first, reason = next(iter(self._report.bad.items()))
        if (count := len(self._report.bad)) == 1:
            return f"its only file cannot be read: {first}: {reason}"
        return f"none of its {count} files can be read, the first one, {first}: {reason}"

    def _identified(self, file: FoundFile) -> tuple[bytes | None, str]:
        """A file's bytes if they had to be read, and their checksum."""
        known = self._known.get(file.name)
        about = [file.size, file.modified]
        data = None
        if known is None or known[:2] != about:
            data = read_file(self._folder, file.name)
        checksum = known[2] if data is None else hashlib.sha256(data).hexdigest()
        self._files[file.name] = [*about, checksum]
        return data, checksum

    def _content(self, name: str, data: bytes) -> Kept:
        return _content(name, data, self._options.least_pixels)

    def _read(
        self, name: str, data: bytes | None, key: str, make: Callable[[str, bytes], Kept]
    ) -> Mapping[str, Any]:
        """What is kept of a file under a key, which is made now if nothing is."""
        kept = self._store.get(key)
        if kept is None or any(k not in self._store for k in _figure_keys(kept)):
            self._opened.add(name)
            data = read_file(self._folder, name) if data is None else data
            kept, pictures = make(name, data)
            self._store.add({**pictures, key: kept})
        self._used.update((key, *_figure_keys(kept)))
        return kept

    def _document_sources(self, figures: dict[str, str]) -> Iterator[Source]:
        """Chunks, figures, pages; a picture's file that a document shows is a source of its own."""
        for name, kept in self._documents.items():
            paragraphs = [Paragraph(*fields) for fields in kept["paragraphs"]]
            if name not in self._pages or self._options.pages == "both":
                yield from self._parts(name, paragraphs, kept["figures"], figures)
            headings = {one.page: one.heading for one in reversed(paragraphs)}  # the first ones
            for _, _, page, key, _ in self._pages.get(name, ()):
                figures[f"{name}#page{page}"] = key
                heading = headings.get(page, "")
                extra = {**self._extra(name, page, heading), WHOLE_PAGE: True}
                yield Source(f"{name}#page{page}", "image", "", _title(name, heading),
                             f"{name}#page{page}", extra)  # fmt: skip

    def _parts(
        self,
        name: str,
        paragraphs: Sequence[Paragraph],
        found: Sequence[list[Any]],
        figures: dict[str, str],
    ) -> Iterator[Source]:
        for number, chunk in enumerate(
            chunks(paragraphs, self._options.chunk, _title(name, "")), start=1
        ):
            extra = self._extra(name, chunk.page, chunk.heading)
            yield Source(f"{name}#{number}", "text", chunk.text, _title(name, chunk.heading),
                         extra=extra)  # fmt: skip
        embedded = [figure for figure in found if figure[3]]
        for number, (caption, heading, page, key, _) in enumerate(embedded, start=1):
            figure = f"{name}#figure{number}"
            figures[figure] = key
            extra = self._extra(name, page, heading)
            yield Source(figure, "image", caption, _title(name, heading), figure, extra)

    def _picture_sources(self) -> Iterator[Source]:
        """Pictures that are files, with the caption of the first document that shows them."""
        captions: dict[str, tuple[str, str]] = {}
        for name, (caption, heading, _, _, link) in self._shown:
            if caption:
                captions.setdefault(_linked(name, link), (caption, _title(name, heading)))
        for name in self._pictures:
            folders = _words(str(PurePosixPath(name).parent)) if "/" in name else ""
            caption, title = captions.get(name, (_words(PurePosixPath(name).stem), folders))
            yield Source(name, "image", caption, title, name, self._extra(name, None, ""))

    def _extra(self, name: str, page: int | None, heading: str) -> dict[str, Any]:
        same = [other for other, first in self._report.same_content.items() if first == name]
        extra = {"file": name, "page": page, "heading": heading}
        return {**extra, "same_as": same} if same else extra


# What is kept of a file, as JSON, and its figures' pictures by their keys.
Kept = tuple[dict[str, Any], dict[str, np.ndarray]]


def _content(name: str, data: bytes, least_pixels: int) -> Kept:
    """What is kept of a file's text and figures."""
    ending = ending_of(name)
    pictures: dict[str, np.ndarray] = {}
    try:
        if ending in PICTURES:
            verify(data, name)
            return {}, {}
        document = READERS[ending].read(data, least_pixels)
    except (DocumentError, PictureError) as error:
        return {"bad": str(error).removeprefix(f"{name}: ").rstrip(".")}, {}
    figures, broken = [], list(document.broken_figures)
    for number, figure in enumerate(document.figures, start=1):
        key = ""
        if figure.picture is not None:
            try:
                verify(figure.picture, f"figure {number}")
            except PictureError as error:
                broken.append(str(error).rstrip("."))
                continue
            key = _add(pictures, figure.picture)
        figures.append([figure.caption, figure.heading, figure.page, key, figure.link])
    kept = {
        "paragraphs": [[p.text, p.heading, p.page] for p in document.paragraphs],
        "figures": figures,
        "scanned_pages": list(document.scanned_pages),
        "broken_figures": broken,
    }
    return kept, pictures


def _drawn(name: str, data: bytes) -> Kept:
    """What is kept of a PDF's pages, as of figures without a caption."""
    pictures: dict[str, np.ndarray] = {}
    pages, broken = [], []
    try:
        for page in page_pictures(data):
            if page.picture is None:
                broken.append(page.problem)
            else:
                pages.append(["", "", page.number, _add(pictures, page.picture), ""])
    except DocumentError as error:
        return {"bad": str(error).rstrip(".")}, {}
    return {"figures": pages, "broken_figures": broken}, pictures


def _with_pages(kept: Mapping[str, Any], pages: Mapping[str, Any]) -> dict[str, Any]:
    """What changes of a PDF whose pages are pictures: a scanned one is read as any other."""
    if bad := pages.get("bad"):
        return {"bad": bad}
    return {
        "scanned_pages": [],
        "broken_figures": [*kept["broken_figures"], *pages["broken_figures"]],
    }


def _add(pictures: dict[str, np.ndarray], picture: bytes) -> str:
    """Adds an encoded picture under its key."""
    key = f"picture {hashlib.sha256(picture).hexdigest()}"
    pictures[key] = np.frombuffer(picture, np.uint8)
    return key


def _without_content(kept: Mapping[str, Any]) -> str:
    """Why nothing of a document can be a source; "" where something can."""
    if kept["paragraphs"] or any(figure[3] for figure in kept["figures"]):
        return ""
    if count := len(kept["scanned_pages"]):
        pages = "1 scanned page" if count == 1 else f"{count} scanned pages"
        return f"no text: {pages}; recognize the text first, as with ocrmypdf"
    return "no text"


def _figure_keys(kept: Mapping[str, Any]) -> list[str]:
    return [figure[3] for figure in kept.get("figures", ()) if figure[3]]


def _known_files(path: Path) -> tuple[dict[str, list[Any]], int]:
    """Files by name as an earlier call found them, and how many results it used; or nothing."""
    try:
        found = read_json(path)
        files = {name: [int(a), int(b), str(c)] for name, (a, b, c) in found["files"].items()}
        return files, int(found["in_use"])
    except (UserError, KeyError, TypeError, ValueError, AttributeError):  # missing, or damaged
        return {}, 0


def _linked(document: str, link: str) -> str:
    """The file that a document's link names, relative to the folder; "" for an address."""
    if not link or urllib.parse.urlsplit(link).scheme:
        return ""
    path = urllib.parse.unquote(link.partition("#")[0].partition("?")[0])
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), path))


def _title(name: str, heading: str) -> str:
    return heading or _words(PurePosixPath(name).stem)


def _words(name: str) -> str:
    """A file's name as words: `red-panda_2` is `red panda 2`."""
    return " ".join(re.split(r"[\s_\-./]+", name)).strip()


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
