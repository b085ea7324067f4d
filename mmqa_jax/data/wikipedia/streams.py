"""The published files of Wikipedia, each as a stream of items: a line, a page or an entry.

An item is what becomes of it: sources, or why it is left out. A stream can be read from any item
on, so that an interrupted `mmqa prepare` goes on where it was.
"""

from __future__ import annotations

import bz2
import codecs
import collections
import contextlib
import csv
import dataclasses
import gzip
import io
import json
import lzma
import multiprocessing
import os
import re
import xml.parsers.expat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import IO, Any, ClassVar, NamedTuple

from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.core.files import parse_json
from mmqa_jax.data.articles import (
    ENGLISH,
    Article,
    PassageOptions,
    Picture,
    Section,
    page_url,
    sources_of,
)
from mmqa_jax.data.disk_sources import SourceRow
from mmqa_jax.data.records.picture_records import processors


class Item(NamedTuple):
    """The result of a line, a page or an entry of the file."""

    sources: Sequence[SourceRow]  # in order
    left_out: str = ""  # why there are none: a name under which it is counted
    broken: str = ""  # what is wrong with it, and where; it is named in the manifest


@dataclasses.dataclass(frozen=True)
class Stream:
    """A published file, `raw` or in the folder `raw`, that subclasses read and cut by `options`."""

    names: ClassVar[tuple[str, ...]]
    what: ClassVar[str]

    raw: Path
    options: PassageOptions = dataclasses.field(default_factory=PassageOptions)

    @property
    def file(self) -> Path:
        """The file; UserError where there is none."""
        return find_file(self.raw, self.names, self.what)

    @property
    def pictures(self) -> Path | None:
        """The folder that names of pictures are relative to; None: its sources have none."""
        return None

    def items(self, opened: InputFile, skip: int) -> Iterator[Item]:
        """All items but the first `skip`, in order."""
        raise NotImplementedError


class DPRStream(Stream):
    """DPR's passages (facebookresearch/DPR, psgs_w100.tsv): id, text, title; cut already.

    Ids are those of the file, so that rankings of others name the same passages.
    """

    names = ("psgs_w100.tsv",)
    what = "DPR's passages"

    def items(self, opened: InputFile, skip: int) -> Iterator[Item]:
        """An item a line."""
        last, extra = None, ""
        for number, line in enumerate(opened.lines()):
            if number < skip:
                continue
            fields = _tsv_fields(line)
            if len(fields) != 3:
                yield _broken(opened, number, "three columns of UTF-8 text were expected")
                continue
            name, text, title = fields
            if not number and (name, text) == ("id", "text"):
                yield Item((), "header")
            elif not name or not text:
                yield Item((), "without text") if name else _broken(opened, number, "it has no id")
            else:
                if title != last:
                    last, extra = title, json.dumps({"url": page_url(title)}, ensure_ascii=False)
                yield Item((SourceRow(name, title, text, "", extra),))


class KILTStream(Stream):
    """KILT's knowledge source (facebookresearch/KILT, kilt_knowledgesource.json): a page a line.

    `text` is a list of paragraphs, of which the first is the title; headings are paragraphs
    `Section::::A.:B.`, and items of lists begin with `BULLET::::-`. Links (`anchors`) and
    categories are not kept.
    """

    names = ("kilt_knowledgesource.json", "kilt_knowledgesource.jsonl")
    what = "KILT's knowledge source"

    def items(self, opened: InputFile, skip: int) -> Iterator[Item]:
        """An item a line."""
        return _json_items(opened, skip, self._of_page)

    def _of_page(self, page: Mapping[str, Any]) -> Item:
        name, title, paragraphs = str(page["wikipedia_id"]), page["wikipedia_title"], page["text"]
        _expect(isinstance(title, str) and _are_texts(paragraphs), "title and text of paragraphs")
        sections, heading, texts = [], "", []
        for number, paragraph in enumerate(paragraphs):
            if paragraph.startswith("Section::::"):
                sections.append(Section(heading, " ".join(texts)))
                heading, texts = _kilt_heading(paragraph), []
            elif number or paragraph.strip() != title:
                texts.append(_KILT_BULLET.sub("", paragraph))
        sections.append(Section(heading, " ".join(texts)))
        history, wikidata = page.get("history") or {}, page.get("wikidata_info") or {}
        extra = {"wikidata": wikidata["wikidata_id"]} if wikidata.get("wikidata_id") else {}
        url = history.get("url") or page_url(title)
        return article_item(Article(name, title, url, sections, (), extra), self.options)


_KILT_BULLET = re.compile(r"^BULLET::::-?\s*")


def _kilt_heading(paragraph: str) -> str:
    """`Life: Early years` of `Section::::Life.:Early years.`"""
    parts = paragraph.removeprefix("Section::::").strip().split(".:")
    return ": ".join(part.removesuffix(".").strip() for part in parts)


class InfoSeekStream(Stream):
    """The articles of InfoSeek and OVEN, or of Encyclopedic-VQA, with a picture where there is one.

    Wiki6M_ver_1_0.jsonl: an article a line, with wikidata_id, wikipedia_title, wikipedia_content
    (or wikipedia_summary alone) and wikipedia_image_url. Its pictures are those of OVEN: Q806563's
    is images/Q806/Q806563.jpg or images/Q806563.jpg.

    encyclopedic_kb_wiki.json (or .zip): one object, from the URL of an article to title,
    section_titles, section_texts, image_urls, image_reference_descriptions and
    image_section_indices. A picture is the file in images/ whose name is the last part of its URL.
    Passages stay within a section, whose number is `section_index`.

    Pictures are not copied: the corpus names their folder.
    """

    names = ("Wiki6M_ver_1_0.jsonl", "encyclopedic_kb_wiki.json", "encyclopedic_kb_wiki")
    what = "InfoSeek's or Encyclopedic-VQA's articles"

    @property
    def pictures(self) -> Path | None:
        """raw/images, if there is one."""
        folder = (self.raw if self.raw.is_dir() else self.raw.parent) / "images"
        return folder if folder.is_dir() else None

    def items(self, opened: InputFile, skip: int) -> Iterator[Item]:
        """An item an article."""
        if ".jsonl" in opened.path.name:
            return _json_items(opened, skip, self._of_entity)
        return self._entries(opened, skip)

    def _of_entity(self, page: Mapping[str, Any]) -> Item:
        name, title = page["wikidata_id"], page["wikipedia_title"]
        text = page.get("wikipedia_content") or page.get("wikipedia_summary") or ""
        _expect(
            _are_texts([name, title, text]),
            "texts wikidata_id, wikipedia_title and wikipedia_content",
        )
        picture = self._picture(f"{name[:4]}/{name}", name) if self.pictures else None
        pictures = (
            [Picture(picture, title, _url_of(page.get("wikipedia_image_url")))] if picture else []
        )
        url = page.get("wikipedia_url") or page_url(title)
        sections = [Section("", text)]
        return article_item(
            Article(name, title, url, sections, pictures, {"wikidata": name}), self.options
        )

    def _entries(self, opened: InputFile, skip: int) -> Iterator[Item]:
        for number, (url, entry) in enumerate(json_entries(opened)):
            if number < skip:
                continue
            try:
                yield self._of_entry(url, entry)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                yield Item((), broken=f"{opened.path.name}, {url[:100]}: {_said(error)}")

    def _of_entry(self, url: str, entry: Mapping[str, Any]) -> Item:
        title, headings, texts = entry["title"], entry["section_titles"], entry["section_texts"]
        _expect(
            _are_texts([url, title]) and _are_texts(headings) and _are_texts(texts),
            "texts title, section_titles and section_texts",
        )
        "".join((url, title, *headings, *texts)).encode()  # halves of a character are refused
        of_article = []
        pictures = zip(
            entry["image_urls"], entry["image_reference_descriptions"],
            entry["image_section_indices"], strict=True,
        ) if self.pictures else ()  # fmt: skip
        for address, caption, section in pictures:
            stem, _, suffix = address.rpartition("/")[2].rpartition(".")
            if picture := self._picture(stem, f"{stem}.{suffix}"):
                _expect(_are_texts([caption or ""]), "texts image_reference_descriptions")
                (caption or "").encode()
                _expect(section in range(len(headings)), "image_section_indices of its sections")
                more = {"section": headings[section], "section_index": section}
                of_article.append(Picture(picture, caption or title, {**more, **_url_of(address)}))
        rows = list(sources_of(Article(url, title, url, (), of_article), self.options))
        options = dataclasses.replace(self.options, across_sections=False)
        count = 0
        for index, section in enumerate(zip(headings, texts, strict=True)):
            article = Article(url, title, url, [Section(*section)], (), {"section_index": index})
            for row in sources_of(article, options):
                count += 1
                rows.append(row._replace(id=f"{url}#{count}"))
        return Item(rows) if rows else Item((), "without text")

    def _picture(self, *names: str) -> str | None:
        """The first of the files NAME, NAME.jpg, NAME.jpeg, NAME.png that there is."""
        folder = self.pictures
        for name in names:
            if folder is None or ".." in name or os.path.isabs(name):  # the names are data
                continue
            for suffix in ("", ".jpg", ".jpeg", ".png", ".JPEG"):
                if os.path.isfile(folder / f"{name}{suffix}"):  # also where it is too long
                    return f"{name}{suffix}"
        return None


def json_entries(opened: InputFile) -> Iterator[tuple[str, Any]]:
    """Key and value of all entries of a file that is one JSON object, which need not fit memory."""
    decoder, blocks = json.JSONDecoder(), opened.blocks()
    decode = _utf8_blocks(opened, blocks)
    text, at, begun = "", 0, False
    for block in decode:
        text, at = text[at:] + block, 0
        while True:
            match = _BETWEEN.match(text, at)
            assert match is not None
            if not begun:
                if match.end() < len(text) and text[match.end()] != "{":
                    raise UserError(
                        f"{opened.path}: a JSON object was expected; fetch the file again."
                    )
                if match.end() == len(text):
                    break
                begun, at = True, match.end() + 1
                continue
            if text[match.end() : match.end() + 1] == "}":
                return
            try:
                key, end = decoder.raw_decode(text, match.end())
                if not isinstance(key, str):
                    raise ValueError("a key is text")
                value, end = decoder.raw_decode(text, _COLON.match(text, end).end())
            except (
                ValueError,
                AttributeError,
                RecursionError,
            ) as error:  # it may go on in the next block
                if len(text) - at > LONGEST_LINE or not isinstance(
                    error, ValueError | AttributeError
                ):
                    raise UserError(
                        f"{opened.path}: what follows {text[at : at + 60]!r} is no JSON; fetch the "
                        "file again."
                    ) from error
                break
            at = end
            yield key, value
    raise UserError(f"{opened.path}: ends within {text[at : at + 60]!r}; fetch the file again.")


_BETWEEN, _COLON = re.compile(r"[\s,]*"), re.compile(r"\s*:\s*")


def _utf8_blocks(opened: InputFile, blocks: Iterator[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in blocks:
        try:
            yield decoder.decode(block)
        except UnicodeDecodeError as error:
            raise UserError(f"{opened.path}: is not UTF-8; fetch the file again.") from error


def _json_items(
    opened: InputFile, skip: int, of_page: Callable[[Mapping[str, Any]], Item]
) -> Iterator[Item]:
    """The items of a file with a JSON object a line."""
    for number, line in enumerate(opened.lines()):
        if number < skip:
            continue
        if not line.strip():
            yield Item((), "blank line")
            continue
        try:
            page = parse_json(line, "it")
            _expect(isinstance(page, dict), "a JSON object")
            yield of_page(page)
        except UserError as error:
            yield _broken(opened, number, str(error).partition(";")[0])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield _broken(opened, number, _said(error))


def article_item(article: Article, options: PassageOptions) -> Item:
    """Turns an article into an item."""
    sources = sources_of(article, options)
    return Item(sources) if sources else Item((), "without text")


def _tsv_fields(line: bytes) -> list[str]:
    """The columns of a line, as the authors' csv.reader reads them; [] of a broken one."""
    try:
        text = line.decode()
        if text.count('"') == 2:  # of nearly all: the second column is quoted, and has no quotes
            name, opening, rest = text.partition('\t"')
            quoted, closing, title = rest.partition('"\t')
            if opening and closing and "\t" not in name:
                return [name, quoted, *title.split("\t")]
        rows = list(csv.reader([text], delimiter="\t", strict=True))
        return rows[0] if len(rows) == 1 else []
    except (csv.Error, UnicodeDecodeError):
        return []


def _broken(opened: InputFile, number: int, why: str) -> Item:
    return Item((), broken=f"{opened.path.name}, line {number + 1}: {why}")


def _said(error: Exception) -> str:
    return f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(f"{what} were expected" if " " in what else f"{what} was expected")


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _url_of(address: Any) -> dict[str, str]:
    return {"image_url": address} if isinstance(address, str) and address else {}


# Large files read once from the beginning to the end: as they are, or packed (.gz, .bz2, .zip).


LONGEST_LINE = 1 << 26  # bytes; Wikipedia's longest articles have 2 MB
PACKED = ("", ".gz", ".bz2", ".zip")
_BUFFER = 1 << 20
# Text packs to a third or a tenth. What unpacks to more than this is no text, but fills disks.
_MOST_UNPACKED, _ALLOWED = 250, 1 << 26


class InputFile:
    """An open file; its content is `stream`.

    Args:
      path: a packed file by its ending; of a .zip the only file that is in it.

    Attributes:
      size: bytes of the file, packed.
    """

    def __init__(self, path: Path):
        self.path = path
        with self._named_errors():
            self._raw = open(path, "rb")  # noqa: SIM115 (`close` does)
            self.size = os.fstat(self._raw.fileno()).st_size
            unpacked = self._unpacked()
        bounded = self._raw if unpacked is self._raw else _Bounded(unpacked, self._raw, path)
        self.stream = io.BufferedReader(bounded, _BUFFER) if unpacked is not self._raw else bounded

    def done(self) -> int:
        """Bytes of the file, packed, that have been read."""
        return self._raw.tell()

    def lines(self) -> Iterator[bytes]:
        """The lines, without their ends; of one that is too long its beginning alone."""
        with self._named_errors():
            while line := self.stream.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    while (rest := self.stream.readline(LONGEST_LINE)) and rest[-1:] != b"\n":
                        pass
                yield line.rstrip(b"\r\n")

    def blocks(self, size: int = _BUFFER) -> Iterator[bytes]:
        """The content, some bytes at a time; UserError as of the class."""
        with self._named_errors():
            while block := self.stream.read(size):
                yield block

    def close(self) -> None:
        """Closes the file."""
        self._raw.close()

    def _unpacked(self) -> IO[bytes]:
        match self.path.suffix:
            case ".gz":
                return gzip.GzipFile(fileobj=self._raw)
            case ".bz2":
                return bz2.BZ2File(self._raw)
            case ".zip":
                try:
                    return self._only_member(zipfile.ZipFile(self._raw))
                # A password, or what zipfile does not know; of a damaged one also an IndexError.
                except (RuntimeError, IndexError) as error:
                    raise UserError(
                        f"{self.path}: cannot be unpacked here ({error}); unpack it, and give the "
                        "file that is in it."
                    ) from error
        return self._raw

    def _only_member(self, packed: zipfile.ZipFile) -> IO[bytes]:
        inside = [member for member in packed.infolist() if not member.is_dir()]
        if len(inside) != 1:
            raise UserError(
                f"{self.path}: holds {len(inside)} files, one was expected; unpack it, and give "
                "the one that is to be read."
            )
        return packed.open(inside[0])

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UserError(
                f"{self.path}: cannot be read ({reason or 'it ends too early'}); fetch the file "
                "again."
            ) from error


class _Bounded(io.RawIOBase):
    """An unpacked stream that ends with an error where it grows beyond all that text does."""

    def __init__(self, unpacked: IO[bytes], packed: IO[bytes], path: Path):
        self._unpacked, self._packed, self._path = unpacked, packed, path
        self._count = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Reads into a buffer, as io.RawIOBase defines it."""
        data = self._unpacked.read(len(buffer))
        self._count += len(data)
        if self._count > _ALLOWED + _MOST_UNPACKED * self._packed.tell():
            raise UserError(
                f"{self._path}: unpacks to more than {_MOST_UNPACKED} times its size, which is no "
                "text; fetch the file again."
            )
        buffer[: len(data)] = data
        return len(data)


def find_file(raw: Path, names: Sequence[str], what: str) -> Path:
    """The file in a folder with one of these names (glob patterns), packed or not; or `raw`."""
    if raw.is_file():
        return raw
    patterns = [f"{name}{packed}" for name in names for packed in PACKED]
    files = sorted({path for pattern in patterns for path in raw.glob(pattern) if path.is_file()})
    if len(files) != 1:
        there = f"has {len(files)} files of" if files else "has no file of"
        listed = ", ".join(path.name for path in files) or " or ".join(names)
        raise UserError(f"--raw={raw}: {there} {what} ({listed}); name the file itself.")
    return files[0]


# A dump of Wikipedia: pages-articles.xml, packed or not (MediaWiki's export format).


_FILE, _CATEGORY = "6", "14"  # keys of namespaces, whose names differ by language
_FIELDS = ("title", "ns", "id", "model", "text")
_AT_ONCE = 64  # pages that a worker is handed


@dataclasses.dataclass
class Page:
    """A page as the dump has it: the last revision's text."""

    title: str = ""
    ns: str = ""
    id: str = ""
    model: str = "wikitext"
    text: str = ""
    redirect: bool = False


class DumpStream(Stream):
    """The articles of a dump, an item a page; redirects and pages of other namespaces are left out.

    Wikitext is parsed by as many processes as there are processors; order and sources do not depend
    on their number.
    """

    names = ("*pages-articles*.xml",)
    what = "the articles of a dump (pages-articles.xml)"

    def items(self, opened: InputFile, skip: int) -> Iterator[Item]:
        """An item a page."""
        parser()  # refused here, and not in a worker
        reader = PageReader(opened)
        pages = (page for number, page in enumerate(reader.pages()) if number >= skip)
        work = _blocks(pages, lambda: (reader.base, tuple(reader.not_text), self.options))
        workers = processors()
        if workers == 1:
            for block in work:
                yield from _items(block)
            return
        # Not forked: threads of Arrow and of the progress may be running.
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawned) as pool:
            for items in _in_order(pool, work, 2 * workers):
                yield from items


class PageReader:
    """Reads pages one by one; the whole file never is in memory.

    Attributes:
      base: the beginning of its articles' addresses.
      not_text: names of the namespaces whose links are no words; both are known before the first
        page.
    """

    def __init__(self, opened: InputFile):
        self.base, self.not_text = ENGLISH, ["file", "image", "category"]
        self._opened = opened
        self._parser = xml.parsers.expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters
        self._parser.EntityDeclHandler = self._entity  # a dump has none; they could grow
        self._path: list[str] = []
        self._key, self._text, self._length = "", [], 0
        self._page = Page()
        self._done: collections.deque[Page] = collections.deque()

    def pages(self) -> Iterator[Page]:
        """All pages, in order."""
        try:
            for block in self._opened.blocks():
                self._parser.Parse(block, False)
                while self._done:
                    yield self._done.popleft()
            self._parser.Parse(b"", True)
        except xml.parsers.expat.ExpatError as error:
            raise UserError(
                f"{self._opened.path}: is no XML, or is cut ({error}); fetch the file again."
            ) from error
        yield from self._done

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._path.append(name)
        self._text, self._length = [], 0
        if name == "page":
            self._page = Page()
        elif name == "redirect":
            self._page.redirect = True
        elif name == "namespace":
            self._key = attributes.get("key", "")

    def _end(self, name: str) -> None:
        value, inside = "".join(self._text), self._path[-2:-1]
        self._text = []
        self._path.pop()
        if name == "page":
            self._done.append(self._page)
        elif name == "base" and "/" in value:
            self.base = value.rpartition("/")[0] + "/"
        elif name == "namespace" and self._key in (_FILE, _CATEGORY) and value:
            self.not_text.append(value.lower())
        elif name in _FIELDS and (inside == ["page"] or name in ("model", "text")):
            setattr(self._page, name, value)

    def _characters(self, text: str) -> None:
        self._length += len(text)
        if self._length > LONGEST_LINE:
            raise UserError(
                f"{self._opened.path}: page {self._page.title!r} has an element of more than "
                f"{LONGEST_LINE:,} characters; this is no dump of MediaWiki."
            )
        self._text.append(text)

    def _entity(self, name: str, *_: Any) -> None:
        raise UserError(
            f"{self._opened.path}: declares the entity {name!r}; this is no dump of MediaWiki."
        )


_Block = tuple[Sequence[Page], str, tuple[str, ...], PassageOptions]


def _blocks(pages: Iterable[Page], known: Callable[[], tuple]) -> Iterator[_Block]:
    """Yields some pages at a time, with the `known` facts of the wiki after the first page."""
    block: list[Page] = []
    for page in pages:
        block.append(page)
        if len(block) == _AT_ONCE:
            yield (block, *known())
            block = []
    if block:
        yield (block, *known())


def _in_order(
    pool: ProcessPoolExecutor, work: Iterable[_Block], most: int
) -> Iterator[Sequence[Item]]:
    """Yields the results of all blocks in order; `most` of them are computed at once."""
    waiting: collections.deque[Future] = collections.deque()
    for block in work:
        waiting.append(pool.submit(_items, block))
        if len(waiting) == most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _items(block: _Block) -> list[Item]:
    pages, base, not_text, options = block
    return [_item_of(page, base, not_text, options) for page in pages]


def _item_of(page: Page, base: str, not_text: Sequence[str], options: PassageOptions) -> Item:
    if page.redirect:
        return Item((), "redirect")
    if page.ns != "0":
        return Item((), f"namespace {page.ns}")
    if page.model != "wikitext":
        return Item((), f"model {page.model}")
    try:
        sections = plain_sections(page.text, not_text)
    except Exception as error:  # the parser's own, of markup that it cannot read
        return Item((), broken=f"page {page.title!r}: {type(error).__name__} {error}"[:200])
    article = Article(page.id, page.title, page_url(page.title, base), sections)
    return article_item(article, options)


# Wikitext as plain text, by sections; mwparserfromhell parses it.
#
# What is left out: templates (infoboxes, citations; what they would expand to is not known
# without all of the wiki), tables, references, formulas, pictures with their captions,
# categories, comments, and tags that are not shown. Links keep their words.


_SPACES = re.compile(r"[ \t]+")
_LINES = re.compile(r"\n{2,}")
_MARKS = re.compile(r"^[*#:;]+\s*", re.MULTILINE)  # of lists
_NO_TEXT = {
    "table",
    "ref",
    "references",
    "math",
    "gallery",
    "timeline",
    "imagemap",
    "score",
    "chem",
}
_SWITCHES = re.compile(r"__[A-Z]+__")  # __NOTOC__


def parser() -> ModuleType:
    """mwparserfromhell; UserError where it is not installed."""
    return import_optional("mwparserfromhell", "wikipedia: reading a dump", "wikipedia")


def plain_sections(wikitext: str, not_text: Sequence[str]) -> list[Section]:
    """Returns the sections of a page that have text, in order.

    `not_text` names the namespaces whose links are no words, in lower case: `file`, `category`.
    """
    package = parser()
    nodes = package.nodes
    prefixes = tuple(f"{name}:" for name in not_text)
    sections: list[Section] = []
    heading, nodes_of_section = "", []

    def finish() -> None:
        text = _plain(
            package.wikicode.Wikicode(nodes_of_section).strip_code(keep_template_params=False)
        )
        if text:
            sections.append(Section(heading, text))

    for node in _shown(package.parse(wikitext, skip_style_tags=True).nodes, nodes, prefixes):
        if isinstance(node, nodes.Heading):
            finish()
            heading, nodes_of_section = _plain(node.title.strip_code()), []
        else:
            nodes_of_section.append(node)
    finish()
    return sections


def _shown(children: Sequence[Any], nodes: ModuleType, prefixes: tuple[str, ...]) -> Iterator[Any]:
    """Yields the nodes whose words are read, in order; a tag's nodes stand in its place."""
    for node in children:
        if isinstance(node, nodes.Wikilink) and str(node.title).strip().lower().startswith(
            prefixes
        ):
            continue
        if isinstance(node, nodes.Tag) and node.contents is not None:
            if str(node.tag).strip().lower() not in _NO_TEXT:
                yield from _shown(node.contents.nodes, nodes, prefixes)
            continue
        yield node


def _plain(text: str) -> str:
    text = _SWITCHES.sub("", text.replace("'''''", "").replace("'''", "").replace("''", ""))
    text = _MARKS.sub("", _SPACES.sub(" ", text.replace("\xa0", " ")))
    return _LINES.sub("\n", text).strip()
