"""Encoders and rerankers beside each other on a corpus' questions, with paired significance.

python -m tests.bench.tuned_encoders DATA NAME=MODEL NAME=MODEL ... [--questions=N] [--sources=N]

MODEL is what `mmqa embed --model` takes, or MODEL+RERANKER+WEIGHT: the reranker (`mmqa rerank
--model`) orders the first sources of the encoder by its log-odds and WEIGHT times the encoder's
score. Questions lie evenly over the split; they search their own gold sources and negatives with
further sources, evenly over the corpus.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.data.corpus import Corpus, evenly, open_corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.evaluation.compare import ScoredRun, compare_runs, compare_tables
from mmqa_jax.evaluation.tables import show
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.late_interaction import dense_retriever
from mmqa_jax.retrieval.rankings import find_candidates
from mmqa_jax.tasks.embedder import open_embedder
from mmqa_jax.tasks.rerank import open_reranker
from mmqa_jax.tasks.task import part_of

_TOP = 50  # sources of a ranking; a gold one behind them counts as none


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each encoder's mean reciprocal rank and the differences from the first encoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--split", default="test")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--reranked", type=int, default=10, help="first sources that are reranked")
    arguments = parser.parse_args(argv)
    corpus = open_corpus(arguments.data)
    asked = [question for question in corpus.questions(arguments.split) if question.positives]
    questions = evenly(asked, arguments.questions)
    own = [row for question in questions for row in corpus.candidates(question)]
    pool = part_of(corpus, [*own, *evenly(range(len(corpus)), arguments.sources)])
    runs = []
    for named in arguments.models:
        name, _, model = named.partition("=")
        values = reciprocal_ranks(model, questions, pool, arguments.reranked)
        scores = {"mrr": sum(values.values()) / len(values)}
        described = {"dataset": arguments.data, "split": arguments.split, "scores": scores}
        of_questions = {question: {"mrr": value} for question, value in values.items()}
        runs.append(ScoredRun(name, described, of_questions))
    print(f"{len(questions)} questions search {len(pool)} sources")
    for table in compare_tables(compare_runs(runs, "mrr", against_first=True)):
        show(table)


def reciprocal_ranks(
    model: str, questions: Sequence[Question], pool: Corpus, first: int
) -> dict[str, float]:
    """By question: 1 / the rank of its first gold source, 0 behind the first _TOP."""
    encoder, _, reranker = model.partition("+")
    rankings = found(Path(encoder), questions, pool)
    if reranker:
        place, _, weight = reranker.partition("+")
        rankings = reordered(Path(place), float(weight or 0), questions, rankings, pool, first)
    values = {}
    for question, ranking in zip(questions, rankings, strict=True):
        ranks = [n for n, name in enumerate(ranking.sources, 1) if name in question.positives]
        values[question.id] = 1 / ranks[0] if ranks else 0.0
    return values


def found(model: Path, questions: Sequence[Question], pool: Corpus) -> list[Ranking]:
    """The first _TOP sources by an encoder."""
    embedder, pictures = open_embedder(model, pool)
    vectors = embedder.embed_rows(pool, pictures, range(len(pool)))
    index = ExactIndex(Embeddings(vectors, "", pool.fingerprint))
    return find_candidates(questions, dense_retriever(pool, embedder, index, pictures), _TOP)


def reordered(
    model: Path,
    weight: float,
    questions: Sequence[Question],
    rankings: Sequence[Ranking],
    pool: Corpus,
    first: int,
) -> list[Ranking]:
    """The rankings with their first sources in the order of a reranker."""
    heads = [Ranking(x.question_id, x.sources[:first], x.scores[:first]) for x in rankings]
    scored = open_reranker(model, pool).score(questions, heads)
    made = []
    for ranking, head, by_model in zip(rankings, heads, scored, strict=True):
        odds = dict(zip(by_model.sources, _log_odds(by_model.scores), strict=True))
        values = {
            name: odds[name] + weight * score
            for name, score in zip(head.sources, head.scores, strict=True)
        }
        best = sorted(values, key=lambda name: -values[name])
        rest = ranking.sources[first:]
        scores = (0.0,) * len(ranking.sources)
        made.append(Ranking(ranking.question_id, (*best, *rest), scores))
    return made


def _log_odds(scores: Sequence[float]) -> np.ndarray:
    p = np.clip(np.asarray(scores, np.float64), 1e-12, 1 - 1e-12)
    return np.log(p) - np.log1p(-p)


if __name__ == "__main__":
    main()
