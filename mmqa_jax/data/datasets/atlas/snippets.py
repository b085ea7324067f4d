"""Atlas's snippets: the Factbook's fields as prose that names its country, with their facts.

A *card* frames the short values of one field group in a sentence and says which answers stand
in it. *Prose* fields are cut into passages of at most some 55 words.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator

from mmqa_jax.data.datasets.atlas.cards_land import LAND_CARDS
from mmqa_jax.data.datasets.atlas.cards_state import STATE_CARDS
from mmqa_jax.data.datasets.atlas.factbook import Country, chunks, clean
from mmqa_jax.data.datasets.atlas.text_frames import FACTS

# Prose fields: kind -> (path, frames). `{X}` is the country's name in a sentence, `{own}` its
# possessive, `{v}` the field's text; a passage after the first gets "{name}: " where it does
# not name the country itself.
PROSE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "background": (("Introduction", "Background"), ("{v}",)),
    "climate": (
        ("Geography", "Climate"),
        ("The climate of {X}: {v}.", "{own} climate is as follows: {v}."),
    ),
    "terrain": (
        ("Geography", "Terrain"),
        ("The terrain of {X}: {v}.", "The land of {X} consists of {v}."),
    ),
    "resources": (
        ("Geography", "Natural resources"),
        ("The natural resources of {X} include {v}.", "Natural resources found in {X}: {v}."),
    ),
    "settlement": (
        ("Geography", "Population distribution"),
        ("How the population of {X} is distributed: {v}.", "Where people live in {X}: {v}."),
    ),
    "hazards": (
        ("Geography", "Natural hazards"),
        ("Natural hazards in {X}: {v}.", "{X} is exposed to these natural hazards: {v}."),
    ),
    "geography_note": (
        ("Geography", "Geography - note"),
        ("A note on the geography of {X}: {v}.",),
    ),
    "rivers": (("Geography", "Major rivers (by length in km)"), ("The major rivers of {X}: {v}.",)),
    "environment": (
        ("Environment", "Environmental issues"),
        ("Environmental issues in {X}: {v}.", "{X} faces these environmental issues: {v}."),
    ),
    "legal": (("Government", "Legal system"), ("The legal system of {X}: {v}.",)),
    "amendments": (
        ("Government", "Constitution", "amendment process"),
        ("How the constitution of {X} can be amended: {v}.",),
    ),
    "economy": (
        ("Economy", "Economic overview"),
        ("An overview of the economy of {X}: {v}.", "The economy of {X}: {v}."),
    ),
    "industries": (
        ("Economy", "Industries"),
        ("The industries of {X}: {v}.", "Industry in {X} covers {v}."),
    ),
    "broadcasting": (
        ("Communications", "Broadcast media"),
        ("Broadcast media in {X}: {v}.", "Radio and television in {X}: {v}."),
    ),
    "forces": (
        ("Military and Security", "Military and security forces"),
        ("The military and security forces of {X}: {v}.",),
    ),
    "equipment": (
        ("Military and Security", "Military equipment inventories and acquisitions"),
        ("On the military equipment of {X}: {v}.",),
    ),
    "service": (
        ("Military and Security", "Military service age and obligation"),
        ("Military service in {X}: {v}.",),
    ),
    "military": (("Military and Security", "Military - note"), ("{v}",)),
    "space": (
        ("Space", "Space program overview"),
        ("The space program of {X}: {v}.",),
    ),
    "space_milestones": (
        ("Space", "Key space-program milestones"),
        ("Milestones of the space program of {X}: {v}.",),
    ),
    "dependency": (("Government", "Dependency status"), ("The status of {X}: {v}.",)),
}
# Which prose joins the corpus first while there is room.
PROSE_ORDER = ("background", "climate", "geography_note", "economy", "terrain", "settlement",
               "military", "broadcasting", "hazards", "environment", "industries", "resources",
               "legal", "space", "service", "rivers", "dependency", "equipment",
               "amendments", "forces", "space_milestones")  # fmt: skip
# Long fields give at most so many passages per country.
_MOST_PASSAGES = {"background": 9, "military": 5, "space_milestones": 1, "space": 1, "service": 1,
                  "amendments": 1, "equipment": 1, "forces": 1}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Snippet:
    """One text source.

    Attributes:
      country: Factbook code of its country.
      kind: the field group it comes from.
      text: the snippet; it names its country.
      facts: answers that stand verbatim in `text`, by fact name (`capital` -> `Luanda`).
    """

    country: str
    kind: str
    text: str
    facts: dict[str, str] = dataclasses.field(default_factory=dict)


def pick(options: tuple, *key: str):
    """One of `options`, fixed by the words of `key` (stable across runs and machines)."""
    digest = hashlib.sha256("|".join(key).encode()).digest()
    return options[int.from_bytes(digest[:4], "big") % len(options)]


def make_snippets(country: Country) -> list[Snippet]:
    """All snippets of one country, in a fixed order, no two with the same text."""
    found: dict[str, Snippet] = {}
    for snippet in (*_cards(country), *_prose(country)):
        found.setdefault(snippet.text, snippet)
    return list(found.values())


def select_snippets(countries: list[Country], *, most: int) -> tuple[list[Snippet], int]:
    """The corpus's snippets: all cards, then prose by PROSE_ORDER until there are `most`.

    A prose passage that tells a fact of its country's cards is left out, so that a question
    about the fact has one gold snippet; where a second card tells it, the fact is not asked.
    Returns (snippets in country order, number of passages left out for that reason).
    """
    cards: list[tuple[int, Snippet]] = []
    prose: list[tuple[tuple[int, int], Snippet]] = []
    dropped, texts = 0, set()
    for place, country in enumerate(countries):
        made = [s for s in make_snippets(country) if s.text not in texts]
        texts.update(s.text for s in made)
        told = {s: s.facts for s in made if s.kind not in PROSE}
        seen: dict[str, int] = {}
        for snippet in made:
            if snippet.kind not in PROSE:
                facts = {
                    f: a
                    for f, a in snippet.facts.items()
                    if f in FACTS and not any(o is not snippet and _tells(o, f, a) for o in told)
                }
                cards.append((place, dataclasses.replace(snippet, facts=facts)))
            elif any(_tells(snippet, f, a) for facts in told.values() for f, a in facts.items()):
                dropped += 1
            else:
                n = seen[snippet.kind] = seen.get(snippet.kind, -1) + 1
                prose.append(((PROSE_ORDER.index(snippet.kind) + 2 * n, place), snippet))
    prose.sort(key=lambda item: item[0])
    kept = cards + [(key[1], s) for key, s in prose[: max(most - len(cards), 0)]]
    kept.sort(key=lambda item: item[0])
    return [snippet for _, snippet in kept], dropped


def _tells(snippet: Snippet, fact: str, answer: str) -> bool:
    return (
        fact in FACTS
        and answer in snippet.text  # the cheap test first
        and _stands_in(answer, snippet.text)
        and re.search(FACTS[fact].cue, snippet.text, re.IGNORECASE) is not None
    )


def _cards(country: Country) -> Iterator[Snippet]:
    for kind, card in (LAND_CARDS | STATE_CARDS).items():
        made = card(country)
        if made is None:
            continue
        text, facts = made
        text = _tidy(_at_most(text, 64))
        facts = {k: v for k, v in facts.items() if v and _stands_in(v, text)}
        yield Snippet(country.code, kind, text, facts)


def _prose(country: Country) -> Iterator[Snippet]:
    for kind, (path, frames) in PROSE.items():
        value = re.sub(r"\n+", "\n", clean(country.raw(*path)))
        value = re.sub(r"(?i)\bnote(?: \d)?\s*[:-]\s*", "", value).replace("\n", ". ")
        value = re.sub(r"\.+(?= |$)", ".", value).replace(";.", ".").strip(" ;.")
        if _words(value) < 2 or value.lower() in ("none", "na", "nothing"):
            continue
        frame = pick(frames, country.code, kind)
        for n, passage in enumerate(chunks(value)[: _MOST_PASSAGES.get(kind, 3)]):
            if n == 0 and frame != "{v}":
                text = frame.format(X=country.the_name, own=country.own, v=passage)
            elif names(country, passage):
                text = passage
            else:
                text = f"{country.name}: {passage}"
            if _words(text) >= 8:
                yield Snippet(country.code, kind, _tidy(text))


def names(country: Country, text: str) -> bool:
    """Whether `text` names the country as a whole word."""
    return re.search(rf"(?<![\w-]){re.escape(country.name)}(?![\w-])", text) is not None


def _at_most(text: str, most: int) -> str:
    words = text.split()
    return text if len(words) <= most else re.sub(r"[,;][^,;]*$", "", " ".join(words[:most]))


def _words(text: str) -> int:
    return len(text.split())


def _stands_in(answer: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _tidy(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\s+([,;:]|\.(?!\w))", r"\1", text)
    text = re.sub(r"([.;:,])\1+", r"\1", text)
    text = re.sub(r"[;,:]\.", ".", text)
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?\"')" else text.rstrip(";:,") + "."
