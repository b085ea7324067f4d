"""ViDoRe's score as MTEB computes it, and MTEB's file of results (mteb _evaluators, results).

    vidore/ndcg@5, @10   trec_eval's nDCG: a page gains its grade, equal scores (as float32) are in
                         descending order of their ids
    vidore/official      the version's main score: nDCG@5 of v1 and v2, nDCG@10 of v3

A set's score is the mean over its languages, a version's the mean over its sets; those stand in
notes. Questions without a relevant page are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_json
from mmqa_jax.data.datasets.vidore import GRADES, LANGUAGE, TASKS, V1, V2, V3
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.found_sources import has_positives
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.evaluation.scores import (
    Scores,
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.evaluation.scoring import Evaluation

OFFICIAL = "vidore/official"
KS = (5, 10)
_MAIN_K = {"v1": 5, "v2": 5, "v3": 10}
_VERSIONS = {"v1": V1, "v2": V2, "v3": V3}
_ISO = {
    "english": "eng-Latn",
    "french": "fra-Latn",
    "german": "deu-Latn",
    "italian": "ita-Latn",
    "portuguese": "por-Latn",
    "spanish": "spa-Latn",
}
_DIGITS = 5  # of MTEB's means


def version_of(name: str) -> str:
    """`v1`, `v2` or `v3` of a set."""
    return next(version for version, sets in _VERSIONS.items() if name in sets)


def score_vidore(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """nDCG by set, language and version; a question without a ranking has found nothing.

    MTEB leaves questions without a ranking out of its means.
    """
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_positives, "relevant pages")
    gold = [dict(zip(one.positives, one.extra[GRADES], strict=True)) for one in scored]
    ranked = [as_trec_orders(given[one.id]) if one.id in given else () for one in scored]
    found = score_rankings(gold, ranked, KS).per_question
    per_question = {f"vidore/ndcg@{k}": found[f"ndcg@{k}"] for k in KS}
    main = [_MAIN_K[version_of(one.category)] for one in scored]
    by_k = [found[f"ndcg@{k}"][n] for n, k in enumerate(main)]
    per_question = {OFFICIAL: np.array(by_k), **per_question}
    scores = scores_of(questions, scored, given, per_question, _groups(scored))
    evaluation = Evaluation([scores], has_modalities=False)
    for version, sets in _VERSIONS.items():
        there = [name for name in sets if scores.counts.get(name)]
        if there:
            average = float(np.mean([set_score(scores, name) for name in there]))
            evaluation.notes.append(
                f"{version}, average of {len(there)} of {len(sets)} sets, nDCG@{_MAIN_K[version]}: "
                f"{100 * average:.2f} %"
            )
    return evaluation


def set_score(scores: Scores, name: str) -> float:
    """A set's main score: the mean over its languages."""
    of_set = [group for group in scores.counts if group.startswith(f"{name}, ")] or [name]
    return float(np.mean([scores.of_category(OFFICIAL, group).mean() for group in of_set]))


def as_trec_orders(given: Prediction) -> tuple[str, ...]:
    """The sources as trec_eval orders them; as they are where there are no scores."""
    if not given.source_scores:
        return given.sources
    rounded = np.asarray(given.source_scores, np.float32).tolist()
    pairs = sorted(zip(rounded, given.sources, strict=True), reverse=True)
    return tuple(name for _, name in pairs)


def write_vidore_results(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes one set's scores as MTEB's results of a task, without the dataset's revision."""
    names = list(dict.fromkeys(question.category for question in questions))
    if len(names) > 1:
        raise UserError(
            f"{path}: MTEB has a file for each set, and the questions are of {len(names)} sets; "
            "give --references the folder of one."
        )
    (scores,) = score_vidore(questions, predictions).scored
    subsets = [one for one in _ISO if scores.counts.get(f"{names[0]}, {one}")]
    rows = [_subset(scores, f"{names[0]}, {one}", one) for one in subsets]
    content = {
        "dataset_revision": "no_revision_available",
        "task_name": TASKS[names[0]],
        "mteb_version": None,
        "scores": {"test": rows or [_subset(scores, names[0], "default")]},
        "evaluation_time": None,
        "kg_co2_emissions": None,
    }
    write_json(path, content)


def _subset(scores: Scores, group: str, name: str) -> dict[str, Any]:
    def mean(scorer: str) -> float:
        return round(float(scores.of_category(scorer, group).mean()), _DIGITS)

    return {
        **{f"ndcg_at_{k}": mean(f"vidore/ndcg@{k}") for k in KS},
        "main_score": mean(OFFICIAL),
        "hf_subset": name,
        "languages": [_ISO.get(name, _ISO["english"])],
    }


def _groups(questions: Sequence[Question]) -> Mapping[str, np.ndarray]:
    """By set, by language, and by language within the sets that have several."""
    sets = np.array([question.category for question in questions])
    languages = np.array([question.extra.get(LANGUAGE, "") for question in questions])
    groups = {}
    for name in [name for name in TASKS if name in sets]:
        groups[name] = sets == name
        spoken = [one for one in dict.fromkeys(languages[sets == name]) if one]
        if len(spoken) > 1:
            groups |= {f"{name}, {one}": (sets == name) & (languages == one) for one in spoken}
    return {**groups, **{str(one): languages == one for one in sorted(set(languages)) if one}}
