"""LLaVA-OneVision (Li et al. 2024): a LLaVA whose pictures are shown in tiles too.

SigLIP's tower and a projector give states of each tile; of these come the tokens
(`onevision_tiles`) that take the place of a picture's placeholder in Qwen2's input.
Original: transformers models/llava_onevision/modeling_llava_onevision.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import normal_init, param
from mmqa_jax.models.llama.config import RELATIVES
from mmqa_jax.models.llava.network import (
    Llava,
    LlavaConfig,
    Projector,
    picture_features,
)
from mmqa_jax.models.onevision.tiles import TileBatch, TileSizes, tokens_of
from mmqa_jax.models.siglip.network import SiglipVisionConfig, SiglipVisionTower, siglip_so400m

# The published tower: SigLIP so400m without its last layer and its head.
SIGLIP = dataclasses.replace(siglip_so400m().vision, layers=26, head=False)
RESOLUTIONS = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))


@dataclasses.dataclass(frozen=True)
class OnevisionConfig(LlavaConfig):
    """A LLaVA's with defaults of its own, and how pictures are shown.

    Attributes:
      vision: a SigLIP; all of its states are read.
      resolutions: heights and widths of canvases, of which a picture takes the best.
      most_tiles: tiles whose states a picture may have (`anyres_max_9`: 9).
      video_token: what stands for a video in prompts; none is read here.
    """

    feature_layer: int = -1
    select: str = "full"
    resize: str = "squash"
    image_token: int = 151646
    resolutions: tuple[tuple[int, int], ...] = RESOLUTIONS
    most_tiles: int = 9
    video_token: int = 151647

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.vision, SiglipVisionConfig) or self.select != "full":
            raise UserError(
                "model.vision and model.select: expected a SigLIP and 'full', all states of a "
                "square; use a LLaVA-OneVision as it was published."
            )
        side, least = self.vision.image_size, min(map(min, self.resolutions), default=0)
        if not least or any(one % side for pair in self.resolutions for one in pair):
            raise UserError(
                f"model.resolutions is {self.resolutions}: expected heights and widths that are "
                f"multiples of model.vision.image_size = {side}; correct them."
            )
        if self.most_tiles < 1:
            raise UserError(
                f"model.most_tiles is {self.most_tiles}: expected at least 1; raise it."
            )

    @property
    def tiles(self) -> TileSizes:
        """What the tokens of pictures follow from."""
        vision = self.vision
        return TileSizes(vision.image_size, vision.side, self.resolutions, self.most_tiles)

    @property
    def expected_pixels(self) -> str:
        """See PictureConfig."""
        return "a models.onevision.tiles.TiledPicture, uint8 [tiles, H, W, 3]"

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """See `onevision_tiles.tokens_of`."""
        return tokens_of(shape, self.tiles)


class Onevision(Llava):
    """Vision tower, projector, newline and decoder.

    `embed` and `__call__` take [1, all tokens of pictures, H] of `encode_images`, without padding.
    """

    def __init__(self, config: OnevisionConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.llama.hidden
        self.newline = param(rngs, normal_init(width**-0.5), (width,), ("embed",))

    def encode_images(self, pictures: TileBatch) -> jax.Array:
        """Pictures -> [B, T, H]."""
        return tile_features(self.vision, self.projector, self.newline[...], pictures, self.config)

    def __call__(
        self,
        input_ids: jax.Array,
        features: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token at every position, [B, L, V] float32; see `Llava.__call__`."""
        hidden = self.llama.encode(
            self.embed(input_ids, features), attention_mask, positions, dropout_key=dropout_key
        )
        return self.llama.logits(hidden)


def tile_features(
    vision: SiglipVisionTower,
    projector: Projector,
    newline: jax.Array,
    pictures: TileBatch,
    config: OnevisionConfig,
) -> jax.Array:
    """B pictures of T tokens -> [B, T, H] in the decoder's compute dtype."""
    count = pictures.pixels.shape[0]
    pixels = vision.normalize(pictures.pixels.reshape(-1, *pictures.pixels.shape[2:]))
    states = picture_features(vision, projector, pixels, config)
    states = states.reshape(count, -1, states.shape[-1])  # [B, N * states, H]
    newline = (newline * config.feature_scale).astype(states.dtype)
    newline = jnp.broadcast_to(newline, (count, 1, len(newline)))
    states = jnp.concatenate([newline, states], axis=1)
    mixed = jnp.zeros((*pictures.rows.shape[:2], states.shape[-1]), jnp.float32)
    for tap in range(pictures.rows.shape[-1]):
        taken = jnp.take_along_axis(states, pictures.rows[..., tap, None], axis=1)
        mixed += pictures.weights[..., tap, None] * taken
    return mixed.astype(states.dtype)


# Words: Qwen2's and two more, padded to a multiple of 64 (transformers'
# convert_llava_onevision_weights_to_hf.py).


def onevision_05b(**changes) -> OnevisionConfig:
    """llava-hf/llava-onevision-qwen2-0.5b-ov-hf."""
    sizes = OnevisionConfig(SIGLIP, RELATIVES["qwen25_05b"](vocab_size=152000))
    return dataclasses.replace(sizes, **changes)


def onevision_7b(**changes) -> OnevisionConfig:
    """llava-hf/llava-onevision-qwen2-7b-ov-hf."""
    sizes = OnevisionConfig(SIGLIP, RELATIVES["qwen25_7b"](vocab_size=152128))
    return dataclasses.replace(sizes, **changes)


PRESETS = {"onevision_05b": onevision_05b, "onevision_7b": onevision_7b}
