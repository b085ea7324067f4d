"""Encoders and rerankers beside each other on a corpus' questions, with paired significance.

python -m tests.bench.tuned_encoders DATA NAME=MODEL NAME=MODEL ... [--questions=N] [--sources=N]

MODEL is what `mmqa embed --model` takes, or MODEL+RERANKER: the reranker (`mmqa rerank --model`)
orders the first sources of the encoder by its log-odds and a weight times the encoder's score. The
weight is the one of _WEIGHTS with the best mean reciprocal rank on the split val; MODEL+RERANKER+W
gives it. Questions lie evenly over the split; they search their own gold sources and negatives with
further sources, evenly over the corpus. With --keep each model is a folder there that `mmqa compare`
reads; --pairs of that corrects over several data sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from mmqa_jax.core.files import write_json, write_jsonl
from mmqa_jax.data.corpus import Corpus, evenly, open_corpus
from mmqa_jax.data.schema import Ranking
from mmqa_jax.evaluation.compare import ScoredRun, compare_runs, compare_tables
from mmqa_jax.evaluation.tables import show
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.late_interaction import dense_retriever
from mmqa_jax.retrieval.rankings import by_score, find_candidates
from mmqa_jax.tasks.embedder import open_embedder
from mmqa_jax.tasks.rerank import open_reranker
from mmqa_jax.tasks.task import part_of

_TOP = 50  # sources of a ranking; a gold one behind them counts as none
_WEIGHTS = (0.0, *(2.0**power for power in range(9)))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each model's mean reciprocal rank and the differences from the first model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--split", default="test")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--reranked", type=int, default=10, help="first sources that are reranked")
    parser.add_argument("--keep", type=Path, help="folder of a folder for each model")
    arguments = parser.parse_args(argv)
    corpus = open_corpus(arguments.data)
    samples = {
        split: Sample(corpus, split, arguments.questions, arguments.sources, arguments.reranked)
        for split in ("val", arguments.split)
    }
    asked = samples[arguments.split]
    runs = []
    for named in arguments.models:
        name, _, model = named.partition("=")
        values = reciprocal_ranks(model, asked, samples["val"])
        runs.append(scored_run(name, arguments.data, arguments.split, values))
        if arguments.keep is not None:
            keep(runs[-1], arguments.keep / name)
    print(f"{len(asked.questions)} questions search {len(asked.pool)} sources")
    for table in compare_tables(compare_runs(runs, "mrr", against_first=True)):
        show(table)


class Sample:
    """Questions of a split and the sources that they search.

    Args:
      count: of the questions, evenly over the split.
      sources: of the corpus that are searched beside the questions' own.
      reranked: the first sources of a ranking that rerankers order.

    Attributes:
      found_by: encoder -> the rankings that it gave.
      judged_by: (encoder, reranker) -> the first sources with the reranker's scores.
    """

    def __init__(self, corpus: Corpus, split: str, count: int, sources: int, reranked: int):
        asked = [question for question in corpus.questions(split) if question.positives]
        self.questions = evenly(asked, count)
        own = [row for question in self.questions for row in corpus.candidates(question)]
        self.pool = part_of(corpus, [*own, *evenly(range(len(corpus)), sources)])
        self._reranked = reranked
        self.found_by: dict[str, list[Ranking]] = {}
        self.judged_by: dict[tuple[str, str], list[Ranking]] = {}

    def found(self, encoder: str) -> list[Ranking]:
        """The first _TOP sources by an encoder."""
        if encoder not in self.found_by:
            embedder, pictures = open_embedder(Path(encoder), self.pool)
            vectors = embedder.embed_rows(self.pool, pictures, range(len(self.pool)))
            index = ExactIndex(Embeddings(vectors, "", self.pool.fingerprint))
            retriever = dense_retriever(self.pool, embedder, index, pictures)
            self.found_by[encoder] = find_candidates(self.questions, retriever, _TOP)
        return self.found_by[encoder]

    def reordered(self, encoder: str, reranker: str, weight: float) -> list[Ranking]:
        """These rankings with their first sources in the order of a reranker."""
        heads, key = [self._head(x) for x in self.found(encoder)], (encoder, reranker)
        if key not in self.judged_by:
            model = open_reranker(Path(reranker), self.pool)
            self.judged_by[key] = model.score(self.questions, heads)
        made = []
        for ranking, head, judged in zip(
            self.found(encoder), heads, self.judged_by[key], strict=True
        ):
            odds = dict(zip(judged.sources, _log_odds(judged.scores), strict=True))
            pairs = zip(head.sources, head.scores, strict=True)
            best = by_score(head.question_id, {x: odds[x] + weight * y for x, y in pairs}).sources
            behind = ranking.sources[len(best) :]
            none = (0.0,) * len(ranking.sources)
            made.append(Ranking(ranking.question_id, (*best, *behind), none))
        return made

    def _head(self, ranking: Ranking) -> Ranking:
        count = self._reranked
        return Ranking(ranking.question_id, ranking.sources[:count], ranking.scores[:count])

    def values(self, rankings: Sequence[Ranking]) -> dict[str, float]:
        """By question: 1 / the rank of its first gold source, 0 behind the first _TOP."""
        values = {}
        for question, ranking in zip(self.questions, rankings, strict=True):
            ranks = [n for n, name in enumerate(ranking.sources, 1) if name in question.positives]
            values[question.id] = 1 / ranks[0] if ranks else 0.0
        return values


def reciprocal_ranks(model: str, asked: Sample, val: Sample) -> dict[str, float]:
    """By question: 1 / the rank of its first gold source; a weight that is not given is chosen on
    `val`."""
    encoder, *reranking = model.split("+")
    if not reranking:
        return asked.values(asked.found(encoder))
    reranker, *given = reranking
    weights = [float(weight) for weight in given] or _WEIGHTS
    means = {
        weight: fmean(val.values(val.reordered(encoder, reranker, weight)).values())
        for weight in (weights if len(weights) > 1 else ())
    }
    if means:
        alone = fmean(val.values(val.found(encoder)).values())
        shown = ", ".join(f"{weight:g}: {mean:.4f}" for weight, mean in means.items())
        print(f"{model}: val, {alone:.4f} by the encoder alone; by weight {shown}")
    weight = max(means, key=means.__getitem__) if means else weights[0]
    return asked.values(asked.reordered(encoder, reranker, weight))


def scored_run(name: str, data: str, split: str, values: Mapping[str, float]) -> ScoredRun:
    """Reciprocal ranks as `compare_runs` takes them."""
    described = {"dataset": data, "split": split, "scores": {"mrr": fmean(values.values())}}
    return ScoredRun(name, described, {question: {"mrr": x} for question, x in values.items()})


def keep(run: ScoredRun, folder: Path) -> None:
    """Writes the files that `mmqa compare` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[Mapping[str, object]] = [
        {"question_id": question, "scores": scores} for question, scores in run.per_question.items()
    ]
    write_jsonl(folder / "per_question.jsonl", lines)
    write_json(folder / "scores.json", dict(run.scores))


def _log_odds(scores: Sequence[float]) -> np.ndarray:
    p = np.clip(np.asarray(scores, np.float64), 1e-12, 1 - 1e-12)
    return np.log(p) - np.log1p(-p)


if __name__ == "__main__":
    main()
