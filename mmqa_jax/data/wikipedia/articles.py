"""Articles cut into passages, as DPR cuts them (Karpukhin et al., EMNLP 2020, 4.1).

A passage is a block of 100 words; words are what is between spaces. The last block of an article is
as short as it is: DPR's own file fills it with the article's beginning. The title stands before a
passage where it is embedded or searched (`schema.source_text`).
"""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.disk_sources import SourceRow
from mmqa_jax.data.schema import Material

WORDS = 100
ENGLISH = "https://en.wikipedia.org/wiki/"
WIKIPEDIA = Material("Wikipedia", "its authors; each source names its article", "CC BY-SA")
WIKIPEDIA_PICTURES = Material("Wikipedia's pictures", license="under their own licenses")


class Section(NamedTuple):
    """A section of an article; its heading is "" before the first one."""

    heading: str
    text: str


class Picture(NamedTuple):
    """A picture of an article.

    Attributes:
      name: relative to the folder of pictures.
      caption: what is said about it.
      extra: of its source, beside the article's.
    """

    name: str
    caption: str
    extra: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Article:
    """An article.

    Attributes:
      id: begins its sources' ids.
      url: its page.
      extra: of all its sources, beside `article`, `url` and `section`.
    """

    id: str
    title: str
    url: str
    sections: Sequence[Section]
    pictures: Sequence[Picture] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PassageOptions:
    """How articles are cut.

    Attributes:
      words: of a passage, at most.
      across_sections: whether a passage may go on in the next section, as DPR's do; its `section`
        is that of its first word.
    """

    words: int = WORDS
    across_sections: bool = True

    def __post_init__(self):
        if self.words < 1:
            raise UserError(
                f"--passage_words={self.words}: 1 or more was expected; give a larger number."
            )


def sources_of(article: Article, options: PassageOptions) -> list[SourceRow]:
    """The sources of an article: its pictures, ARTICLE#picture1, then its passages, ARTICLE#1."""
    head = {"article": article.id, "url": article.url, **article.extra}
    rows = [
        SourceRow(f"{article.id}#picture{number}", article.title, picture.caption, picture.name,
                  json.dumps({**head, **picture.extra}, ensure_ascii=False))
        for number, picture in enumerate(article.pictures, start=1)
    ]  # fmt: skip
    opened = json.dumps(head, ensure_ascii=False)[:-1]
    for number, (heading, text) in enumerate(_passages(article.sections, options), start=1):
        section = f', "section": {json.dumps(heading, ensure_ascii=False)}' if heading else ""
        rows.append(
            SourceRow(f"{article.id}#{number}", article.title, text, "", f"{opened}{section}}}")
        )
    return rows


def _passages(sections: Sequence[Section], options: PassageOptions) -> Iterator[tuple[str, str]]:
    """Heading and text of every passage."""
    words: list[str] = []
    heading = ""
    for section in sections:
        own = section.text.split()
        if not words:
            heading = section.heading
        taken = 0
        if options.across_sections and words:  # fills up what the section before has begun
            taken = options.words - len(words)
            words += own[:taken]
            if len(words) < options.words:
                continue
            yield heading, " ".join(words)
            words, heading = [], section.heading
        for start in range(taken, len(own), options.words):
            words = own[start : start + options.words]
            if len(words) == options.words or not options.across_sections:
                yield section.heading, " ".join(words)
                words = []
    if words:
        yield heading, " ".join(words)


def page_url(title: str, begin: str = ENGLISH) -> str:
    """The address of an article by its title."""
    return begin + urllib.parse.quote(title.replace(" ", "_"), safe="/:(),'!*@;~")
