"""Statistics of a corpus as the WebQA paper gives them: tables 3 and 4, section 4, figures 2 and 3.

Lengths are in words between blanks. Whether a question needs a picture or a snippet is told by its
category, or else by its gold sources. Appendix C's coverage: how many answers' keywords a
classifier over the most frequent ones of train could give at all.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.official import HAS_PICTURE
from mmqa_jax.data.formats.webqa import has_keywords
from mmqa_jax.data.schema import SPLITS, Question, category_modality
from mmqa_jax.evaluation.report import LinePlot
from mmqa_jax.evaluation.tables import Cell, Table

MODALITIES = ("image", "text")
_SHOWN = 20  # most frequent prefixes and topics
_PREFIX = 3  # words of a question's beginning
_TOPIC = "topic"  # key of Question.extra, of WebQA's release
_COVERED_BY = (1, 10, 100, 1_000, 5_000)  # most frequent keywords

_LENGTHS = (
    *("question", "answer", "gold descriptions", "other descriptions"),
    *("gold snippets", "other snippets"),
)
# WebQA: table 4 (questions of train, val, test); table 3 (words, mean and deviation); sections
# 4.1, 4.2, 4.4 (gold sources of a question, its other snippets, its other pictures, share of
# questions with two gold sources or more).
PUBLISHED_QUESTIONS = {"image": (18_954, 2_511, 3_464), "text": (17_812, 2_455, 4_076)}
PUBLISHED_LENGTHS = {
    "image": ((16.4, 6), (14.4, 6), (13.3, 11), (12.6, 11), None, (36.4, 10)),
    "text": ((18.6, 8), (10.7, 10), None, (14.1, 13), (45.3, 12), (38.3, 10)),
}
PUBLISHED_SOURCES = {"image": (1.4, 15.3, 15.9, 0.44), "text": (2.0, 14.6, 11.6, 0.99)}


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of n values; `–` where there are none."""

    n: int
    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Summarizes values; None if there are none."""
        if not values:
            return None
        return cls(len(values), float(np.mean(values)), float(np.std(values)))

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.deviation:.0f}"


@dataclasses.dataclass(frozen=True)
class CorpusStatistics:
    """The statistics of a corpus, each by the modality that questions need."""

    questions: Mapping[str, Mapping[str, int]]  # modality -> split -> how many
    lengths: Mapping[str, Mapping[str, Spread | None]]  # modality -> text -> words
    # Modality -> gold sources, other snippets and other pictures of a question (means), and the
    # share of questions with two gold sources or more; of those with gold sources.
    sources: Mapping[str, tuple[float, float, float, float]]
    # prefixes, topics: modality -> the most frequent, with their counts.
    prefixes: Mapping[str, Sequence[tuple[str, int]]]
    topics: Mapping[str, Sequence[tuple[str, int]]]
    # How many of train's most frequent keywords of image questions -> the share of `coverage_of`
    # whose keywords are among them; empty where either has none.
    coverage: Mapping[int, float]
    coverage_of: str

    def to_json(self) -> dict[str, Any]:
        """Converts the statistics to JSON values."""
        return dataclasses.asdict(self)


def question_modality(question: Question, corpus: Corpus) -> str:
    """`image` or `text`: by its category, its gold sources, or whether it comes with a picture."""
    known = category_modality(question.category)
    if known is not None:
        return known
    gold = [corpus.sources[row].modality for row in corpus.positive_rows(question)]
    if gold:
        return "image" if "image" in gold else "text"
    return "image" if question.extra.get(HAS_PICTURE, question.image is not None) else "text"


def corpus_statistics(corpus: Corpus) -> CorpusStatistics:
    """The statistics of all questions of a corpus and the sources that they list."""
    by_modality: dict[str, list[Question]] = {modality: [] for modality in MODALITIES}
    for question in corpus.questions():
        by_modality[question_modality(question, corpus)].append(question)
    asked = {modality: questions for modality, questions in by_modality.items() if questions}
    coverage_of, coverage = keyword_coverage(by_modality["image"])
    return CorpusStatistics(
        questions={
            modality: {split: sum(q.split == split for q in questions) for split in SPLITS}
            for modality, questions in asked.items()
        },
        lengths={modality: _lengths(questions, corpus) for modality, questions in asked.items()},
        sources={
            modality: counted
            for modality, questions in asked.items()
            if (counted := _sources(questions, corpus)) is not None
        },
        prefixes={
            modality: _most_frequent(map(_prefix, questions))
            for modality, questions in asked.items()
        },
        topics={
            modality: topics
            for modality, questions in asked.items()
            if (topics := _most_frequent(str(q.extra.get(_TOPIC, "")) for q in questions))
        },
        coverage=coverage,
        coverage_of=coverage_of,
    )


def keyword_coverage(questions: Sequence[Question]) -> tuple[str, dict[int, float]]:
    """Appendix C: the split, and k -> the share of its questions that train's k keywords cover.

    A question's keywords are one class, in lower case. The split is test, or val where test hides
    its keywords. k are _COVERED_BY and, last, all that train has.
    """
    known = [q for q in questions if has_keywords(q)]
    classes = collections.Counter(_class(q) for q in known if q.split == "train")
    for split in ("test", "val"):
        asked = [_class(q) for q in known if q.split == split]
        if classes and asked:
            ranks = {name: rank for rank, (name, _) in enumerate(classes.most_common())}
            places = np.array([ranks.get(name, len(ranks)) for name in asked])
            ks = [k for k in _COVERED_BY if k < len(ranks)] + [len(ranks)]
            return split, {k: float((places < k).mean()) for k in ks}
    return "", {}


def _class(question: Question) -> str:
    return " ".join(question.keywords.lower().split())


def _lengths(questions: Sequence[Question], corpus: Corpus) -> dict[str, Spread | None]:
    words: dict[str, list[int]] = {name: [] for name in _LENGTHS}
    for question in questions:
        words["question"].append(_words(question.question))
        words["answer"] += [_words(answer) for answer in question.answers[:1]]
        for kind, rows in (
            ("gold", corpus.positive_rows(question)),
            ("other", corpus.negative_rows(question) if question.positives else []),
        ):
            for source in (corpus.sources[row] for row in rows):
                what = "descriptions" if source.modality == "image" else "snippets"
                words[f"{kind} {what}"].append(_words(source.text))
    return {name: Spread.of(values) for name, values in words.items()}


def _sources(
    questions: Sequence[Question], corpus: Corpus
) -> tuple[float, float, float, float] | None:
    """See CorpusStatistics.sources; None where all gold sources are hidden."""
    with_gold = [q for q in questions if q.positives]
    if not with_gold:
        return None
    gold = np.array([len(q.positives) for q in with_gold])
    others = collections.Counter(
        corpus.sources[row].modality for q in with_gold for row in corpus.negative_rows(q)
    )
    n = len(with_gold)
    return float(gold.mean()), others["text"] / n, others["image"] / n, float((gold > 1).mean())


def _words(text: str) -> int:
    return len(text.split())


def _prefix(question: Question) -> str:
    return " ".join(question.question.replace('"', "").lower().split()[:_PREFIX])


def _most_frequent(texts: Iterable[str]) -> list[tuple[str, int]]:
    return collections.Counter(filter(None, texts)).most_common(_SHOWN)


def statistics_tables(statistics: CorpusStatistics, *, published: bool = False) -> list[Table]:
    """The statistics as tables; WebQA's `published` figures stand in a line below each."""
    tables = [_questions_table(statistics, published), _lengths_table(statistics, published)]
    if statistics.sources:
        tables.append(_sources_table(statistics, published))
    if statistics.coverage:
        rows: list[list[Cell]] = [[k, share] for k, share in statistics.coverage.items()]
        note = (
            f"Share of the image questions of {statistics.coverage_of} whose keywords are among "
            "the k most frequent of train's image questions; the last k is all of them."
            + (" WebQA's appendix C: about .70 of test by all (over 5,000)." if published else "")
        )
        tables.append(Table("Keyword coverage (appendix C)", ("k", "covered"), rows, note))
    for title, counted in (
        (f"First {_PREFIX} words of questions (figure 2)", statistics.prefixes),
        ("Topics (figure 3)", statistics.topics),
    ):
        for modality, pairs in counted.items():
            total = sum(statistics.questions[modality].values())
            rows = [[name, n, n / total] for name, n in pairs]
            columns = ("", "questions", "share")
            tables.append(Table(f"{title}: {modality} questions", columns, rows))
    return tables


def _by_modality(
    title: str,
    columns: Sequence[str],
    counted: Mapping[str, Iterable[Cell]],
    published: Mapping[str, Iterable[Cell]] | None,
    note: str = "",
) -> Table:
    """A line for each modality, and WebQA's figures below it."""
    rows: list[list[Cell]] = []
    for modality, cells in counted.items():
        rows.append([modality, *cells])
        if published:
            rows.append([f"{modality}, published", *published[modality]])
    return Table(title, ("modality", *columns), rows, note)


def _questions_table(statistics: CorpusStatistics, published: bool) -> Table:
    counted = {modality: counts.values() for modality, counts in statistics.questions.items()}
    theirs = PUBLISHED_QUESTIONS if published else None
    return _by_modality("Questions (table 4)", SPLITS, counted, theirs)


def _lengths_table(statistics: CorpusStatistics, published: bool) -> Table:
    counted = {
        modality: [spread and str(spread) for spread in lengths.values()]
        for modality, lengths in statistics.lengths.items()
    }
    theirs = {
        modality: [pair and f"{pair[0]} ± {pair[1]}" for pair in pairs]
        for modality, pairs in PUBLISHED_LENGTHS.items()
    }
    note = (
        "Words between blanks, mean ± standard deviation over all splits: of a question's first "
        "answer, and of the sources that questions with known gold sources list."
    )
    title = "Lengths in words (table 3)"
    return _by_modality(title, _LENGTHS, counted, theirs if published else None, note)


def _sources_table(statistics: CorpusStatistics, published: bool) -> Table:
    columns = ("gold sources", "other snippets", "other pictures", "two or more gold")
    note = "Means over the questions whose gold sources are known."
    title = "Sources of a question (sections 4.1, 4.2, 4.4)"
    theirs = PUBLISHED_SOURCES if published else None
    return _by_modality(title, columns, statistics.sources, theirs, note)


def statistics_plots(statistics: CorpusStatistics) -> list[LinePlot]:
    """Appendix C's curve, if there are keywords."""
    if len(statistics.coverage) < 2:
        return []
    lines = {f"image questions of {statistics.coverage_of}": list(statistics.coverage.items())}
    return [LinePlot("Keyword coverage", "k (most frequent keywords of train)", lines, log=True)]
