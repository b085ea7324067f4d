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
import itertools
import json
import os
import posixpath
import queue
import re
import stat
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np

from mmqa_jax.core.box import Box, Budget, Failed, OverBudget
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.host import threads
from mmqa_jax.core.store import Store
from mmqa_jax.core.typed import at_least
from mmqa_jax.data import boxed_documents
from mmqa_jax.data.documents import ocr
from mmqa_jax.data.documents.chunks import ChunkOptions, chunks
from mmqa_jax.data.documents.document import (
    PAGES_VERSION,
    READERS,
    VERSION,
    DocumentError,
    Paragraph,
    Place,
    budget_of,
    budget_of_scans,
    check_libraries,
    ending_of,
    letters,
    one_line,
)
from mmqa_jax.data.documents.ocr import PageReader
from mmqa_jax.data.pictures.bounds import MOST_BYTES
from mmqa_jax.data.schema import Source

PICTURES = (".jpg", ".jpeg", ".png", ".webp")
WHOLE_PAGE = "whole_page"  # in `Source.extra` of a page that is a picture
Pages = Literal["text", "pictures", "both"]
_PDF = ".pdf"
_FILES, _DOCUMENTS = "files.json", "documents"
_MOST_WORKERS, _AHEAD = 8, 4  # boxes; files for each of them that are read or wait for it
_AHEAD_BYTES = 2**27  # of such files together
_BATCH = 32  # scanned pages that a model reads at once
_SPARE = 100  # results that may be kept beyond twice those in use


@dataclasses.dataclass(frozen=True)
class FolderOptions:
    """How documents become sources."""

    # How long a source's text is.
    chunk: ChunkOptions = dataclasses.field(default_factory=ChunkOptions)
    # The shorter side of a figure embedded in a PDF; smaller ones are ornaments.
    least_pixels: int = at_least(1, 64)
    # What is taken of a PDF: its `text` and figures, its pages as `pictures`, or `both`.
    pages: Pages = "text"
    # What reads the pages of a PDF that are pictures; None: RapidOCR, where it is installed.
    ocr: PageReader | None = None

    @property
    def flag(self) -> str:
        """The flag that says how PDFs are read; "": as by default."""
        if self.pages != "text":
            return f"--pages={self.pages}"
        return "" if self.ocr is None else f"--ocr={self.ocr.name}"

    def __post_init__(self):
        if self.pages not in get_args(Pages):
            raise UserError(
                f"--pages={self.pages}: one of {', '.join(get_args(Pages))} was expected; correct "
                "it."
            )


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The letters of a document (documents/document.py)."""

    read: int  # that were read
    held: int  # that the file holds; 0 of a format whose reader does not count them
    left_out: dict[str, int]  # cause -> letters that are left out on purpose
    missing: int  # letters of `held` that were neither read nor left out on purpose


@dataclasses.dataclass
class FolderReport:
    """The outcome of reading a folder's files."""

    # documents, pictures: files that are sources now.
    documents: int = 0
    pictures: int = 0
    pages: int = 0  # of PDFs, that are sources as pictures
    opened: int = 0  # files that were read in this call; the others are as they were
    bad: dict[str, str] = dataclasses.field(default_factory=dict)  # file -> why it is left out
    # File -> the file of the same text or picture whose sources are kept.
    same_content: dict[str, str] = dataclasses.field(default_factory=dict)
    # File -> its pages that are pictures without text, from 1.
    scanned_pages: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    # File -> its figures that are no pictures.
    broken_figures: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    # Document -> the letters that were read of it.
    ledger: dict[str, Ledger] = dataclasses.field(default_factory=dict)
    # Ending -> files of no known ending.
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    hidden: int = 0  # files and folders whose names begin with `.` or `~$`


@dataclasses.dataclass(frozen=True)
class FolderContent:
    """A folder's sources."""

    # Their ids are FILE#3 (a chunk), FILE#figure2, FILE#page4 or FILE (a picture): the same in
    # every run. `extra` holds `file`, `page` (from 1; None without pages), `heading`, WHOLE_PAGE of
    # a page that is a picture and, where there are some, the document's `title`, `places` ({start,
    # end} of the text with `name`, `box` or `line`: documents/document.py, Place), and `same_as`,
    # the other files of the same content.
    sources: list[Source]
    read_picture: Callable[[str], bytes]  # encoded bytes of a `Source.image`
    report: FolderReport  # of the files
    digest: str  # of everything above


def read_folder(
    folder: Path,
    cache: Path,
    options: FolderOptions,
    *,
    leave_out: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FolderContent:
    """Reads what has changed in a folder since the last call with the same `cache`.

    Args:
      cache: the folder of what was read of the files.
      leave_out: a folder in `folder` that is none of its content.
      progress: called with (files done, files).
    """
    listing = list_folder(folder, (*READERS, *PICTURES), leave_out)
    if not listing.files and not listing.bad:
        raise UserError(f"{folder}: {_nothing(listing)}.")
    check_libraries(file.name for file in listing.files)
    reading = _Reading(folder, cache, options, listing)
    reading.read(listing.files, progress)
    for file in listing.files:
        reading.add(file.name)
    return reading.finish()


def _nothing(listing: Listing) -> str:
    there = ", ".join(f"{n} {ending or 'without an ending'}" for ending, n in
                      listing.other_endings.most_common(5))  # fmt: skip
    known = " ".join((*READERS, *PICTURES))
    return f"no documents and no pictures{f' (but {there})' if there else ''}; put {known} there"


class _Reading:
    """One call of `read_folder`."""

    def __init__(self, folder: Path, cache: Path, options: FolderOptions, listing: Listing):
        self._folder, self._kept, self._options = folder, cache, options
        self._report = FolderReport(
            bad=dict(listing.bad), left_out=dict(listing.other_endings), hidden=listing.hidden
        )
        what = {"documents": VERSION, "least_pixels": options.least_pixels}
        what["ocr"] = self._has_rapidocr = options.ocr is None and ocr.is_installed()
        self._store = Store(cache / _DOCUMENTS, what, damage="drop", sync=False)
        self._known, self._in_use = _known_files(cache / _FILES)
        if (
            len(self._store) > 2 * self._in_use + _SPARE
        ):  # mostly of files that are gone or were changed
            self._store.remove()
        self._is_picture = {file.name: ending_of(file.name) in PICTURES for file in listing.files}
        self._content: dict[
            str, Mapping[str, Any]
        ] = {}  # key of the store -> what is kept of files
        self._files: dict[str, list[Any]] = {}  # name -> size, time, checksum
        self._documents: dict[str, Mapping[str, Any]] = {}  # name -> what is kept of it
        self._pages: dict[str, Sequence[list[Any]]] = {}  # PDF -> its pages, figures of their own
        self._pictures: dict[str, str] = {}  # name -> checksum
        self._shown: list[tuple[str, list[Any]]] = []  # document, its figure that is a file
        self._first: dict[str, str] = {}  # digest of a content -> the first file that has it
        self._same: defaultdict[str, list[str]] = defaultdict(list)  # file -> those of its content
        self._used: set[str] = set()  # keys of the store
        self._opened: set[str] = set()  # files

    def read(self, files: Sequence[FoundFile], progress: Callable[[int, int], None]) -> None:
        """Reads the files that are new by their bytes, each in a box, several at a time."""
        workers = max(1, min(threads(), _MOST_WORKERS, len(files)))
        boxes = [Box(Path(boxed_documents.__file__)) for _ in range(workers)]
        free: queue.SimpleQueue[Box] = queue.SimpleQueue()
        for box in boxes:
            free.put(box)
        pool = ThreadPoolExecutor(workers)
        waiting: dict[Future[boxed_documents.Read], tuple[str, int]] = {}  # key, bytes
        try:
            for done, file in enumerate(files):
                progress(done, len(files))
                for key, work in self._to_do(file).items():
                    if all(key != another for another, _ in waiting.values()):
                        waiting[pool.submit(_boxed, free, *work)] = key, len(work[0])
                self._take(waiting, _AHEAD * workers)
            self._take(waiting, 0)
            if self._options.ocr is not None:
                self._read_scans(self._options.ocr, free)
        finally:
            for box in boxes:
                box.close()
            pool.shutdown(cancel_futures=True)
        progress(len(files), len(files))

    def _to_do(self, file: FoundFile) -> dict[str, tuple[bytes, str, str, dict[str, Any]]]:
        """Returns key -> arguments of `_boxed` for a file's missing results."""
        try:
            data, checksum = self._identified(file)
            missing = {
                key: work
                for key, work in self._works(file.name, checksum).items()
                if not self._is_kept(key)
            }
            if missing:
                self._opened.add(file.name)
                data = read_file(self._folder, file.name) if data is None else data
        except DocumentError as error:
            self._report.bad[file.name] = str(error)
            return {}
        return {key: (data, ending_of(file.name), *work) for key, work in missing.items()}

    def _works(self, name: str, checksum: str) -> dict[str, tuple[str, dict[str, Any]]]:
        """Key -> function in the box and its arguments, for all that is wanted of a file."""
        ending = ending_of(name)
        key = f"{checksum}{ending}"
        if self._is_picture[name]:
            return {key: ("picture", {})}
        reading = {"ending": ending, "least_pixels": self._options.least_pixels}
        reading["scans"] = self._has_rapidocr
        works = {key: ("text", reading)}
        if self._options.pages != "text" and ending == _PDF:
            works[f"{key} pages {PAGES_VERSION}"] = ("pages", {})
        return works

    def _is_kept(self, key: str) -> bool:
        if key not in self._content:
            content = self._store.get(key)
            if content is None or any(k not in self._store for k in _figure_keys(content)):
                return False
            self._content[key] = content
        return True

    def _take(
        self, waiting: dict[Future[boxed_documents.Read], tuple[str, int]], most: int
    ) -> None:
        """Stores results until at most so many files are being read."""
        while len(waiting) > most or sum(size for _, size in waiting.values()) > _AHEAD_BYTES:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                key, _ = waiting.pop(future)
                content, pictures = future.result()
                arrays = [np.frombuffer(picture, np.uint8) for picture in pictures]
                self._store.add(
                    {**dict(zip(content["pictures"], arrays, strict=True)), key: content}
                )
                self._content[key] = content

    def _scan_keys(self, name: str) -> dict[int, str]:
        """Key by page, of what the vision-language model reads of a document."""
        reader = self._options.ocr
        if reader is None or self._is_picture[name] or self._options.pages == "pictures":
            return {}
        key = next(iter(self._works(name, self._files[name][2])))
        pages = self._content[key].get("scanned_pages", ())
        by = f"{PAGES_VERSION} by {reader.fingerprint}"
        return {page: f"{key} page {page} {by}" for page in pages}

    def _read_scans(self, reader: PageReader, free: queue.SimpleQueue[Box]) -> None:
        """Keeps what the model reads of scanned pages, in batches over all files."""
        wanted: dict[str, dict[int, str]] = {}  # file -> keys of its pages
        for name in self._files:
            if name not in self._report.bad:
                keys = self._scan_keys(name)
                wanted[name] = {page: key for page, key in keys.items() if not self._is_kept(key)}
        drawn = self._drawn(wanted, free)
        if not (batch := list(itertools.islice(drawn, _BATCH))):
            return
        with reader.open() as read:
            while batch:
                texts = read([picture for *_, picture in batch])
                for (key, size, _), (text, problem) in zip(batch, texts, strict=True):
                    self._content[key] = {"text": text, "problem": problem, "size": size}
                    if text or not problem:  # others are tried again
                        self._store.add({key: self._content[key]})
                batch = list(itertools.islice(drawn, _BATCH))

    def _drawn(
        self, wanted: Mapping[str, Mapping[int, str]], free: queue.SimpleQueue[Box]
    ) -> Iterator[tuple[str, list[float], bytes]]:
        """Key, size in points and picture of pages, as they are drawn in a box."""
        for name, keys in wanted.items():
            try:
                data = read_file(self._folder, name) if keys else b""
            except DocumentError:
                continue
            if not keys or hashlib.sha256(data).hexdigest() != self._files[name][2]:
                continue  # it has just changed, and the next call reads it
            self._opened.add(name)
            for start in range(0, len(keys), _BATCH):
                request = {"numbers": list(keys)[start : start + _BATCH]}
                content, pictures = _boxed(free, data, ending_of(name), "scans", request)
                for (number, *size), picture in zip(
                    content.get("sizes", ()), pictures, strict=True
                ):
                    yield keys[number], size, picture

    def add(self, name: str) -> None:
        """Takes a file that was read for a source, in the order of their names."""
        if name in self._report.bad:
            return
        is_picture = self._is_picture[name]
        checksum = self._files[name][2]
        keys = list(self._works(name, checksum))
        self._used.update(*((key, *_figure_keys(self._content[key])) for key in keys))
        document, pages = self._content[keys[0]], None
        if scans := {p: k for p, k in self._scan_keys(name).items() if k in self._content}:
            self._used.update(scans.values())
            document = _with_scans(
                document, {page: self._content[key] for page, key in scans.items()}
            )
        if not document.get("bad") and len(keys) > 1:
            pages = self._content[keys[1]]
            document = {**document, **_with_pages(document, pages)}
        has_content = is_picture or (pages is not None and bool(pages.get("figures")))
        if bad := document.get("bad") or (
            "" if has_content else self._without_content(name, document)
        ):
            self._report.bad[name] = bad
            return
        if is_picture:
            content = checksum
        else:
            self._shown += [(name, figure) for figure in document["figures"] if figure[4]]
            texts = [p[0] for p in document["paragraphs"]]
            content = _digest(texts, _figure_keys(document), _figure_keys(pages or {}))
            if not texts and not has_content and not _figure_keys(document):
                content = name  # it only shows pictures, which no other file's content stands for
        first = self._first.setdefault(content, name)
        if first != name:
            self._report.same_content[name] = first
            self._same[first].append(name)
        elif is_picture:
            self._pictures[name] = checksum
        else:
            self._documents[name] = document
            if pages is not None:
                self._pages[name] = pages["figures"]

    def _without_content(self, name: str, document: Mapping[str, Any]) -> str:
        """Tells why nothing of a document can be a source; "" where something can."""
        if document["paragraphs"] or any(
            figure[3] or self._is_picture.get(_linked(name, figure[4]))
            for figure in document["figures"]
        ):
            return ""
        if count := len(document["scanned_pages"]):
            pages = "1 scanned page" if count == 1 else f"{count} scanned pages"
            remedy = "; install 'mmqa-jax[ocr]', which reads them, or name a model by --ocr"
            if self._has_rapidocr or self._options.ocr is not None:
                remedy = ""
            return f"no text: {pages}{remedy}"
        return "no text"

    def finish(self) -> FolderContent:
        """The sources of all files, and the report."""
        report = self._report
        report.bad = dict(sorted(report.bad.items()))
        report.documents, report.pictures = len(self._documents), len(self._pictures)
        report.pages, report.opened = sum(map(len, self._pages.values())), len(self._opened)
        if not (self._documents or self._pictures):
            self._store.remove()  # as if nothing had been tried
            raise UserError(f"{self._folder}: {self._all_bad()}.")
        self._store.close()
        if (self._files, len(self._used)) != (self._known, self._in_use):
            write_json(self._kept / _FILES, {"files": self._files, "in_use": len(self._used)})
        for name, document in self._documents.items():
            counted = (document[name] for name in ("letters", "held", "left_out", "missing"))
            report.ledger[name] = Ledger(*counted)
            if document["scanned_pages"]:
                report.scanned_pages[name] = document["scanned_pages"]
            if document["broken_figures"]:
                report.broken_figures[name] = document["broken_figures"]
        figures: dict[str, str] = {}  # name of a figure -> key of its picture
        sources = [*self._document_sources(figures), *self._picture_sources()]
        names = [field.name for field in dataclasses.fields(Source)]  # asdict copies all values
        rows = [{name: getattr(source, name) for name in names} for source in sources]
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

    def _document_sources(self, figures: dict[str, str]) -> Iterator[Source]:
        """Chunks, figures, pages; a picture's file that a document shows is a source of its own."""
        for name, document in self._documents.items():
            paragraphs = [_paragraph(document["headings"], *row) for row in document["paragraphs"]]
            if name not in self._pages or self._options.pages == "both":
                yield from self._parts(name, paragraphs, document["figures"], figures)
            headings = {
                paragraph.page: paragraph.heading for paragraph in reversed(paragraphs)
            }  # the first ones
            for _, _, page, key, *_ in self._pages.get(name, ()):
                figures[f"{name}#page{page}"] = key
                heading = headings.get(page, "")
                extra = {**self._extra(name, page, heading), WHOLE_PAGE: True}
                title = _title(name, heading or self._stated(name))
                source = f"{name}#page{page}"
                yield Source(source, "image", "", title, source, extra)

    def _parts(
        self,
        name: str,
        paragraphs: Sequence[Paragraph],
        figures_of_file: Sequence[list[Any]],
        figures: dict[str, str],
    ) -> Iterator[Source]:
        for number, chunk in enumerate(
            chunks(paragraphs, self._options.chunk, _title(name, "")), start=1
        ):
            extra = self._extra(name, chunk.page, chunk.heading)
            if chunk.places:
                extra["places"] = [_shown_place(place) for place in chunk.places]
            title = _title(name, chunk.heading or self._stated(name))
            yield Source(f"{name}#{number}", "text", chunk.text, title, extra=extra)
        embedded = [figure for figure in figures_of_file if figure[3]]
        for number, (caption, heading, page, key, _, box) in enumerate(embedded, start=1):
            figure = f"{name}#figure{number}"
            figures[figure] = key
            extra = self._extra(name, page, heading)
            if box is not None:
                extra["places"] = [_shown_place(Place(0, len(caption), box=box))]
            title = _title(name, heading or self._stated(name))
            yield Source(figure, "image", caption, title, figure, extra)

    def _picture_sources(self) -> Iterator[Source]:
        """Pictures that are files, with the caption of the first document that shows them."""
        captions: dict[str, tuple[str, str]] = {}
        for name, (caption, heading, _, _, link, _) in self._shown:
            if caption:
                captions.setdefault(
                    _linked(name, link), (caption, _title(name, heading or self._stated(name)))
                )
        for name in self._pictures:
            folders = _words(str(PurePosixPath(name).parent)) if "/" in name else ""
            caption, title = captions.get(name, (_words(PurePosixPath(name).stem), folders))
            yield Source(name, "image", caption, title, name, self._extra(name, None, ""))

    def _stated(self, name: str) -> str:
        """The title that a document states, or ""."""
        return self._documents.get(name, {}).get("title", "")

    def _extra(self, name: str, page: int | None, heading: str) -> dict[str, Any]:
        extra = {"file": name, "page": page, "heading": heading}
        if title := self._stated(name):
            extra["title"] = title
        if size := self._documents.get(name, {}).get("page_sizes", {}).get(str(page)):
            extra["page_size"] = size
        return {**extra, "same_as": self._same[name]} if name in self._same else extra


def _boxed(
    free: queue.SimpleQueue[Box], data: bytes, ending: str, function: str, request: dict[str, Any]
) -> boxed_documents.Read:
    """Returns what a function of boxed_documents makes of a file; `bad` where it takes too much.

    `request`: of the function; `scans` of a document counts in a second call, of a larger budget.
    """
    has_ocr = function == "text" and request.get("scans")
    request = {**request, "scans": False} if has_ocr else request
    box = free.get()
    try:
        content, pictures = _called(box, data, budget_of(ending, len(data)), function, request)
        if content.get("scanned_pages") and has_ocr:
            budget = budget_of_scans(len(content["scanned_pages"]), len(data))
            whole, more = _called(box, data, budget, function, request | {"scans": True})
            if "bad" not in whole:
                return whole, more
            content["broken_figures"].append(f"scanned pages: {whole['bad']}")
        return content, pictures
    finally:
        free.put(box)


def _called(
    box: Box, data: bytes, budget: Budget, function: str, request: dict[str, Any]
) -> boxed_documents.Read:
    try:
        return box.call_on(data, budget, function, **request)
    except OverBudget as error:
        return {"bad": str(error), "pictures": []}, []
    except Failed as error:
        reason = f"its parser fails ({error.kind}: {one_line(str(error))[:120]})"
        return {"bad": reason, "pictures": []}, []


def _with_pages(document: Mapping[str, Any], pages: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a PDF's changes if its pages are pictures: a scanned one is read as any other."""
    if bad := pages.get("bad"):
        return {"bad": bad}
    return {
        "scanned_pages": [],
        "broken_figures": [*document["broken_figures"], *pages["broken_figures"]],
    }


def _with_scans(
    document: Mapping[str, Any], readings: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Adds paragraphs of its scanned pages, whose place is the page, to a document.

    What a page says as text, such as a stamp on it, is not said again.
    """
    rows, broken = list(document["paragraphs"]), list(document["broken_figures"])
    texts_of_pages = {(page, _letters_of(text)) for text, _, page, *_ in rows}
    unread, added = [], 0
    for page in document["scanned_pages"]:
        reading = readings.get(page, {"text": "", "problem": "", "size": [0, 0]})
        lines = [one_line(line) for line in reading["text"].splitlines()]
        lines = [
            line
            for line in lines
            if letters(line) and (page, _letters_of(line)) not in texts_of_pages
        ]
        rows += [
            [line, 0, page, False, 0, [[0, len(line), "", [0, 0, *reading["size"]], None]]]
            for line in lines
        ]
        added += sum(map(letters, lines))
        unread += [] if lines else [page]
        broken += [f"page {page}: {reading['problem']}"] if reading["problem"] else []
    rows.sort(key=lambda row: row[2])
    more = {name: document[name] + added for name in ("letters", "held")}
    return {
        **document,
        **more,
        "paragraphs": rows,
        "scanned_pages": unread,
        "broken_figures": broken,
    }


def _letters_of(text: str) -> str:
    """The letters and digits of a text, to be compared."""
    return "".join(filter(str.isalnum, text.casefold()))


def _paragraph(
    headings: Sequence[str], text: str, heading: int, page: int | None, is_row: bool,
    header: int, places: Sequence[Sequence[Any]],
) -> Paragraph:  # fmt: skip
    """A paragraph as boxed_documents keeps it."""
    stretches = tuple(
        Place(start, end, name, None if box is None else tuple(box), line)
        for start, end, name, box, line in places
    )
    return Paragraph(text, headings[heading], page, is_row, headings[header], stretches)


def _figure_keys(document: Mapping[str, Any]) -> list[str]:
    return [figure[3] for figure in document.get("figures", ()) if figure[3]]


def _known_files(path: Path) -> tuple[dict[str, list[Any]], int]:
    """Files by name as an earlier call found them, and how many results it used; or nothing."""
    try:
        saved = read_json(path)
        files = {name: [int(a), int(b), str(c)] for name, (a, b, c) in saved["files"].items()}
        return files, int(saved["in_use"])
    except (UserError, KeyError, TypeError, ValueError, AttributeError):  # missing, or damaged
        return {}, 0


def known_checksums(cache: Path) -> dict[str, str]:
    """The SHA-256 of each file that was read, by its name; `cache` as of `read_folder`."""
    return {name: checksum for name, (*_, checksum) in _known_files(cache / _FILES)[0].items()}


def _linked(document: str, link: str) -> str:
    """The file that a document's link names, relative to the folder; "" for an address."""
    if not link or urllib.parse.urlsplit(link).scheme:
        return ""
    path = urllib.parse.unquote(link.partition("#")[0].partition("?")[0])
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), path))


def _title(name: str, heading: str) -> str:
    return heading or _words(PurePosixPath(name).stem)


def _shown_place(place: Place) -> dict[str, Any]:
    """A place as `Source.extra` holds it."""
    about: dict[str, Any] = {"start": place.start, "end": place.end}
    if place.box is not None:
        return about | {"box": list(place.box)}
    return about | ({"name": place.name} if place.line is None else {"line": place.line})


def _words(name: str) -> str:
    """A file's name as words: `red-panda_2` is `red panda 2`."""
    return " ".join(re.split(r"[\s_\-./]+", name)).strip()


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# The files of a folder that a stranger may have made, and nothing outside it.
#
# Symbolic links are not followed, so that no loop is walked and no link leads out; pipes, devices
# and sockets are not opened. What is left out is counted and named.


_TRIES = 3  # readings of a file that another program writes to


@dataclasses.dataclass(frozen=True)
class FoundFile:
    """A file of the folder."""

    name: str  # its path relative to the folder, with `/`
    size: int  # in bytes
    modified: int  # time in nanoseconds


@dataclasses.dataclass
class Listing:
    """The files in a folder and below it."""

    # Those with one of the wanted endings, by name.
    files: list[FoundFile] = dataclasses.field(default_factory=list)
    # File or folder -> why it is left out.
    bad: dict[str, str] = dataclasses.field(default_factory=dict)
    # Ending -> files that have it and are left out.
    other_endings: Counter[str] = dataclasses.field(default_factory=Counter)
    hidden: int = 0  # files and folders whose names begin with `.` or `~$`, which are left out


def list_folder(folder: Path, endings: Collection[str], leave_out: Path | None = None) -> Listing:
    """Looks through a folder and all folders in it.

    Args:
      endings: of the files that are wanted, in lower case, such as `.pdf`.
      leave_out: a folder below it that is not looked into.
    """
    listing = Listing()
    apart = None if leave_out is None else os.path.realpath(leave_out)
    waiting = [folder.resolve()]
    root = waiting[0]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as entries:
                by_name = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            listing.bad[_relative(here, root) or "."] = f"cannot be read ({error.strerror})"
            continue
        for entry in by_name:
            if entry.name.startswith((".", "~$")):
                listing.hidden += 1
            elif entry.is_dir(follow_symlinks=False):
                if entry.path != apart:
                    waiting.append(Path(entry.path))
            else:
                _add(listing, entry, _relative(Path(entry.path), root), endings)
    listing.files.sort(key=lambda file: file.name)
    return listing


def _relative(path: Path, root: Path) -> str:
    """The path relative to the folder; bytes that are no UTF-8 are written as escapes."""
    name = path.relative_to(root).as_posix() if path != root else ""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _add(listing: Listing, entry: os.DirEntry, name: str, endings: Collection[str]) -> None:
    if entry.is_symlink():
        listing.bad[name] = "a symbolic link, which is not followed; copy the file into the folder"
        return
    ending = PurePosixPath(name).suffix.lower()
    if ending not in endings:
        listing.other_endings[ending] += 1
        return
    if not entry.name.isprintable():  # also where it is no UTF-8
        listing.bad[name] = "its name is no plain text; rename it"
        return
    try:
        about = entry.stat(follow_symlinks=False)
    except OSError as error:
        listing.bad[name] = f"cannot be read ({error.strerror})"
        return
    if not stat.S_ISREG(about.st_mode):
        listing.bad[name] = "a pipe, device or socket, not a file"
    else:
        listing.files.append(FoundFile(name, about.st_size, about.st_mtime_ns))


def read_file(folder: Path, name: str) -> bytes:
    """The bytes of a file of the folder, all of one moment.

    Raises:
      DocumentError: it is gone, has become a link, may not be read, is empty or too large, or is
        written to each time it is read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(os.open(folder / name, flags), "rb") as file:
            for _ in range(_TRIES):
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise DocumentError("no longer a file")
                if about.st_size > MOST_BYTES:
                    raise DocumentError(
                        f"{about.st_size:,} bytes, more than the {MOST_BYTES:,} of a file; split it"
                    )
                file.seek(0)
                data = file.read(MOST_BYTES + 1)
                after = os.fstat(file.fileno())
                if (after.st_mtime_ns, len(data)) == (about.st_mtime_ns, about.st_size):
                    break
            else:
                raise DocumentError("it changes while it is read; try again when it is written")
    except OSError as error:
        raise DocumentError(f"cannot be read ({error.strerror})") from error
    if not data:
        raise DocumentError("empty")
    return data
