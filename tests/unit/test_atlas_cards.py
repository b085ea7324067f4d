"""Cards: what cards.toml makes of the Factbook's fields."""

import re

from mmqa_jax.data.atlas import factbook
from mmqa_jax.data.atlas.factbook import Country, cards


def country(**sections):
    def leaves(fields):
        return {k: leaves(v) if isinstance(v, dict) else {"text": v} for k, v in fields.items()}

    return Country("hv", "HV", "Hav", leaves(sections))


def test_a_clause_without_its_values_is_left_out():
    peak = {"highest point": "Mount Ina 1,203 m", "lowest point": "Black Sea 0 m"}
    text, facts = cards(country(Geography={"Elevation": peak}))["elevation"]
    assert text == (
        "The highest point of Hav is Mount Ina, which rises to 1,203 m; the lowest point is "
        "Black Sea, at 0 m."
    )
    assert facts == {"peak": "Mount Ina", "peak_height": "1,203 m", "lowest_point": ""}
    del peak["lowest point"]
    text, _ = cards(country(Geography={"Elevation": peak}))["elevation"]
    assert text == "The highest point of Hav is Mount Ina, which rises to 1,203 m."
    peak["highest point"] = "unnamed hill 30 m"
    assert "elevation" not in cards(country(Geography={"Elevation": peak}))


def test_the_first_alternative_with_its_opening_values_is_used():
    branch = {"chief of state": "President Jan MORRIS (since 3 May 1985); note: elected"}
    leaders = cards(country(Government={"Executive branch": branch}))["leaders"]
    assert leaders == (
        "The chief of state of Hav is President Jan Morris, in office since 3 May 1985.",
        {"head_of_state": "President Jan Morris", "head_of_government": ""},
    )
    branch["head of government"] = "President Jan MORRIS (since 3 May 1985)"
    text, facts = cards(country(Government={"Executive branch": branch}))["leaders"]
    assert text.endswith("since 3 May 1985, who is also the head of government.")
    assert facts["head_of_government"] == "President Jan Morris"
    del branch["chief of state"]
    text, _ = cards(country(Government={"Executive branch": branch}))["leaders"]
    assert text == "The head of government of Hav is President Jan Morris, since 3 May 1985."


def test_lists_give_their_largest_member():
    made = cards(
        country(
            Geography={"Land boundaries": {"border countries": "Dor 90 km; Vey (east) 1,200 km"}},
            Economy={"Exports - commodities": "snow, salt (2023)",
                     "Exports - partners": "Dor 40%, Vey 30% (2023)"},
        )
    )  # fmt: skip
    assert made["borders"] == (
        "Hav shares land borders with Dor (90 km), Vey (1,200 km).",
        {"longest_border": "Vey"},
    )
    assert made["exports"] == (
        "The main goods that Hav exports are snow, salt; the main buyers are Dor 40%, Vey 30%.",
        {"export": "snow", "export_partner": "Dor"},
    )
    assert set(made) == {"borders", "exports"}


def test_an_answer_is_found_as_whole_words_wherever_it_stands():
    texts = (
        "Nigeria and Niger",
        "Niger-Congo",
        "a Nigerian",
        "Nigeria, nigers",
        "xNiger Niger_",
        "Niger",
    )
    for text in texts:
        found = re.search(r"(?<!\w)Niger(?!\w)", text) is not None
        assert factbook._contains(text, "Niger") == found, text
