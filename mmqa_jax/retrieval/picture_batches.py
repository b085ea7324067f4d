"""Prompts with pictures in batches of a few shapes, for a model that only reads them.

A Qwen-VL's pictures, of any size, are padded to the buckets of their tower; those of others are
squares, or tiles, each a picture of its own. Prompts are padded to lengths of their own: there is
one program for each bucket, length and number of pictures, whatever pictures come.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mmqa_jax.core.serving import Serving
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.network import expand_images
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.models.qwen_vl import network as qwen_vl
from mmqa_jax.retrieval.embedder import rows_of_length

SeeingConfig = qwen_vl.QwenVLConfig | LlavaConfig | ModernVBertConfig

HELD = 64  # decoded pictures at a time; of a page some 5 MB


class PicturePrompt(NamedTuple):
    """Tokens with one placeholder for each picture, uint8 [H, W, 3]: of sides of whole units, or a
    square of the tower's size."""

    tokens: Sequence[int]
    pictures: tuple[np.ndarray, ...] = ()


class PromptBatch(NamedTuple):
    """This process's rows of a padded batch, as `models.encoders.heads` takes them."""

    input_ids: np.ndarray  # int32 [B, L]
    mask: np.ndarray  # bool [B, L]
    pictures: qwen_vl.PatchBatch | np.ndarray | None = None  # [B, K, ...]; squares are uint8
    rows: np.ndarray | None = None  # int32 [B, L]
    positions: np.ndarray | None = None  # int32 [B, L, 3]


def prompt_batches(
    prompts: Sequence[PicturePrompt],
    config: SeeingConfig,
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
        bucket = 0
        if isinstance(config, qwen_vl.QwenVLConfig):
            grids = (qwen_vl.grid_of(pixels.shape, config.vision) for pixels in prompt.pictures)
            units = (qwen_vl.bucket_of(grid, config.vision) for grid in grids)
            bucket = max(units, default=0)
        tokens = len(prompt.tokens) + beyond_placeholders(prompt.pictures, config)
        length = lengths[int(np.searchsorted(lengths, tokens))]
        groups[len(prompt.pictures), bucket, length].append(number)
    for (count, bucket, length), members in sorted(groups.items()):
        if isinstance(config, qwen_vl.QwenVLConfig):
            most = rows_of_length(serving, attended(config, bucket, length))
        else:  # squares see themselves alone
            of_squares = int(count**0.5 * config.vision.patches)
            most = rows_of_length(serving, max(length, of_squares))
        for start in range(0, len(members), most):
            chunk = members[start : start + most]
            size = min(serving.size_for(len(chunk)), most)
            padded = [chunk[min(row, len(chunk) - 1)] for row in serving.placement.rows(size)]
            rows_of_batch = [prompts[number] for number in padded]
            yield np.array(chunk), batch_of(rows_of_batch, config, count, bucket, length, pad_token)


def beyond_placeholders(pictures: Sequence[np.ndarray], config: SeeingConfig) -> int:
    """Tokens of pictures in a prompt beyond their placeholders."""
    return sum(config.picture_tokens(pixels.shape) - 1 for pixels in pictures)


def attended(config: qwen_vl.QwenVLConfig, bucket: int, length: int) -> int:
    """Tokens or patches that see each other in such a batch; the tower attends to patches."""
    return max(length, bucket * config.vision.merge**2)


def batch_of(
    prompts: Sequence[PicturePrompt],
    config: SeeingConfig,
    count: int,
    bucket: int,
    length: int,
    pad_token: int,
) -> PromptBatch:
    """One batch of prompts with at most `count` pictures each, behind which are black ones.

    Args:
      bucket: units of a Qwen-VL's pictures.
      length, pad_token: as of `prompt_batches`.
    """
    is_qwen = isinstance(config, qwen_vl.QwenVLConfig)
    side = config.vision.unit if is_qwen else config.vision.image_size
    black = np.zeros((side, side, 3), np.uint8)
    pictures = [
        prompt.pictures[slot] if slot < len(prompt.pictures) else black
        for prompt in prompts
        for slot in range(count)
    ]
    tokens = [prompt.tokens for prompt in prompts]
    if not is_qwen:
        counts = [len(prompt.pictures) for prompt in prompts]
        squares = np.stack(pictures).reshape(-1, count, *black.shape) if count else None
        expanded = expand_images(tokens, counts, config, length=length, pad_token=pad_token)
        return PromptBatch(*expanded, squares)
    made = qwen_vl.expand_pictures(
        tokens,
        [[pixels.shape for pixels in prompt.pictures] for prompt in prompts],
        config,
        first_rows=(slot * bucket for prompt in prompts for slot in range(len(prompt.pictures))),
        length=length,
        pad_token=pad_token,
    )
    if not count:
        return PromptBatch(made.input_ids, made.mask)
    laid = qwen_vl.lay_out(pictures, config.vision, bucket)
    laid = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), laid)
    return PromptBatch(made.input_ids, made.mask, laid, made.rows, made.positions)


class Slots(NamedTuple):
    """Room for pictures in each prompt of a batch: how many, of how many units of a Qwen-VL."""

    count: int
    bucket: int


def slots_of(config: SeeingConfig) -> Slots:
    """Room for one picture of any size."""
    if not isinstance(config, qwen_vl.QwenVLConfig):
        return Slots(config.most_squares, 0)
    vision, side = config.vision, math.isqrt(config.vision.most_units)
    return Slots(1, qwen_vl.bucket_of(qwen_vl.Grid(side, side), vision))


def prompt_arrays(
    prompts: Sequence[PicturePrompt],
    config: SeeingConfig,
    slots: Slots,
    length: int,
    pad_token: int,
) -> dict[str, np.ndarray]:
    """The arrays of one batch by name, as the records of `models.encoders.trained_pictured` read
    them: ids, mask, and of pictures squares, or the fields of a PatchBatch, features (the rows of
    tokens) and positions."""
    batch = batch_of(prompts, config, *slots, length, pad_token)
    arrays = {"ids": batch.input_ids, "mask": batch.mask}
    if batch.rows is not None:
        arrays |= {**vars(batch.pictures), "features": batch.rows, "positions": batch.positions}
    elif batch.pictures is not None:
        arrays["squares"] = batch.pictures
    return arrays
