"""Basic color terms of pixels and regions, against OpenMoji's palette and counted pictures."""

from __future__ import annotations

import numpy as np

from mmqa_jax.data.atlas.pictures import PALETTE
from mmqa_jax.data.colors import COLOR_TERMS, color_shares, color_terms
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.examples import RawExample, RawSource
from mmqa_jax.data.patch_regions import PatchRegions
from mmqa_jax.data.schema import Source
from mmqa_jax.data.source_reader import SourceReader
from mmqa_jax.data.tokenizers import minilm_tokenizer

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
    regions = PatchRegions(12, 4, whole=True, colors=True)
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
    regions = PatchRegions(12, 4, whole=True, colors=True, where=True)
    _, places = regions(RawSource("flag", pixels=pixels))
    tags = regions.tags(places)
    assert tags.picture == ("red", "blue", "white")
    assert " ".join(tags.parts) == (
        "top red bottom white left blue right red center red "
        "upper left blue upper right red lower left blue lower right white"
    )


def test_parts_are_read_where_one_picture_is_shown():
    """Two pictures have no room for them, and questions about two are about the wholes."""
    regions = PatchRegions(12, 4, colors=True, where=True)
    flag = RawSource("flag", pixels=np.full((12, 12, 3), RED, np.uint8))
    corpus = Corpus([Source("s", "text", "flag")], [])
    reader = SourceReader(corpus, minilm_tokenizer(), None, regions, tags=regions.tags)

    def text(*sources: RawSource) -> str:
        tokens = reader.example(RawExample("what?", sources)).sources[0].tokens
        return reader.tokenizer.decode(tokens)

    assert text(flag, flag) == "flag red"
    alone = text(flag, RawSource("a snippet"))
    assert alone.startswith("flag top red bottom red left red")
    assert alone.endswith("lower right red red")


def test_the_bucket_counts_the_tags():
    """`text_length` is what `example` then holds, but for the number of colors (4 assumed)."""
    regions = PatchRegions(12, 4, colors=True, where=True)
    sources = [
        Source("a", "image", "a flag"),
        Source("b", "image", "b"),
        Source("c", "text", "c d"),
    ]
    reader = SourceReader(Corpus(sources, []), minilm_tokenizer(), None, regions, tags=regions.tags)
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
