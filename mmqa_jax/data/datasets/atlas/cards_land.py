"""Cards about land and people: short Factbook fields framed as prose, with the facts in them.

A card is a function Country -> (text, {fact: answer}) or None where the field is missing.
Answers are copied from the text, so every answer stands in its snippet word for word.
"""

from __future__ import annotations

import re

from mmqa_jax.data.datasets.atlas.factbook import Country, clean

Card = tuple[str, dict[str, str]] | None


def bare(text: str) -> str:
    """The text without what stands in round brackets."""
    return re.sub(r"\s*\([^)]*\)", "", text).strip(" ,;.")


def first_item(text: str, most_words: int = 6) -> str:
    """The first item of a comma or semicolon list without share and brackets."""
    item = re.split(r"[,;]", bare(text))[0]
    item = re.sub(r"\s*[<>~]?\d[\d.]*%?.*$", "", item).strip()
    return item if item and len(item.split()) <= most_words else ""


def largest(value: str) -> str:
    """The first name of a list with shares, `A 40%, B 30%`, if it is a proper answer."""
    if not re.match(r"[^,;]*?\d[\d.]*%", bare(value)):
        return ""
    answer = first_item(value)
    return "" if re.match(r"(?i)(other|none|no |unspecified)", answer) else answer


def shorten(text: str, most: int = 45) -> str:
    """The first clauses of a text up to `most` words, cut at semicolons."""
    kept: list[str] = []
    for part in re.split(r"(?<=;)\s+", text):
        if kept and len(" ".join([*kept, part]).split()) > most:
            break
        kept.append(part)
    return " ".join(" ".join(kept).split()[: most + 15]).strip(" ;,.")


def first_words(text: str, most: int) -> str:
    """At most the first `most` words, cut at a comma where there is one."""
    words = text.split()
    if len(words) <= most:
        return text
    return re.sub(r",[^,]*$", "", " ".join(words[:most])).rstrip(" ,;(")


def _meaning(text: str) -> str:
    found = re.search(
        r'mean(?:s|ing)\s+(?:either |the |approximately )?"([^"]{3,40}?)[,;.]?"', text
    )
    return found[1] if found else ""


def capital(c: Country) -> Card:
    name = bare(c.text("Government", "Capital", "name"))
    if not name or len(name.split()) > 4 or re.search(r"(?i)\bnone\b|administered|\d", name):
        return None
    zone = clean(c.raw("Government", "Capital", "time difference")).split("\n")[0]
    utc = re.match(r"UTC ?([+-]?[\d.]+)", zone)
    text = f"The capital of {c.the_name} is {name}"
    place = c.text("Government", "Capital", "geographic coordinates")
    text += f", which lies at {place}" if re.fullmatch(r"[\d ]+ [NS], [\d ]+ [EW]", place) else ""
    text += f"; its time zone is {zone}" if utc else ""
    return f"{text}.", {"capital": name, "utc": re.sub(r" \(.*", "", zone) if utc else ""}


def capital_name(c: Country) -> Card:
    name = bare(c.text("Government", "Capital", "name"))
    story = clean(c.raw("Government", "Capital", "etymology")).split("\n")[0]
    if not name or not story or len(name.split()) > 4 or "none" in name:
        return None
    story = shorten(re.sub(r"^(the )?(city's )?(origin of )?the name ", "the name ", story))
    text = f"Where the city name {name} ({c.name}) comes from: {story}."
    return text, {"capital_meaning": _meaning(story)}


def elevation(c: Country) -> Card:
    peak = c.text("Geography", "Elevation", "highest point")
    low = c.text("Geography", "Elevation", "lowest point")
    found = re.match(r"^(.*?)\s+([\d,.]+)\s*m\b", bare(peak))
    if not found or len(found[1].split()) > 7:
        return None
    name, height = found[1].strip(" ,"), f"{found[2]} m"
    text = f"The highest point of {c.the_name} is {name}, which rises to {height}"
    deep = re.match(r"^(.*?)\s+(-?[\d,.]+)\s*m\b", bare(low))
    lowest = deep[1].strip(" ,") if deep else ""
    text += f"; the lowest point is {lowest}, at {deep[2]} m" if deep else ""
    mean = c.text("Geography", "Elevation", "mean elevation")
    text += f", and the mean elevation is {mean}" if mean.endswith(" m") else ""
    if re.search(r"(?i)unnamed|undetermined", name):
        return None
    if re.search(r"\b(Ocean|Sea)$", lowest):
        lowest = ""
    return f"{text}.", {"peak": name, "peak_height": height, "lowest_point": lowest}


def location(c: Country) -> Card:
    place = c.text("Geography", "Location")
    if not place:
        return None
    region = place.split(",")[0].strip()
    known = (
        region if re.search(r"(Africa|America|Asia|Europe|Oceania|Middle East)$", region) else ""
    )
    return f"{c.start} is located in {place}.", {"region": known}


def area(c: Country) -> Card:
    total = re.match(r"[\d,.]+ sq km", c.text("Geography", "Area", "total "))
    if not total:
        return None
    like = c.text("Geography", "Area - comparative")
    coast = c.text("Geography", "Coastline")
    coast = coast if re.fullmatch(r"[1-9][\d,.]* km", coast) else ""
    text = f"{c.start} covers a total area of {total[0]}"
    text += f", which is {like}" if like else ""
    text += f"; its coastline is {coast} long" if coast else ""
    return f"{text}.", {"area": total[0], "coastline": coast}


def borders(c: Country) -> Card:
    listing = bare(c.text("Geography", "Land boundaries", "border countries"))
    pairs = re.findall(r"([A-Z][\w .'()-]+?) ([\d,.]+) km", listing)
    if not pairs:
        return None
    total = c.text("Geography", "Land boundaries", "total")
    text = f"{c.start} shares land borders with " + ", ".join(f"{n} ({k} km)" for n, k in pairs)
    text += f"; its land boundaries run for {total} in all" if total.endswith("km") else ""
    longest = max(pairs, key=lambda p: float(p[1].replace(",", "").rstrip(".")))[0]
    return f"{text}.", {"longest_border": longest if len(pairs) > 1 else ""}


def population(c: Country) -> Card:
    total = re.match(r"[\d,]{3,}(?= |$)", c.text("People and Society", "Population", "total"))
    if not total:
        return None
    text = f"{c.start} has a population of {total[0]}"
    age = c.text("People and Society", "Median age", "total").split("(")[0].strip()
    life = c.text("People and Society", "Life expectancy at birth", "total population")
    life = life.split("(")[0].strip()
    text += f"; the median age is {age}" if age else ""
    text += f", and life expectancy at birth is {life}" if life else ""
    return f"{text}.", {"population": total[0], "life_expectancy": life, "median_age": age}


def people(c: Country) -> Card:
    noun = c.text("People and Society", "Nationality", "noun")
    adjective = c.text("People and Society", "Nationality", "adjective")
    groups = c.text("People and Society", "Ethnic groups")
    if not noun or re.search(r"(?i)\bnone\b", noun):
        return None
    single = re.sub(r"\(.*", "", noun.split(",")[0]).strip()
    text = f"A person from {c.the_name} is called {single}"
    text += f", and the adjective is {adjective}" if adjective else ""
    text += f"; the ethnic groups there are {first_words(groups, 32)}" if groups else ""
    return f"{text}.", {"demonym": single, "ethnic_group": largest(groups)}


def culture(c: Country) -> Card:
    path = ("People and Society", "Languages")
    languages = c.text(*path) or c.text(*path, "Languages")
    religions = c.text("People and Society", "Religions")
    parts = []
    if languages:
        parts.append(f"the languages spoken in {c.the_name} are {first_words(languages, 26)}")
    if religions:
        place = "its religions" if languages else f"the religions of {c.the_name}"
        parts.append(f"{place} are {first_words(religions, 26)}")
    if not parts:
        return None
    text = "; ".join(parts)
    facts = {"language": largest(languages), "religion": largest(religions)}
    return f"{text[0].upper()}{text[1:]}.", facts


def cities(c: Country) -> Card:
    value = clean(c.raw("People and Society", "Major urban areas - population")).split("\n")[0]
    value = re.sub(r"\s*\([^)]*(?:capital|\d{4})[^)]*\)", "", value)
    pairs = re.findall(r"([\d.,]+(?: million)?) ([^\d,;]+)", value)
    if not pairs:
        return None
    named = [(name.strip(" ,;"), count) for count, name in pairs]
    named = [(name.title() if name.isupper() else name, count) for name, count in named]
    text = f"The largest urban areas of {c.the_name} by population: "
    return text + ", ".join(f"{n} ({k})" for n, k in named) + ".", {
        "largest_city": named[0][0] if len(named) > 1 else ""
    }


def country_name(c: Country) -> Card:
    long = c.text("Government", "Country name", "conventional long form").split(";")[0]
    long = "" if long.lower() == "none" else long
    local = c.text("Government", "Country name", "local short form").split(";")[0]
    local = bare(local.split("/")[0])
    local = "" if local.lower() in ("none", c.name.lower()) else local
    if not long and not local:
        return None
    text = f"The official long form of the name of {c.the_name} is {long}" if long else ""
    if local:
        text += (
            f", and its local short form is {local}"
            if text
            else f"The local short form of the name of {c.the_name} is {local}"
        )
    return f"{text}.", {"long_form": long, "local_name": local}


def former_name(c: Country) -> Card:
    value = c.text("Government", "Country name", "former")
    if not value or value.lower() == "none":
        return None
    first = bare(value.split(",")[0].split(";")[0])
    text = f"{c.start} {'were' if c.is_plural else 'was'} formerly known as {value}."
    good = 1 <= len(first.split()) <= 6 and first[0].isupper() and first != c.name
    return text, {"former": first if good else ""}


def name_origin(c: Country) -> Card:
    story = clean(c.raw("Government", "Country name", "etymology")).split("\n")[0]
    if not story:
        return None
    story = shorten(story)
    return f"How {c.the_name} got its name: {story}.", {"name_meaning": _meaning(story)}


LAND_CARDS = {
    "capital": capital,
    "capital_name": capital_name,
    "elevation": elevation,
    "location": location,
    "area": area,
    "borders": borders,
    "population": population,
    "people": people,
    "culture": culture,
    "cities": cities,
    "country_name": country_name,
    "former_name": former_name,
    "name_origin": name_origin,
}
