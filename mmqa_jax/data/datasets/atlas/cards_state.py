"""Cards about state and economy: short Factbook fields framed as prose, with the facts in them.

A card is a function Country -> (text, {fact: answer}) or None where the field is missing.
Answers are copied from the text, so every answer stands in its snippet word for word.
"""

from __future__ import annotations

import re

from mmqa_jax.data.datasets.atlas.cards_land import (
    Card,
    bare,
    first_item,
    first_words,
    largest,
    shorten,
)
from mmqa_jax.data.datasets.atlas.factbook import Country, clean, person_name

_DATE = re.compile(
    r"\b(\d{1,2} (?:January|February|March|April|May|June|July|August|September|October|"
    r"November|December)(?: \d{3,4})?)\b"
)


def _quoted(text: str) -> str:
    found = re.search(r'"([^"]{3,60})"', text)
    return found[1].strip(" ,") if found else ""


def government(c: Country) -> Card:
    value = c.text("Government", "Government type")
    if not value:
        return None
    vote = c.text("Government", "Suffrage")
    text = f"The form of government of {c.the_name} is {value}"
    age = re.match(r"\d\d years of age", vote)
    text += f"; the voting age is {vote.replace('; ', ', ')}" if vote else ""
    answer = value.split(";")[0].split(",")[0]
    return f"{text}.", {
        "government": answer if len(answer.split()) <= 7 else "",
        "voting_age": age[0] if age else "",
    }


def divisions(c: Country) -> Card:
    value = clean(c.raw("Government", "Administrative divisions")).replace("\n", " ")
    found = re.match(r"(\d+ [a-z][a-z -]*[a-z])", value)
    if not found:
        return None
    listing = re.sub(r"\([^)]*\)", "", value).replace(";", ":", 1)
    text = f"{c.start} is divided into " + " ".join(listing.split()[:48]).rstrip(" ,;:")
    return f"{text}.", {"divisions": re.sub(r" (and|in)\b.*", "", found[1])}


def leaders(c: Country) -> Card:
    def leader(role: str) -> tuple[str, str]:
        value = c.text("Government", "Executive branch", role).split(";")[0]
        found = re.match(r"([^(]+?) \(since ([^)]+)\)", value)
        return (person_name(found[1]), found[2]) if found else ("", "")

    (state, state_since), (head, head_since) = (
        leader("chief of state"),
        leader("head of government"),
    )
    if not state and not head:
        return None
    text = ""
    if state:
        text = f"The chief of state of {c.the_name} is {state}, in office since {state_since}"
    if head and head == state:
        text += ", who is also the head of government"
    elif head:
        text += f"; the head of government is {head}" if text else ""
        text = text or f"The head of government of {c.the_name} is {head}"
        text += f", since {head_since}"
    facts = {"head_of_state": state, "head_of_government": head}
    return f"{text}.", {k: v if len(v.split()) <= 9 else "" for k, v in facts.items()}


def legislature(c: Country) -> Card:
    path = ("Government", "Legislative branch")
    value = c.text(*path, "legislature name")
    name = bare(value)
    if not name:
        return None
    shape = c.text(*path, "legislative structure")
    seats = re.match(r"\d+", c.text(*path, "number of seats"))
    text = f"The legislature of {c.the_name} is called {value}"
    text += f"; it is {shape}" if shape else ""
    text += f" and has {seats[0]} seats" if seats else ""
    return f"{text}.", {
        "legislature": name if len(name.split()) <= 7 else "",
        "seats": f"{seats[0]} seats" if seats else "",
    }


def court(c: Country) -> Card:
    value = clean(c.raw("Government", "Judicial branch", "highest court(s)")).split("\n")[0]
    value = re.split(r";?\s*note\b", value)[0]
    name = re.split(r" or |\(|;", value)[0].strip(" ,")
    if not name:
        return None
    text = f"The highest court of {c.the_name} is {' '.join(value.split()[:45])}"
    return f"{text}.", {"court": name if 2 <= len(name.split()) <= 6 else ""}


def national_day(c: Country) -> Card:
    text, facts = "", {}
    value = c.text("Government", "Independence")
    found = re.match(r"^(\d{1,2} \w+ \d{4}|\d{3,4}) \((.*)", value)
    if found:
        origin = re.match(r"from (?:the )?([A-Z][\w .-]*?)(?:[,;)]|$)", found[2])
        reason = re.split(r"[)]", found[2])[0].strip()
        full = " " in found[1]
        verb = "became independent on" if full else "dates its independence from"
        text = f"{c.start} {verb} {found[1]} ({reason})"
        facts["independence"] = found[1] if full else ""
        facts["independence_from"] = origin[1].strip() if origin else ""
    value = c.text("Government", "National holiday")
    found = re.match(r"^([^,;]+), (\d{1,2} [A-Z][a-z]+)", value)
    if found:
        day = value.split(";")[0]
        text += f"; its national holiday is {day}" if text else ""
        text = text or f"The national holiday of {c.the_name} is {day}"
        facts["holiday_date"] = found[2]
        facts["holiday"] = bare(found[1]) if "Independence" not in found[1] else ""
    return (f"{text}.", facts) if text else None


def symbol(c: Country) -> Card:
    value = c.text("Government", "National symbol(s)")
    if not value:
        return None
    first = bare(value).split(",")[0].split(";")[0].strip()
    return f"The national symbol of {c.the_name} is {value}.", {
        "symbol": first if 1 <= len(first.split()) <= 5 else ""
    }


def flag_meaning(c: Country) -> Card:
    text = clean(c.raw("Government", "Flag"))
    found = re.search(r"meaning:\s*([^\n]+)", text)
    if not found:
        return None
    story = shorten(found[1])
    colors = re.findall(
        r"\b(red|white|blue|green|yellow|black|orange|gold)\b "
        r"(?:stands? for|represents?|symbolizes?) (?:the )?([a-z][^;,.()]*?)(?: and |[;,.(]|$)",
        story,
    )
    facts = {f"flag_{color}": what.strip() for color, what in colors if len(what.split()) <= 6}
    return f"What the flag of {c.the_name} means: {story}.", facts


def anthem(c: Country) -> Card:
    value = c.text("Government", "National anthem(s)", "title")
    title = _quoted(value)
    if not title:
        return None
    authors = person_name(c.text("Government", "National anthem(s)", "lyrics/music"))
    text = f'The national anthem of {c.the_name} is "{title}"'
    translated = re.search(r"\(([^)]+)\)", value)
    text += f", which means {translated[1]}" if translated else ""
    author = bare(authors.split("/")[0].split(",")[0])
    known = author and "unknown" not in authors.lower() and 2 <= len(author.split()) <= 6
    text += f"; its words and music are by {authors.replace('/', ' and ')}" if known else ""
    return f"{text}.", {"anthem": title, "anthem_author": author if known else ""}


def currency(c: Country) -> Card:
    value = c.text("Economy", "Exchange rates", "Currency")
    found = re.match(r"^(.+?) \(([A-Z]{3})\)", value)
    if not found:
        return None
    text = f"The currency used in {c.the_name} is the {found[1]}, with the code {found[2]}"
    rate = next(
        (
            r
            for y in (2024, 2023, 2022)
            if (r := c.text("Economy", "Exchange rates", f"Exchange rates {y}"))
        ),
        "",
    )
    rate = rate.split("(")[0].strip()
    text += f"; one US dollar was worth {rate} of them lately" if rate else ""
    return f"{text}.", {"currency": found[1], "currency_code": found[2]}


def constitution(c: Country) -> Card:
    value = c.text("Government", "Constitution", "history")
    if not value:
        return None
    latest = value.split("latest")[-1]
    date = _DATE.search(latest)
    full = date[1] if date and re.search(r"\d{4}$", date[1]) else ""
    return f"The history of the constitution of {c.the_name}: {value}.", {
        "constitution": full if "latest" in value or len(_DATE.findall(value)) == 1 else ""
    }


def heritage(c: Country) -> Card:
    value = c.text("Government", "National heritage", "total World Heritage Sites")
    found = re.match(r"^(\d+)\b", value)
    if not found or found[1] == "0":
        return None
    sites = c.text("Government", "National heritage", "selected World Heritage Site locales")
    text = f"{c.start} has {bare(value)} on the list of World Heritage Sites"
    text += f", among them {first_words(sites, 36)}" if sites else ""
    return f"{text}.", {"heritage": found[1]}


def crops(c: Country) -> Card:
    value = c.text("Economy", "Agricultural products")
    year = re.search(r" \((\d{4})\)$", value)
    if not value:
        return None
    value = value[: year.start()] if year else value
    facts = {"crop": first_item(value, 4) if year else ""}
    return f"The leading agricultural products of {c.the_name} are {value}.", facts


def exports(c: Country) -> Card:
    return _trade(c, "Exports", "exports", "the main buyers are", "export")


def imports(c: Country) -> Card:
    return _trade(c, "Imports", "imports", "the main suppliers are", "import")


def _trade(c: Country, field: str, verb: str, partners_are: str, fact: str) -> Card:
    goods = re.sub(r" \(\d{4}\)$", "", c.text("Economy", f"{field} - commodities"))
    partners = re.sub(r" \(\d{4}\)$", "", c.text("Economy", f"{field} - partners"))
    if not goods:
        return None
    text = f"The main goods that {c.the_name} {verb} are {first_words(goods, 30)}"
    text += f"; {partners_are} {partners}" if partners else ""
    return f"{text}.", {fact: first_item(goods, 4), f"{fact}_partner": largest(partners)}


def internet(c: Country) -> Card:
    code = re.search(r"\.[a-z]{2}\b", c.raw("Communications", "Internet country code"))
    prefix = c.text("Transportation", "Civil aircraft registration country code prefix")
    text = f"Internet addresses of {c.the_name} end in {code[0]}"
    text += f", and its civil aircraft carry the prefix {prefix}" if prefix else ""
    ports = re.match(r"[\d,]+", c.text("Transportation", "Airports"))
    text += f"; it has {ports[0]} airports" if ports else ""
    return f"{text}.", {
        "internet_code": code[0],
        "aircraft_prefix": prefix if re.fullmatch(r"[A-Z0-9]{1,3}", prefix) else "",
        "airports": ports[0] if ports else "",
    }


def infrastructure(c: Country) -> Card:
    parts = []
    total = re.match(r"[\d,.]+ km", c.text("Transportation", "Railways", "total"))
    if total:
        parts.append(f"its railways have a total length of {total[0]}")
    power = c.text("Energy", "Electricity", "installed generating capacity").split("(")[0].strip()
    if power:
        parts.append(f"its power plants have an installed capacity of {power}")
    harbors = c.text("Transportation", "Ports", "key ports")
    if harbors:
        parts.append(f"its key ports are {first_words(harbors, 24)}")
    if not parts:
        return None
    text = f"On the infrastructure of {c.the_name}: {'; '.join(parts)}."
    return text, {"railways": total[0] if total else "", "power_capacity": power}


def citizenship(c: Country) -> Card:
    path = ("Government", "Citizenship")
    value = c.text(*path, "residency requirement for naturalization")
    found = re.match(r"\d+ (?:years?|months)", value)
    if not found:
        return None
    descent = c.text(*path, "citizenship by descent only")
    text = f"To be naturalized in {c.the_name}, a person must have lived there for {value}"
    text += f"; citizenship by descent: {descent}" if descent else ""
    return f"{text}.", {"residency": found[0]}


STATE_CARDS = {
    "government": government,
    "divisions": divisions,
    "leaders": leaders,
    "legislature": legislature,
    "court": court,
    "national_day": national_day,
    "symbol": symbol,
    "flag_meaning": flag_meaning,
    "anthem": anthem,
    "currency": currency,
    "constitution": constitution,
    "heritage": heritage,
    "crops": crops,
    "exports": exports,
    "imports": imports,
    "internet": internet,
    "infrastructure": infrastructure,
    "citizenship": citizenship,
}
