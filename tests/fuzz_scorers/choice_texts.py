"""Random answers that name an option, in the ways that models do."""

import random
from collections.abc import Sequence

from tests.fuzz_scorers import traps

LETTERS = "ABCDEFGHIJ"
# {L} and {M} are letters of options, {l} a small one, {text} and {other} texts, {any} anything.
_FORMS = (
    *("{L}", "{L}.", "({L})", "{L})", "[{L}]", " {L} ", "{L}\n", "{l}", "({l})", "({l}) {text}"),
    *("{L}:", "'{L}'", "**{L}**", "#{L}", "{L};", "{L}!", "{L}?", "{{{L}}}", "Z", "Z {L}", "nan"),
    *("{L}. {text}", "({L}) {text}", "{L}: {text}", "{L} {text}", "{L}.{text}", "{text}."),
    "{text}",
    *("The answer is {L}.", "The answer is {L}", "the answer is {l}.", "The answer is ({L})."),
    *("The answer is **{L}**.", "The correct answer is **{L}**. {any}", "answer\nis {L}"),
    *("The answer is {text}.", "The answer is {L}\n", "The answer is {L}. The answer is {M}."),
    *("The best answer is {L}. {any}", "Answer: {L}", "FINAL ANSWER: {L}", "so it is a {text}"),
    *("{L} or {M}", "({L}) or ({M})", "{L}, not {M}", "A {text} is {M}", "I think it is {text}"),
    *("I would say {text} and not {other}", "It is not ({L}) but rather {other}, {any} {any}"),
    *("Let us see: {any} {any} {any}, so {L} {any}", "{any} {L}", "{L} {any}", "{any}"),
    "Option {L} is right because {any} {any} {any} {any}",
    *("Sorry, I can't help with images of people yet. {L}", "I can't process this file. ({L})"),
    *("I'm sorry, but without the image provided {L}", "Cannot determine the answer, maybe {L}"),
    *("Failed to obtain answer via API {L}", "Failed to obtain answer via API {text}"),
)
_USUAL = ("{L}", "{L}. {text}", "The answer is {L}.")


def choices(draw: random.Random, fewest: int = 2, most: int = 5) -> list[str]:
    """Texts of options, of which two may be equal or one a part of another; none is empty."""
    found: list[str] = []
    for _ in range(draw.randint(fewest, most)):
        kind = draw.random()
        text = traps.near(draw, found[-1]) if found and kind < 0.3 else traps.text(draw, most=2)
        found.append(text or draw.choice(traps.PLAIN))
    return found


def choosing(draw: random.Random, options: Sequence[str]) -> str:
    """An answer that names one of the options, two of them, one that is not there, or none."""
    number, other = draw.randrange(len(options)), draw.randrange(len(options))
    letter = LETTERS[number] if draw.random() < 0.9 else draw.choice("EFGHZ")
    forms = draw.choice((_FORMS, _FORMS, _FORMS, _USUAL))
    parts = [
        draw.choice(forms).format(
            L=letter,
            l=letter.lower(),
            M=LETTERS[other],
            text=options[number],
            other=options[other],
            any=traps.text(draw, most=3),
        )
        for _ in range(draw.choice((1, 1, 1, 2)))
    ]
    return draw.choice((" ", ". ", "\n")).join(parts)
