"""Recall of M-BEIR and of articles, and ViDoRe's nDCG, on random rankings."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmqa_jax.benchmarks.mbeir import SETS, official_k, score_mbeir
from mmqa_jax.benchmarks.vidore import GRADES, V1, V3, score_vidore
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.retrieval import score_rankings
from tests.fuzz_scorers.case import Case, Score
from tests.fuzz_scorers.official import definitions

_IDS = [f"d{number}" for number in range(40)]
_KS = (1, 5, 10, 20)
_SCORES = (0.0, 0.5, 0.5 + 1e-9, 0.25, -0.5, 1.0, 1 / 3, 0.1, 0.1 + 1e-8, 0.7)


def _draw_rankings(draw: random.Random) -> list[dict[str, Any]]:
    """Queries of M-BEIR's sets, each with a positive at least, and twenty candidates or fewer."""
    return [
        {
            "set": draw.choice(SETS),
            "gold": draw.sample(_IDS, draw.randint(1, 4)),
            "found": draw.sample(_IDS, draw.randint(0, 20)),
        }
        for _ in range(draw.randint(1, 12))
    ]


def _official_mbeir(file: Path) -> Score:
    """Mean recall at each k, and by set at the set's k."""
    recall = definitions(file, "compute_recall_at_k").compute_recall_at_k

    def score(given: list[dict[str, Any]]) -> dict[str, float]:
        def mean(rows: list[dict[str, Any]], k: int) -> float:
            return sum(recall(row["gold"], row["found"], k) for row in rows) / len(rows)

        sets = {row["set"]: [one for one in given if one["set"] == row["set"]] for row in given}
        by_set = {name: mean(rows, official_k(name)) for name, rows in sets.items()}
        deepest = max([10, *(len(row["found"]) for row in given)])
        return {**by_set, **{f"mbeir/recall@{k}": mean(given, k) for k in _KS if k <= deepest}}

    return score


def _mbeir(given: list[dict[str, Any]]) -> dict[str, float]:
    questions = [
        Question(f"{n}", "test", "?", category=row["set"], positives=tuple(row["gold"]))
        for n, row in enumerate(given)
    ]
    predictions = [Prediction(f"{n}", sources=tuple(row["found"])) for n, row in enumerate(given)]
    (scores,) = score_mbeir(questions, predictions).scored
    recalls = {name: value for name, value in scores.scores.items() if "recall" in name}
    names = {row["set"] for row in given}
    return {**{name: scores.by_category[name]["mbeir/official"] for name in names}, **recalls}


def _draw_articles(draw: random.Random) -> dict[str, Any]:
    return {"gold": draw.choice(_IDS), "found": draw.sample(_IDS, draw.randint(0, 30))}


def _official_articles(file: Path) -> Score:
    recall = definitions(file, "eval_recall").eval_recall

    def score(given: dict[str, Any]) -> dict[int, int]:
        return recall(given["found"], given["gold"], list(_KS))

    return score


def _articles(given: dict[str, Any]) -> dict[int, float]:
    scores = score_rankings([[given["gold"]]], [given["found"]], _KS).scores
    return {k: scores[f"recall@{k}"] for k in _KS}


def _draw_pages(draw: random.Random) -> list[dict[str, Any]]:
    """Queries with graded pages, and scored ones, of which many are equal or almost."""
    name = draw.choice((*V1, *V3))
    return [
        {
            "set": name,
            "grades": {page: draw.randint(1, 3) for page in draw.sample(_IDS, draw.randint(1, 8))},
            "scores": {
                page: draw.choice((*_SCORES, draw.random()))
                for page in draw.sample(_IDS, draw.randint(1, 30))
            },
        }
        for _ in range(draw.randint(1, 8))
    ]


def _official_pages(file: Path) -> Score:
    """nDCG of each query."""
    official = definitions(
        file,
        "calculate_retrieval_scores",
        RetrievalEvaluationResult=SimpleNamespace,
        evaluate_abstention=lambda results, scores: {},
    )

    def score(given: list[dict[str, Any]]) -> list[list[float]]:
        names = [f"q{number}" for number in range(len(given))]
        found = official.calculate_retrieval_scores(
            dict(zip(names, (row["scores"] for row in given), strict=True)),
            dict(zip(names, (row["grades"] for row in given), strict=True)),
            [5, 10],
        )
        return [
            [found.all_scores[name]["ndcg_cut_5"], found.all_scores[name]["ndcg_cut_10"]]
            for name in names
        ]

    return score


def _pages(given: list[dict[str, Any]]) -> list[list[float]]:
    questions = [
        Question(
            f"q{n}",
            "test",
            "?",
            category=row["set"],
            positives=tuple(row["grades"]),
            extra={GRADES: list(row["grades"].values())},
        )
        for n, row in enumerate(given)
    ]
    predictions = []
    for n, row in enumerate(given):
        best_first = sorted(row["scores"], key=row["scores"].__getitem__, reverse=True)
        scores = tuple(row["scores"][page] for page in best_first)
        predictions.append(Prediction(f"q{n}", sources=tuple(best_first), source_scores=scores))
    (found,) = score_vidore(questions, predictions).scored
    columns = [found.per_question[f"vidore/ndcg@{k}"] for k in (5, 10)]
    return [list(map(float, row)) for row in zip(*columns, strict=True)]


CASES = (
    Case(
        "mbeir",
        "TIGER-AI-Lab/UniIR",
        "src/common/mbeir_retriever.py",
        draw=_draw_rankings,
        official=_official_mbeir,
        ours=_mbeir,
        rows=6,
    ),
    Case(
        "articles",
        "Go2Heart/EchoSight",
        "test/test_reranker.py",
        draw=_draw_articles,
        official=_official_articles,
        ours=_articles,
    ),
    Case(
        "vidore",
        "embeddings-benchmark/mteb",
        "mteb/_evaluators/retrieval_metrics.py",
        draw=_draw_pages,
        official=_official_pages,
        ours=_pages,
        rows=4,
        tolerance=1e-12,  # trec_eval adds up one by one
    ),
)
