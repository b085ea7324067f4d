"""Builds the Atlas benchmark: sources, facts, questions, splits, negatives, official files."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.atlas.drafts import Draft
from mmqa_jax.data.datasets.atlas.emoji import make_emoji
from mmqa_jax.data.datasets.atlas.factbook import Country, clean, load_countries
from mmqa_jax.data.datasets.atlas.flag_facts import described_shapes, flag_facts
from mmqa_jax.data.datasets.atlas.negatives import Pool, looks, mine
from mmqa_jax.data.datasets.atlas.pair_questions import emoji_questions, pair_questions
from mmqa_jax.data.datasets.atlas.picture_questions import (
    ASKED,
    Flag,
    choose_questions,
    color_questions,
    number_questions,
    other_questions,
    shape_questions,
    yes_no_any,
    yes_no_corner,
    yes_no_main,
)
from mmqa_jax.data.datasets.atlas.pictures import Picture, make_flags
from mmqa_jax.data.datasets.atlas.selection import select, split_groups
from mmqa_jax.data.datasets.atlas.snippets import Snippet, select_snippets
from mmqa_jax.data.datasets.atlas.summary import AtlasSummary, describe
from mmqa_jax.data.datasets.atlas.text_questions import one_hop, two_hop
from mmqa_jax.data.datasets.atlas.writer import PACKAGES, Folder, write_benchmark

SNIPPETS = 9400  # of the full corpus
LEAST_COUNTRIES = 8  # that give every training question 16 negatives
Progress = Callable[[str, int, int], None]


def build_atlas(
    out_dir: str | os.PathLike,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    limit_countries: int | None = None,
) -> AtlasSummary:
    """Builds Atlas in `out_dir`, whole or not at all, the same bytes for the same seed.

    Args:
      out_dir: a new or empty folder, or one that holds an earlier build (then replaced).
      seed: of splits, wordings and the choice of questions.
      progress: called as progress(stage, done, total).
      limit_countries: only so many countries, and emoji and questions in proportion: a small
        corpus for a quick look. None builds the benchmark.

    Returns:
      What was built. Files: atlas_train_val.json, atlas_test.json, imgs.tsv, imgs.lineidx,
      ATTRIBUTION.txt, summary.json.

    Raises:
      UserError: a package is missing, `out_dir` holds something else, or too few countries.
    """

    if limit_countries is not None and limit_countries < LEAST_COUNTRIES:
        raise UserError(
            f"limit_countries={limit_countries}: Atlas needs {LEAST_COUNTRIES} countries or more "
            "to find negatives in every split; give a larger number."
        )

    def say(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(stage, done, total)

    with Folder(Path(out_dir)) as folder:
        say("sources", 0, 1)
        countries = load_countries()
        scale = 1.0
        if limit_countries is not None and limit_countries < len(countries):
            # Spread over the alphabet, always with a few that everybody knows.
            scale = limit_countries / len(countries)
            known = [c for c in countries if c.iso in ("AO", "FR", "JP", "RO", "TD")]
            rest = [c for c in countries if c not in known]
            step = len(rest) / max(limit_countries - len(known), 1)
            spread = [rest[int(i * step)] for i in range(max(limit_countries - len(known), 0))]
            countries = sorted(known + spread, key=lambda c: c.code)
        snippets, left_out = select_snippets(countries, most=round(SNIPPETS * scale))
        pictures, flags = _pictures(countries, scale)
        say("sources", 1, 1)

        say("questions", 0, 1)
        counts = collections.Counter(s.country for s in snippets)
        emoji = pictures[len(flags) :]
        only_flags = [flag.picture for flag in flags]
        split = split_groups(countries, only_flags, emoji, counts, np.random.default_rng([seed, 0]))
        drafts = _drafts(countries, snippets, pictures, flags, split, seed)
        drafts = select(drafts, split, scale, np.random.default_rng([seed, 1]))
        _ban_flag_texts(drafts, snippets)
        say("questions", 1, 1)

        text_pool, image_pool = _pools(countries, snippets, pictures, split)
        text_negatives = mine(
            drafts, text_pool, "t", np.random.default_rng([seed, 2]),
            lambda done, total: say("negative snippets", done, total),
        )  # fmt: skip
        image_negatives = mine(
            drafts, image_pool, "i", np.random.default_rng([seed, 3]),
            lambda done, total: say("negative pictures", done, total),
        )  # fmt: skip

        say("files", 0, 1)
        summary = describe(
            drafts, snippets, pictures, flags, split, left_out, image_negatives, text_negatives
        )
        summary["seed"] = seed
        summary["packages"] = {name: metadata.version(name) for name in PACKAGES}
        write_benchmark(
            folder, drafts, pictures, snippets, countries, image_negatives, text_negatives, summary
        )
        say("files", 1, 1)
    return AtlasSummary(Path(out_dir), summary["questions"], len(snippets), len(pictures), summary)


def _pictures(countries: list[Country], scale: float) -> tuple[list[Picture], list[Flag]]:
    pictures = make_flags(countries)
    by_iso = {c.iso: c for c in countries}
    flags = []
    for row, picture in enumerate(pictures):
        country = by_iso.get(picture.key)
        shapes = ()
        if country is not None:
            text = clean(country.raw("Government", "Flag"))
            shapes = described_shapes(text.split("meaning:")[0].split("history:")[0])
        group = country.code if country is not None else picture.key
        flags.append(Flag(row, picture, flag_facts(picture), group, shapes))
    return pictures + make_emoji(every=max(round(1 / scale), 1)), flags


def _drafts(
    countries: list[Country],
    snippets: list[Snippet],
    pictures: list[Picture],
    flags: list[Flag],
    split: dict[str, str],
    seed: int,
) -> list[Draft]:
    """Every question that could be asked."""
    rng = np.random.default_rng([seed, 4])
    drafts = one_hop(countries, snippets, rng) + two_hop(countries, snippets, rng)
    for flag in flags:
        drafts += color_questions(flag, rng) + choose_questions(flag, rng)
        drafts += number_questions(flag, rng) + shape_questions(flag, rng)
        drafts += other_questions(flag, rng) + _yes_no(flag, rng)
    for name, rounds in (("train", 4), ("val", 4), ("test", 4)):
        members = [flag for flag in flags if split[flag.group] == name]
        drafts += pair_questions(members, rng, rounds)
    rows = list(enumerate(pictures))[len(flags) :]
    for name in ("train", "val", "test"):
        mains, yes_no = emoji_questions([r for r in rows if split[r[1].key] == name], rng)
        drafts += mains + yes_no
    return drafts


def _yes_no(flag: Flag, rng: np.random.Generator) -> list[Draft]:
    facts, drafts = flag.facts, []
    for color in ASKED:
        if color in facts.present or facts.absent(color):
            drafts.append(yes_no_any(flag, color, rng))
    others = [c for c in facts.present if c != facts.main]
    if facts.main and others:
        for color in (facts.main, others[int(rng.integers(len(others)))]):
            drafts.append(yes_no_main(flag, color, rng))
    for place, color in facts.corners.items():
        wrong = [c for c in ASKED[:6] if c != color]
        near = [c for c in wrong if c in facts.present] or wrong
        options = near if rng.random() < 0.7 else wrong
        said = color if rng.random() < 0.5 else options[int(rng.integers(len(options)))]
        drafts.append(yes_no_corner(flag, place, said, rng))
    return drafts


def _ban_flag_texts(drafts: list[Draft], snippets: list[Snippet]) -> None:
    """What a flag's colors mean tells that they are there: no negative for its pictures."""
    meanings = collections.defaultdict(set)
    for row, snippet in enumerate(snippets):
        if snippet.kind == "flag_meaning":
            meanings[snippet.country].add(("t", row))
    for draft in drafts:
        if draft.topic == "flag" and draft.category != "text":
            for group in draft.group:
                draft.banned |= meanings[group]


def _pools(
    countries: list[Country],
    snippets: list[Snippet],
    pictures: list[Picture],
    split: dict[str, str],
) -> tuple[Pool, Pool]:
    seen_by = {
        "train": frozenset(("train", "val", "test")),
        "val": frozenset(("val", "test")),
        "test": frozenset(("test",)),
    }
    text_pool = Pool(
        texts=[s.text for s in snippets],
        kind=np.array([s.kind for s in snippets]),
        group=np.array([s.country for s in snippets]),
        splits=[seen_by[split[s.country]] for s in snippets],
        identity=np.arange(len(snippets)),
    )
    codes = {c.iso: c.code for c in countries}
    groups = [codes.get(p.key, p.key) for p in pictures]
    image_pool = Pool(
        texts=[p.caption for p in pictures],
        kind=np.array([p.kind for p in pictures]),
        group=np.array(groups),
        splits=[seen_by[split[g]] for g in groups],
        identity=np.unique([p.digest for p in pictures], return_inverse=True)[1],
        look=looks([p.png for p in pictures]),
    )
    return text_pool, image_pool
