"""Text questions: one hop from a country's fact, two hops over a fact that stands for it."""

from __future__ import annotations

import collections
import re

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import Draft, wordings
from mmqa_jax.data.datasets.atlas.factbook import Country
from mmqa_jax.data.datasets.atlas.snippets import Snippet
from mmqa_jax.data.datasets.atlas.text_frames import BRIDGES, FACTS


def one_hop(
    countries: list[Country], snippets: list[Snippet], rng: np.random.Generator
) -> list[Draft]:
    """One draft for every fact of every snippet."""
    by_code = {c.code: c for c in countries}
    drafts = []
    for row, snippet in enumerate(snippets):
        country = by_code[snippet.country]
        for name, answer in snippet.facts.items():
            fact = FACTS[name]
            question = wordings(fact.questions, rng, X=country.the_name)[0]
            drafts.append(
                Draft(
                    question=question,
                    answers=_answers(name, country, answer, rng),
                    keywords=answer,
                    category="text",
                    template=name,
                    topic=fact.topic,
                    positives=[("t", row)],
                    group=(country.code,),
                    entities=_entities(country, answer if fact.name_like else ""),
                )
            )
    return drafts


def two_hop(
    countries: list[Country], snippets: list[Snippet], rng: np.random.Generator
) -> list[Draft]:
    """Drafts that name a country by its capital, anthem, peak, former name or internet code.

    A bridge must be the fact of one country alone, must not name the country, and the two
    snippets must need each other: neither holds the other's answer.
    """
    by_code = {c.code: c for c in countries}
    unique = _unique_bridges(countries, snippets)
    rows: dict[str, list[int]] = collections.defaultdict(list)
    for row, snippet in enumerate(snippets):
        if snippet.facts:
            rows[snippet.country].append(row)
    drafts = []
    for code, country_rows in rows.items():
        country = by_code[code]
        for first in country_rows:
            for bridge, value in snippets[first].facts.items():
                if (bridge, value) not in unique:
                    continue
                for second in country_rows:
                    drafts.extend(_chain(country, snippets, first, second, bridge, value, rng))
    return drafts


def _chain(
    country: Country,
    snippets: list[Snippet],
    first: int,
    second: int,
    bridge: str,
    value: str,
    rng: np.random.Generator,
) -> list[Draft]:
    one, two = snippets[first], snippets[second]
    if first == second or value in two.text:
        return []
    drafts = []
    for name, answer in two.facts.items():
        fact = FACTS[name]
        if answer in one.text or name in _NAMING:
            continue
        frames = BRIDGES[bridge]
        described = frames[int(rng.integers(len(frames)))].format(b=value)
        question = wordings(fact.questions, rng, X=described)[0]
        names = [value] if FACTS.get(bridge) and FACTS[bridge].name_like else []
        drafts.append(
            Draft(
                question=question,
                answers=_answers(name, country, answer, rng),
                keywords=answer,
                category="text",
                template=f"{bridge}>{name}",
                topic=fact.topic,
                positives=[("t", first), ("t", second)],
                group=(country.code,),
                hops=2,
                entities=_entities(country, answer if fact.name_like else "", *names),
            )
        )
    return drafts


# Second facts that a two-hop question does not ask: they are other names of the country.
_NAMING = frozenset({"long_form", "local_name", "former", "name_meaning", "capital_meaning"})


def _unique_bridges(countries: list[Country], snippets: list[Snippet]) -> set[tuple[str, str]]:
    name_of = {c.code: c.name.lower() for c in countries}
    holders: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for snippet in snippets:
        for fact, value in snippet.facts.items():
            if fact in BRIDGES:
                holders[fact, value].add(snippet.country)
    unique = set()
    all_names = sorted(name_of.values(), key=len, reverse=True)
    named = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, all_names)) + r")(?!\w)")
    for (fact, value), codes in holders.items():
        if len(codes) != 1 or len(value) < 3 or named.search(value.lower()):
            continue
        if not _hints_at(value, name_of[next(iter(codes))]):
            unique.add((fact, value))
    return unique


def _hints_at(value: str, country: str) -> bool:
    """Whether `value` holds the opening of a word of the country's name (`Russian Empire`)."""
    stems = {w[:4] for w in re.findall(r"\w{4,}", country) if w not in _COMMON}
    return any(stem in value.lower() for stem in stems)


_COMMON = frozenset(
    {"island", "islands", "republic", "saint", "north", "south", "united", "states"}
)


def _answers(name: str, country: Country, answer: str, rng: np.random.Generator) -> list[str]:
    # Full sentences first: the main answer names what it is about.
    frames = FACTS[name].answers
    full = wordings(frames[:2], rng, X=country.the_name, a=answer)
    return full + wordings(frames[2:], rng, X=country.the_name, a=answer)


def _entities(country: Country, *names: str) -> list[str]:
    found = [country.the_name]
    for name in names:
        if name and name[0].isupper() and name not in found and name != country.name:
            found.append(name)
    return found
