"""Articles of an encyclopedia: which one a source is of, and which ones answer a question.

A source is a passage or a picture of an article. Its article is named by a key of its `extra`, the
first of NAMES that it has: an address of Wikipedia, or an id of Wikidata. A question names its
articles by `wikipedia_url` (Encyclopedic-VQA) or `entity_id` (InfoSeek).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mmqa_jax.data.schema import Question, Ranking, Source

# Keys of Source.extra that name its article, the one that results name it by first.
NAMES = ("article", "wikipedia_url", "url", "wikidata_id", "entity_id")
# Key of Source.extra: the title of the section that a passage is of.
SECTION = "section"
# Keys of Question.extra that name the articles that answer it, one or a list.
_ANSWERS = ("wikipedia_url", "entity_id")

# A source -> all names of its article, the one that results use first; none: it is of no article.
NamesOf = Callable[[Source], Sequence[str]]


def article_names(source: Source) -> list[str]:
    """The names of a source's article."""
    return _texts(source.extra, NAMES)


def answering_articles(question: Question) -> list[str]:
    """The names of the articles that answer a question; none where they are not known."""
    return _texts(question.extra, _ANSWERS)


class Articles:
    """The articles of a collection, and their sources.

    Args:
      sources: of the collection.
      names_of: see NamesOf.
    """

    def __init__(self, sources: Iterable[Source], names_of: NamesOf = article_names):
        self._of_source: dict[str, str] = {}
        self._passages: dict[str, list[str]] = {}
        self._known_as: dict[str, str] = {}
        for source in sources:
            names = names_of(source)
            if not names:
                continue
            name = self._known_as.get(names[0], names[0])
            self._of_source[source.id] = name
            for other in names:
                self._known_as.setdefault(other, name)
            passages = self._passages.setdefault(name, [])
            if source.modality == "text":
                passages.append(source.id)

    def __len__(self) -> int:
        return len(self._passages)

    def of(self, source_id: str) -> str:
        """The article of a source; the source itself where it is of none."""
        return self._of_source.get(source_id, source_id)

    def passages(self, article: str) -> Sequence[str]:
        """Ids of an article's passages, in their order; none of an article that is not there."""
        return self._passages.get(self._known_as.get(article, article), ())

    def gold(self, question: Question) -> set[str]:
        """The articles that answer a question, whether they are there or not."""
        return {self._known_as.get(name, name) for name in answering_articles(question)}

    def ranked(self, ranking: Ranking) -> Ranking:
        """A ranking of sources as one of their articles, each with the score of its first."""
        scores: dict[str, float] = {}
        for source, score in zip(ranking.sources, ranking.scores, strict=True):
            scores.setdefault(self.of(source), score)
        return Ranking(ranking.question_id, tuple(scores), tuple(scores.values()))


def _texts(extra: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    found: list[str] = []
    for key in keys:
        value = extra.get(key)
        several = value if isinstance(value, list) else [value]
        found += [text for text in several if isinstance(text, str) and text]
    return list(dict.fromkeys(found))
