"""Oscar's captions against the published search, restated in torch, and on eight devices."""

import dataclasses

import jax
import numpy as np
import pytest
from compare import WHOLE
from flax import nnx
from oscar_pair import FEATURES, LAYOUT, VOCAB, make_pair, pictures
from oscar_torch import MASK, PAD, SEP, TorchCaptioner

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.masked_lm import write_captions
from tests.refusals import refuses

LONGEST = 7  # of a caption with [CLS] and [SEP]
TOKENS = {"mask_id": MASK, "sep_id": SEP, "pad_id": PAD}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Weights so large that captions differ by picture."""
    return make_pair(tmp_path_factory.mktemp("oscar"), scale=0.4)


@pytest.fixture(scope="module")
def captioner(pair):
    return TorchCaptioner(pair.theirs, LAYOUT.caption, LONGEST, LAYOUT.text, LAYOUT.regions)


@pytest.fixture(scope="module")
def many():
    """Labels and regions of eight pictures: those of `pictures`, and random ones."""
    rng = np.random.default_rng(1)
    _, labels, regions = pictures()
    for count in (2, 3, 5, 6):
        labels.append(rng.integers(5, VOCAB, count).tolist())
        regions.append(rng.normal(size=(count, FEATURES)).astype("f4"))
    return labels, regions


def written(result, row: int, n: int) -> list[int]:
    length = int(result.lengths[row, n])
    assert not np.any(result.tokens[row, n, length:])
    return result.tokens[row, n, :length].tolist()


def test_greedy_captions(pair, captioner, many):
    labels, regions = many
    result = write_captions(
        *nnx.split(pair.ours),
        LAYOUT.prompt(labels, regions),
        **TOKENS,
        num_beams=1,
        max_new_tokens=LONGEST - 1,
    )
    result, found = jax.device_get(result), []
    for row, picture in enumerate(zip(labels, regions, strict=True)):
        expected, score = captioner.greedy(*picture)
        assert written(result, row, 0) == expected, row
        np.testing.assert_allclose(result.scores[row, 0], score, **WHOLE)
        found.append(tuple(expected))
    assert len(set(found)) >= 4  # the picture matters
    assert len({len(words) for words in found}) > 1  # some end early


@pytest.mark.parametrize(("beams", "length_penalty"), [(5, 1.0), (3, 0.4)])
def test_beam_search_captions(pair, captioner, many, beams, length_penalty):
    labels, regions = many
    prompt = LAYOUT.prompt(labels, regions)
    asked = TOKENS | {
        "num_beams": beams,
        "max_new_tokens": LONGEST - 1,
        "length_penalty": length_penalty,
    }
    whole = jax.device_get(write_captions(*nnx.split(pair.ours), prompt, **asked))
    lengths = set()
    for row, picture in enumerate(zip(labels, regions, strict=True)):
        expected = captioner.beam_search(*picture, beams, beams, length_penalty)
        for n, (words, score) in enumerate(expected):
            assert written(whole, row, n) == words, (row, n)
            np.testing.assert_allclose(whole.scores[row, n], score, **WHOLE)
            lengths.add(len(words))
    assert len(lengths) > 2


def test_the_best_caption_alone(pair, captioner, many):
    """The original's default, num_keep_best 1: it stops earlier and must not stop too early."""
    labels, regions = many
    asked = TOKENS | {"num_beams": 5, "max_new_tokens": LONGEST - 1, "only_best": True}
    prompt = LAYOUT.prompt(labels, regions)
    best = jax.device_get(write_captions(*nnx.split(pair.ours), prompt, **asked))
    for row, picture in enumerate(zip(labels, regions, strict=True)):
        [(words, score)] = captioner.beam_search(*picture, 5, 1)
        assert written(best, row, 0) == words, row
        np.testing.assert_allclose(best.scores[row, 0], score, **WHOLE)


def test_the_prompt_is_cut_out_of_the_layout():
    """Same labels at the same positions, and only [CLS] of the caption."""
    captions, labels, regions = pictures()
    whole, prompt = LAYOUT.captioning(captions, labels, regions), LAYOUT.prompt(labels, regions)
    kept = np.r_[0, LAYOUT.caption : LAYOUT.text]
    for name in ("input_ids", "token_type_ids", "position_ids", "context_mask"):
        np.testing.assert_array_equal(getattr(prompt, name), getattr(whole, name)[:, kept])
    assert prompt.caption_mask[:, 0].all()
    assert prompt.caption_mask.sum() == len(labels)
    np.testing.assert_array_equal(prompt.region_features, whole.region_features)


def test_captions_do_not_depend_on_padding_or_the_rest_of_the_batch(pair, many):
    labels, regions = many
    asked = TOKENS | {"num_beams": 3, "max_new_tokens": LONGEST - 1, "length_penalty": 0.4}
    graphdef, state = nnx.split(pair.ours)
    wide = dataclasses.replace(LAYOUT, text=LAYOUT.text + 3, regions=LAYOUT.regions + 2)
    together, padded = (
        jax.device_get(write_captions(graphdef, state, prompt, **asked))
        for prompt in (LAYOUT.prompt(labels, regions), wide.prompt(labels[::-1], regions[::-1]))
    )
    whole = np.array([row for row in range(8) if len(labels[row]) < 7 and len(regions[row]) <= 6])
    assert len(whole) == 7  # the others are cut, differently
    np.testing.assert_array_equal(together.tokens[whole], padded.tokens[::-1][whole])
    np.testing.assert_allclose(together.scores[whole], padded.scores[::-1][whole], **WHOLE)


def test_one_compilation_per_shape(pair, many):
    labels, regions = many
    graphdef, state = nnx.split(pair.ours)
    asked = TOKENS | {"num_beams": 1, "max_new_tokens": LONGEST - 1}
    write_captions(graphdef, state, LAYOUT.prompt(labels, regions), **asked)
    count = write_captions._cache_size()
    again = nnx.split(nnx.merge(graphdef, state))
    write_captions(*again, LAYOUT.prompt(labels[::-1], regions), **asked)
    assert write_captions._cache_size() == count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0: expected 1 to a third of the vocabulary, 13"),
        ({"num_beams": 14}, "num_beams is 14"),
        ({"max_new_tokens": 48}, "max_new_tokens is 48: expected 1 to 47"),
        ({"length_penalty": -0.1}, r"length_penalty is -0\.1: expected 0 or more"),
    ],
)
def test_bad_arguments_are_named(pair, many, change, message):
    with pytest.raises(UserError, match=message):
        write_captions(*nnx.split(pair.ours), LAYOUT.prompt(*many), **TOKENS, **change)


def test_bad_batches_are_named(many):
    labels, regions = many
    refuses(r"7 label lists and 8 pictures'", LAYOUT.captioning, [[]] * 8, labels[1:], regions)
    with pytest.raises(UserError, match=r"picture 1 of the batch have shape \(4, 9\)"):
        LAYOUT.prompt(labels[:2], [regions[0], regions[1][:, :9]])
    refuses(r"layout\.caption is 15: expected 3 to 14", dataclasses.replace, LAYOUT, caption=15)
