"""The data of a report's cards, as the page's script reads it."""

import json
import re
from typing import Any


def card_data(page: str) -> dict[str, Any]:
    """The JSON of the page: cards, sources, pictures, lines, filters."""
    found = re.search(r'<script type="application/json" id="card-data">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def cards_of(page: str) -> list[dict[str, Any]]:
    """The cards with their texts in place: details as texts, sources with what is known of them."""
    data = card_data(page)
    for card in data["cards"]:
        card["details"] = [
            [name, "\n".join(data["lines"][n] for n in numbers)]
            for name, numbers in card["details"]
        ]
        for place in card["sources"]:
            place["id"], place["title"], place["text"], picture, _ = data["sources"][
                place["source"]
            ]
            place["picture"] = None if picture is None else data["pictures"][picture]
        card["picture"] = None if card["picture"] is None else data["pictures"][card["picture"]]
    return data["cards"]
