"""Picture questions about one flag; `pair_questions` asks about two, and about emoji."""

from __future__ import annotations

import dataclasses

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import Draft, join_words, wordings
from mmqa_jax.data.datasets.atlas.flag_facts import FlagFacts
from mmqa_jax.data.datasets.atlas.pictures import Picture

# Colors asked about with yes or no; the others are in hardly any flag.
ASKED = ("red", "white", "blue", "green", "yellow", "black", "orange", "brown")


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A flag with its row in the corpus, its facts, its group key and its described shapes."""

    row: int
    picture: Picture
    facts: FlagFacts
    group: str
    shapes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.picture.name


def make(
    flags: list[Flag],
    rng: np.random.Generator,
    category: str,
    template: str,
    questions: tuple[str, ...],
    answers: tuple[str, ...],
    keywords: str,
    **values: str,
) -> Draft:
    """A draft about one or two flags (or emoji), its frames filled in."""
    filled = wordings(answers, rng, **values)
    return Draft(
        question=wordings(questions, rng, **values)[0],
        answers=filled,
        keywords=keywords,
        category=category,
        template=template,
        topic=flags[0].picture.kind,
        positives=[("i", flag.row) for flag in flags],
        group=tuple(flag.group for flag in flags),
        entities=[flag.name for flag in flags] if flags[0].picture.kind == "flag" else [],
        palette_safe=flags[0].picture.kind == "flag",
    )


def color_questions(flag: Flag, rng: np.random.Generator) -> list[Draft]:
    """Main color, stripes, corners, center, and the list of all colors."""
    facts, X, drafts = flag.facts, flag.name, []
    if facts.main:
        drafts.append(
            make(
                [flag], rng, "color", "main_color",
                ("What is the main color of the flag of {X}?",
                 "Which color covers most of the flag of {X}?",
                 "What color takes up the largest part of the flag of {X}?"),
                ("The main color of the flag of {X} is {c}.", "The flag of {X} is mostly {c}.",
                 "Most of the flag of {X} is {c}."),
                facts.main, X=X, c=facts.main,
            )
        )  # fmt: skip
    for place, color in stripe_places(facts).items():
        drafts.append(
            make(
                [flag], rng, "color", f"{place}_stripe",
                ("What color is the {p} stripe of the flag of {X}?",
                 "Which color does the {p} stripe of the flag of {X} have?"),
                ("The {p} stripe of the flag of {X} is {c}.",
                 "In the flag of {X}, the {p} stripe is {c}.",
                 "It is {c}: the {p} stripe of the flag of {X}."),
                color, X=X, p=place, c=color,
            )
        )  # fmt: skip
    for place, color in facts.corners.items():
        drafts.append(
            make(
                [flag], rng, "color", "corner_color",
                ("What color is the {p} corner of the flag of {X}?",
                 "Which color is found in the {p} corner of the flag of {X}?"),
                ("The {p} corner of the flag of {X} is {c}.",
                 "In the {p} corner, the flag of {X} is {c}.",
                 "The flag of {X} has {c} in its {p} corner."),
                color, X=X, p=place, c=color,
            )
        )  # fmt: skip
    if facts.center:
        drafts.append(
            make(
                [flag], rng, "color", "center_color",
                ("What color is the very center of the flag of {X}?",
                 "Which color lies in the middle of the flag of {X}?"),
                ("The center of the flag of {X} is {c}.",
                 "In its middle, the flag of {X} is {c}.",
                 "The flag of {X} has {c} at its center."),
                facts.center, X=X, c=facts.center,
            )
        )  # fmt: skip
    if facts.clear and 2 <= len(facts.present) <= 4:
        drafts.append(
            make(
                [flag], rng, "color", "color_list",
                ("Which colors can be seen in the flag of {X}?",
                 "What are the colors of the flag of {X}?"),
                ("The colors of the flag of {X} are {c}.", "The flag of {X} is {c}.",
                 "The flag of {X} shows {c}."),
                " ".join(facts.present), X=X, c=join_words(list(facts.present)),
            )
        )  # fmt: skip
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


def yes_no_any(flag: Flag, color: str, rng: np.random.Generator) -> Draft:
    """Is there any red in the flag? Ask only where the answer is beyond doubt."""
    return make(
        [flag], rng, "YesNo", f"any_{color}",
        ("Is there any {c} in the flag of {X}?", "Does the flag of {X} contain the color {c}?",
         "Can the color {c} be seen in the flag of {X}?"),
        *_yes_no(color in flag.facts.present,
                 ("there is {c} in the flag of {X}.", "the flag of {X} contains {c}.",
                  "{c} can be seen in the flag of {X}."),
                 ("there is no {c} in the flag of {X}.", "the flag of {X} does not contain {c}.",
                  "{c} cannot be seen in the flag of {X}.")),
        X=flag.name, c=color,
    )  # fmt: skip


def yes_no_main(flag: Flag, color: str, rng: np.random.Generator) -> Draft:
    """Is this the main color of the flag?"""
    return make(
        [flag], rng, "YesNo", "is_main",
        ("Is {c} the main color of the flag of {X}?", "Is the flag of {X} mostly {c}?",
         "Does {c} cover most of the flag of {X}?"),
        *_yes_no(color == flag.facts.main,
                 ("{c} is the main color of the flag of {X}.", "the flag of {X} is mostly {c}.",
                  "{c} covers most of it."),
                 ("{c} is not the main color of the flag of {X}.",
                  "the flag of {X} is not mostly {c}.", "another color covers most of it.")),
        X=flag.name, c=color,
    )  # fmt: skip


def yes_no_corner(flag: Flag, place: str, color: str, rng: np.random.Generator) -> Draft:
    """Is the upper left corner of the flag red?"""
    return make(
        [flag], rng, "YesNo", "is_corner",
        ("Is the {p} corner of the flag of {X} {c}?",
         "Does the flag of {X} have the color {c} in its {p} corner?"),
        *_yes_no(flag.facts.corners[place] == color,
                 ("the {p} corner of the flag of {X} is {c}.", "it is {c} there.",
                  "the flag of {X} is {c} in its {p} corner."),
                 ("the {p} corner of the flag of {X} is not {c}.", "it is not {c} there.",
                  "the flag of {X} is not {c} in its {p} corner.")),
        X=flag.name, c=color, p=place,
    )  # fmt: skip


def _yes_no(
    yes: bool, if_yes: tuple[str, ...], if_no: tuple[str, ...]
) -> tuple[tuple[str, ...], str]:
    word = "Yes" if yes else "No"
    return tuple(f"{word}, {text}" for text in (if_yes if yes else if_no)), word.lower()


def choose_questions(flag: Flag, rng: np.random.Generator) -> list[Draft]:
    """Is the top stripe red or green? Does the flag show more red or more white?"""
    facts, X, drafts = flag.facts, flag.name, []
    places = {f"{p} stripe": c for p, c in stripe_places(facts).items()}
    places |= {f"{p} corner": c for p, c in facts.corners.items()}
    for place, color in places.items():
        others = [c for c in ASKED[:6] if c != color]
        near = [c for c in facts.present if c != color and c in others]
        other = near[int(rng.integers(len(near)))] if near and rng.random() < 0.7 else None
        other = other or others[int(rng.integers(len(others)))]
        one, two = (color, other) if rng.random() < 0.5 else (other, color)
        drafts.append(
            make(
                [flag], rng, "choose", "place_choice",
                ("Is the {p} of the flag of {X} {one} or {two}?",
                 "Which color is the {p} of the flag of {X}, {one} or {two}?"),
                ("The {p} of the flag of {X} is {c}.", "In the flag of {X}, the {p} is {c}.",
                 "It is {c}: the {p} of the flag of {X}."),
                color, X=X, p=place, one=one, two=two, c=color,
            )
        )  # fmt: skip
    shares = facts.shares
    pairs = [
        (a, b) for a in facts.present for b in facts.present
        if shares[a] >= 1.5 * shares[b] and shares[a] - shares[b] >= 0.06
    ]  # fmt: skip
    for index in rng.permutation(len(pairs))[:2]:
        more, less = pairs[index]
        one, two = (more, less) if rng.random() < 0.5 else (less, more)
        drafts.append(
            make(
                [flag], rng, "choose", "more_of",
                ("Does the flag of {X} show more {one} or more {two}?",
                 "Is there more {one} or more {two} in the flag of {X}?"),
                ("The flag of {X} shows more {c}.", "There is more {c} in the flag of {X}.",
                 "In the flag of {X}, {c} covers more."),
                more, X=X, one=one, two=two, c=more,
            )
        )  # fmt: skip
    return drafts


def number_questions(flag: Flag, rng: np.random.Generator) -> list[Draft]:
    """How many different colors, how many stripes."""
    facts, X, drafts = flag.facts, flag.name, []
    if facts.clear and facts.one_shade:
        drafts.append(
            make(
                [flag], rng, "number", "color_count",
                ("How many different colors are there in the flag of {X}?",
                 "How many colors does the flag of {X} have?"),
                ("The flag of {X} has {n} different colors.",
                 "There are {n} colors in the flag of {X}.", "{n} colors are in the flag of {X}."),
                str(len(facts.present)), X=X, n=str(len(facts.present)),
            )
        )  # fmt: skip
    if facts.whole and facts.one_shade:
        drafts.append(
            make(
                [flag], rng, "number", "stripe_count",
                ("How many stripes does the flag of {X} have?",
                 "How many stripes can be counted in the flag of {X}?"),
                ("The flag of {X} has {n} stripes.", "There are {n} stripes in the flag of {X}.",
                 "{n} stripes make up the flag of {X}."),
                str(len(facts.stripes)), X=X, n=str(len(facts.stripes)),
            )
        )  # fmt: skip
    return drafts


def shape_questions(flag: Flag, rng: np.random.Generator) -> list[Draft]:
    """Which shape of SHAPES the flag shows; the Factbook's description names it."""
    if not 1 <= len(flag.shapes) <= 2:
        return []
    return [
        make(
            [flag], rng, "shape", "shape",
            questions,
            ("The flag of {X} shows a {s}.", "A {s} can be seen in the flag of {X}.",
             "There is a {s} in the flag of {X}."),
            " ".join(flag.shapes), X=flag.name, s=" and a ".join(flag.shapes),
        )
        for questions in (
            ("Which shape can be seen in the flag of {X}?",
             "What shape does the flag of {X} show?"),
            ("What kind of shape is drawn on the flag of {X}?",
             "Which geometric shape is part of the flag of {X}?"),
        )
    ]  # fmt: skip


def other_questions(flag: Flag, rng: np.random.Generator) -> list[Draft]:
    """Which way the stripes run; in which half most of a color lies."""
    facts, X, drafts = flag.facts, flag.name, []
    if facts.whole and facts.direction:
        drafts.append(
            make(
                [flag], rng, "Others", "stripe_direction",
                ("In which direction do the stripes of the flag of {X} run?",
                 "How are the stripes of the flag of {X} arranged?"),
                ("The stripes of the flag of {X} run {d}.", "They run {d} in the flag of {X}.",
                 "The flag of {X} has stripes that run {d}."),
                facts.direction, X=X, d=facts.direction,
            )
        )  # fmt: skip
    for (color, _), half in facts.halves.items():
        drafts.append(
            make(
                [flag], rng, "Others", "half_of_color",
                ("In which half of the flag of {X} is most of the {c} found?",
                 "Where in the flag of {X} does most of the {c} lie?"),
                ("Most of the {c} in the flag of {X} is in the {h} half.",
                 "The {c} of the flag of {X} lies mostly in its {h} half.",
                 "It is in the {h} half of the flag of {X}."),
                half, X=X, c=color, h=half,
            )
        )  # fmt: skip
    return drafts
