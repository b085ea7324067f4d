"""Qwen2.5-VL (Bai et al. 2025) and Qwen3-VL: a Qwen that reads pictures of any size.

A picture becomes one token for each unit of 2 x 2 patches (`qwen_vl_tower`), which takes the place
of a placeholder in the text. Rotary positions are three (M-RoPE): of time, row and column, the
same for text; a picture has one time, and what follows it goes on behind its longer side. Qwen3-VL
adds what its tower's layers hold to the first layers' states at these tokens (deepstack).
Originals: transformers models/qwen2_5_vl/modeling_qwen2_5_vl.py and qwen3_vl/modeling_qwen3_vl.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama import Llama
from mmqa_jax.models.llama_config import RELATIVES, LlamaConfig
from mmqa_jax.models.qwen_vl_layout import Grid, PatchBatch, grid_of
from mmqa_jax.models.qwen_vl_tower import QwenVision
from mmqa_jax.models.qwen_vl_vision import QwenVisionConfig

if TYPE_CHECKING:
    from jaxtyping import Int32


@dataclasses.dataclass(frozen=True)
class QwenVLConfig:
    """Tower and language model.

    Attributes:
      vision: the tower; its `out` is the language model's width.
      llama: the language model, with `mrope`.
      image_token: id of a picture's placeholder; one stands for each token of a picture.
      video_token, vision_start_token, vision_end_token: ids that prompts have around pictures, and
        of videos, which are not read here.
    """

    vision: QwenVisionConfig
    llama: LlamaConfig
    image_token: int = 151655
    video_token: int = 151656
    vision_start_token: int = 151652
    vision_end_token: int = 151653

    def __post_init__(self):
        if self.vision.out != self.llama.hidden:
            raise UserError(
                f"model.vision.out is {self.vision.out}: expected model.llama.hidden = "
                f"{self.llama.hidden}; make them equal."
            )
        if not self.llama.mrope:
            raise UserError("model.llama.mrope is (): expected three numbers; give them.")
        if len(self.vision.deepstack) > self.llama.layers:
            raise UserError(
                f"model.vision.deepstack is {self.vision.deepstack}: expected at most as many as "
                f"model.llama.layers = {self.llama.layers}; shorten it."
            )

    @property
    def expected_pixels(self) -> str:
        """See PictureConfig."""
        unit = self.vision.unit
        return f"uint8 [H, W, 3], multiples of {unit}; use data.qwen_images.qwen_pixels"

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """One for each unit of pixels [H, W, 3] whose sides are whole units; 0 for others."""
        fits = len(shape) == 3 and shape[2] == 3 and min(shape) > 0
        fits = fits and shape[0] % self.vision.unit == shape[1] % self.vision.unit == 0
        return grid_of(shape, self.vision).units if fits else 0

    def position_shifts(
        self, tokens: Sequence[int], shapes: Sequence[Sequence[int]]
    ) -> Int32[np.ndarray, "L+1 3"]:
        """M-RoPE's positions less the columns; see PictureConfig."""
        grids = [grid_of(shape, self.vision) for shape in shapes]
        positions = token_positions(tokens, grids, self.image_token)
        columns = np.arange(len(positions), dtype=np.int32)
        return positions - columns[:, None]


def token_positions(
    tokens: Sequence[int], grids: Sequence[Grid], image_token: int
) -> Int32[np.ndarray, "L+1 3"]:
    """Time, row and column of each token of a prompt whose pictures have one placeholder each.

    The last row is that of the token after the prompt.
    """
    parts, now, waiting = [], 0, iter(grids)
    for token in tokens:
        if token != image_token:
            parts.append(np.full((1, 3), now, np.int32))
            now += 1
            continue
        grid = next(waiting)
        places = np.zeros((grid.units, 3), np.int32)
        places[:, 1:] = np.stack(np.indices(grid), axis=-1).reshape(-1, 2)
        parts.append(places + now)
        now += max(grid)
    return np.concatenate([*parts, np.full((1, 3), now, np.int32)])


class QwenVL(nnx.Module):
    """Tower and language model."""

    def __init__(self, config: QwenVLConfig, *, rngs: nnx.Rngs):
        self.vision = QwenVision(config.vision, rngs=rngs)
        self.llama = Llama(config.llama, rngs=rngs)
        self.config = config

    def encode_images(self, pictures: PatchBatch) -> jax.Array:
        """Pictures -> [B, U, features] in the language model's compute dtype."""
        return self.vision(pictures).astype(self.config.llama.dtype)

    def embed(
        self, input_ids: jax.Array, features: jax.Array | None, rows: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Token embeddings with the pictures' in their places, and what deepstack adds.

        Args:
          input_ids: int [B, L].
          features: [..., features] of `encode_images`; None if no row has a picture.
          rows: int [B, L], which of the features' rows a token takes; -1: none.

        Returns:
          [B, L, H], and [n, B, L, H] or None.
        """
        picture = input_ids == self.config.image_token
        tokens = self.llama.embed(jnp.where(picture, 0, input_ids))
        if features is None:
            return jnp.where(picture[..., None], jnp.nan, tokens), None
        flat = features.reshape(-1, features.shape[-1]).astype(tokens.dtype)
        own = flat.at[jnp.where(rows < 0, len(flat), rows)].get(mode="fill", fill_value=jnp.nan)
        return spread(tokens, own, picture)

    def __call__(
        self,
        input_ids: jax.Array,
        features: jax.Array | None = None,
        rows: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token at every position, [B, L, V] float32.

        Args:
          input_ids, features, rows: see `embed`, and `expand_pictures`.
          attention_mask, positions, dropout_key: see `Llama.encode`; positions [B, L, 3].
        """
        embedded, deepstack = self.embed(input_ids, features, rows)
        hidden = self.llama.encode(
            embedded, attention_mask, positions, deepstack=deepstack, dropout_key=dropout_key
        )
        return self.llama.logits(hidden)


def spread(
    tokens: jax.Array, features: jax.Array, picture: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The first layer's input and what is added to the next ones'.

    Args:
      tokens: [B, L, H], embeddings.
      features: [B, L, (1 + n) * H], of the pictures' tokens.
      picture: bool [B, L], which those are.

    Returns:
      [B, L, H] and [n, B, L, H], zeros where there is no picture; None where n is 0.
    """
    if features.shape == tokens.shape:
        return jnp.where(picture[..., None], features.astype(tokens.dtype), tokens), None
    parts = jnp.stack(jnp.split(features, features.shape[-1] // tokens.shape[-1], axis=-1))
    embedded = jnp.where(picture[..., None], parts[0].astype(tokens.dtype), tokens)
    return embedded, jnp.where(picture[..., None], parts[1:], 0)


class Prompts(NamedTuple):
    """A padded batch of prompts."""

    input_ids: np.ndarray  # int32 [B, L], one placeholder for each token of a picture
    mask: np.ndarray  # bool [B, L], true at real tokens
    positions: np.ndarray  # int32 [B, L, 3]
    rows: np.ndarray  # int32 [B, L], see `QwenVL.embed`


def expand_pictures(
    rows: Sequence[Sequence[int]],
    pictures: Sequence[Sequence[Sequence[int]]],
    config: QwenVLConfig,
    *,
    first_rows: Iterator[int] | None = None,
    length: int | None = None,
    pad_token: int = 0,
) -> Prompts:
    """Repeats every placeholder once for each token of its picture, and pads the rows.

    Args:
      rows: token ids of each prompt, with one `config.image_token` per picture.
      pictures: of each prompt, the shapes [H, W, 3] of its pictures.
      config: of the model.
      first_rows: where each picture's features begin, in order; None: one behind the other.
      length: of the padded rows; None is the longest one's.
      pad_token: any id but the placeholder's.
    """
    expanded, begin = [], 0
    for number, (row, shapes) in enumerate(zip(rows, pictures, strict=True)):
        ids = np.asarray(row, np.int32)
        placeholder = ids == config.image_token
        if placeholder.sum() != len(shapes):
            raise UserError(
                f"prompt {number}: {placeholder.sum()} image placeholders (token "
                f"{config.image_token}) for {len(shapes)} pictures; put exactly one into the "
                "prompt for each picture."
            )
        counts = np.ones(len(ids), np.int64)
        counts[placeholder] = [config.picture_tokens(shape) for shape in shapes]
        taken = np.full(counts.sum(), -1, np.int32)
        starts = np.cumsum(counts) - counts
        for start, count in zip(starts[placeholder], counts[placeholder], strict=True):
            first = begin if first_rows is None else next(first_rows)
            taken[start : start + count] = np.arange(first, first + count)
            begin += count
        grids = [grid_of(shape, config.vision) for shape in shapes]
        positions = token_positions(ids, grids, config.image_token)[:-1]
        expanded.append((np.repeat(ids, counts), positions, taken))
    length = max(len(ids) for ids, _, _ in expanded) if length is None else length
    made = Prompts(
        np.full((len(expanded), length), pad_token, np.int32),
        np.zeros((len(expanded), length), bool),
        np.zeros((len(expanded), length, 3), np.int32),
        np.full((len(expanded), length), -1, np.int32),
    )
    for number, (ids, positions, taken) in enumerate(expanded):
        if len(ids) > length:
            raise UserError(
                f"prompt {number}: {len(ids)} tokens with its pictures, the batch holds {length}; "
                "shorten the prompt or use longer batches."
            )
        real = slice(len(ids))
        made.input_ids[number, real], made.mask[number, real] = ids, True
        made.positions[number, real], made.rows[number, real] = positions, taken
    return made


def qwen25_vl_7b(**changes) -> QwenVLConfig:
    """Qwen/Qwen2.5-VL-7B-Instruct."""
    llama = RELATIVES["qwen25_7b"](positions=128000, mrope=(16, 24, 24))
    vision = QwenVisionConfig(max_pixels=28 * 28 * 16384)
    return dataclasses.replace(QwenVLConfig(vision, llama), **changes)


def qwen3_vl_vision(**changes) -> QwenVisionConfig:
    """The tower of Qwen/Qwen3-VL-8B-Instruct."""
    sizes = QwenVisionConfig(
        family="qwen3_vl",
        width=1152,
        layers=27,
        mlp=4304,
        out=4096,
        patch=16,
        window=0,
        full_layers=(),
        positions=48,
        deepstack=(8, 16, 24),
        activation="gelu_new",
        pixel_mean=(0.5, 0.5, 0.5),
        pixel_std=(0.5, 0.5, 0.5),
        min_pixels=65536,
        max_pixels=16777216,
    )
    return dataclasses.replace(sizes, **changes)


def qwen3_vl_2b(**changes) -> QwenVLConfig:
    """Qwen/Qwen3-VL-2B-Instruct; Qwen3-VL-Embedding-2B and -Reranker-2B have its sizes."""
    llama = RELATIVES["qwen3_17b"](
        positions=262144, rope_theta=5e6, mrope=(24, 20, 20), mrope_interleaved=True
    )
    vision = qwen3_vl_vision(width=1024, layers=24, mlp=4096, out=2048, deepstack=(5, 11, 17))
    return dataclasses.replace(QwenVLConfig(vision, llama), **changes)


def qwen3_vl_8b(**changes) -> QwenVLConfig:
    """Qwen/Qwen3-VL-8B-Instruct."""
    llama = RELATIVES["qwen3_8b"](
        positions=262144, rope_theta=5e6, mrope=(24, 20, 20), mrope_interleaved=True
    )
    return dataclasses.replace(QwenVLConfig(qwen3_vl_vision(), llama), **changes)
