"""Picture questions about one flag; `pair_questions` asks about two, and about emoji."""

from __future__ import annotations

import functools

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import Draft, Subject, picture_draft
from mmqa_jax.data.datasets.atlas.flag_facts import FlagFacts

# Colors of yes/no questions; the others are in hardly any flag.
QUESTION_COLORS = ("red", "white", "blue", "green", "yellow", "black", "orange", "brown")


def color_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """Main color, stripes, corners, center, and the list of all colors."""
    facts, drafts = flag.facts, []
    ask = functools.partial(picture_draft, [flag], rng)
    if facts.main:
        drafts.append(ask("main_color", facts.main))
    for place, color in stripe_places(facts).items():
        drafts.append(ask("stripe", color, template=f"{place}_stripe", p=place))
    for place, color in facts.corners.items():
        drafts.append(ask("corner_color", color, p=place))
    if facts.center:
        drafts.append(ask("center_color", facts.center))
    if facts.clear and 2 <= len(facts.present) <= 4:
        *others, last = facts.present
        listing = f"{', '.join(others)} and {last}"
        drafts.append(ask("color_list", " ".join(facts.present), list=listing))
    return drafts


def stripe_places(facts: FlagFacts) -> dict[str, str]:
    """Position -> color of the stripes that can be named: `top`, `left`, `center`, ..."""
    if not facts.stripes or (facts.direction == "vertically" and not facts.whole):
        return {}
    first, last = ("top", "bottom") if facts.direction == "horizontally" else ("left", "right")
    places = {first: facts.stripes[0], last: facts.stripes[-1]}
    if len(facts.stripes) == 3:
        places["center"] = facts.stripes[1]
    return places


def choose_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """Is the top stripe red or green? Does the flag show more red or more white?"""
    facts, drafts = flag.facts, []
    ask = functools.partial(picture_draft, [flag], rng)
    places = {f"{p} stripe": c for p, c in stripe_places(facts).items()}
    places |= {f"{p} corner": c for p, c in facts.corners.items()}
    for place, color in places.items():
        others = [c for c in QUESTION_COLORS[:6] if c != color]
        near = [c for c in facts.present if c in others]
        other = near[int(rng.integers(len(near)))] if near and rng.random() < 0.7 else None
        other = other or others[int(rng.integers(len(others)))]
        one, two = (color, other) if rng.random() < 0.5 else (other, color)
        drafts.append(ask("place_choice", color, p=place, one=one, two=two))
    shares = facts.shares
    pairs = [
        (a, b) for a in facts.present for b in facts.present
        if shares[a] >= 1.5 * shares[b] and shares[a] - shares[b] >= 0.06
    ]  # fmt: skip
    for index in rng.permutation(len(pairs))[:2]:
        more, less = pairs[index]
        one, two = (more, less) if rng.random() < 0.5 else (less, more)
        drafts.append(ask("more_of", more, one=one, two=two))
    return drafts


def number_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """How many different colors, how many stripes."""
    facts, drafts = flag.facts, []
    if facts.clear and facts.one_shade:
        drafts.append(picture_draft([flag], rng, "color_count", str(len(facts.present))))
    if facts.whole and facts.one_shade:
        drafts.append(picture_draft([flag], rng, "stripe_count", str(len(facts.stripes))))
    return drafts


def other_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """Which way the stripes run; which half holds most of a color."""
    facts, drafts = flag.facts, []
    if facts.whole and facts.direction:
        drafts.append(picture_draft([flag], rng, "stripe_direction", facts.direction))
    for (color, _), half in facts.halves.items():
        drafts.append(picture_draft([flag], rng, "half_of_color", half, c=color))
    return drafts


def yes_no_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """Whether a color is there, covers most, fills a corner; only where there is no doubt."""
    facts, drafts = flag.facts, []
    ask = functools.partial(picture_draft, [flag], rng)
    for color in QUESTION_COLORS:
        if color in facts.present or facts.absent(color):
            drafts.append(ask("any", color in facts.present, template=f"any_{color}", c=color))
    others = [c for c in facts.present if c != facts.main]
    if facts.main and others:
        for color in (facts.main, others[int(rng.integers(len(others)))]):
            drafts.append(ask("is_main", color == facts.main, c=color))
    for place, color in facts.corners.items():
        wrong = [c for c in QUESTION_COLORS[:6] if c != color]
        near = [c for c in wrong if c in facts.present] or wrong
        options = near if rng.random() < 0.7 else wrong
        said = color if rng.random() < 0.5 else options[int(rng.integers(len(options)))]
        drafts.append(ask("is_corner", said == color, p=place, c=said))
    return drafts


# Category -> the function that drafts its questions about one flag.
FLAG_QUESTIONS = {
    "color": color_questions,
    "choose": choose_questions,
    "number": number_questions,
    "Others": other_questions,
    "YesNo": yes_no_questions,
}
