# ruff: noqa: E501
"""Wordings of the text questions: fact -> topic, cue, question frames, answer frames.

`{X}` is the country (or, in two-hop questions, a description of it), `{a}` the answer. The cue
marks, in another snippet of the same country that holds the answer too, that it tells the same
fact: such passages are left out of the corpus.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """How one fact is asked and answered.

    Attributes:
      topic: field of knowledge.
      cue: regular expression of the fact's own words.
      questions, answers: frames.
      name_like: the answer is a proper name that entity replacement may exchange.
    """

    topic: str
    cue: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    name_like: bool = False


def _f(topic: str, cue: str, questions: str, answers: str, name_like: bool = False) -> Fact:
    return Fact(topic, cue, tuple(questions.split(" | ")), tuple(answers.split(" | ")), name_like)


FACTS: dict[str, Fact] = {
    "capital": _f("capital", "capital|seat of",
        "What is the capital of {X}? | Which city is the capital of {X}? | What city serves as the capital of {X}?",
        "The capital of {X} is {a}. | {a} is the capital of {X}. | The city of {a} serves as the capital of {X}.", True),
    "capital_meaning": _f("capital", "mean",
        "What does the name of the capital of {X} mean? | What is the meaning of the name of the capital of {X}?",
        'The name of the capital of {X} means "{a}". | The meaning of the name of the capital of {X} is "{a}". | It means "{a}".'),
    "utc": _f("time", "time zone",
        "Which time zone is the capital of {X} in? | What is the time zone of {X}? | Which UTC offset does {X} use?",
        "The time zone of {X} is {a}. | {a} is the time zone of {X}. | The clocks of {X} follow {a}."),
    "peak": _f("geography", "highest|peak|summit",
        "What is the highest point of {X}? | Which place is the highest point of {X}? | What is the name of the highest point in {X}?",
        "The highest point of {X} is {a}. | {a} is the highest point of {X}. | The name of the highest point in {X} is {a}.", True),
    "peak_height": _f("geography", "highest|peak|summit",
        "How high is the highest point of {X}? | What is the elevation of the highest point of {X}? | How many meters does the highest point of {X} rise?",
        "The highest point of {X} rises to {a}. | The elevation of the highest point of {X} is {a}. | It is {a} high."),
    "lowest_point": _f("geography", "lowest",
        "What is the lowest point of {X}? | Which place is the lowest point of {X}?",
        "The lowest point of {X} is {a}. | {a} is the lowest point of {X}. | The lowest place in {X} is {a}.", True),
    "region": _f("geography", "locat|situat",
        "In which part of the world is {X} located? | Where in the world is {X} located? | In which region does {X} lie?",
        "{X} is located in {a}. | The location of {X} is {a}. | It lies in {a}."),
    "area": _f("geography", "area|sq km",
        "What is the total area of {X}? | How large is the area of {X}? | How many square kilometers does {X} cover?",
        "The total area of {X} is {a}. | {X} covers {a}. | The area of {X} measures {a}."),
    "coastline": _f("geography", "coast",
        "How long is the coastline of {X}? | What is the length of the coastline of {X}?",
        "The coastline of {X} is {a} long. | The length of the coastline of {X} is {a}. | It measures {a}."),
    "longest_border": _f("geography", "border",
        "With which neighbor does {X} share its longest land border? | Which neighbor has the longest land border with {X}?",
        "The longest land border of {X} is with {a}. | {X} shares its longest land border with {a}. | {a} has the longest land border with {X}.", True),
    "population": _f("people", "population|people|inhabitants",
        "What is the population of {X}? | How many people live in {X}? | How large is the population of {X}?",
        "The population of {X} is {a}. | {X} has a population of {a}. | There are {a} people in {X}."),
    "median_age": _f("people", "median",
        "What is the median age in {X}? | What is the median age of the population of {X}?",
        "The median age in {X} is {a}. | {a} is the median age in {X}. | The population of {X} has a median age of {a}."),
    "life_expectancy": _f("people", "life expectancy",
        "What is life expectancy at birth in {X}? | How long is life expectancy at birth in {X}?",
        "Life expectancy at birth in {X} is {a}. | People in {X} can expect to live {a}. | It is {a}."),
    "demonym": _f("people", "called|adjective",
        "What is a person from {X} called? | What do you call somebody from {X}?",
        "A person from {X} is called {a}. | Somebody from {X} is called {a}. | Such a person is called {a}."),
    "ethnic_group": _f("people", "ethnic|descent|people",
        "What is the largest ethnic group of {X}? | Which ethnic group is the largest in {X}?",
        "The largest ethnic group of {X} is {a}. | {a} is the largest ethnic group in {X}. | It is {a}."),
    "language": _f("people", "language|speak|spoken",
        "Which language is the most spoken in {X}? | What is the main language of {X}?",
        "The most spoken language in {X} is {a}. | {a} is the main language of {X}. | Most people in {X} speak {a}."),
    "religion": _f("people", "religio|faith|church",
        "What is the largest religion in {X}? | Which religious group is the largest in {X}?",
        "The largest religious group in {X} is {a}. | {a} is the largest religion in {X}. | Its largest religion is {a}."),
    "largest_city": _f("people", "urban|city|cities|largest",
        "What is the largest urban area of {X}? | By population, which city is the largest of {X}?",
        "The largest urban area of {X} is {a}. | {a} is the largest city of {X}. | The biggest city of {X} is {a}.", True),
    "long_form": _f("name", "official|long form|name",
        "What is the official long form of the name of {X}? | What is {X} officially called in full?",
        "The official long form of the name of {X} is {a}. | Officially, {X} is called {a}. | In full, it is called {a}."),
    "local_name": _f("name", "local|name",
        "What is the local short form of the name of {X}? | What is {X} called locally?",
        "The local short form of the name of {X} is {a}. | Locally, {X} is called {a}. | It is locally known as {a}.", True),
    "former": _f("name", "former|known as|renam|called",
        "What was {X} formerly known as? | What is a former name of {X}?",
        "{X} was formerly known as {a}. | A former name of {X} is {a}. | It used to be known as {a}.", True),
    "name_meaning": _f("name", "mean",
        "What does the name of {X} mean? | What is said to be the meaning of the name of {X}?",
        'The name of {X} means "{a}". | The meaning of the name of {X} is "{a}". | It means "{a}".'),
    "government": _f("government", "government|republic|monarchy",
        "What form of government does {X} have? | What is the form of government of {X}?",
        "The form of government of {X} is {a}. | {X} has this form of government: {a}. | It is governed as a {a}."),
    "voting_age": _f("government", "vot|suffrage",
        "What is the voting age in {X}? | From which age can people vote in {X}?",
        "The voting age in {X} is {a}. | People in {X} can vote from {a}. | It is {a}."),
    "divisions": _f("government", "divid|provinces|regions|districts",
        "Into how many divisions of which kind is {X} divided? | What administrative divisions does {X} have?",
        "{X} is divided into {a}. | The administrative divisions of {X} are {a}. | There are {a}."),
    "head_of_state": _f("government", "president|chief of state|king|queen|monarch|elected",
        "Who is the chief of state of {X}? | What is the name of the chief of state of {X}?",
        "The chief of state of {X} is {a}. | {a} is the chief of state of {X}. | The office is held by {a}."),
    "head_of_government": _f("government", "prime minister|head of government|president|elected",
        "Who is the head of government of {X}? | Who leads the government of {X}?",
        "The head of government of {X} is {a}. | {a} leads the government of {X}. | It is led by {a}."),
    "legislature": _f("government", "legislat|parliament|assembly|congress",
        "What is the legislature of {X} called? | What is the name of the legislature of {X}?",
        "The legislature of {X} is called {a}. | The name of the legislature of {X} is {a}. | It is called the {a}."),
    "seats": _f("government", "seats",
        "How many seats does the legislature of {X} have? | What is the number of seats in the legislature of {X}?",
        "The legislature of {X} has {a}. | There are {a} in the legislature of {X}. | It has {a}."),
    "court": _f("government", "court",
        "What is the highest court of {X}? | Which court is the highest of {X}?",
        "The highest court of {X} is the {a}. | The {a} is the highest court of {X}. | It is the {a}."),
    "independence": _f("history", "independen",
        "When did {X} become independent? | On which date did {X} gain its independence?",
        "{X} became independent on {a}. | The independence of {X} dates from {a}. | It gained its independence on {a}."),
    "independence_from": _f("history", "independen",
        "From whom did {X} become independent? | From which power did {X} gain its independence?",
        "{X} became independent from {a}. | {X} gained its independence from {a}. | It had been ruled by {a}.", True),
    "holiday": _f("history", "holiday",
        "What is the name of the holiday that {X} celebrates as its national day? | What is the name of the national holiday of {X}?",
        "The national holiday of {X} is called {a}. | {a} is the national holiday of {X}. | Its name is {a}."),
    "holiday_date": _f("history", "holiday",
        "On which day does {X} celebrate its national holiday? | When is the national holiday of {X}?",
        "The national holiday of {X} is on {a}. | {X} celebrates its national holiday on {a}. | It is celebrated on {a}."),
    "constitution": _f("history", "constitution",
        "What is the first date given for the latest constitution of {X}? | From which date is the latest constitution of {X}?",
        "The latest constitution of {X} is from {a}. | The date of the latest constitution of {X} is {a}. | It dates from {a}."),
    "symbol": _f("symbols", "symbol|national (bird|animal|flower|emblem)",
        "What is the national symbol of {X}? | Which national symbol does {X} have?",
        "The national symbol of {X} is the {a}. | {X} has the {a} as its national symbol. | Its symbol is the {a}."),
    "anthem": _f("symbols", "anthem|song",
        "What is the national anthem of {X} called? | What is the title of the national anthem of {X}?",
        'The national anthem of {X} is called "{a}". | "{a}" is the national anthem of {X}. | Its title is "{a}".', True),
    "anthem_author": _f("symbols", "anthem|lyrics|words|song",
        "Who wrote the words of the national anthem of {X}? | Who is named first as author of the national anthem of {X}?",
        "The words of the national anthem of {X} are by {a}. | {a} wrote the national anthem of {X}. | They were written by {a}.", True),
    "heritage": _f("culture", "heritage",
        "How many World Heritage Sites does {X} have? | What is the number of World Heritage Sites in {X}?",
        "{X} has {a} on the list of World Heritage Sites. | The number of World Heritage Sites in {X} is {a}. | There are {a}."),
    "currency": _f("economy", "currenc|dollar|franc|exchange",
        "What is the currency of {X}? | Which currency is used in {X}? | What money do people in {X} pay with?",
        "The currency of {X} is the {a}. | People in {X} use the {a}. | The money used in {X} is the {a}."),
    "currency_code": _f("economy", "code|currenc",
        "What is the code of the currency of {X}? | Which three-letter code does the currency of {X} have?",
        "The code of the currency of {X} is {a}. | {a} is the currency code of {X}. | Its code is {a}."),
    "crop": _f("economy", "agricultur|crop|farm",
        "What is the leading agricultural product of {X}? | Which agricultural product of {X} comes first?",
        "The leading agricultural product of {X} is {a}. | {X} produces {a} above all. | It is {a}."),
    "export": _f("economy", "export",
        "What is the main good that {X} exports? | Which product comes first among the exports of {X}?",
        "The main good that {X} exports is {a}. | {X} exports {a} above all. | It is {a}."),
    "export_partner": _f("economy", "export|buyer",
        "Who is the main buyer of what {X} exports? | Which country buys the most from {X}?",
        "The main buyer of what {X} exports is {a}. | {a} buys the most from {X}. | It is {a}.", True),
    "import": _f("economy", "import",
        "What is the main good that {X} imports? | Which product comes first among the imports of {X}?",
        "The main good that {X} imports is {a}. | {X} imports {a} above all. | It is {a}."),
    "import_partner": _f("economy", "import|supplier",
        "Who is the main supplier of what {X} imports? | Which country does {X} import the most from?",
        "The main supplier of what {X} imports is {a}. | {X} imports the most from {a}. | It is {a}.", True),
    "internet_code": _f("communications", r"internet|\.[a-z]{2}\b",
        "What is the internet country code of {X}? | What do internet addresses of {X} end in?",
        "Internet addresses of {X} end in {a}. | The internet country code of {X} is {a}. | They end in {a}."),
    "aircraft_prefix": _f("communications", "aircraft|prefix",
        "Which prefix do civil aircraft of {X} carry? | What is the civil aircraft prefix of {X}?",
        "Civil aircraft of {X} carry the prefix {a}. | The civil aircraft prefix of {X} is {a}. | Its prefix is {a}."),
    "airports": _f("transport", "airport",
        "How many airports does {X} have? | What is the number of airports in {X}?",
        "{X} has {a} airports. | The number of airports in {X} is {a}. | There are {a} airports."),
    "railways": _f("transport", "rail",
        "How long are the railways of {X}? | What is the total length of the railways of {X}?",
        "The railways of {X} are {a} long. | The total length of the railways of {X} is {a}. | They measure {a}."),
    "power_capacity": _f("transport", "power|electric",
        "What installed capacity do the power plants of {X} have? | How large is the installed power capacity of {X}?",
        "The installed power capacity of {X} is {a}. | The power plants of {X} have a capacity of {a}. | It is {a}."),
    "residency": _f("government", "naturali|residen",
        "How long must a person have lived in {X} to be naturalized? | What is the residency requirement for naturalization in {X}?",
        "To be naturalized in {X}, a person must have lived there for {a}. | The residency requirement of {X} is {a}. | It takes {a}."),
}  # fmt: skip
FACTS |= {
    f"flag_{color}": _f("flag", "flag",
        f"What does {color} stand for in the flag of {{X}}? | What is the meaning of {color} in the flag of {{X}}?",
        f"In the flag of {{X}}, {color} stands for {{a}}. | The meaning of {color} in the flag of {{X}} is {{a}}. | It stands for {{a}}.")
    for color in ("red", "white", "blue", "green", "yellow", "black")
}  # fmt: skip

# Facts that name a country by something else, and how: the first hop of two-hop questions.
BRIDGES: dict[str, tuple[str, ...]] = {
    "capital": ("the country whose capital is {b}", "the country that has {b} as its capital"),
    "anthem": ('the country whose national anthem is "{b}"',),
    "peak": (
        "the country whose highest point is {b}",
        "the country where {b} is the highest point",
    ),
    "former": ("the country formerly known as {b}", "the country that used to be called {b}"),
    "internet_code": ("the country whose internet addresses end in {b}",),
}
