"""Text questions: one hop from a country's fact, two hops over a fact that stands for it."""

from __future__ import annotations

import collections
import re

import numpy as np

from mmqa_jax.data.datasets.atlas import templates
from mmqa_jax.data.datasets.atlas.drafts import Draft, wordings
from mmqa_jax.data.datasets.atlas.factbook import Country
from mmqa_jax.data.datasets.atlas.snippets import Snippet

# Facts that no second hop asks for: they are other names of the country.
_NAMING = frozenset({"long_form", "local_name", "former", "name_meaning", "capital_meaning"})
_COMMON_WORDS = frozenset(
    {"island", "islands", "republic", "saint", "north", "south", "united", "states"}
)


def one_hop(
    countries: list[Country], snippets: list[Snippet], rng: np.random.Generator
) -> list[Draft]:
    """One draft for every fact of every snippet."""
    by_code = {c.code: c for c in countries}
    return [
        _draft(by_code[snippet.country], name, answer, [row], rng)
        for row, snippet in enumerate(snippets)
        for name, answer in snippet.facts.items()
    ]


def two_hop(
    countries: list[Country], snippets: list[Snippet], rng: np.random.Generator
) -> list[Draft]:
    """Drafts that describe a country by its capital, anthem, peak, former name or internet code.

    A bridge must be the fact of one country alone and must not name the country, and the two
    snippets must need each other: neither holds the other's answer.
    """
    by_code = {c.code: c for c in countries}
    unique = _unique_bridges(countries, snippets)
    rows: dict[str, list[int]] = collections.defaultdict(list)
    for row, snippet in enumerate(snippets):
        if snippet.facts:
            rows[snippet.country].append(row)
    return [
        _draft(by_code[code], name, answer, [first, second], rng, bridge)
        for code, country_rows in rows.items()
        for first in country_rows
        for bridge in snippets[first].facts.items()
        if bridge in unique
        for second in country_rows
        if first != second and bridge[1] not in snippets[second].text
        for name, answer in snippets[second].facts.items()
        if answer not in snippets[first].text and name not in _NAMING
    ]


def _draft(
    country: Country,
    name: str,
    answer: str,
    rows: list[int],
    rng: np.random.Generator,
    bridge: tuple[str, str] | None = None,
) -> Draft:
    """A question for the fact `name`; `bridge` (fact, its answer) describes the country."""
    fact = templates.facts()[name]
    subject, names = country.the_name, [answer] if fact.name_like else []
    if bridge is not None:
        first = templates.facts()[bridge[0]]
        subject = first.bridges[int(rng.integers(len(first.bridges)))].format(b=bridge[1])
        names += [bridge[1]] if first.name_like else []
    question = wordings(fact.questions, rng, X=subject)[0]
    entities = [country.the_name]
    for entity in names:
        if entity[0].isupper() and entity not in entities and entity != country.name:
            entities.append(entity)
    # Full sentences first: the main answer names what it is about.
    answers = wordings(fact.answers[:2], rng, X=country.the_name, a=answer)
    return Draft(
        question=question,
        answers=answers + wordings(fact.answers[2:], rng, X=country.the_name, a=answer),
        keywords=answer,
        category="text",
        template=f"{bridge[0]}>{name}" if bridge else name,
        topic=fact.topic,
        positives=[("t", row) for row in rows],
        group=(country.code,),
        hops=len(rows),
        entities=entities,
    )


def _unique_bridges(countries: list[Country], snippets: list[Snippet]) -> set[tuple[str, str]]:
    """The (fact, answer) pairs that one country alone has and that do not name it."""
    name_of = {c.code: c.name.lower() for c in countries}
    holders: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for snippet in snippets:
        for fact, value in snippet.facts.items():
            if templates.facts()[fact].bridges:
                holders[fact, value].add(snippet.country)
    all_names = sorted(name_of.values(), key=len, reverse=True)
    named = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, all_names)) + r")(?!\w)")
    return {
        (fact, value)
        for (fact, value), codes in holders.items()
        if len(codes) == 1
        and len(value) >= 3
        and not named.search(value.lower())
        and not _suggests(value, name_of[next(iter(codes))])
    }


def _suggests(value: str, country: str) -> bool:
    """Whether `value` holds the start of a word of the country's name (`Russian Empire`)."""
    stems = {w[:4] for w in re.findall(r"\w{4,}", country) if w not in _COMMON_WORDS}
    return any(stem in value.lower() for stem in stems)
