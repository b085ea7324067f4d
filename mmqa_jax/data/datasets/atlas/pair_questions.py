"""Questions about two flags (both are gold sources), and about the colors of emoji."""

from __future__ import annotations

import collections
import functools

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import Draft, Subject, picture_draft
from mmqa_jax.data.datasets.atlas.picture_questions import QUESTION_COLORS
from mmqa_jax.data.datasets.atlas.pictures import COLORS, color_map, color_shares, decode


def pair_questions(flags: list[Subject], rng: np.random.Generator, rounds: int) -> list[Draft]:
    """Drafts about pairs of flags of one split, `rounds` random partners for each flag."""
    drafts: list[Draft] = []
    for _ in range(rounds):
        for one, partner in zip(flags, rng.permutation(len(flags)), strict=True):
            two = flags[partner]
            if one.picture.digest != two.picture.digest:
                drafts.extend(_about(one, two, rng))
    return drafts


def _about(one: Subject, two: Subject, rng: np.random.Generator) -> list[Draft]:
    a, b, drafts = one.facts, two.facts, []
    ask = functools.partial(picture_draft, [one, two], rng)
    color = QUESTION_COLORS[int(rng.integers(6))]
    holders = [flag for flag in (one, two) if color in flag.facts.present]
    if holders and all(color in f.present or f.absent(color) for f in (a, b)):
        drafts.append(ask("both_contain", len(holders) == 2, c=color))
        if len(holders) == 1:
            holder = holders[0]
            drafts.append(ask("which_contains", holder.picture.title, c=color, W=holder.name))
    shared = [c for c in COLORS if c in a.shares and c in b.shares]
    if shared:
        color = shared[int(rng.integers(len(shared)))]
        more, less = (one, two) if a.shares[color] > b.shares[color] else (two, one)
        big, small = more.facts.shares[color], less.facts.shares[color]
        if big >= 1.6 * small and big - small >= 0.12:
            drafts.append(ask("which_more", more.picture.title, c=color, W=more.name))
    if a.main and b.main:
        drafts.append(ask("same_main", a.main == b.main))
    if a.clear and b.clear:
        common = [c for c in a.present if c in b.present]
        drafts.append(ask("common_count", str(len(common))))
        if len(common) == 1:
            drafts.append(ask("common_color", common[0]))
    return drafts


def emoji_questions(emoji: list[Subject], rng: np.random.Generator) -> list[Draft]:
    """Main-color drafts, then yes/no drafts in pairs of yes and no, of emoji with clear colors.

    White and black are background and outline of every emoji; no question is about them.
    """
    drafts: list[Draft] = []
    yes: dict[str, list[Subject]] = {}
    no: dict[str, list[Subject]] = collections.defaultdict(list)
    for subject in emoji:
        words = subject.name.split()
        if len(words) > 5:
            continue
        shares = color_shares(color_map(decode(subject.picture.png)))
        body = {c: s for c, s in shares.items() if c not in ("white", "black") and s >= 0.004}
        if not body or sum(body.values()) < 0.06:
            continue
        main = max(body, key=lambda c: body[c])
        rest = sum(body.values()) - body[main]
        named = not set(COLORS).isdisjoint(words)
        if body[main] >= 2 * rest and not named:
            drafts.append(picture_draft([subject], rng, "emoji_color", main))
        for color in ("red", "blue", "green", "yellow", "orange", "brown", "gray"):
            if shares.get(color, 0.0) >= 0.03:
                yes.setdefault(color, []).append(subject)
            elif color not in shares and not named:
                no[color].append(subject)
    for color, with_color in yes.items():
        # zip drops what the shorter list has no partner for.
        partners = rng.permutation(len(no[color]))[: len(with_color)]
        for subject, partner in zip(with_color, partners, strict=False):
            for shown, is_there in ((subject, True), (no[color][partner], False)):
                template = f"emoji_any_{color}"
                drafts.append(
                    picture_draft([shown], rng, "emoji_any", is_there, template=template, c=color)
                )
    return drafts
