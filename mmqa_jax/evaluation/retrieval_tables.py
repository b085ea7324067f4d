"""Retrieval scores by modality: recall@k, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.evaluation.retrieval import ks_up_to, score_rankings
from mmqa_jax.evaluation.scores import Scores
from mmqa_jax.evaluation.tables import Table, show
from mmqa_jax.evaluation.webqa import source_f1
from mmqa_jax.retrieval.modality import MODALITIES, gold_modality


def score_retrieval(
    corpus: Corpus, questions: Sequence[Question], rankings: Sequence[Ranking], top_k: int = 0
) -> dict[str, Any]:
    """recall@k and the source F1 of the top two, over all questions and by gold modality.

    Args:
      top_k: how many sources were looked for, which may be more than were found (BM25); recall@k
        is given up to it, and up to the longest ranking.

    Returns:
      `recall`, empty if no question has gold sources, as in WebQA's test split; otherwise also
      `questions_scored`, `source_f1_top_2` and, under `by_modality`, the same per modality.
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

    Args:
      rankings: of a retriever that searched one modality per question, that of its first source.
        An empty one counts as wrong. Questions that need both, or of unknown need, are left out.
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
