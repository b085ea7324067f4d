"""A dump of Wikipedia: pages-articles.xml, packed or not (MediaWiki's export format)."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import re
import xml.parsers.expat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from types import ModuleType
from typing import Any

from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.data.articles import ENGLISH, Article, PassageOptions, Section, page_url
from mmqa_jax.data.records.picture_records import processors
from mmqa_jax.data.wikipedia.streams import LONGEST_LINE, InputFile, Item, Stream, article_item

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
