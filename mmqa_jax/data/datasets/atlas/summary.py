"""What summary.json says of a build: counts and balance."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import SPLITS, Draft, Subject
from mmqa_jax.data.datasets.atlas.snippets import Snippet


def describe(
    drafts: list[Draft],
    snippets: list[Snippet],
    flags: list[Subject],
    emoji: list[Subject],
    split: Mapping[str, str],
    negatives: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Counts of a benchmark's questions, sources and splits."""
    identical = collections.defaultdict(list)
    for flag in flags:
        identical[flag.picture.digest].append(flag.picture.key)
    countries = {s.country for s in snippets}
    lengths = [len(s.text.split()) for s in snippets]
    listed = {(modality, row) for modality in negatives for row in np.unique(negatives[modality])}
    listed.update(source for draft in drafts for source in draft.positives)
    yes_no = collections.defaultdict(collections.Counter)
    for draft in drafts:
        if draft.category == "YesNo":
            yes_no[f"{draft.split}/{draft.template}"][draft.keywords] += 1
    in_split = {name: [draft for draft in drafts if draft.split == name] for name in SPLITS}
    return {
        "questions": {name: len(group) for name, group in in_split.items()},
        "by_category": {name: _counts(d.category for d in in_split[name]) for name in SPLITS},
        "two_hop": {name: sum(d.hops == 2 for d in in_split[name]) for name in SPLITS},
        "two_pictures": {name: sum(len(d.group) == 2 for d in in_split[name]) for name in SPLITS},
        "templates": _counts(d.template for d in drafts),
        "countries": {name: sum(split[c] == name for c in countries) for name in SPLITS},
        "snippets": len(snippets),
        "snippet_words": {"median": float(np.median(lengths)), "most": max(lengths)},
        "pictures": len(flags) + len(emoji),
        "flags": len(flags),
        "other_pictures": len(emoji),
        "identical_flags": sorted(keys for keys in identical.values() if len(keys) > 1),
        "ambiguous_flags": sorted(f.picture.key for f in flags if not f.facts.clear),
        "striped_flags": sum(bool(f.facts.stripes) for f in flags),
        "unlisted_sources": len(snippets) + len(flags) + len(emoji) - len(listed),
        "yes_no": {name: dict(count) for name, count in sorted(yes_no.items())},
    }


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(names).items()))
