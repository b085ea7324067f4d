"""Questions about two flags (both are gold sources), and about the colors of emoji."""

from __future__ import annotations

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import Draft
from mmqa_jax.data.datasets.atlas.flag_facts import FlagFacts
from mmqa_jax.data.datasets.atlas.picture_questions import ASKED, Flag, _yes_no, make
from mmqa_jax.data.datasets.atlas.pictures import COLORS, Picture, color_shares, decode


def pair_questions(flags: list[Flag], rng: np.random.Generator, rounds: int) -> list[Draft]:
    """Drafts about pairs of flags of one split, `rounds` random partners for each flag."""
    drafts: list[Draft] = []
    for _ in range(rounds):
        for one, partner in zip(flags, rng.permutation(len(flags)), strict=True):
            two = flags[partner]
            if one.picture.digest != two.picture.digest:
                drafts.extend(_about(one, two, rng))
    return drafts


def _about(one: Flag, two: Flag, rng: np.random.Generator) -> list[Draft]:
    a, b, drafts = one.facts, two.facts, []
    names = {"A": one.name, "B": two.name}

    def draft(category, template, questions, answers, keywords, **values):
        drafts.append(
            make(
                [one, two], rng, category, template, questions, answers, keywords, **names, **values
            )
        )

    color = ASKED[int(rng.integers(6))]
    if _sure(a, color) and _sure(b, color):
        both = color in a.present and color in b.present
        if color in a.present or color in b.present:
            answers, word = _yes_no(
                both,
                ("both flags contain {c}.", "{c} is in the flag of {A} and in that of {B}.",
                 "the flags of {A} and {B} both contain {c}."),
                ("not both flags contain {c}.", "only one of the two flags contains {c}.",
                 "{c} is not in both flags."),
            )  # fmt: skip
            draft("YesNo", "both_contain",
                  ("Do the flags of {A} and {B} both contain {c}?",
                   "Is there {c} in the flag of {A} as well as in the flag of {B}?"),
                  answers, word, c=color)  # fmt: skip
        if (color in a.present) != (color in b.present):
            holder = one if color in a.present else two
            draft("choose", "which_contains",
                  ("Which flag contains {c}, that of {A} or that of {B}?",
                   "Is there {c} in the flag of {A} or in the flag of {B}?"),
                  ("The flag of {W} contains {c}.", "There is {c} in the flag of {W}.",
                   "It is the flag of {W} that contains {c}."),
                  holder.picture.title, c=color, W=holder.name)  # fmt: skip
    shared = [c for c in COLORS if c in a.shares and c in b.shares]
    if shared:
        color = shared[int(rng.integers(len(shared)))]
        more, less = (one, two) if a.shares[color] > b.shares[color] else (two, one)
        big, small = more.facts.shares[color], less.facts.shares[color]
        if big >= 1.6 * small and big - small >= 0.12:
            draft("choose", "which_more",
                  ("Which flag has more {c}, that of {A} or that of {B}?",
                   "Is there more {c} in the flag of {A} or in the flag of {B}?"),
                  ("The flag of {W} has more {c}.", "There is more {c} in the flag of {W}.",
                   "It is the flag of {W} that has more {c}."),
                  more.picture.title, c=color, W=more.name)  # fmt: skip
    if a.main and b.main:
        answers, word = _yes_no(
            a.main == b.main,
            ("the flags of {A} and {B} have the same main color.",
             "both flags are mostly of one color.", "their main color is the same."),
            ("the flags of {A} and {B} have different main colors.",
             "the two flags are mostly of different colors.", "their main colors differ."),
        )  # fmt: skip
        draft("YesNo", "same_main",
              ("Do the flags of {A} and {B} have the same main color?",
               "Is the main color of the flag of {A} the same as that of the flag of {B}?"),
              answers, word)  # fmt: skip
    if a.clear and b.clear:
        common = [c for c in a.present if c in b.present]
        draft("number", "common_count",
              ("How many colors do the flags of {A} and {B} have in common?",
               "How many colors are in both the flag of {A} and the flag of {B}?"),
              ("The flags of {A} and {B} have {n} colors in common.",
               "{n} colors are in both the flag of {A} and that of {B}.",
               "There are {n} colors that both flags share."),
              str(len(common)), n=str(len(common)))  # fmt: skip
        if len(common) == 1:
            draft("color", "common_color",
                  ("Which color do the flags of {A} and {B} have in common?",
                   "Which color is in both the flag of {A} and the flag of {B}?"),
                  ("The flags of {A} and {B} have {c} in common.",
                   "{c} is in both the flag of {A} and that of {B}.",
                   "The color that both flags share is {c}."),
                  common[0], c=common[0])  # fmt: skip
    return drafts


def _sure(facts: FlagFacts, color: str) -> bool:
    return color in facts.present or facts.absent(color)


def emoji_questions(
    rows: list[tuple[int, Picture]], rng: np.random.Generator
) -> tuple[list[Draft], list[Draft]]:
    """(main-color drafts, yes/no drafts in yes, no pairs) about emoji with clear colors.

    White and black are ground and outline of every emoji and are not asked about.
    """
    mains: list[Draft] = []
    yes: dict[str, list[Flag]] = {}
    no: dict[str, list[Flag]] = {}
    for row, picture in rows:
        if len(picture.name.split()) > 5:
            continue
        shares = color_shares(decode(picture.png))
        body = {c: s for c, s in shares.items() if c not in ("white", "black") and s >= 0.004}
        if not body or sum(body.values()) < 0.06:
            continue
        flag = Flag(row, picture, _NO_FACTS, picture.key)
        main = max(body, key=lambda c: body[c])
        rest = sum(body.values()) - body[main]
        named = {c for c in COLORS if c in picture.name.split()}
        if body[main] >= 2 * rest and not named:
            mains.append(
                make([flag], rng, "color", "emoji_color",
                     ("What is the main color of the {X} emoji?",
                      "Which color is the {X} emoji mostly drawn in?"),
                     ("The main color of the {X} emoji is {c}.",
                      "The {X} emoji is mostly drawn in {c}.", "The {X} emoji is {c}."),
                     main, X=picture.name, c=main)
            )  # fmt: skip
        for color in ("red", "blue", "green", "yellow", "orange", "brown", "gray"):
            if shares.get(color, 0.0) >= 0.03:
                yes.setdefault(color, []).append(flag)
            elif color not in shares and not named:
                no.setdefault(color, []).append(flag)
    pairs: list[Draft] = []
    for color in yes:
        count = min(len(yes[color]), len(no.get(color, [])))
        chosen = rng.permutation(len(no.get(color, [])))[:count]
        for flag, other in zip(yes[color], chosen, strict=False):
            for subject, is_there in ((flag, True), (no[color][other], False)):
                answers, word = _yes_no(
                    is_there,
                    ("there is {c} in the {X} emoji.", "the {X} emoji contains {c}.",
                     "{c} can be seen in it."),
                    ("there is no {c} in the {X} emoji.", "the {X} emoji contains no {c}.",
                     "{c} cannot be seen in it."),
                )  # fmt: skip
                pairs.append(
                    make([subject], rng, "YesNo", f"emoji_any_{color}",
                         ("Is there any {c} in the {X} emoji?",
                          "Does the {X} emoji contain the color {c}?"),
                         answers, word, X=subject.name, c=color)
                )  # fmt: skip
    return mains, pairs


_NO_FACTS = FlagFacts({}, (), False, False, None, None, (), False, {}, None, {})
