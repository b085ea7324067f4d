"""Articles of an encyclopedia: which one a source is of, and which ones answer a question.

A source is a passage or a picture of an article. Its article is named by a key of its `extra`, the
first of NAMES that it has, as `mmqa prepare infoseek_wiki` and `wikipedia` write them. A question
names its articles by `wikipedia_url` (Encyclopedic-VQA) or `entity_id` (InfoSeek).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mmqa_jax.data.schema import Question, Ranking, Source

# Keys of Source.extra that name its article, the one that results name it by first.
NAMES = ("article", "url", "wikidata")
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
    """The articles of a collection.

    What a source is of is read from the source; the passages of all articles are looked up in one
    pass over the sources, when they are first asked for, and kept as ranges of rows.

    Args:
      sources: of the collection, in memory or on disk.
      row: source id -> its row.
      names_of: see NamesOf.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        row: Mapping[str, int],
        names_of: NamesOf = article_names,
    ):
        self._sources, self._row, self._names_of = sources, row, names_of

    def of(self, source_id: str) -> str:
        """The article of a source; the source itself where it is of none."""
        return self._names(source_id)[0]

    def passages(self, article: str) -> list[str]:
        """Ids of an article's passages, in their order; none of an article that is not there."""
        rows = (row for run in self._runs.get(article, ()) for row in run)
        own = (self._sources[row] for row in rows)
        return [source.id for source in own if source.modality == "text"]

    def ranked(self, ranking: Ranking, gold: Collection[str] = ()) -> Ranking:
        """A ranking of sources as one of their articles, each with the score of its first.

        Args:
          gold: names by which an article goes, if it has one of them.
        """
        scores: dict[str, float] = {}
        for source, score in zip(ranking.sources, ranking.scores, strict=True):
            names = self._names(source)
            scores.setdefault(next((name for name in names if name in gold), names[0]), score)
        return Ranking(ranking.question_id, tuple(scores), tuple(scores.values()))

    def _names(self, source_id: str) -> Sequence[str]:
        return self._names_of(self._sources[self._row[source_id]]) or [source_id]

    @functools.cached_property
    def _runs(self) -> Mapping[str, list[range]]:
        """An article by each of its names -> the rows of its sources, which mostly follow."""
        runs: dict[str, list[range]] = {}
        for row, source in enumerate(self._sources):
            names = self._names_of(source)
            if not names:
                continue
            own = next((runs[name] for name in names if name in runs), [])
            if own and own[-1].stop == row:
                own[-1] = range(own[-1].start, row + 1)
            else:
                own.append(range(row, row + 1))
            for name in names:
                runs.setdefault(name, own)
        return runs


def _texts(extra: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    found: list[str] = []
    for key in keys:
        value = extra.get(key)
        several = value if isinstance(value, list) else [value]
        found += [text for text in several if isinstance(text, str) and text]
    return list(dict.fromkeys(found))
