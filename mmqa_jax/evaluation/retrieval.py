"""Retrieval metrics over rankings of source ids: recall@k, hit@k, MRR, nDCG@k."""

import dataclasses
import glob
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.data.articles import Articles, answering_articles
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking, Source
from mmqa_jax.evaluation.scores import Scores, hop_groups, read_answers
from mmqa_jax.evaluation.tables import Table, show
from mmqa_jax.evaluation.webqa import source_f1
from mmqa_jax.retrieval.modality import MODALITIES, gold_modality
from mmqa_jax.retrieval.rankings import holds_rankings, is_run, read_rankings

# The nine values of WebQA's CLIP retrieval (vlp/CLIP_retrieval_experiments), and 1 and 5.
KS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


@dataclasses.dataclass(frozen=True)
class RetrievalScores:
    """Per-question retrieval scores; `scores` averages them."""

    rows: tuple[int, ...]  # input indices of the questions that have gold sources
    excluded: int  # how many questions have none and are left out
    # `recall@5`, `hit_any@5`, `hit_all@5`, `ndcg@5` (for every k) and `mrr` -> float64 array
    # aligned with `rows`.
    per_question: Mapping[str, np.ndarray]

    @property
    def n(self) -> int:
        """How many questions were scored."""
        return len(self.rows)

    @property
    def scores(self) -> dict[str, float]:
        """Metric -> mean over the scored questions."""
        return {name: float(values.mean()) for name, values in self.per_question.items()}

    def of(self, questions: Sequence[Question], prefix: str = "") -> Scores:
        """Recall and MRR as the scores of these questions; `prefix` begins their names."""
        scored = [questions[row] for row in self.rows]
        metrics = self.per_question.items()
        return Scores(
            tuple(question.id for question in scored),
            tuple(question.category for question in scored),
            {prefix + name: x for name, x in metrics if name.startswith(("recall", "mrr"))},
            unscored=self.excluded,
            groups=hop_groups(scored),
        )


def score_rankings(
    gold: Sequence[Collection[str]],
    rankings: Sequence[Sequence[str]],
    ks: Sequence[int] | None = None,
) -> RetrievalScores:
    """Scores one ranking (best first) per question against its gold sources.

    recall@k is the fraction of a question's gold sources among the top k; hit_any@k and hit_all@k
    are 1 if at least one or all of them are; mrr is one over the rank of the first gold source, 0
    if none is ranked. ndcg@k is trec_eval's: a gold source gains 1, or its relevance where they
    differ, and the ideal ranking has the best k. A source ranked twice counts at its first rank.

    `ks` defaults to the values of KS up to the longest ranking: recall@1000 of a hundred sources
    would be the same as their recall@100.

    Args:
      gold: of every question its gold sources, or its relevant sources -> relevance above 0.
      rankings: of every question its sources.

    Raises:
      TypeError: a question's sources are one text.
    """
    for sources in (*gold, *rankings):
        check_several(sources, "score_rankings: the sources of a question", "source ids")
    if len(gold) != len(rankings):
        raise UserError(
            f"{len(gold)} questions but {len(rankings)} rankings; give one ranking per question, "
            "an empty one if nothing was found."
        )
    if ks is None:
        ks = ks_up_to(max(map(len, rankings), default=0))
    if any(k < 1 for k in ks):
        raise UserError(f"recall@k: k must be 1 or more, not {min(ks)}; change the list of ks.")
    rows = tuple(row for row, sources in enumerate(gold) if sources)
    if not rows:
        raise UserError(
            f"none of the {len(gold)} questions has gold sources; retrieval cannot be scored on "
            "this split."
        )
    relevance = [_relevance(gold[row]) for row in rows]
    places = [_places(of, rankings[row]) for of, row in zip(relevance, rows, strict=True)]
    sizes = np.array([len(of) for of in relevance])
    best = [np.sort([*of.values()])[::-1] for of in relevance]  # gains of the ideal ranking

    per_question: dict[str, np.ndarray] = {}
    for k in ks:
        hits = np.array([(ranks <= k).sum() for ranks, _ in places])
        gain = np.array([_discounted(ranks[ranks <= k], of[ranks <= k]) for ranks, of in places])
        ideal = np.array([_discounted(np.arange(1, len(of[:k]) + 1), of[:k]) for of in best])
        per_question[f"recall@{k}"] = hits / sizes
        per_question[f"hit_any@{k}"] = (hits > 0).astype(np.float64)
        per_question[f"hit_all@{k}"] = (hits == sizes).astype(np.float64)
        per_question[f"ndcg@{k}"] = gain / ideal
    per_question["mrr"] = np.array([1 / ranks[0] if len(ranks) else 0.0 for ranks, _ in places])
    return RetrievalScores(rows, len(gold) - len(rows), per_question)


def ks_up_to(depth: int) -> list[int]:
    """The values of KS that rankings of `depth` sources tell, 1 at least."""
    return [k for k in KS if k <= max(depth, 1)]


def _relevance(gold: Collection[str]) -> dict[str, float]:
    """The gold sources of a question with their gains."""
    return dict(gold) if isinstance(gold, Mapping) else dict.fromkeys(gold, 1.0)


def _places(
    relevance: Mapping[str, float], ranking: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """1-based ranks of the gold sources that were ranked, ascending, and their gains."""
    first: dict[str, int] = {}
    for rank, source in enumerate(ranking, start=1):
        if source in relevance:
            first.setdefault(source, rank)
    gains = np.array([relevance[source] for source in first], np.float64)
    return np.array([*first.values()], np.int64), gains


def _discounted(ranks: np.ndarray, gains: np.ndarray) -> float:
    return float((gains / np.log2(ranks + 1)).sum())


# Retrieval scores by modality: recall@k, as numbers and as a table.


def score_retrieval(
    corpus: Corpus, questions: Sequence[Question], rankings: Sequence[Ranking], top_k: int = 0
) -> dict[str, Any]:
    """recall@k and the source F1 of the top two, over all questions and by gold modality.

    recall@k is given up to `top_k`, how many sources were looked for, which may be more than were
    found (BM25), and up to the longest ranking. Without gold sources, as in WebQA's test split,
    `recall` is empty; else there are also `questions_scored`, `source_f1_top_2` and, under
    `by_modality`, the same per modality.
    """
    gold = [gold_modality(question, corpus) for question in questions]
    groups = {"": list(range(len(questions)))}
    groups |= {name: [i for i, kind in enumerate(gold) if kind == name] for name in MODALITIES}
    ks = ks_up_to(max([top_k, *(len(ranking.sources) for ranking in rankings)]))
    scored = {}
    for name, members in groups.items():
        subset = [questions[i] for i in members]
        if any(question.positives for question in subset):
            scored[name] = _scores(subset, [rankings[i] for i in members], ks)
    if not scored:
        return {"recall": {}}
    return {**scored.pop(""), "by_modality": scored}


def score_modality(
    questions: Sequence[Question], corpus: Corpus, rankings: Sequence[Ranking]
) -> Scores:
    """`modality_accuracy`: whether a question was searched in the modality that it needs.

    The rankings are of a retriever that searched one modality per question, that of its first
    source; an empty one counts as wrong. Questions that need both, or of unknown need, are left
    out.
    """
    gold = [gold_modality(question, corpus) for question in questions]
    known = [i for i, kind in enumerate(gold) if kind is not None]
    searched = [
        corpus.sources[corpus.row[ranking.sources[0]]].modality if ranking.sources else None
        for ranking in rankings
    ]
    return Scores(
        tuple(questions[i].id for i in known),
        tuple(questions[i].category for i in known),
        {"modality_accuracy": np.array([float(searched[i] == gold[i]) for i in known])},
        unscored=len(questions) - len(known),
    )


def show_retrieval(title: str, scored: Mapping[str, Any], *, markdown: bool = False) -> None:
    """Prints the result of `score_retrieval`: a column for all questions and for each modality."""
    if not scored["recall"]:
        return
    groups = {"all": scored, **scored["by_modality"]}
    columns = [f"{name} ({group['questions_scored']:,})" for name, group in groups.items()]
    rows = [
        [name, *(group["recall"].get(name) for group in groups.values())]
        for name in scored["recall"]
    ]
    rows.append(["source F1, top 2", *(group["source_f1_top_2"] for group in groups.values())])
    note = "Questions by the modality of their gold sources." if len(groups) > 2 else ""
    show(Table(title, ["", *columns], rows, note), markdown=markdown)


def show_rankings(title: str, scored: RetrievalScores, *, markdown: bool = False) -> None:
    """Prints scores of `score_rankings`: a row for each k, and mrr."""
    scores = scored.scores
    names = ("recall", "hit_any", "hit_all", "ndcg")
    ks = [name.partition("@")[2] for name in scores if name.startswith("recall@")]
    rows = [[f"@{k}", *(scores[f"{name}@{k}"] for name in names)] for k in ks]
    note = f"{scored.n:,} questions; mrr {scores['mrr']:.4f}."
    show(Table(title, ["", *names], rows, note), markdown=markdown)


def _scores(
    questions: Sequence[Question], rankings: Sequence[Ranking], ks: Sequence[int]
) -> dict[str, Any]:
    gold = [set(question.positives) for question in questions]
    scored = score_rankings(gold, [ranking.sources for ranking in rankings], ks)
    f1 = [
        source_f1(ranking.sources[:2], question.positives, variant="official")
        for question, ranking in zip(questions, rankings, strict=True)
        if question.positives
    ]
    return {
        "questions_scored": scored.n,
        "recall": {name: value for name, value in scored.scores.items() if "recall@" in name},
        "source_f1_top_2": float(np.mean(f1)),
    }


# Rankings as predictions: what benchmarks of retrieval score, whichever file they come from.


FORMATS = (
    "rankings of `mmqa search`, a run of TREC (.trec), UniIR's (_run.txt), predictions.jsonl of "
    "`mmqa run`, or a folder or pattern (*) of them"
)


def has_positives(question: Question) -> bool:
    """Whether the relevant sources of a question are known."""
    return bool(question.positives)


def read_found(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads each question's sources, best first, from all files of a folder or pattern."""
    predictions: dict[str, tuple[Path, Prediction]] = {}
    for file in _files(path):
        if holds_rankings(file):
            rows = [Prediction(x.question_id, "", x.sources, x.scores) for x in read_rankings(file)]
        else:
            rows = read_answers(file, question_ids={question.id for question in questions})
        for row in rows:
            other, _ = predictions.setdefault(row.question_id, (file, row))
            if other != file:
                raise UserError(
                    f"{file}: ranks question {row.question_id!r}, as {other} does; name the files "
                    "of one system and one pool."
                )
    return [row for _, row in predictions.values()]


def as_trec_orders(prediction: Prediction) -> tuple[str, ...]:
    """The sources as trec_eval orders them; as they are where there are no scores."""
    if not prediction.source_scores:
        return prediction.sources
    rounded = np.asarray(prediction.source_scores, np.float32).tolist()
    pairs = sorted(zip(rounded, prediction.sources, strict=True), reverse=True)
    return tuple(name for _, name in pairs)


def first_errors_table(
    name: str,
    corpus: Corpus,
    pairs: Sequence[tuple[Question, Prediction]],
    sets: Sequence[str],
    kinds: Sequence[str],
    kind_of: Callable[[Question, Source], str],
) -> list[Table]:
    """Tells by category, one of `sets`, of which of the `kinds` first sources are that are no
    positives; [] where all are.
    """
    wrong: dict[str, Counter[str]] = {category: Counter() for category in sets}
    for question, ranking in pairs:
        first = next(iter(ranking.sources), None)
        if first is None or not question.positives or first in question.positives:
            continue
        if first not in corpus.row:
            raise UserError(
                f"--references: candidate {first!r}, the first of query {question.id!r}, is not in "
                "that pool; name the corpus that was searched, or the pool of all sets."
            )
        source = corpus.sources[corpus.row[first]]
        wrong[question.category][kind_of(question, source)] += 1
    rows = [
        [category, counts.total(), *(counts[kind] / counts.total() for kind in kinds)]
        for category, counts in wrong.items()
        if counts.total()
    ]
    note = "Of the first candidates that are no positives; shares add up to 1."
    columns = ["", "wrong", *kinds]
    return [Table(f"{name}: errors at rank 1", columns, rows, note)] if rows else []


def average_note(means: Sequence[float], count: str, measure: str) -> str:
    """A note on the mean over a benchmark's sets; `count` says how many it has: `8 sets`."""
    return f"average of {len(means)} of {count}, {measure}: {100 * float(np.mean(means)):.2f} %"


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if is_run(file) or file.suffix == ".jsonl"]
    elif "*" in str(path):
        files = [Path(name) for name in sorted(glob.glob(str(path)))]
    else:
        return [path]
    if not files:
        raise UserError(f"{path}: no file of rankings is there; give {FORMATS}.")
    return files


# Retrieval of entities: whether the right article is among the first k.
#
# A ranking of passages or pictures counts by the articles that they are of, each at the rank of
# its first source, as EchoSight counts them (Go2Heart/EchoSight, test/test_reranker.py).


ARTICLE_KS = (1, 5, 10, 20, 50)
# Key of Prediction.trace: the articles that a system found -> the best source of each, best first.
ARTICLES = "articles"
PREFIX = "article_"  # before the names of score_rankings: article_recall@1, article_mrr


def know_articles(questions: Sequence[Question]) -> bool:
    """Whether the articles that answer any of the questions are known."""
    return any(map(answering_articles, questions))


def score_articles(
    articles: Articles, questions: Sequence[Question], rankings: Sequence[Ranking]
) -> Scores:
    """article_recall@k and article_mrr of rankings of sources; k goes up to the longest ranking.

    Of a question with two articles recall is the part found.
    """
    deepest = max([1, *(len(ranking.sources) for ranking in rankings)])
    gold = [set(answering_articles(question)) for question in questions]
    scored = score_rankings(
        gold,
        [
            articles.ranked(ranking, wanted).sources
            for ranking, wanted in zip(rankings, gold, strict=True)
        ],
        [k for k in ARTICLE_KS if k <= deepest],
    )
    return scored.of(questions, PREFIX)
