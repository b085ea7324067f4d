"""VLP packing against vlp/webqa_loader.py's sequences, restated in plain loops."""

import dataclasses
import functools

import numpy as np
import pytest
from baseline_packing import VLP_WEBQA
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.packing import (
    INPUT_FIELDS,
    Example,
    MaskingConfig,
    Packer,
    PackingConfig,
    SourceTokens,
    batch,
    clean,
    cut,
)
from mmqa_jax.data.tokenizers import fair_shares, minilm_tokenizer
from tests.refusals import refuses

CLS, SEP, UNK, MASK = 101, 102, 100, 103  # BERT's ids
SMALL = PackingConfig(
    buckets=((0, 24), (0, 16), (2, 20)),
    slots_per_picture=3,
    region_dim=2,
    position_dim=1,
    max_source_tokens=10,
    max_question_tokens=5,
    max_answer_tokens=4,
)
TEXT_SHORT, TEXT_LONG, TWO_PICTURES = 0, 1, 2  # indices of SMALL's sorted buckets


@functools.cache
def _tokenizer():
    return minilm_tokenizer()


@pytest.fixture(scope="module")
def tokenizer():
    return _tokenizer()


@pytest.fixture(scope="module")
def packer(tokenizer):
    return Packer(tokenizer, SMALL)


def picture(count: int, value: float = 1.0, config: PackingConfig = SMALL):
    features = np.full((count, config.region_dim), value, np.float32)
    return features, np.full((count, config.position_dim), -value, np.float32)


def full_mask(packed: dict) -> np.ndarray:
    """The mask that every part of the system derives from the two column masks."""
    context, answer = packed["context_mask"], packed["answer_mask"]
    causal = np.tril(np.ones((len(context), len(context)), bool))
    return context[None, :] | (answer[:, None] & answer[None, :] & causal)


def baseline_mask(columns, slots, regions, source, question, answer):
    """Preprocess4webqa's input_mask, in loops: [row, column]; `answer` None in selection."""
    mask = np.zeros((columns, columns), int)
    start_question = 1 + slots + source + 1
    end_question = start_question + question
    for row in range(columns):
        for column in range(end_question):
            in_slots = 1 <= column <= slots
            if not in_slots or column <= regions:
                mask[row, column] = 1
    if answer is not None:
        for row in range(end_question, end_question + answer + 1):
            for column in range(end_question, row + 1):
                mask[row, column] = 1
    return mask


def test_text_sequence_is_laid_out_as_published(packer):
    example = Example((SourceTokens([11, 12]), SourceTokens([13])), [21, 22], [31, 32])
    never = MaskingConfig(mask_prob=0.0, max_pred=1)
    packed = never.pack(packer, example, TEXT_SHORT, np.random.default_rng(0))
    ids = packed["input_ids"].copy()
    ids[packed["masked_positions"][0]] = packed["masked_ids"][0]
    expected = [CLS, 11, 12, 13, SEP, 21, 22, 31, 32, SEP]
    assert ids.tolist() == expected + [0] * 6
    assert packed["token_type_ids"].tolist() == [4] * 5 + [5] * 5 + [0] * 6
    assert packed["position_ids"].tolist() == list(range(16))
    assert packed["context_mask"].tolist() == [True] * 7 + [False] * 9
    assert packed["answer_mask"].tolist() == [False] * 7 + [True] * 3 + [False] * 6
    assert packed["region_features"].shape == (0, 2)
    assert packed["truncated"] == 0


def test_picture_sequence_opens_only_the_slots_that_hold_regions(packer):
    sources = (SourceTokens([11], picture(2, 0.5)), SourceTokens([12], picture(3, 0.25)))
    packed = packer.pack_for_selection(Example(sources, [21]), TWO_PICTURES)
    assert packed["input_ids"][:11].tolist() == [CLS, *[UNK] * 6, 11, 12, SEP, 21]
    opened = [True, *[True, True, False], *[True] * 3, *[True] * 4, *[False] * 15]
    assert packed["context_mask"].tolist() == opened
    assert packed["region_features"][:, 0].tolist() == [0.5, 0.5, 0, 0.25, 0.25, 0.25]
    assert packed["region_positions"][:, 0].tolist() == [-0.5, -0.5, 0, -0.25, -0.25, -0.25]
    assert not packed["answer_mask"].any()


@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_masks_equal_the_baselines_at_512_columns(tokenizer, pictures):
    rng = np.random.default_rng(pictures)
    packer = Packer(tokenizer, VLP_WEBQA)
    texts = [rng.integers(1000, 2000, 40) for _ in range(max(1, pictures))]
    regions = [picture(100, 1.0, VLP_WEBQA)] * pictures + [None]
    sources = tuple(SourceTokens(t, r) for t, r in zip(texts, regions, strict=False))
    example = Example(sources, rng.integers(1000, 2000, 17), rng.integers(1000, 2000, 9))
    bucket = VLP_WEBQA.bucket_index(pictures, example.tokens, 3)
    slots, length = (200 if pictures else 0), 40 * len(texts)
    packed = MaskingConfig().pack(packer, example, bucket, rng)
    assert len(packed["input_ids"]) == 512
    expected = baseline_mask(512, slots, 100 * pictures, length, 17, 9)
    assert (full_mask(packed) == expected).all()
    chosen = packer.pack_for_selection(example, bucket)
    expected = baseline_mask(512, slots, 100 * pictures, length, 17, None)
    assert (full_mask(chosen) == expected).all()
    if pictures:  # "text after images uses position ids from 201"
        assert packed["position_ids"][201] == 201
        assert packed["input_ids"][201] == texts[0][0]


def test_captions_beside_regions_are_cut_at_200_and_facts_at_400(tokenizer):
    packer = Packer(tokenizer, VLP_WEBQA)
    long = np.arange(1000, 1500)
    for regions, kept in ((picture(100, 1.0, VLP_WEBQA), 200), (None, 400)):
        example = Example((SourceTokens(long, regions),), [21])
        bucket = VLP_WEBQA.bucket_index(regions is not None, example.tokens, 2)
        packed = packer.pack_for_selection(example, bucket)
        text = packed["input_ids"][packed["input_ids"] >= 1000]
        assert text.tolist() == long[:kept].tolist()
        assert packed["truncated"] == 500 - kept


def test_selection_does_not_depend_on_the_answer(packer):
    question = Example((SourceTokens([11, 12]),), [21, 22])
    one = packer.pack_for_selection(question, TEXT_LONG)
    other = packer.pack_for_selection(question._replace(answer=[31, 32, 33]), TEXT_LONG)
    for name in one:
        assert (one[name] == other[name]).all(), name
    assert not (other["input_ids"] == 31).any()


def test_decoding_input_ends_with_the_question(packer):
    """decode_webqa.py: positions 0..n for real tokens, 0 for padding."""
    example = Example((SourceTokens([11, 12]),), [21, 22], [31])
    packed = packer.pack_for_decoding(example, TEXT_SHORT)
    assert packed["length"] == 6
    assert packed["input_ids"].tolist() == [CLS, 11, 12, SEP, 21, 22] + [0] * 10
    assert packed["position_ids"].tolist() == [0, 1, 2, 3, 4, 5] + [0] * 10
    assert packed["context_mask"].sum() == 6
    assert packed["token_type_ids"].tolist() == [4] * 4 + [5] * 2 + [0] * 10


def test_surplus_goes_from_head_and_tail_in_training_and_from_the_tail_at_inference(packer):
    example = Example((SourceTokens(list(range(1000, 1030))),), [21], [31])
    starts = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        ids = packer.pack_for_selection(example, TEXT_LONG, rng)["input_ids"]
        text = ids[ids >= 1000]
        assert text.tolist() == list(range(text[0], text[0] + 10))  # max_source_tokens
        starts.append(text[0] - 1000)
    # 20 fair coins: mean 10, standard deviation 2.24.
    assert abs(np.mean(starts) - 10) < 0.5
    assert 1.8 < np.std(starts) < 2.7
    ids = packer.pack_for_selection(example, TEXT_LONG)["input_ids"]
    assert ids[ids >= 1000].tolist() == list(range(1000, 1010))


def test_every_lost_token_and_region_is_counted(packer):
    sources = tuple(SourceTokens([11] * 4, picture(n)) for n in (5, 3, 3))
    packed = packer.pack_for_selection(Example(sources, [21] * 8), TWO_PICTURES)
    # 12 source tokens to 10, 8 question tokens to 5, 2 regions without slot, third picture.
    assert packed["truncated"] == 2 + 3 + 2 + 3


@pytest.mark.parametrize(
    ("answer", "pictures", "predicted"),
    # L = len(answer) + 1, p = .5: min(max_pred, max(min(3, L) or 1, round(L * p)))
    [(1, 0, 1), (4, 0, 2), (1, 1, 2), (2, 1, 3), (3, 1, 3), (4, 1, 3)],
)
def test_how_many_answer_tokens_are_predicted(packer, answer, pictures, predicted):
    regions = picture(3) if pictures else None
    example = Example((SourceTokens([11], regions),), [21], list(range(1001, 1001 + answer)))
    bucket = TWO_PICTURES if pictures else TEXT_SHORT
    for seed in range(20):
        rng = np.random.default_rng(seed)
        packed = MaskingConfig(0.5, 6).pack(packer, example, bucket, rng)
        assert packed["masked_weights"].tolist() == [1.0] * predicted + [0.0] * (6 - predicted)
        assert (packed["masked_positions"][predicted:] == 0).all()
    packed = MaskingConfig(1.0, 2).pack(packer, example, bucket, rng)
    assert packed["masked_weights"].sum() == min(2, answer + 1)


def test_masking_is_80_10_10_and_reaches_every_answer_token(packer):
    answer = [1001, 1002, 1003, 1004]
    example = Example((SourceTokens([11, 12]),), [21], answer)
    clear = [CLS, 11, 12, SEP, 21, *answer, SEP]
    fates, places = {"mask": 0, "random": 0, "keep": 0}, np.zeros(16, int)
    for seed in range(1500):
        rng = np.random.default_rng(seed)
        packed = MaskingConfig(0.5, 4).pack(packer, example, TEXT_SHORT, rng)
        count = int(packed["masked_weights"].sum())
        ids = packed["input_ids"].copy()
        positions = packed["masked_positions"][:count]
        assert len(set(positions)) == count
        places[positions] += 1
        for shown, wanted in zip(ids[positions], packed["masked_ids"][:count], strict=True):
            name = "mask" if shown == MASK else "keep" if shown == wanted else "random"
            fates[name] += 1
        ids[positions] = packed["masked_ids"][:count]
        assert ids[:10].tolist() == clear
    total = sum(fates.values())
    assert abs(fates["mask"] / total - 0.8) < 0.03
    assert abs(fates["random"] / total - 0.1) < 0.025
    assert set(np.flatnonzero(places)) == {5, 6, 7, 8, 9}  # answer and final [SEP], no other
    assert places[5:10].min() / places[5:10].max() > 0.85


def test_bucket_is_the_smallest_that_holds_the_example():
    config = PackingConfig(((2, 150), (0, 64), (1, 64), (0, 128), (1, 120)), 4, 1, 1, 99, 9, 30, 20)
    assert [tuple(b) for b in config.buckets] == [(0, 64), (0, 128), (1, 64), (1, 120), (2, 150)]
    assert config.bucket_index(0, 61, 3) == 0
    assert config.bucket_index(0, 62, 3) == 1
    assert config.bucket_index(0, 500, 3) == 1
    assert config.bucket_index(1, 61, 3) == 2
    assert config.bucket_index(1, 62, 3) == 3
    assert config.bucket_index(2, 5, 3) == 4
    assert config.bucket_index(7, 5, 3) == 4
    vlp = VLP_WEBQA
    assert vlp.buckets[vlp.bucket_index(1, 50, 3)] == (2, 312)  # one picture: 200 slots too


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(0, 120))
def test_fair_shares_waste_nothing_and_favor_nobody(lengths, budget):
    shares = fair_shares(lengths, budget)
    assert sum(shares) == min(sum(lengths), budget)
    assert all(share <= length for share, length in zip(shares, lengths, strict=True))
    cut_ones = [s for s, n in zip(shares, lengths, strict=True) if s < n]
    if cut_ones:  # no source that was cut has less than another got, give or take rounding
        assert max(shares) - min(cut_ones) <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(-2, 60), st.integers(0, 2**32))
def test_cut_keeps_a_window(length, budget, seed):
    tokens = list(range(length))
    kept = list(cut(tokens, budget, np.random.default_rng(seed)))
    assert len(kept) == min(length, max(budget, 0))
    assert not kept or kept == list(range(kept[0], kept[0] + len(kept)))
    assert list(cut(tokens, budget, None)) == tokens[: max(budget, 0)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_example_fits_any_bucket(data):
    """Whatever the lengths, the sequence has its frame: [CLS], [SEP], answer's [SEP]."""
    packer = Packer(_tokenizer(), SMALL)
    lengths = st.integers(0, 40)
    sources = tuple(
        SourceTokens([1001] * data.draw(lengths), picture(2) if data.draw(st.booleans()) else None)
        for _ in range(data.draw(st.integers(0, 3)))
    )
    example = Example(sources, [1002] * data.draw(lengths), [1003] * data.draw(lengths))
    bucket = data.draw(st.integers(0, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    packed = MaskingConfig(0.5, 5).pack(packer, example, bucket, rng)
    count = int(packed["masked_weights"].sum())
    ids = packed["input_ids"]
    ids[packed["masked_positions"][:count]] = packed["masked_ids"][:count]
    homeless = [s for s in sources if s.regions][SMALL.buckets[bucket].pictures :]
    lost = packed["truncated"] - sum(len(s.regions[0]) for s in homeless)
    kept = ((ids >= 1001) & (ids <= 1003)).sum()
    assert kept == example.tokens - lost
    assert (ids == SEP).sum() == 2
    assert ids[np.flatnonzero(packed["answer_mask"])[-1]] == SEP
    assert not (packed["context_mask"] & packed["answer_mask"]).any()


def test_batch_stacks_the_models_inputs(packer):
    examples = [Example((SourceTokens([n]),), [21]) for n in (11, 12)]
    arrays = batch([packer.pack_for_selection(e, TEXT_SHORT) for e in examples])
    assert set(arrays) == {*INPUT_FIELDS, "truncated"}
    assert arrays["input_ids"][:, 1].tolist() == [11, 12]
    assert arrays["input_ids"].dtype == np.int32
    assert arrays["region_features"].shape == (2, 0, 2)


def test_quotes_and_blanks_are_dropped():
    assert clean(' "Is the "red" flag?" ') == "Is the red flag?"


def test_a_question_longer_than_the_model_takes(packer):
    assert packer.excess('"which flag"') == 0
    assert packer.excess("which flag of these is") == 0
    assert packer.excess("which flag of these is red") == 1


def test_bad_region_features_and_buckets(packer):
    example = Example((SourceTokens([11], (np.zeros((3, 7)), np.zeros((3, 1)))),), [21])
    refuses(r"\(3, 7\)", packer.pack_for_selection, example, TWO_PICTURES, error=AssertionError)
    with pytest.raises(UserError, match=r"12 text columns with 2 picture.*at least 13"):
        dataclasses.replace(SMALL, buckets=((0, 24), (2, 12)))
    refuses("buckets is empty", dataclasses.replace, SMALL, buckets=())
