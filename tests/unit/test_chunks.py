"""Prompts in chunks: pictures that are seen whole are not cut."""

import numpy as np
import pytest

from mmqa_jax.decoding.scheduler import Chunking, bucket_of, chunks_within, prefix_keys
from mmqa_jax.models.attention.masked import last_of_pictures

BUCKETS = (2, 4)


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 4, 1]),
        ([1, 2, 3, -1, 4, -2, -3, 7, 8], [4, 4, 1]),  # a picture ends, and begins, at a cut
        ([1, 2, -1, -2, -3, -4, 7, 8, 9], [8, 1]),
        ([-1, -2, -3, -4, -5, -6, -7, -8, -9], [9]),
        ([1, 2, 3, -1, -2, 6, 7, -8, -9, -10], [10]),
    ],
)
def test_no_picture_is_cut(tokens, sizes):
    chunks = Chunking(BUCKETS, "both").split(tokens)
    assert [len(chunk.tokens) for chunk in chunks] == sizes
    assert [token for chunk in chunks for token in chunk.tokens] == tokens
    assert all(chunk.start % 4 == 0 for chunk in chunks)
    assert [len(chunk.tokens) for chunk in Chunking(BUCKETS).split(tokens)][:2] == [4, 4]
    padded = [chunk.start + bucket_of(len(chunk.tokens), BUCKETS) for chunk in chunks]
    assert max(padded) <= -(-len(tokens) // 4) * 4


def test_prompts_share_what_is_before_a_chunk_of_several_buckets():
    tokens = [1, 2, 3, 4, 5, 6, -1, -2, -3, 10, 11, 12, 13, 14]
    chunks = Chunking(BUCKETS, "both").split(tokens)
    assert [chunk.end for chunk in chunks] == [4, 12, 14]
    assert len(prefix_keys(chunks, 4)) == 1
    assert [chunks_within(chunks, columns) for columns in (0, 4, 8, 12, 14)] == [0, 1, 1, 2, 3]


def test_pictures_tokens_see_their_last_one():
    pictures = np.array([[0, 1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]], bool)
    last = last_of_pictures(pictures)
    np.testing.assert_array_equal(last, [[0, 2, 2, 3, 4, 5, 6], [6] * 7])


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(9, [8, 1]), (10, [8, 2]), (11, [8, 2, 1]), (6, [2, 2, 2]), (7, [7]), (8, [8]), (1, [1])],
)
def test_the_rest_of_a_prompt_is_padded_little(tokens, sizes):
    """Several of the smaller bucket, unless these take as many columns as one of the larger."""
    chunks = Chunking((2, 8), tight=True).split(range(tokens))
    assert [len(chunk.tokens) for chunk in chunks] == sizes
    assert all(chunk.start % bucket_of(len(chunk.tokens), (2, 8)) == 0 for chunk in chunks)
