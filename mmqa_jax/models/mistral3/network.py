"""Mistral Small 3.1 and Ministral 3 with pictures: Pixtral's tower before a Mistral.

A picture of any size becomes one token for each unit of 2 x 2 patches, row by row; behind each row
stands the decoder's embedding of the token [IMG_BREAK], behind the last that of [IMG_END]. Here
these are the picture's own tokens, so that a picture has one placeholder, and the tower gives all
of its tokens. Original: transformers models/mistral3/modeling_mistral3.py and
models/pixtral/processing_pixtral.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama.config import RELATIVES
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.connectors import Connector
from mmqa_jax.models.llava.network import FeaturedLlava, picture_features
from mmqa_jax.models.llava.pixtral import PixtralVision, PixtralVisionConfig
from mmqa_jax.models.qwen_vl import network as qwen_vl


@flax.struct.dataclass
class RowBatch:
    """B pictures of one bucket of T tokens, of as many units at most."""

    pictures: qwen_vl.PatchBatch
    # int32 [B, T], of each token in [break, end, units row by row]; of padding anything.
    rows: np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Mistral3Config(LlavaConfig):
    """A LLaVA's with pictures of any size."""

    vision: PixtralVisionConfig  # Pixtral's tower
    feature_layer: int = -1
    select: str = "full"
    resize: str = "squash"
    projector_bias: bool = False
    image_token: int = 10
    family: str = "mistral3"
    connector: str = "merger"
    merge: int = 2  # side of a unit in patches
    # break_token, end_token: ids behind the rows of a picture, and behind the last.
    break_token: int = 12
    end_token: int = 13

    def __post_init__(self):
        super().__post_init__()
        for name in ("break_token", "end_token"):
            if not 0 <= getattr(self, name) < self.llama.vocab_size:
                raise UserError(
                    f"model.{name} is {getattr(self, name)}: expected an id below "
                    f"model.llama.vocab_size = {self.llama.vocab_size}; correct it."
                )

    @property
    def picture_kind(self) -> Literal["rows"]:
        """See PictureConfig."""
        return "rows"

    def tokens_of(self, grid: qwen_vl.Grid) -> int:
        """One for each unit, and one for each row."""
        return grid.rows * (grid.columns + 1)


def bucket_of(shape: Sequence[int], config: Mistral3Config) -> int:
    """The smallest bucket of tokens that holds a picture of pixels [H, W, 3]."""
    grid = qwen_vl.grid_of(shape, config.units)
    return qwen_vl.bucket_of(qwen_vl.Grid(grid.rows, grid.columns + 1), config.units)


def lay_out(
    pictures: Sequence[UInt8[np.ndarray, "H W 3"]], config: Mistral3Config, bucket: int
) -> RowBatch:
    """Pictures, of which none has more than `bucket` tokens (`bucket_of`), as a batch."""
    rows = np.zeros((len(pictures), bucket), np.int32)
    for number, picture in enumerate(pictures):
        grid = qwen_vl.grid_of(picture.shape, config.units)
        taken = np.zeros((grid.rows, grid.columns + 1), np.int32)
        taken[:, :-1] = 2 + np.arange(grid.units).reshape(grid)
        taken[-1, -1] = 1
        rows[number, : taken.size] = taken.reshape(-1)
    return RowBatch(qwen_vl.lay_out(pictures, config.units, bucket), rows)


class Mistral3(FeaturedLlava):
    """Tower, connector and decoder."""

    def breaks(self) -> jax.Array:
        """The embeddings behind the rows, and behind the last: [2, H]."""
        return self.llama.embed(np.array([self.config.break_token, self.config.end_token]))

    def tower(self) -> nnx.Dict:
        """See Llava; with the embeddings behind the rows."""
        parts = super().tower()
        parts.breaks = nnx.Param(self.breaks())
        return parts

    def encode_images(self, pictures: RowBatch) -> jax.Array:
        """Pictures -> [B, T, H]."""
        return row_features(self.vision, self.projector, self.breaks(), pictures, self.config)


def row_features(
    vision: PixtralVision,
    projector: Connector,
    breaks: jax.Array,
    pictures: RowBatch,
    config: Mistral3Config,
) -> jax.Array:
    """B pictures of T tokens -> [B, T, H] in the decoder's compute dtype."""
    batch = vision.normalize(pictures.pictures)
    units = picture_features(vision, projector, batch, config)  # [B, U, H]
    behind = jnp.broadcast_to(breaks.astype(units.dtype), (len(units), *breaks.shape))
    tokens = jnp.concatenate([behind, units], axis=1)
    return jnp.take_along_axis(tokens, pictures.rows[..., None], axis=1)


def mistral_small31_24b(**changes: Any) -> Mistral3Config:
    """mistralai/Mistral-Small-3.1-24B-Instruct-2503; the sizes of 3.2 are the same."""
    llama = RELATIVES["mistral_small_24b"](positions=131072, rope_theta=1e9)
    return dataclasses.replace(Mistral3Config(PixtralVisionConfig(), llama), **changes)


def ministral3_vl_3b(**changes: Any) -> Mistral3Config:
    """mistralai/Ministral-3-3B-Instruct-2512."""
    return _ministral3("ministral3_3b", **changes)


def ministral3_vl_8b(**changes: Any) -> Mistral3Config:
    """mistralai/Ministral-3-8B-Instruct-2512."""
    return _ministral3("ministral3_8b", **changes)


def _ministral3(decoder: str, **changes: Any) -> Mistral3Config:
    sizes = Mistral3Config(PixtralVisionConfig(activation="silu"), RELATIVES[decoder]())
    return dataclasses.replace(sizes, **changes)


PRESETS = {
    "mistral_small31_24b": mistral_small31_24b,
    "ministral3_vl_3b": ministral3_vl_3b,
    "ministral3_vl_8b": ministral3_vl_8b,
}
