"""Atlas's augmentation of a training example: names and colors change everywhere or nowhere."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.atlas.augment import PERMUTED, AtlasAugment
from mmqa_jax.data.atlas.factbook import place_names
from mmqa_jax.data.atlas.pictures import COLORS, color_map
from mmqa_jax.data.batches.packing import RawExample, RawSource
from mmqa_jax.data.schema import Question
from mmqa_jax.tasks.task import make_augmentation

pytestmark = pytest.mark.slow

# OpenMoji's shades, one of each color that is exchanged (pictures.PALETTE).
RGB = {
    "red": "d22f27", "white": "ffffff", "blue": "1e50a0", "green": "5c9e31",
    "yellow": "f1b31c", "black": "000000", "orange": "e27022",
}  # fmt: skip
STRIPE = 4  # pixels


def flag(*colors: str) -> np.ndarray:
    """Horizontal stripes from top to bottom, uint8[H, W, 3]."""
    stripes = [np.frombuffer(bytes.fromhex(RGB[color]), np.uint8) for color in colors]
    return np.stack([s for s in stripes for _ in range(STRIPE)])[:, None].repeat(8, axis=1)


def stripes(pixels: np.ndarray) -> list[str]:
    """The colors of a flag's stripes, read back from its pixels."""
    colors = color_map(pixels)
    assert (colors == colors[:, :1]).all()
    return [COLORS[int(row[0])] for row in colors[::STRIPE]]


def record(question: str, **extra) -> Question:
    return Question("q", "train", question, extra=extra)


TWO_HOP = RawExample(
    "Which anthem has the country whose capital is Nassau?",
    (
        RawSource("The capital of the Bahamas is Nassau.", "Bahamas", row=3),
        RawSource("The Bahamas: its anthem is March On, heard in Nassau.", "Bahamas", row=4),
        RawSource("Kenya has a coast; Kenyan tea is grown in Kenya.", "Kenya", row=5),
    ),
    "The anthem of the Bahamas is March On.",
    record("Which anthem?", entities=["the Bahamas", "Nassau"], palette_safe=False),
)

TWO_FLAGS = RawExample(
    "Is the top stripe of the flag of Chad red, and is Red the color below white on Peru's?",
    (
        RawSource("Flag of Chad", "Chad", flag("red", "white", "black"), 0),
        RawSource("Chad is in Africa; a red line.", "Chad", row=1),
        RawSource("Banner of Peru", "Peru", flag("white", "red", "yellow"), 2),
    ),
    "Yes, red, white and black are on one, white, red and yellow on the other.",
    record("Is it?", entities=["Chad", "Peru"], palette_safe=True),
)


def fields(raw: RawExample) -> tuple:
    sources = [
        (s.text, s.title, s.pixels is not None and s.pixels.tobytes(), s.row) for s in raw.sources
    ]
    return raw.question, raw.answer, sources, raw.record


@pytest.mark.parametrize("seed", range(5))
def test_names_are_replaced_alike_in_question_sources_and_answer(seed):
    new = AtlasAugment(entities=1.0)(TWO_HOP, np.random.default_rng(seed))
    land, other = new.sources[0].title, new.sources[2].title
    city = new.question.removeprefix("Which anthem has the country whose capital is ")[:-1]
    assert len({land, other, city}) == 3
    assert {land, other, city} <= set(place_names())
    assert [source.text for source in new.sources] == [
        f"The capital of {land} is {city}.",
        f"{land}: its anthem is March On, heard in {city}.",
        # A wrong source's country is renamed too, and only where it is a whole word.
        f"{other} has a coast; Kenyan tea is grown in {other}.",
    ]
    assert new.sources[1].title == land
    assert new.answer == f"The anthem of {land} is March On."
    assert [source.row for source in new.sources] == [3, 4, 5]
    assert new.record is TWO_HOP.record


@pytest.mark.parametrize("seed", range(8))
def test_palette_changes_pixels_and_color_words_together(seed):
    new = AtlasAugment(palette=1.0)(TWO_FLAGS, np.random.default_rng(seed))
    chad, text, peru = new.sources
    top, white, third = stripes(chad.pixels)
    assert stripes(peru.pixels)[:2] == [white, top]  # one permutation for both flags
    last = stripes(peru.pixels)[2]
    assert len({top, white, third, last}) == 4
    assert {top, white, third, last} <= set(PERMUTED)
    assert new.question == (
        f"Is the top stripe of the flag of Chad {top}, and is {top.capitalize()} the color below "
        f"{white} on Peru's?"
    )
    assert new.answer == (
        f"Yes, {top}, {white} and {third} are on one, {white}, {top} and {last} on the other."
    )
    # Snippets and names stay.
    assert text == TWO_FLAGS.sources[1]
    names = (chad.text, chad.title, peru.text, peru.title)
    assert names == ("Flag of Chad", "Chad", "Banner of Peru", "Peru")


def test_a_color_may_become_any_other():
    augment, tops = AtlasAugment(palette=1.0), set()
    for seed in range(60):
        (flag, *_) = augment(TWO_FLAGS, np.random.default_rng(seed)).sources
        tops.add(stripes(flag.pixels)[0])
    assert tops == set(PERMUTED)


def test_both_together():
    new = AtlasAugment(entities=1.0, palette=1.0)(TWO_FLAGS, np.random.default_rng(3))
    chad, _, peru = new.sources
    top, white, _ = stripes(chad.pixels)
    assert "Chad" not in new.question
    assert new.question.startswith(f"Is the top stripe of the flag of {chad.title} {top}, and")
    assert new.question.endswith(f"the color below {white} on {peru.title}'s?")
    assert chad.text == f"Flag of {chad.title}"
    assert peru.text == f"Banner of {peru.title}"


def test_examples_that_must_not_change_stay_as_they_are():
    always = AtlasAugment(entities=1.0, palette=1.0)
    # Nothing is known of it; it is not safe to recolor.
    for extra in ({}, {"entities": [], "palette_safe": False}):
        raw = dataclasses.replace(TWO_FLAGS, record=record("Is it?", **extra))
        assert fields(always(raw, np.random.default_rng(0))) == fields(raw)
    # Safe to recolor, but no picture is shown: its color words must stay true of the snippet.
    safe = record("Is it?", palette_safe=True)
    blind = dataclasses.replace(TWO_FLAGS, sources=TWO_FLAGS.sources[1:2], record=safe)
    assert fields(always(blind, np.random.default_rng(0))) == fields(blind)
    never = AtlasAugment()
    for seed in range(20):
        assert fields(never(TWO_FLAGS, np.random.default_rng(seed))) == fields(TWO_FLAGS)


def test_the_probabilities_are_kept_apart():
    augment = AtlasAugment(entities=0.3, palette=0.7)
    renamed = recolored = 0
    for seed in range(400):
        new = augment(TWO_FLAGS, np.random.default_rng(seed))
        renamed += new.sources[0].title != "Chad"
        recolored += (new.sources[0].pixels != TWO_FLAGS.sources[0].pixels).any()
    # Four standard deviations of a binomial; one permutation in 210 leaves three colors alone.
    assert abs(renamed / 400 - 0.3) < 4 * (0.3 * 0.7 / 400) ** 0.5
    assert abs(recolored / 400 - 0.7) < 4 * (0.3 * 0.7 / 400) ** 0.5


def test_same_generator_same_result_and_nothing_is_kept():
    augment = AtlasAugment(entities=0.7, palette=0.7)
    state, before = copy.deepcopy(vars(augment)), fields(TWO_FLAGS)
    first = [fields(augment(TWO_FLAGS, np.random.default_rng(seed))) for seed in range(12)]
    # In another order, among other examples, and in another process' copy.
    sent = pickle.loads(pickle.dumps(augment))
    for seed in reversed(range(12)):
        augment(TWO_HOP, np.random.default_rng(seed + 100))
        assert fields(augment(TWO_FLAGS, np.random.default_rng(seed))) == first[seed]
        assert fields(sent(TWO_FLAGS, np.random.default_rng(seed))) == first[seed]
    assert len({str(result) for result in first}) > 6
    assert vars(augment) == state
    assert fields(TWO_FLAGS) == before  # the example itself is left alone


@pytest.mark.parametrize("seed", range(6))
def test_key_words_change_with_the_answer(seed):
    """New names and new colors reach the key words, so that they still stand in the answer."""
    augment = AtlasAugment(entities=1.0, palette=1.0)
    named = dataclasses.replace(TWO_HOP, keywords="Bahamas")
    renamed = augment(named, np.random.default_rng(seed))
    assert renamed.keywords != "Bahamas"
    assert renamed.keywords in renamed.answer
    colored = RawExample(
        "Which color is on top of the flag of Chad?",
        (RawSource("Flag of Chad", "Chad", flag("red", "white", "black"), 0),),
        "It is red.",
        record("Which color?", palette_safe=True),
        "red",
    )
    changed = augment(colored, np.random.default_rng(seed))
    assert changed.answer == f"It is {changed.keywords}."
    assert changed.keywords == stripes(changed.sources[0].pixels)[0]


FACTORY = "mmqa_jax.data.atlas.augment:AtlasAugment"


def test_a_config_names_its_augmentation():
    made = make_augmentation({"factory": FACTORY, "entities": 0.0, "palette": 1.0})
    assert isinstance(made, AtlasAugment)
    changed = made(TWO_FLAGS, np.random.default_rng(0))
    again = AtlasAugment(palette=1.0)(TWO_FLAGS, np.random.default_rng(0))
    assert fields(changed) == fields(again)
    assert make_augmentation({"factory": FACTORY, "entities": 0.0}) is None
    assert make_augmentation({}) is None


@pytest.mark.parametrize(
    "factory",
    ["", 3, "os:system", "mmqa_jax.nowhere:AtlasAugment", FACTORY[:-1], FACTORY.replace(":", ".")],
)
def test_a_wrong_augmentation_is_named(factory):
    with pytest.raises(UserError, match=r"augment\.factory=.*package\.module:Class"):
        make_augmentation({"factory": factory, "entities": 0.5})


def test_a_run_of_before_the_module_moved_names_its_augmentation():
    former = "mmqa_jax.data.datasets.atlas.augment:AtlasAugment"
    assert isinstance(make_augmentation({"factory": former, "entities": 0.5}), AtlasAugment)
