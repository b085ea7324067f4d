"""Atlas's snippets: the Factbook's fields as prose that names its country, with their facts.

A *card* (cards.toml) frames the short values of one field group in a sentence and lists the
answers in it. *Prose* fields (prose.toml) are cut into passages of at most about 55 words.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from mmqa_jax.data.atlas import factbook
from mmqa_jax.data.atlas.factbook import Country, chunks, clean, person_name


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
    prose_fields, known = factbook.load("prose"), factbook.facts()
    selected: list[tuple[int, Snippet]] = []  # with the country's position
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
                selected.append((position, dataclasses.replace(snippet, facts=facts)))
            elif any(
                _states(snippet, *fact) for facts in stated.values() for fact in facts.items()
            ):
                dropped += 1
            else:
                rank = prose_fields[snippet.kind]["rank"] + 2 * seen[snippet.kind]
                seen[snippet.kind] += 1
                prose.append(((rank, position), snippet))
    prose.sort(key=lambda item: item[0])
    selected += [(key[1], snippet) for key, snippet in prose[: max(most - len(selected), 0)]]
    selected.sort(key=lambda item: item[0])
    return [snippet for _, snippet in selected], dropped


def _states(snippet: Snippet, name: str, answer: str) -> bool:
    fact = factbook.facts().get(name)
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
    for kind, field in factbook.load("prose").items():
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
                text = frame.format(X=country.the_name, own=country.possessive, v=passage)
            elif re.search(rf"(?<![\w-]){re.escape(country.name)}(?![\w-])", passage):
                text = passage
            else:
                text = f"{country.name}: {passage}"
            if len(text.split()) >= 8:
                yield Snippet(country.code, kind, _tidy(text))


def _contains(text: str, answer: str) -> bool:
    """Whether the answer is in the text as whole words."""
    at = text.find(answer)  # a pattern for each answer would take longer to compile than to match
    while at >= 0:
        end = at + len(answer)
        if not re.match(r"\w", text[at - 1 : at]) and not re.match(r"\w", text[end : end + 1]):
            return True
        at = text.find(answer, at + 1)
    return False


def _tidy(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\s+([,;:]|\.(?!\w))", r"\1", text)
    text = re.sub(r"([.;:,])\1+", r"\1", text)
    text = re.sub(r"[;,:]\.", ".", text)
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?\"')" else text.rstrip(";:,") + "."


# --- Cards ---------------------------------------------------------------------------------------


def cards(country: Country) -> dict[str, tuple[str, dict[str, str]]]:
    """Kind of card -> (text, {fact: answer}), for the cards whose fields the country has."""
    made = {}
    for kind, card in factbook.load("cards").items():
        values = {"X": country.the_name, "name": country.name, "was": country.was}
        for name, steps in card.items():
            if name not in ("text", "facts"):
                values[name] = _value(country, steps, values)
        text = next(filter(None, (_joined(clauses, values) for clauses in card["text"])), "")
        if text:
            facts = {fact: _filled(frame, values) for fact, frame in card["facts"].items()}
            if kind == "flag_meaning":
                facts = _flag_colors(values["story"])
            made[kind] = f"{text}.", facts
    return made


def _value(country: Country, steps: list[str], values: dict[str, str]) -> str:
    source, *operations = steps
    value = _field(country, source) if " > " in source else values[source]
    for step in operations:
        name, _, argument = step.partition(" ")
        if name == "or":
            value = value or _field(country, argument)
        elif name in CONDITIONS:
            value = value if CONDITIONS[name](value.lower(), values[argument].lower()) else ""
        elif value:
            value = OPERATIONS[name](value, argument)
    return value


def _field(country: Country, path: str) -> str:
    keys = path.removeprefix("raw ").split(" > ")
    return clean(country.raw(*keys)) if path.startswith("raw ") else country.text(*keys)


def _filled(frame: str, values: dict[str, str]) -> str:
    """The frame filled in, "" where one of its values is empty."""
    return frame.format(**values) if all(map(values.get, re.findall(r"{(\w+)}", frame))) else ""


def _joined(clauses: list[str], values: dict[str, str]) -> str:
    first, *rest = (_filled(clause, values) for clause in clauses)
    return first + "".join(rest) if first else ""


def _group(matched: re.Match | None) -> str:
    return matched[matched.re.groups] if matched else ""


def _bare(value: str, _: str = "") -> str:
    """Removes what stands in round brackets."""
    return re.sub(r"\s*\([^)]*\)", "", value).strip(" ,;.")


def _first_item(value: str, most_words: str = "6") -> str:
    """The first item of a comma or semicolon list without share and brackets."""
    item = re.split(r"[,;]", _bare(value))[0]
    item = re.sub(r"\s*[<>~]?\d[\d.]*%?.*$", "", item).strip()
    return item if item and len(item.split()) <= int(most_words) else ""


def _largest(value: str, _: str) -> str:
    """The first name of a list with shares, `A 40%, B 30%`, if it is a proper answer."""
    if not re.match(r"[^,;]*?\d[\d.]*%", _bare(value)):
        return ""
    answer = _first_item(value)
    return "" if re.match(r"(?i)(other|none|no |unspecified)", answer) else answer


def _shorten(value: str, _: str, most: int = 45) -> str:
    """The first clauses up to `most` words, cut at semicolons."""
    parts_so_far: list[str] = []
    for part in re.split(r"(?<=;)\s+", value):
        if parts_so_far and len(" ".join([*parts_so_far, part]).split()) > most:
            break
        parts_so_far.append(part)
    return " ".join(" ".join(parts_so_far).split()[: most + 15]).strip(" ;,.")


def _first_words(value: str, most: str) -> str:
    """Returns at most the first `most` words, cut at a comma where there is one."""
    words = value.split()
    if len(words) <= int(most):
        return value
    return re.sub(r",[^,]*$", "", " ".join(words[: int(most)])).rstrip(" ,;(")


def _borders(value: str, _: str) -> str:
    pairs = re.findall(r"([A-Z][\w .'()-]+?) ([\d,.]+) km", value)
    return ", ".join(f"{name} ({length} km)" for name, length in pairs)


def _longest_border(value: str, _: str) -> str:
    pairs = re.findall(r"([A-Z][\w .'()-]+?) \(([\d,.]+) km\)", value)
    longest = max(pairs, key=lambda pair: float(pair[1].replace(",", "").rstrip(".")))
    return longest[0] if len(pairs) > 1 else ""


def _cities(value: str, _: str) -> str:
    pairs = re.findall(r"([\d.,]+(?: million)?) ([^\d,;]+)", value)
    named = [(name.strip(" ,;"), count) for count, name in pairs]
    return ", ".join(f"{name.title() if name.isupper() else name} ({n})" for name, n in named)


_DATE = re.compile(
    r"\b\d{1,2} (?:January|February|March|April|May|June|July|August|September|October|"
    r"November|December)(?: \d{3,4})?\b"
)


def _latest_date(value: str, _: str) -> str:
    """The full date that follows the word `latest`, or the only date."""
    date = _DATE.search(value.split("latest")[-1])
    sure = "latest" in value or len(_DATE.findall(value)) == 1
    return date[0] if date and sure and re.search(r"\d{4}$", date[0]) else ""


def _flag_colors(story: str) -> dict[str, str]:
    colors = re.findall(
        r"\b(red|white|blue|green|yellow|black|orange|gold)\b "
        r"(?:stands? for|represents?|symbolizes?) (?:the )?([a-z][^;,.()]*?)(?: and |[;,.(]|$)",
        story,
    )
    return {f"flag_{color}": what.strip() for color, what in colors if len(what.split()) <= 6}


_MEANING = re.compile(r'mean(?:s|ing)\s+(?:either |the |approximately )?"([^"]{3,40}?)[,;.]?"')

# Conditions of cards.toml that compare with another value; a value that fails is emptied.
CONDITIONS: dict[str, Callable[[str, str], Any]] = {
    "if": lambda _, other: other,
    "same_as": operator.eq,
    "other_than": operator.ne,
}
# Operations of cards.toml: (value, argument) -> value. They meet no empty value.
OPERATIONS: dict[str, Callable[[str, str], str]] = {
    "match": lambda value, pattern: _group(re.match(pattern, value)),  # or the whole match
    "find": lambda value, pattern: _group(re.search(pattern, value)),
    "only": lambda value, pattern: value if re.search(pattern, value) else "",
    "not": lambda value, pattern: "" if re.search(pattern, value) else value,
    "cut": lambda value, pattern: re.sub(pattern, "", value),
    "swap": lambda value, change: re.sub(*change.split(" => "), value),  # pattern => replacement
    "before": lambda value, pattern: re.split(pattern, value)[0].strip(),
    "strip": lambda value, _: value.strip(" ,"),
    "line": lambda value, _: value.split("\n")[0],
    "one_line": lambda value, _: value.replace("\n", " "),
    "most": lambda value, words: value if len(value.split()) <= int(words) else "",
    "truncate": lambda value, words: " ".join(value.split()[: int(words)]),
    "bare": _bare,
    "first_item": _first_item,
    "first_words": _first_words,
    "largest": _largest,
    "shorten": _shorten,
    "person": lambda value, _: person_name(value),
    "meaning": lambda value, _: _group(_MEANING.search(value)),
    "borders": _borders,
    "longest_border": _longest_border,
    "cities": _cities,
    "latest_date": _latest_date,
}
