"""What summary.json says of a build: counts, balance, and what a constant answer would score."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import Draft
from mmqa_jax.data.datasets.atlas.negatives import words
from mmqa_jax.data.datasets.atlas.picture_questions import Flag
from mmqa_jax.data.datasets.atlas.pictures import Picture
from mmqa_jax.data.datasets.atlas.snippets import Snippet


@dataclasses.dataclass(frozen=True, slots=True)
class AtlasSummary:
    """What `build_atlas` made.

    Attributes:
      folder: where the benchmark lies.
      questions: questions per split.
      snippets, pictures: sources of the corpus.
      details: the whole content of summary.json.
    """

    folder: Path
    questions: dict[str, int]
    snippets: int
    pictures: int
    details: dict[str, Any]


def describe(
    drafts: list[Draft],
    snippets: list[Snippet],
    pictures: list[Picture],
    flags: list[Flag],
    split: dict[str, str],
    left_out: int,
    image_negatives: np.ndarray,
    text_negatives: np.ndarray,
) -> dict[str, Any]:
    """The content of summary.json but for seed and versions."""
    splits = ("train", "val", "test")
    identical = collections.defaultdict(list)
    for flag in flags:
        identical[flag.picture.digest].append(flag.picture.key)
    lengths = [len(s.text.split()) for s in snippets]
    codes = {s.country for s in snippets}
    listed = {"t": set(text_negatives.ravel()), "i": set(image_negatives.ravel())}
    for draft in drafts:
        for modality, row in draft.positives:
            listed[modality].add(row)
    yes_no = collections.defaultdict(collections.Counter)
    for draft in drafts:
        if draft.category == "YesNo":
            yes_no[f"{draft.split}/{draft.template}"][draft.keywords] += 1
    return {
        "benchmark": "Atlas",
        "questions": {s: sum(d.split == s for d in drafts) for s in splits},
        "by_category": {
            s: dict(sorted(collections.Counter(d.category for d in drafts if d.split == s).items()))
            for s in splits
        },
        "two_hop": {s: sum(d.hops == 2 and d.split == s for d in drafts) for s in splits},
        "two_pictures": {
            s: sum(len(d.group) == 2 and d.split == s for d in drafts) for s in splits
        },
        "templates": dict(sorted(collections.Counter(d.template for d in drafts).items())),
        "countries": {s: sum(split[c] == s for c in codes) for s in splits},
        "snippets": len(snippets),
        "snippet_words": {"median": float(np.median(lengths)), "most": max(lengths)},
        "passages_left_out": left_out,
        "pictures": len(pictures),
        "flags": len(flags),
        "other_pictures": len(pictures) - len(flags),
        "identical_flags": sorted(v for v in identical.values() if len(v) > 1),
        "ambiguous_flags": sorted(f.picture.key for f in flags if not f.facts.clear),
        "striped_flags": sum(bool(f.facts.stripes) for f in flags),
        "unlisted_sources": len(snippets) + len(pictures) - len(listed["t"]) - len(listed["i"]),
        "yes_no": {name: dict(count) for name, count in sorted(yes_no.items())},
        "constant_answer": constant_scores(drafts),
    }


def constant_scores(drafts: list[Draft]) -> dict[str, dict[str, Any]]:
    """The best constant answer per category, chosen on train, scored on test.

    `score` is WebQA's accuracy with plain words (no lemmatiser): F1 for color, shape, number
    and YesNo, recall for the others; `exact` is equality of the word sets.
    """
    scores = {}
    for category in sorted({d.category for d in drafts}):
        train = [d.keywords for d in drafts if d.category == category and d.split == "train"]
        test = [d.keywords for d in drafts if d.category == category and d.split == "test"]
        if not train or not test:
            continue
        use_f1 = category in ("color", "shape", "number", "YesNo")
        candidates = [a for a, _ in collections.Counter(train).most_common(60)]
        sample = train[:: max(len(train) // 200, 1)]
        best = max(
            candidates, key=lambda a, f1=use_f1, among=sample: sum(_score(a, b, f1) for b in among)
        )
        scores[category] = {
            "answer": best,
            "score": round(float(np.mean([_score(best, b, use_f1) for b in test])), 4),
            "exact": round(float(np.mean([set(words(best)) == set(words(b)) for b in test])), 4),
        }
    return scores


def _score(answer: str, reference: str, use_f1: bool) -> float:
    said, wanted = collections.Counter(words(answer)), collections.Counter(words(reference))
    common = sum((said & wanted).values())
    recall = common / max(sum(wanted.values()), 1)
    precision = common / max(sum(said.values()), 1)
    if not use_f1:
        return recall
    return 2 * precision * recall / (precision + recall) if common else 0.0
