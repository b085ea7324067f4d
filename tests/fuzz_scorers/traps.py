"""Random texts on which normalizations of answers tend to differ."""

import random
from collections.abc import Sequence

_ARTICLES = ("a", "an", "the", "The", "A", "to", "AN")
_NUMBERS = (
    *("zero", "one", "Two", "three", "ten", "eleven", "none", "None", "twenty-one", "hundred"),
    *("thousand", "million", "point", "half", "third", "dozen", "and", "0", "1", "2", "007", "10"),
    *(
        "1,000",
        "12,34",
        "1.5",
        "3.0",
        ".5",
        "5.",
        "-5",
        "+3",
        "1e3",
        "1e400",
        "1_000",
        "nan",
        "inf",
    ),
    *("1/2", "1.2.3", "-.2.3", "½", "²", "٣", "7", "99999999999999999999"),
    *(
        "million\nfive",
        "hundred\nthousand",
        "one hundred",
        "two thousand and five",
        "zero point five",
    ),
)
_AMOUNTS = ("5%", "50 percent", "$3.50", "€1,000", "1990s", "1990", "in 1990", "1990-1995", "3-4")
_MORE_AMOUNTS = ("2 to 3", "10–12", "5 km", "12'", "10:30", "3rd", "#1", "no. 5", "1,2", "1, 2")
_CONTRACTIONS = ("dont", "don't", "Im", "I'm", "cant", "itll", "whos", "oclock", "let's", "id've")
_MORE_CONTRACTIONS = ("couldn'tve", "Ive", "somebodys", "y'all", "ow's'at", "wont", "she's", "twas")
_WORDS = (
    *("dog", "Dog", "dogs", "cat", "red", "Red", "blue", "yes", "no", "Yes", "NO", "true", "false"),
    *("round", "square", "circle", "h", "point", "playing", "was", "better", "mice", "left"),
    *("Paris", "New York", "new-york", "U.S.A.", "u.s.", "St. Louis", "x-ray", "t-shirt", "C++"),
    *("hot dog", "top/bottom", "salt & pepper", "black and white", "don", "t", "s", "an apple"),
)
_UNICODE = (
    *("café", "cafe\u0301", "naïve", "Straße", "İstanbul", "ſ", "ﬁne", "中文", "🙂", "“quoted”"),
    *("a\u0301", "the\u0301 dog", "a²", "an\u200d", "the_dog", "à la", "aª"),
    *("it’s", "–", "—", "…", "non\u00a0breaking", "\u200b", "\u2028", "Ⅳ", "ΑΒΓ", "ß", "´", "`"),
)
_EMPTY = ("", " ", "  ", "\n", "\t", "\r\n", "\x0b", ".", ",", "-", "?", "!", "'", '"', "()", "[]")
_REFUSALS = (
    *("Not found in the sources.", "I don't know", "unknown", "N/A", "none of the above"),
    *("Sorry, I can't help with images of people yet.", "Cannot determine the answer", "FAILED"),
    "Failed to obtain answer via API",
)
# Words that one normalization or another makes equal.
_TWINS = (
    *(("two", "2"), ("ten", "10"), ("zero", "0"), ("none", "0"), ("one", "1.0"), ("five", "5.")),
    *(("yes", "true"), ("no", "false"), ("yes", "entailment"), ("dont", "don't"), ("its", "it's")),
    *(("couldn'tve", "couldn't've"), ("dogs", "dog"), ("better", "good"), ("1,000", "1000")),
    *(("5.55", "5.554"), ("5.55", "5.51"), ("1.5", "1.50"), ("1.5", "15"), ("hot dog", "hot-dog")),
    *(("u.s.", "us"), ("café", "cafe\u0301"), ("new york", "New York"), ("a", "the")),
    *(("grey", "gray"), ("thousand", "1000"), ("and", "&"), ("3", "three"), ("3", "3.004")),
)
WORDS = (
    *(word for pair in _TWINS for word in pair),
    *_ARTICLES,
    *_NUMBERS,
    *_AMOUNTS,
    *_MORE_AMOUNTS,
    *_CONTRACTIONS,
    *_MORE_CONTRACTIONS,
    *_WORDS,
    *_UNICODE,
    *_EMPTY,
    *_REFUSALS,
)
PLAIN = ("dog", "cat", "red", "two", "2", "yes", "no", "the", "a", "left", "1990", "x-ray")
MARKS = ";/[]\"{}()=+\\_-><@`,?!.:'&%$#*|~^"
_GLUE = (" ", " ", " ", " ", "", "  ", "\n", "\t", ", ", ",", ". ", ".", "-", " - ", "/", " and ")


def text(draw: random.Random, words: Sequence[str] = WORDS, most: int = 5) -> str:
    """Words of a vocabulary with odd things between them."""
    parts = [draw.choice(words)]
    for _ in range(draw.randrange(most)):
        parts += [draw.choice(_GLUE), draw.choice(words)]
    return "".join(parts)


def _twin(draw: random.Random, given: str) -> str:
    """The text with a word for another that may count as the same; with one more if it has none."""
    pairs = [*_TWINS, *((second, first) for first, second in _TWINS)]
    there = [pair for pair in pairs if pair[0] in given]
    first, second = draw.choice(there) if there else ("", draw.choice(pairs)[1])
    return given.replace(first, second, 1) if there else f"{given} {second}"


def near(draw: random.Random, given: str) -> str:
    """A text that most normalizations make equal to the given one, or almost."""
    for _ in range(draw.randint(0, 2)):
        place = draw.randint(0, len(given))
        given = draw.choice(
            (
                f"the {given}",
                f"{given}.",
                f" {given} ",
                given.upper(),
                given.lower(),
                given.title(),
                given.replace(" ", draw.choice(("  ", "\n", "\t", "-", "")), 1),
                given[:place] + draw.choice(MARKS) + given[place:],
                given[:place] + given[place + 1 :],
                draw.choice(('"{}"', "({})", "'{}'", "**{}**")).format(given),
                f"{given} {given}",
                f"{given}, {draw.choice(PLAIN)}",
                _twin(draw, given),
                _twin(draw, given),
            )
        )
    return given


def answer(draw: random.Random, references: Sequence[str]) -> str:
    """One of the references, something near one, or any text."""
    kind = draw.random()
    if references and kind < 0.3:
        return draw.choice(references)
    if references and kind < 0.75:
        return near(draw, draw.choice(references))
    return text(draw)
