"""What rankings of a corpus's sources are worth: recall@k, by modality, as numbers and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.systems import webqa


def score_retrieval(
    corpus: Corpus, questions: Sequence[Question], rankings: Sequence[Ranking]
) -> dict[str, Any]:
    """recall@k and the source F1 of the best two, over all and by the gold sources' modality.

    Returns:
      `recall`, empty where no question has gold sources, as in WebQA's test split; otherwise
      `questions_scored`, `source_f1_top_2` and, under `by_modality`, the same for the modalities.
    """
    from mmqa_jax.retrieval.modality import MODALITIES, gold_modality

    gold = [gold_modality(question, corpus) for question in questions]
    groups = {"": list(range(len(questions)))}
    groups |= {name: [i for i, found in enumerate(gold) if found == name] for name in MODALITIES}
    scored = {}
    for name, places in groups.items():
        some = [questions[i] for i in places]
        if any(question.positives for question in some):
            scored[name] = _scores(some, [rankings[i] for i in places])
    if not scored:
        return {"recall": {}}
    return {**scored.pop(""), "by_modality": scored}


def show_retrieval(title: str, scored: Mapping[str, Any], *, markdown: bool = False) -> None:
    """Prints what `score_retrieval` found: a column for all questions and for each modality."""
    from mmqa_jax.evaluation.tables import Table, show

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


def _scores(questions: Sequence[Question], rankings: Sequence[Ranking]) -> dict[str, Any]:
    from mmqa_jax.evaluation.retrieval import score_rankings

    found = score_rankings([set(q.positives) for q in questions], [r.sources for r in rankings])
    best = [webqa.top(ranking, 2) for ranking in rankings]
    return {
        "questions_scored": found.n,
        "recall": {name: value for name, value in found.scores.items() if "recall@" in name},
        "source_f1_top_2": webqa.mean_source_f1(questions, best),
    }
