"""Prompts with pictures of any size in batches of a few shapes, for a Qwen-VL that only reads.

Pictures are padded to the buckets of their tower and prompts to lengths of their own: there is one
program for each pair of both and each number of pictures, whatever pictures come.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mmqa_jax.core.serving import Serving
from mmqa_jax.models.qwen_vl import network as qwen_vl
from mmqa_jax.retrieval.embedder import rows_of_length

HELD = 64  # decoded pictures at a time; of a page some 5 MB


class PicturePrompt(NamedTuple):
    """Tokens with one placeholder for each picture, uint8 [H, W, 3], of sides of whole units."""

    tokens: Sequence[int]
    pictures: tuple[np.ndarray, ...] = ()


class PromptBatch(NamedTuple):
    """This process's rows of a padded batch, as `models.encoders.heads` takes them."""

    input_ids: np.ndarray  # int32 [B, L]
    mask: np.ndarray  # bool [B, L]
    pictures: qwen_vl.PatchBatch | None = None  # arrays [B, K, ...]
    rows: np.ndarray | None = None  # int32 [B, L]
    positions: np.ndarray | None = None  # int32 [B, L, 3]


def prompt_batches(
    prompts: Sequence[PicturePrompt],
    config: qwen_vl.QwenVLConfig,
    serving: Serving,
    lengths: Sequence[int],
    pad_token: int,
) -> Iterator[tuple[np.ndarray, PromptBatch]]:
    """Batches of prompts of like size, with the places of their rows in `prompts`.

    Args:
      config: of the model.
      lengths: to which prompts are padded, ascending; none is longer than the last.
      pad_token: any id but the placeholder's.
    """
    groups: dict[tuple[int, int, int], list[int]] = collections.defaultdict(list)
    for number, prompt in enumerate(prompts):
        grids = (qwen_vl.grid_of(pixels.shape, config.vision) for pixels in prompt.pictures)
        units = [qwen_vl.bucket_of(grid, config.vision) for grid in grids]
        tokens = len(prompt.tokens) + beyond_placeholders(prompt.pictures, config)
        length = lengths[int(np.searchsorted(lengths, tokens))]
        groups[len(units), max(units, default=0), length].append(number)
    for (count, bucket, length), members in sorted(groups.items()):
        most = rows_of_length(serving, attended(config, bucket, length))
        for start in range(0, len(members), most):
            chunk = members[start : start + most]
            size = min(serving.size_for(len(chunk)), most)
            padded = [chunk[min(row, len(chunk) - 1)] for row in serving.placement.rows(size)]
            rows_of_batch = [prompts[number] for number in padded]
            yield np.array(chunk), _batch(rows_of_batch, config, count, bucket, length, pad_token)


def beyond_placeholders(pictures: Sequence[np.ndarray], config: qwen_vl.QwenVLConfig) -> int:
    """Tokens of pictures in a prompt beyond their placeholders."""
    return sum(config.picture_tokens(pixels.shape) - 1 for pixels in pictures)


def attended(config: qwen_vl.QwenVLConfig, bucket: int, length: int) -> int:
    """Tokens or patches that see each other in such a batch; the tower attends to patches."""
    return max(length, bucket * config.vision.merge**2)


def _batch(
    prompts: Sequence[PicturePrompt],
    config: qwen_vl.QwenVLConfig,
    count: int,
    bucket: int,
    length: int,
    pad_token: int,
) -> PromptBatch:
    made = qwen_vl.expand_pictures(
        [prompt.tokens for prompt in prompts],
        [[pixels.shape for pixels in prompt.pictures] for prompt in prompts],
        config,
        first_rows=itertools.cycle(range(0, count * bucket, bucket)) if count else None,
        length=length,
        pad_token=pad_token,
    )
    if not count:
        return PromptBatch(made.input_ids, made.mask)
    pictures = [pixels for prompt in prompts for pixels in prompt.pictures]
    laid = qwen_vl.lay_out(pictures, config.vision, bucket)
    laid = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), laid)
    return PromptBatch(made.input_ids, made.mask, laid, made.rows, made.positions)
