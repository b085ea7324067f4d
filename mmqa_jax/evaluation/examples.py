"""Example questions of a report, with their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.report import Example, ExampleAnswer, ExampleSource

_SHOWN = 6  # sources per ranking


def evenly_by_category(questions: Sequence[Question], count: int) -> list[int]:
    """Indices of about `count` questions: the first few of each category, equally many."""
    groups: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.category, []).append(i)
    per_category = -(-count // max(len(groups), 1))
    return [i for category in sorted(groups) for i in groups[category][:per_category]]


def example(
    corpus: Corpus,
    question: Question,
    answers: Mapping[str, tuple[Prediction, Mapping[str, float]]],
    ranking: Ranking,
    cited: Sequence[str],
) -> Example:
    """One question of a report.

    Args:
      answers: setting -> its prediction and that prediction's scores.
      ranking: the sources to show, best first; missing gold sources are added.
      cited: ids of the sources that the shown answer cites.
    """
    top = list(zip(ranking.sources[:_SHOWN], ranking.scores[:_SHOWN], strict=True))
    sources = [
        _source(corpus, question, name, rank, score, name in cited)
        for rank, (name, score) in enumerate(top, start=1)
    ]
    listed = {name for name, _ in top}
    ranks = {name: rank for rank, name in enumerate(ranking.sources, start=1)}
    sources += [
        _source(corpus, question, name, ranks.get(name), None, name in cited)
        for name in question.positives
        if name not in listed
    ]
    return Example(
        question=question.question,
        category=question.category,
        answers=[
            ExampleAnswer(setting, prediction.answer, scores)
            for setting, (prediction, scores) in answers.items()
        ],
        references=question.answers,
        keywords=question.keywords,
        sources=sources,
        picture=corpus.question_picture(question),
        id=question.id,
    )


def _source(
    corpus: Corpus,
    question: Question,
    name: str,
    rank: int | None,
    score: float | None,
    cited: bool,
) -> ExampleSource:
    row = corpus.row[name]
    source = corpus.sources[row]
    return ExampleSource(
        id=name,
        text=source.text,
        title=source.title,
        picture=corpus.picture(row),
        rank=rank,
        score=score,
        cited=cited,
        gold=name in question.positives,
    )
