"""Atlas's snippets: the Factbook's fields as prose that names its country, with their facts.

A *card* (cards.toml) frames the short values of one field group in a sentence and lists the
answers in it. *Prose* fields (prose.toml) are cut into passages of at most about 55 words.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Iterator

from mmqa_jax.data.datasets.atlas import templates
from mmqa_jax.data.datasets.atlas.cards import cards
from mmqa_jax.data.datasets.atlas.factbook import Country, chunks, clean


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Snippet:
    """One text source.

    Attributes:
      country: Factbook code of its country.
      kind: the field group it comes from.
      text: the snippet; it names its country.
      facts: answers that `text` contains verbatim, by fact name (`capital` -> `Luanda`).
    """

    country: str
    kind: str
    text: str
    facts: dict[str, str] = dataclasses.field(default_factory=dict)


def select_snippets(countries: list[Country], *, most: int) -> tuple[list[Snippet], int]:
    """The corpus's snippets: all cards, then prose by rank until there are `most`.

    A prose passage that states a fact of its country's cards is left out, so that a question
    about the fact has one gold snippet; where a second card states it, no question asks for it.
    Returns (snippets in country order, number of passages left out for that reason).
    """
    prose_fields, known = templates.load("prose"), templates.facts()
    kept: list[tuple[int, Snippet]] = []  # with the country's position
    prose: list[tuple[tuple[int, int], Snippet]] = []
    dropped, texts = 0, set()
    for position, country in enumerate(countries):
        made: list[Snippet] = []
        for snippet in (*_cards(country), *_prose(country)):
            if snippet.text not in texts:
                texts.add(snippet.text)
                made.append(snippet)
        stated = {s: s.facts for s in made if s.kind not in prose_fields}
        seen = collections.Counter()
        for snippet in made:
            if snippet in stated:
                facts = {
                    fact: answer
                    for fact, answer in snippet.facts.items()
                    if fact in known
                    and not any(s is not snippet and _states(s, fact, answer) for s in stated)
                }
                kept.append((position, dataclasses.replace(snippet, facts=facts)))
            elif any(
                _states(snippet, *fact) for facts in stated.values() for fact in facts.items()
            ):
                dropped += 1
            else:
                rank = prose_fields[snippet.kind]["rank"] + 2 * seen[snippet.kind]
                seen[snippet.kind] += 1
                prose.append(((rank, position), snippet))
    prose.sort(key=lambda item: item[0])
    kept += [(key[1], snippet) for key, snippet in prose[: max(most - len(kept), 0)]]
    kept.sort(key=lambda item: item[0])
    return [snippet for _, snippet in kept], dropped


def _states(snippet: Snippet, name: str, answer: str) -> bool:
    fact = templates.facts().get(name)
    return (
        fact is not None
        and answer in snippet.text  # the cheap test first
        and _contains(snippet.text, answer)
        and re.search(fact.cue, snippet.text, re.IGNORECASE) is not None
    )


def _cards(country: Country) -> Iterator[Snippet]:
    for kind, (text, facts) in cards(country).items():
        words = text.split()
        if len(words) > 64:
            text = re.sub(r"[,;][^,;]*$", "", " ".join(words[:64]))
        text = _tidy(text)
        facts = {fact: a for fact, a in facts.items() if a and _contains(text, a)}
        yield Snippet(country.code, kind, text, facts)


def _prose(country: Country) -> Iterator[Snippet]:
    for kind, field in templates.load("prose").items():
        value = re.sub(r"\n+", "\n", clean(country.raw(*field["path"].split(" > "))))
        value = re.sub(r"(?i)\bnote(?: \d)?\s*[:-]\s*", "", value).replace("\n", ". ")
        value = re.sub(r"\.+(?= |$)", ".", value).replace(";.", ".").strip(" ;.")
        if len(value.split()) < 2:
            continue
        frames = field["frames"]
        # Fixed by the country and the kind, on every machine.
        digest = hashlib.sha256(f"{country.code}|{kind}".encode()).digest()
        frame = frames[int.from_bytes(digest[:4], "big") % len(frames)]
        for n, passage in enumerate(chunks(value)[: field.get("most", 3)]):
            if n == 0 and frame != "{v}":
                text = frame.format(X=country.the_name, own=country.own, v=passage)
            elif re.search(rf"(?<![\w-]){re.escape(country.name)}(?![\w-])", passage):
                text = passage
            else:
                text = f"{country.name}: {passage}"
            if len(text.split()) >= 8:
                yield Snippet(country.code, kind, _tidy(text))


def _contains(text: str, answer: str) -> bool:
    """Whether the answer is in the text as whole words."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _tidy(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\s+([,;:]|\.(?!\w))", r"\1", text)
    text = re.sub(r"([.;:,])\1+", r"\1", text)
    text = re.sub(r"[;,:]\.", ".", text)
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?\"')" else text.rstrip(";:,") + "."
