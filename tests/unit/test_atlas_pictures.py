"""Facts read from flag pixels, text cleaning, and the two augmentations."""

import collections
import functools
import itertools
import re

import numpy as np
import pytest

from mmqa_jax.data.atlas.augment import PERMUTED, permute_palette, replace_entities
from mmqa_jax.data.atlas.factbook import clean, load_countries, place_names, sentences, value_text
from mmqa_jax.data.atlas.pictures import (
    SHADES,
    TOLERANCE,
    decode,
    emoji_name,
    flag_facts,
    make_flags,
    pixel_facts,
)
from mmqa_jax.data.atlas.questions import (
    Subject,
    choose_questions,
    color_questions,
    split_groups,
    stripe_places,
)


@pytest.fixture(scope="module")
def flags():
    return {flag.key: flag for flag in make_flags(load_countries())}


@pytest.fixture(scope="module")
def facts(flags):
    return functools.cache(lambda key: flag_facts(flags[key]))


def test_palette_shades_cannot_be_confused():
    apart = np.abs(SHADES[:, None] - SHADES[None]).max(-1) + 255 * np.eye(len(SHADES))
    assert apart.min() > 2 * TOLERANCE


def test_the_splits_of_all_countries(flags):
    countries = load_countries()
    codes = {country.iso: country.code for country in countries}
    assert len(flags) >= 259
    subjects = [
        Subject(n, flag, codes.get(key, key)) for n, (key, flag) in enumerate(flags.items())
    ]
    counts = dict.fromkeys(codes.values(), 30)  # snippets
    split = split_groups(subjects, [], countries, counts, np.random.default_rng(0))
    found = collections.Counter(split[country.code] for country in countries)
    assert found == {"train": 172, "val": 20, "test": 48}
    alike = collections.defaultdict(set)
    for key, flag in flags.items():
        alike[flag.digest].add(key)
    # The issue counts five pairs among the countries' flags.
    pairs = [keys & codes.keys() for keys in alike.values() if len(keys & codes.keys()) > 1]
    assert len(pairs) == 5
    assert {"TD", "RO"} in pairs
    assert all(len({split[codes[key]] for key in pair}) == 1 for pair in pairs)


def test_golden_flag_facts(facts):
    # What everybody can see on these flags.
    france, japan, germany = facts("FR"), facts("JP"), facts("DE")
    assert stripe_places(france) == {"left": "blue", "center": "white", "right": "red"}
    assert set(japan.present) == {"white", "red"}
    assert japan.main == "white"
    assert japan.center == "red"
    assert set(japan.corners.values()) == {"white"}
    assert japan.stripes == ()
    assert germany.stripes == ("black", "red", "yellow")
    assert germany.direction == "horizontally"
    assert stripe_places(facts("CZ")) == {"top": "white", "bottom": "red"}
    assert not facts("CZ").whole
    assert facts("TH").stripes == ("red", "white", "blue", "white", "red")
    assert facts("US").halves["blue", "side"] == "left"
    assert facts("NL").stripes == ("red", "white", "blue")


def test_crosses_and_plain_fields_have_no_stripes(facts):
    for key in ("DK", "SE", "NO", "FI", "IS", "AX", "CH", "GB", "CN", "VN", "CF", "AE"):
        assert facts(key).stripes == (), key


def test_edges_do_not_invent_colors(facts):
    # A red-yellow edge blends to orange in both; the prototype fell for it.
    assert "orange" not in facts("ES").shares
    assert "orange" not in facts("CN").shares
    assert "orange" in facts("IE").present


def test_color_lists_are_in_order_of_share(flags, facts):
    for key in itertools.islice(flags, None, None, 3):
        fact = facts(key)
        shares = [fact.shares[c] for c in fact.present]
        assert all(a >= b - 0.02 for a, b in itertools.pairwise(shares))


@pytest.mark.parametrize("seed", [0, 1])
def test_permuted_flags_have_permuted_facts(flags, facts, seed):
    rng = np.random.default_rng(seed)
    for key, flag in list(flags.items())[seed::6]:
        before = facts(key)
        pixels, (words,) = permute_palette(decode(flag.png), [" ".join(PERMUTED)], rng)
        new = dict(zip(PERMUTED, words.split(), strict=True))
        assert sorted(new.values()) == sorted(PERMUTED)
        assert pixels.dtype == np.uint8
        assert pixels.shape == (150, 250, 3)
        fills = frozenset(new.get(c, c) for c in flag.fills)
        after = pixel_facts(pixels, fills)

        def renamed(color, new=new):
            return new.get(color, color)

        assert after.present == tuple(map(renamed, before.present)), key
        assert after.stripes == tuple(map(renamed, before.stripes)), key
        # A blend that was no color of the flag may have become one of its fills.
        assert after.corners.items() >= {p: renamed(c) for p, c in before.corners.items()}.items()
        assert after.halves == {(renamed(c), a): h for (c, a), h in before.halves.items()}, key
        if before.main:
            assert after.main == renamed(before.main), key


def test_permuted_questions_keep_true_answers(flags, facts):
    rng = np.random.default_rng(3)
    asked = set()
    for key in ("FR", "CZ", "JP", "ET", "MX"):
        flag = Subject(0, flags[key], key, facts(key))
        drafts = color_questions(flag, rng) + choose_questions(flag, rng)
        assert all(draft.palette_safe for draft in drafts)
        asked |= {draft.template for draft in drafts}
        for draft in drafts:
            texts = [draft.question, draft.answers[0], draft.keywords]
            pixels, (question, answer, keywords) = permute_palette(
                decode(flags[key].png), texts, rng
            )
            after = pixel_facts(pixels)
            assert keywords.split()[0] in answer
            if draft.template == "main_color":
                assert keywords == after.main
            elif draft.template == "color_list":
                assert keywords.split() == list(after.present)
            elif draft.template.endswith("_stripe"):
                assert keywords == stripe_places(after)[draft.template.removesuffix("_stripe")]
            elif draft.template == "more_of":
                said = re.findall(rf"\b(?:{'|'.join(PERMUTED)})\b", question)
                assert keywords == max(said, key=lambda c: after.shares[c])
    assert asked >= {"main_color", "color_list", "left_stripe", "top_stripe", "more_of"}


def test_two_pictures_get_one_permutation(flags):
    both = np.stack([decode(flags["FR"].png), decode(flags["IT"].png)])
    pixels, _ = permute_palette(both, [], np.random.default_rng(0))
    assert pixels.shape == both.shape
    # France and Italy share white and red in center and right.
    assert (pixels[0, 75, 125] == pixels[1, 75, 125]).all()
    assert (pixels[0, 75, 240] == pixels[1, 75, 240]).all()
    assert (pixels[0, 75, 10] != pixels[1, 75, 10]).any()


def test_blends_stay_between_their_colors():
    # Half red, half white, with a half-blended column between them.
    red, white = np.array([210, 47, 39]), np.array([255, 255, 255])
    picture = np.zeros((10, 11, 3), np.uint8)
    picture[:, :5], picture[:, 5], picture[:, 6:] = red, (red + white) // 2, white
    pixels, _ = permute_palette(picture, [], np.random.default_rng(4))
    middle = (pixels[0, 0].astype(int) + pixels[0, 10]) / 2
    np.testing.assert_allclose(pixels[0, 5], middle, atol=2)


def test_color_words_keep_their_capital_and_only_whole_words_change():
    _, (text,) = permute_palette(
        np.zeros((4, 4, 3), np.uint8), ["Red is in Redonda, red"], np.random.default_rng(1)
    )
    first, last = re.fullmatch(r"(\w+) is in Redonda, (\w+)", text).groups()
    assert first == last.capitalize()
    assert last in PERMUTED


NAMES = ["Zemio", "Oruro", "Kasai"]


def test_replaced_names_agree_in_all_texts():
    question, sources, answer, keywords = replace_entities(
        "What is the capital of the Bahamas?",
        ["The capital of the Bahamas is Nassau.", "The Bahamas: Nassau lies on an island."],
        "Nassau is the capital of the Bahamas.",
        "Nassau",
        ["the Bahamas", "Nassau"],
        NAMES,
        np.random.default_rng(0),
    )
    country = question.removeprefix("What is the capital of ").removesuffix("?")
    assert country in NAMES
    assert keywords in set(NAMES) - {country}
    assert answer == f"{keywords} is the capital of {country}."
    assert sources == [
        f"The capital of {country} is {keywords}.",
        f"{country}: {keywords} lies on an island.",
    ]


def test_only_whole_words_are_replaced_and_the_longest_first():
    question, sources, _, _ = replace_entities(
        "Where is Niger?",
        ["Niger is not Nigeria nor Guinea-Niger.", "Niger City is in Niger."],
        "",
        "",
        ["Niger", "Niger City"],
        NAMES,
        np.random.default_rng(2),
    )
    country = question.removeprefix("Where is ").removesuffix("?")
    city = sources[1].split(" is in ")[0]
    assert sources[0] == f"{country} is not Nigeria nor Guinea-Niger."
    assert city in NAMES
    assert city != country
    assert "Niger" not in sources[1]


def test_names_already_in_a_text_are_not_drawn():
    for seed in range(20):
        question, _, _, _ = replace_entities(
            "Is Togo near Zemio and Oruro?", [], "", "", ["Togo"], NAMES,
            np.random.default_rng(seed),
        )  # fmt: skip
        assert question == "Is Kasai near Zemio and Oruro?"


def test_place_names_are_many_and_name_no_country():
    names = place_names()
    assert len(names) >= 3_500
    assert not {"france", "angola", "luxembourg"} & {n.lower() for n in names}
    assert list(names) == sorted(set(names))


def test_cleaning():
    assert clean("S&atilde;o <em>Tom&eacute;</em>&nbsp; (2023 est.)") == "São Tomé (2023)"
    assert clean("one<br><br>two (est.) ;") == "one\ntwo"
    raw = "<strong>metropolitan France:</strong> 46 N <br><br><strong>Guiana:</strong> 4 N"
    assert value_text(raw) == "46 N"
    assert value_text("54 (46 cultural); note - includes one site") == "54 (46 cultural)"
    assert sentences("J. A. Smith came. He left at 5 p.m. for St. Ives. Then rain.") == [
        "J. A. Smith came.",
        "He left at 5 p.m. for St. Ives.",
        "Then rain.",
    ]


def test_emoji_names():
    assert emoji_name([0x1F436]) == "dog face"
    assert emoji_name([0x1F469, 0x200D, 0x1F692]) == "woman firefighter"
    assert emoji_name([0x1F1EB, 0x1F1F7]) == ""  # a flag
    assert emoji_name([0x1F44B, 0x1F3FB]) == ""  # a skin tone
    assert emoji_name([0xE000]) == ""  # OpenMoji's own code point
    assert emoji_name([0x1FACE]) == "moose"  # newer than Python 3.11's Unicode
