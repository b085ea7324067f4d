"""Builds the Atlas benchmark: sources, facts, questions, splits, negatives, official files."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.atlas.drafts import SPLITS, Draft, Subject, random_stream
from mmqa_jax.data.datasets.atlas.emoji import make_emoji
from mmqa_jax.data.datasets.atlas.factbook import Country, load_countries
from mmqa_jax.data.datasets.atlas.flag_facts import flag_facts
from mmqa_jax.data.datasets.atlas.negatives import mine, picture_pool, snippet_pool
from mmqa_jax.data.datasets.atlas.pair_questions import emoji_questions, pair_questions
from mmqa_jax.data.datasets.atlas.picture_questions import FLAG_QUESTIONS
from mmqa_jax.data.datasets.atlas.pictures import make_flags
from mmqa_jax.data.datasets.atlas.selection import select, split_groups
from mmqa_jax.data.datasets.atlas.snippets import Snippet, select_snippets
from mmqa_jax.data.datasets.atlas.summary import describe
from mmqa_jax.data.datasets.atlas.text_questions import one_hop, two_hop
from mmqa_jax.data.datasets.atlas.writer import new_benchmark, versions, write_benchmark

SNIPPETS = 9400  # of the full corpus
LEAST_COUNTRIES = 8  # that give every training question 16 negatives
_ALWAYS = ("AO", "FR", "JP", "RO", "TD")  # in every small corpus: well known, or identical flags
Progress = Callable[[str, int, int], None]


def build_atlas(
    out_dir: str | os.PathLike,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    limit_countries: int | None = None,
) -> dict[str, Any]:
    """Builds Atlas in `out_dir`, whole or not at all, the same bytes for the same seed.

    Args:
      out_dir: a new or empty folder, or one that holds an earlier build (then replaced).
      seed: of splits, wordings and the choice of questions.
      progress: called as progress(stage, done, total).
      limit_countries: number of countries; emoji and questions in proportion. None: all.

    Returns:
      The content of summary.json. The other files are atlas_train_val.json, atlas_test.json,
      imgs.tsv, imgs.lineidx and ATTRIBUTION.txt.

    Raises:
      UserError: a package is missing, `out_dir` holds something else, or too few countries.
    """

    if limit_countries is not None and limit_countries < LEAST_COUNTRIES:
        raise UserError(
            f"limit_countries={limit_countries}: Atlas needs {LEAST_COUNTRIES} countries or more "
            "to find negatives in every split; give a larger number."
        )

    def report(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(stage, done, total)

    with new_benchmark(Path(out_dir)) as folder:
        report("sources", 0, 1)
        countries, scale = _countries(limit_countries)
        snippets, left_out = select_snippets(countries, most=round(SNIPPETS * scale))
        flags, emoji = _pictures(countries, scale)
        pictures = [subject.picture for subject in flags + emoji]
        report("sources", 1, 1)

        report("questions", 0, 1)
        counts = collections.Counter(s.country for s in snippets)
        split = split_groups(flags, emoji, countries, counts, np.random.default_rng([seed, 0]))
        drafts = _drafts(countries, snippets, flags, emoji, split, seed)
        drafts = select(drafts, split, scale, seed)
        _ban_flag_texts(drafts, snippets)
        report("questions", 1, 1)

        pools = {"t": snippet_pool(snippets, split), "i": picture_pool(flags + emoji, split)}
        negatives = {}
        for stream, (modality, stage) in enumerate(
            (("t", "negative snippets"), ("i", "negative pictures")), start=2
        ):
            rng = np.random.default_rng([seed, stream])
            on_batch = functools.partial(report, stage)
            negatives[modality] = mine(drafts, pools[modality], modality, rng, on_batch)

        report("files", 0, 1)
        summary = {
            "benchmark": "Atlas",
            **describe(drafts, snippets, flags, emoji, split, negatives),
            "passages_left_out": left_out,
            "seed": seed,
            "packages": versions(),
        }
        write_benchmark(folder, drafts, pictures, snippets, countries, negatives, summary)
        report("files", 1, 1)
    return summary


def _countries(limit: int | None) -> tuple[list[Country], float]:
    """(countries, their share of all); a part is spread over the alphabet."""
    countries = load_countries()
    if limit is None or limit >= len(countries):
        return countries, 1.0
    known = [c for c in countries if c.iso in _ALWAYS]
    rest = [c for c in countries if c not in known]
    more = max(limit - len(known), 0)
    step = len(rest) / max(more, 1)
    spread = [rest[int(i * step)] for i in range(more)]
    return sorted(known + spread, key=lambda c: c.code), limit / len(countries)


def _pictures(countries: list[Country], scale: float) -> tuple[list[Subject], list[Subject]]:
    """(flags, emoji), in the order of their rows."""
    codes = {c.iso: c.code for c in countries}
    flags, emoji = [], []
    for picture in make_flags(countries):
        group = codes.get(picture.key, picture.key)
        flags.append(Subject(len(flags), picture, group, flag_facts(picture)))
    for picture in make_emoji(every=max(round(1 / scale), 1)):
        emoji.append(Subject(len(flags) + len(emoji), picture, picture.key))
    return flags, emoji


def _drafts(
    countries: list[Country],
    snippets: list[Snippet],
    flags: list[Subject],
    emoji: list[Subject],
    split: dict[str, str],
    seed: int,
) -> list[Draft]:
    """Every possible question."""
    stream = functools.partial(random_stream, seed, 4)
    drafts = one_hop(countries, snippets, stream("text"))
    drafts += two_hop(countries, snippets, stream("two_hop"))
    for category, questions in FLAG_QUESTIONS.items():
        rng = stream(category)
        drafts += [draft for flag in flags for draft in questions(flag, rng)]
    for name in SPLITS:
        of_split = [flag for flag in flags if split[flag.group] == name]
        drafts += pair_questions(of_split, stream(f"pairs {name}"), 4)
        of_split = [e for e in emoji if split[e.group] == name]
        drafts += emoji_questions(of_split, stream(f"emoji {name}"))
    return drafts


def _ban_flag_texts(drafts: list[Draft], snippets: list[Snippet]) -> None:
    """The meaning of a flag's colors says that they are there: no negative for its pictures."""
    meanings = collections.defaultdict(set)
    for row, snippet in enumerate(snippets):
        if snippet.kind == "flag_meaning":
            meanings[snippet.country].add(("t", row))
    for draft in drafts:
        if draft.topic == "flag" and draft.category != "text":
            for group in draft.group:
                draft.banned |= meanings[group]
