"""Encoders beside each other on a corpus' questions, with paired significance.

python -m tests.bench.tuned_encoders DATA NAME=MODEL NAME=MODEL ... [--questions=N] [--sources=N]

MODEL is what `mmqa embed --model` takes. Questions lie evenly over the split; they search their own
gold sources and negatives with further sources, evenly over the corpus.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mmqa_jax.data.corpus import Corpus, evenly, open_corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.compare import ScoredRun, compare_runs, compare_tables
from mmqa_jax.evaluation.tables import show
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.late_interaction import dense_retriever
from mmqa_jax.retrieval.rankings import find_candidates
from mmqa_jax.tasks.embedder import open_embedder
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
    arguments = parser.parse_args(argv)
    corpus = open_corpus(arguments.data)
    asked = [question for question in corpus.questions(arguments.split) if question.positives]
    questions = evenly(asked, arguments.questions)
    own = [row for question in questions for row in corpus.candidates(question)]
    pool = part_of(corpus, [*own, *evenly(range(len(corpus)), arguments.sources)])
    runs = []
    for named in arguments.models:
        name, _, model = named.partition("=")
        values = reciprocal_ranks(Path(model), questions, pool)
        scores = {"mrr": sum(values.values()) / len(values)}
        described = {"dataset": arguments.data, "split": arguments.split, "scores": scores}
        of_questions = {question: {"mrr": value} for question, value in values.items()}
        runs.append(ScoredRun(name, described, of_questions))
    print(f"{len(questions)} questions search {len(pool)} sources")
    for table in compare_tables(compare_runs(runs, "mrr", against_first=True)):
        show(table)


def reciprocal_ranks(model: Path, questions: Sequence[Question], pool: Corpus) -> dict[str, float]:
    """By question: 1 / the rank of its first gold source, 0 behind the first _TOP."""
    embedder, pictures = open_embedder(model, pool)
    vectors = embedder.embed_rows(pool, pictures, range(len(pool)))
    index = ExactIndex(Embeddings(vectors, "", pool.fingerprint))
    rankings = find_candidates(questions, dense_retriever(pool, embedder, index, pictures), _TOP)
    values = {}
    for question, ranking in zip(questions, rankings, strict=True):
        ranks = [n for n, name in enumerate(ranking.sources, 1) if name in question.positives]
        values[question.id] = 1 / ranks[0] if ranks else 0.0
    return values


if __name__ == "__main__":
    main()
