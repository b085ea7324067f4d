"""Inputs of Atlas's reader: colors of pixels and regions, tags, token types, probes."""

import dataclasses

import numpy as np
import pytest
from test_packing import CLS, SEP, TEXT_LONG, TEXT_SHORT, TWO_PICTURES, UNK, picture
from test_packing import SMALL as PUBLISHED

from mmqa_jax.data.atlas.pictures import PALETTE
from mmqa_jax.data.atlas.reader import (
    COLOR_TERMS,
    AtlasMasking,
    AtlasPacker,
    AtlasPackingConfig,
    AtlasRegions,
    TaggedSources,
    color_shares,
    color_terms,
)
from mmqa_jax.data.batches.packing import Example, Packer, RawExample, RawSource, SourceTokens
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Source
from mmqa_jax.data.tokenizers import minilm_tokenizer

SMALL = AtlasPackingConfig(**vars(PUBLISHED))
RED, WHITE, BLUE = (210, 47, 39), (255, 255, 255), (30, 80, 160)


def test_openmoji_shades_have_their_palette_names():
    """Golden: the names in Atlas's questions. Maroon is not a basic term."""
    for name, shades in PALETTE.items():
        pixels = np.array([[int(h[i : i + 2], 16) for i in (0, 2, 4)] for h in shades], np.uint8)
        found = {COLOR_TERMS[term] for term in color_terms(pixels)}
        assert found == {"brown" if name == "maroon" else name}


def test_pure_screen_colors_are_named():
    for name, rgb in (("red", (255, 0, 0)), ("green", (0, 255, 0)), ("blue", (0, 0, 255))):
        assert COLOR_TERMS[int(color_terms(np.array(rgb, np.uint8)))] == name


def test_shares_are_square_roots_of_parts():
    patch = np.array([[RED] * 1 + [WHITE] * 3], np.uint8)  # [1, 4, 3]
    expected = np.zeros((1, len(COLOR_TERMS)))
    expected[0, COLOR_TERMS.index("red")] = 0.5
    expected[0, COLOR_TERMS.index("white")] = 0.75**0.5
    np.testing.assert_allclose(color_shares(patch), expected, rtol=1e-6)


def test_regions_hold_where_colors_are_and_tags_name_them():
    pixels = np.zeros((12, 12, 3), np.uint8)
    pixels[:4], pixels[4:8], pixels[8:] = RED, WHITE, BLUE
    pixels[5:7, 5:7] = RED  # a small emblem in the middle patch
    regions = AtlasRegions(12, 4, whole=True, colors=True)
    features, places = regions(RawSource("flag", pixels=pixels))
    assert features.shape == (10, 48) == (regions.slots, regions.dim)
    assert places.shape == (10, 17) == (10, regions.position_dim)
    np.testing.assert_allclose(features[0].reshape(16, 3)[0], np.array(RED) / 127.5 - 1, rtol=1e-5)
    np.testing.assert_allclose(places[9, :6], [0, 0, 1, 1, 1, 1])
    red = places[:, 6 + COLOR_TERMS.index("red")]
    np.testing.assert_allclose(red[[0, 4, 8, 9]], [1, 0.5, 0, (52 / 144) ** 0.5], rtol=1e-5)
    # The whole picture's region is the mean of 3 x 3 pixels per value.
    whole = (features[9].reshape(4, 4, 3) + 1) * 127.5
    np.testing.assert_allclose(whole[0, 0], RED, atol=1e-3)
    np.testing.assert_allclose(whole[1, 0], np.mean([RED, WHITE, WHITE], axis=0), atol=1e-3)
    tags = regions.tags(places)
    assert tags.regions == ("red",) * 3 + ("white",) * 3 + ("blue",) * 3 + ("red",)
    assert tags.picture == ("red", "blue", "white")


def test_tags_can_name_the_color_of_every_part():
    pixels = np.zeros((12, 12, 3), np.uint8)
    pixels[:, :4], pixels[:, 4:] = BLUE, RED
    pixels[8:, 4:] = WHITE
    regions = AtlasRegions(12, 4, whole=True, colors=True, where=True)
    _, places = regions(RawSource("flag", pixels=pixels))
    tags = regions.tags(places)
    assert tags.picture == ("red", "blue", "white")
    assert " ".join(tags.parts) == (
        "top red bottom white left blue right red center red "
        "upper left blue upper right red lower left blue lower right white"
    )


def test_parts_are_read_where_one_picture_is_shown():
    """Two pictures have no room for them, and questions about two are about the wholes."""
    regions = AtlasRegions(12, 4, colors=True, where=True)
    flag = RawSource("flag", pixels=np.full((12, 12, 3), RED, np.uint8))
    corpus = Corpus([Source("s", "text", "flag")], [])
    reader = TaggedSources(corpus, minilm_tokenizer(), None, regions, tags=regions.tags)

    def text(*sources: RawSource) -> str:
        tokens = reader.example(RawExample("what?", sources)).sources[0].tokens
        return reader.tokenizer.decode(tokens)

    assert text(flag, flag) == "flag red"
    alone = text(flag, RawSource("a snippet"))
    assert alone.startswith("flag top red bottom red left red")
    assert alone.endswith("lower right red red")


def test_the_bucket_counts_the_tags():
    """`text_length` is what `example` then holds, but for the number of colors (4 assumed)."""
    regions = AtlasRegions(12, 4, colors=True, where=True)
    sources = [
        Source("a", "image", "a flag"),
        Source("b", "image", "b"),
        Source("c", "text", "c d"),
    ]
    reader = TaggedSources(
        Corpus(sources, []), minilm_tokenizer(), None, regions, tags=regions.tags
    )
    pixels = np.full((12, 12, 3), RED, np.uint8)  # one color

    def read(*rows: int) -> int:
        shown = [RawSource(sources[r].text, pixels=pixels if r < 2 else None) for r in rows]
        example = reader.example(RawExample("what?", tuple(shown)))
        return sum(len(source.tokens) for source in example.sources)

    rows = np.array([[0, 1], [0, 2], [2, -1], [1, -1]])
    colors = np.array([2, 1, 0, 1])
    held = [read(0, 1), read(0, 2), read(2), read(1)]
    np.testing.assert_array_equal(reader.text_length(rows), np.array(held) + 3 * colors)
    own = reader.text_length(rows[2], 1)  # a picture of the question's, without a caption
    assert own == reader.text_length(rows[3]) - len(reader.table[1]) + len(reader.table[2])
    plain = SourceReader(Corpus(sources, []), minilm_tokenizer(), None, regions)
    np.testing.assert_array_equal(plain.text_length(rows), [3, 4, 2, 1])


# --- Sequences


@pytest.fixture(scope="module")
def tokenizer():
    return minilm_tokenizer()


@pytest.mark.parametrize("probes", [False, True])
def test_key_words_of_the_answer_weigh_more(tokenizer, probes):
    """The predicted key words share the further weight."""
    config = AtlasPackingConfig(((0, 40),), 3, 2, 1, max_question_tokens=5, max_answer_tokens=8)
    packer = AtlasPacker(tokenizer, config)
    example = Example(
        (SourceTokens([11, 12]),), [21], [1001, 1002, 1003, 1002], keywords=[1002, 999]
    )
    masking = AtlasMasking(1.0, 8, probes=probes, keyword_weight=6.0)
    packed = masking.pack(packer, example, 0, np.random.default_rng(0))
    assert packed["masked_ids"].tolist() == [1001, 1002, 1003, 1002, SEP, 0, 0, 0]
    assert packed["masked_weights"].tolist() == [1.0, 4.0, 1.0, 4.0, 1.0, 0.0, 0.0, 0.0]
    plain = dataclasses.replace(masking, keyword_weight=0.0)
    packed = plain.pack(packer, example, 0, np.random.default_rng(0))
    assert packed["masked_weights"].tolist() == [1.0] * 5 + [0.0] * 3


def test_per_source_types_bind_captions_to_their_pictures(tokenizer):
    packer = AtlasPacker(tokenizer, dataclasses.replace(SMALL, per_source=True))
    sources = (SourceTokens([11, 12], picture(3)), SourceTokens([13], picture(2)))
    packed = packer.pack_for_selection(Example(sources, [21]), TWO_PICTURES)
    types = packed["token_type_ids"].tolist()
    assert types[:12] == [4, 2, 2, 2, 3, 3, 3, 2, 2, 3, 4, 5]
    snippets = (SourceTokens([11]), SourceTokens([12]), SourceTokens([13]))
    packed = packer.pack_for_selection(Example(snippets, [21]), TEXT_SHORT)
    assert packed["token_type_ids"][:6].tolist() == [4, 2, 3, 4, 4, 5]


def test_per_source_cuts_the_long_source_and_keeps_the_short_one(tokenizer):
    fair = AtlasPacker(tokenizer, dataclasses.replace(SMALL, per_source=True))
    joined = AtlasPacker(tokenizer, SMALL)
    sources = (SourceTokens([1001] * 30), SourceTokens([1002] * 3))
    for packer, counts in ((fair, (7, 3)), (joined, (10, 0))):
        ids = packer.pack_for_selection(Example(sources, [21]), TEXT_LONG)["input_ids"]
        assert ((ids == 1001).sum(), (ids == 1002).sum()) == counts


def test_text_positions_can_ignore_the_slots(tokenizer):
    packer = AtlasPacker(tokenizer, dataclasses.replace(SMALL, positions_after_regions=False))
    example = Example((SourceTokens([11], picture(3)),), [21])
    packed = packer.pack_for_selection(example, TWO_PICTURES)
    assert packed["position_ids"][0] == 0
    assert packed["position_ids"][7:11].tolist() == [1, 2, 3, 4]
    text = packer.pack_for_selection(Example((SourceTokens([11]),), [21]), TEXT_SHORT)
    assert text["position_ids"][1:4].tolist() == [1, 2, 3]


def test_tags_stand_in_the_slots_and_matched_words_get_their_type(tokenizer):
    config = dataclasses.replace(SMALL, per_source=True, match_types=(1,))
    packer = AtlasPacker(tokenizer, config)
    sources = (SourceTokens([11, 12], picture(2), [21, 41]), SourceTokens([22], picture(3)))
    packed = packer.pack_for_selection(Example(sources, [21, 12]), TWO_PICTURES)
    # [CLS], three slots a picture, texts 11 12 22, [SEP], question 21 12.
    np.testing.assert_array_equal(
        packed["input_ids"][:13], [CLS, 21, 41, UNK, UNK, UNK, UNK, 11, 12, 22, SEP, 21, 12]
    )
    np.testing.assert_array_equal(
        packed["token_type_ids"][:13], [4, 1, 2, 2, 3, 3, 3, 2, 1, 3, 4, 5, 5]
    )
    config = dataclasses.replace(config, match_types=(1, 0))  # which source holds the word
    packed = AtlasPacker(tokenizer, config).pack_for_selection(
        Example((*sources, SourceTokens([12])), [21, 12, 22]), TWO_PICTURES
    )
    np.testing.assert_array_equal(
        packed["token_type_ids"][:13], [4, 1, 2, 2, 3, 3, 3, 2, 1, 0, 0, 4, 5]
    )


def test_with_nothing_named_sequences_are_the_published_ones(tokenizer):
    sources = (SourceTokens([11, 12], picture(2)), SourceTokens([1001] * 30, picture(3)))
    example = Example(sources, [21, 11], [31, 32])
    ours, published = AtlasPacker(tokenizer, SMALL), Packer(tokenizer, PUBLISHED)
    one = ours.pack_for_selection(example, TWO_PICTURES, np.random.default_rng(0))
    other = published.pack_for_selection(example, TWO_PICTURES, np.random.default_rng(0))
    for name in other:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
