"""Answers as people write them: spelling from the sources, spaces, first letter, final period."""

import pytest

from mmqa_jax.inference.reader import as_written

KENYA = "The capital of Kenya is Nairobi, which lies at 1 17 S, 36 49 E; its time zone is UTC+3."
IVORY = "Côte d'Ivoire exports cocoa (40% of the world's supply), gold and crude oil."


@pytest.mark.parametrize(
    ("raw", "sources", "names", "wanted"),
    [
        (
            "nairobi is the capital of kenya .",
            [KENYA],
            ["Kenya"],
            "Nairobi is the capital of Kenya.",
        ),
        ("nairobi is the capital of kenya", [KENYA], ["Kenya"], "Nairobi is the capital of Kenya."),
        ("its time zone is utc + 3 .", [KENYA], [], "Its time zone is UTC+3."),
        ("it lies at 1 17 s , 36 49 e .", [KENYA], [], "It lies at 1 17 S, 36 49 E."),
        # Accents, apostrophes and percentages are the source's.
        ("cote d ' ivoire exports cocoa .", [IVORY], [], "Côte d'Ivoire exports cocoa."),
        (
            "cocoa ( 40 % of the world ' s supply ) .",
            [IVORY],
            [],
            "Cocoa (40% of the world's supply).",
        ),
        # A capital that only starts a sentence is no part of the word.
        ("i like the flag .", ["The flag is red."], [], "I like the flag."),
        ("what she is is tall .", ["What is tall?"], [], "What she is is tall."),
        ("the gdp is high .", ["GDP is high."], [], "The GDP is high."),
        # Except where a second capital makes it a name, or where a title has it.
        ("it is new delhi .", ["New Delhi is the capital."], [], "It is New Delhi."),
        ("it is delhi .", ["Delhi is the capital."], [], "It is delhi."),
        ("it is delhi .", ["Delhi is the capital."], ["Delhi"], "It is Delhi."),
        # Without a source, rules.
        (
            "yes , the flag has 3 . 5 % red - ish parts .",
            [],
            [],
            "Yes, the flag has 3.5% red-ish parts.",
        ),
        ("about 3 , 500 , 000 people", [], [], "About 3,500,000 people."),
        ('it says " hello there " twice .', [], [], 'It says "hello there" twice.'),
        ("the people ' s flag", [], [], "The people's flag."),
        ("is it red ?", [], [], "Is it red?"),
        ("red and blue , 1 / 2 each", [], [], "Red and blue, 1/2 each."),
        ("", [KENYA], [], ""),
    ],
)
def test_an_answer_is_written_out(raw, sources, names, wanted):
    assert as_written(raw, sources, names) == wanted


def test_the_most_frequent_spelling_wins_and_words_inside_others_do_not_count():
    texts = ["the us, the US, the US", "Niger borders Nigeria"]
    assert as_written("the us borders it .", texts) == "The US borders it."
    assert as_written("a nig .", texts) == "A nig."
    # However many sentences a word starts, one place inside a sentence says more.
    texts = ["May is warm. May is dry. In May it rains."]
    assert as_written("it is may .", texts) == "It is May."


def test_only_spelling_and_spaces_change():
    raw = "nairobi , unlike mombasa , is the capital of kenya ."
    written = as_written(raw, [KENYA], ["Kenya", "Mombasa"])
    assert "".join(written.lower().split()) == "".join(raw.split())
