"""Articles cut into passages, as DPR cuts them (Karpukhin et al., EMNLP 2020, 4.1).

A passage is a block of 100 words; words are what is between spaces. The last block of an article is
as short as it is: DPR's own file fills it with the article's beginning. The title stands before a
passage where it is embedded or searched (`schema.source_text`).
"""

import dataclasses
import functools
import json
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.disk_sources import SourceRow
from mmqa_jax.data.schema import Material, Question, Ranking, Source

WORDS = 100
ENGLISH = "https://en.wikipedia.org/wiki/"
WIKIPEDIA = Material("Wikipedia", "its authors; each source names its article", "CC BY-SA")
WIKIPEDIA_PICTURES = Material("Wikipedia's pictures", license="under their own licenses")


class Section(NamedTuple):
    """A section of an article; its heading is "" before the first one."""

    heading: str
    text: str


class Picture(NamedTuple):
    """A picture of an article."""

    name: str  # relative to the folder of pictures
    caption: str  # what is said about it
    extra: Mapping[str, Any]  # of its source, beside the article's


@dataclasses.dataclass(frozen=True)
class Article:
    """An article."""

    id: str  # begins its sources' ids
    title: str
    url: str  # its page
    sections: Sequence[Section]
    pictures: Sequence[Picture] = ()
    # Of all its sources, beside `article`, `url` and `section`.
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PassageOptions:
    """How articles are cut."""

    words: int = WORDS  # of a passage, at most
    # Whether a passage may go on in the next section, as DPR's do; its `section` is that of its
    # first word.
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
        section_words = section.text.split()
        if not words:
            heading = section.heading
        taken = 0
        if options.across_sections and words:  # fills up what the section before has begun
            taken = options.words - len(words)
            words += section_words[:taken]
            if len(words) < options.words:
                continue
            yield heading, " ".join(words)
            words, heading = [], section.heading
        for start in range(taken, len(section_words), options.words):
            words = section_words[start : start + options.words]
            if len(words) == options.words or not options.across_sections:
                yield section.heading, " ".join(words)
                words = []
    if words:
        yield heading, " ".join(words)


def page_url(title: str, begin: str = ENGLISH) -> str:
    """The address of an article by its title."""
    return begin + urllib.parse.quote(title.replace(" ", "_"), safe="/:(),'!*@;~")


# Articles of an encyclopedia: which one a source is of, and which ones answer a question.
#
# A source is a passage or a picture of an article. Its article is named by a key of its `extra`,
# the first of NAMES that it has, as `mmqa prepare infoseek_wiki` and `wikipedia` write them. A
# question names its articles by `wikipedia_url` (Encyclopedic-VQA) or `entity_id` (InfoSeek).


# Keys of Source.extra that name its article, the one that results name it by first.
NAMES = ("article", "url", "wikidata")
# Key of Source.extra: the title of the section that a passage is of.
SECTION = "section"
# Keys of Question.extra that name the articles that answer it, one or a list.
_ANSWERS = ("wikipedia_url", "entity_id")


def article_names(source: Source) -> list[str]:
    """The names of a source's article, the first of which results use; none: it is of none."""
    return _texts(source.extra, NAMES)


def answering_articles(question: Question) -> list[str]:
    """The names of the articles that answer a question; none where they are not known."""
    return _texts(question.extra, _ANSWERS)


class Articles:
    """The articles of a collection.

    What a source is of is read from the source; the passages of all articles are looked up in one
    pass over the sources, when they are first asked for, and kept as ranges of rows.

    Args:
      sources: of the collection, in memory or on disk.
      row: source id -> its row.
    """

    def __init__(self, sources: Sequence[Source], row: Mapping[str, int]):
        self._sources, self._row = sources, row

    def of(self, source_id: str) -> str:
        """The article of a source; the source itself where it is of none."""
        return self._names(source_id)[0]

    def passages(self, article: str) -> list[str]:
        """Ids of an article's passages, in their order; none of an article that is not there."""
        rows = (row for run in self._runs.get(article, ()) for row in run)
        listed = (self._sources[row] for row in rows)
        return [source.id for source in listed if source.modality == "text"]

    def ranked(self, ranking: Ranking, gold: Collection[str] = ()) -> Ranking:
        """A ranking of sources as one of their articles, each with the score of its first.

        An article goes by its name in `gold` where it has one.
        """
        scores: dict[str, float] = {}
        for source, score in zip(ranking.sources, ranking.scores, strict=True):
            names = self._names(source)
            scores.setdefault(next((name for name in names if name in gold), names[0]), score)
        return Ranking(ranking.question_id, tuple(scores), tuple(scores.values()))

    def _names(self, source_id: str) -> Sequence[str]:
        return article_names(self._sources[self._row[source_id]]) or [source_id]

    @functools.cached_property
    def _runs(self) -> Mapping[str, list[range]]:
        """An article by each of its names -> the rows of its sources, which mostly follow."""
        runs: dict[str, list[range]] = {}
        for row, source in enumerate(self._sources):
            names = article_names(source)
            if not names:
                continue
            rows = next((runs[name] for name in names if name in runs), [])
            if rows and rows[-1].stop == row:
                rows[-1] = range(rows[-1].start, row + 1)
            else:
                rows.append(range(row, row + 1))
            for name in names:
                runs.setdefault(name, rows)
        return runs


def _texts(extra: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    texts: list[str] = []
    for key in keys:
        value = extra.get(key)
        several = value if isinstance(value, list) else [value]
        texts += [text for text in several if isinstance(text, str) and text]
    return list(dict.fromkeys(texts))
