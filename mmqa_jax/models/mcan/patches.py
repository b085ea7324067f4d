"""MCAN on raw pictures: a CLIP vision tower that is trained with the rest makes its grid (ours).

Where no large CLIP's features are to be had, MCAN can learn its own. The tower's patch states take
the place of the grid of mcan.network. A question may have several pictures, or none: the decoder
reads the patches of all, each with the rotary positions of its own grid and a learned vector that
says which picture it is of. Fusion, pooling and head are those of models.mcan.network.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.network import Bert, BertConfig
from mmqa_jax.models.common.layers import normal_init, param, split_key, torch_linear
from mmqa_jax.models.mcan.network import PAD, Fusion, FusionConfig, Rotation, grid_rotation
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.models.two_towers.network import VisionTower, normalize_pixels


@dataclasses.dataclass(frozen=True)
class PatchMCANConfig:
    """Question encoder, vision tower, fusion and answers."""

    text: BertConfig  # the question encoder
    vision: VisionConfig  # the tower; its last block's patch states are read, its projection is not
    fusion: FusionConfig  # encoder, decoder, pooling
    answers: int  # size of the answer vocabulary
    pictures: int = 2  # of a question, at most
    rope_base: float = 40.0  # of the grid's rotary positions

    def __post_init__(self):
        if self.head_dim % 4:
            raise UserError(
                f"patch_mcan: fusion.hidden {self.fusion.hidden} over {self.fusion.heads} heads "
                f"gives heads of {self.head_dim}; two-dimensional rotary positions need a multiple "
                "of 4."
            )

    @property
    def head_dim(self) -> int:
        """Size of an attention head of the fusion."""
        return self.fusion.hidden // self.fusion.heads


class PatchMCAN(nnx.Module):
    """Answers a question on its pictures by classification."""

    def __init__(self, config: PatchMCANConfig, *, rngs: nnx.Rngs):
        fusion, vision = config.fusion, config.vision
        self.bert = Bert(config.text, rngs=rngs)
        self.vision = VisionTower(vision, rngs=rngs)
        self.text_adapter = torch_linear(
            config.text.hidden, fusion.hidden, ("proj", "embed"), rngs=rngs
        )
        self.image_adapter = torch_linear(
            vision.width, fusion.hidden, ("patch", "embed"), rngs=rngs, use_bias=False
        )
        self.which = param(
            rngs, normal_init(0.02), (config.pictures, fusion.hidden), (None, "embed")
        )
        self.fusion = Fusion(fusion, rngs=rngs)
        self.head = torch_linear(fusion.flat_out, config.answers, ("proj", "vocab"), rngs=rngs)
        self.config = config

    def latent(
        self,
        question_ids: jax.Array,
        image: Mapping[str, jax.Array],
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The fused feature.

        Args:
          question_ids: [B, L] int, WordPieces with [CLS] and [SEP], 0 = padding.
          image: `pixels` uint8 [B, P, S, S, 3] for P = config.pictures, and `shown` bool [B, P],
            False where there is no picture.

        Returns:
          [B, flat_out] float32.
        """
        config = self.config
        pixels, picture_mask = image["pixels"], image["shown"]
        rows, pictures = picture_mask.shape
        text_key, fusion_key = split_key(dropout_key, 2)
        mask = question_ids != PAD
        question = self.bert(question_ids, mask, dropout_key=text_key)  # [B, L, bert hidden]
        flat = normalize_pixels(pixels.reshape(rows * pictures, *pixels.shape[2:]))
        cells = self.image_adapter(self.vision.patch_features(flat, -1))  # [B * P, patches, H]
        cells = cells.reshape(rows, pictures, config.vision.patches, -1)
        cells = cells + self.which[...].astype(cells.dtype)[:, None]
        seen = jnp.repeat(picture_mask, config.vision.patches, axis=1)  # [B, P * patches]
        side = config.vision.image_size // config.vision.patch_size
        rotation = grid_rotation(side, config.head_dim, config.rope_base)
        repeated = Rotation(
            np.tile(rotation.cos, (pictures, 1)), np.tile(rotation.sin, (pictures, 1))
        )
        return self.fusion(
            jnp.tanh(self.text_adapter(question)),
            cells.reshape(rows, pictures * config.vision.patches, -1),
            mask,
            seen,
            rotation=repeated,
            dropout_key=fusion_key,
        )

    def answer_logits(self, latent: jax.Array) -> jax.Array:
        """latent [B, flat_out] -> [B, answers] float32; a sigmoid gives scores."""
        return self.head(latent)


# MCAN without a picture: the picture's caption is what the decoder guides (ours).
#
# Where a benchmark's pictures are not at hand, a caption stands for them. One BERT reads question
# and caption as a pair; the question's states go to MCAN's encoder, the caption's take the place
# of the grid in its decoder, without rotary positions, since BERT's states have theirs. Fusion,
# pooling and head are those of models.mcan.network.


@dataclasses.dataclass(frozen=True)
class CaptionMCANConfig:
    """Text encoder, fusion and answers."""

    text: BertConfig  # reads the pair of question and caption
    fusion: FusionConfig  # encoder, decoder, pooling
    answers: int  # size of the answer vocabulary
    frozen_text: bool = False  # no gradient reaches the text encoder, which has no dropout then


class CaptionMCAN(nnx.Module):
    """Answers a question on a caption by classification."""

    def __init__(self, config: CaptionMCANConfig, *, rngs: nnx.Rngs):
        fusion, size = config.fusion, config.text.hidden
        self.bert = Bert(config.text, rngs=rngs)
        self.text_adapter = torch_linear(size, fusion.hidden, ("proj", "embed"), rngs=rngs)
        self.image_adapter = torch_linear(size, fusion.hidden, ("proj", "embed"), rngs=rngs)
        self.fusion = Fusion(fusion, rngs=rngs)
        self.head = torch_linear(fusion.flat_out, config.answers, ("proj", "vocab"), rngs=rngs)
        self.config = config

    def latent(
        self,
        question_ids: jax.Array,
        image: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The fused feature.

        Args:
          question_ids: [B, L] int, `[CLS] question [SEP] caption [SEP]`, 0 = padding.
          image: bool [B, L], the caption's tokens and its [SEP].

        Returns:
          [B, flat_out] float32.
        """
        text_key, fusion_key = split_key(dropout_key, 2)
        real = question_ids != PAD
        if self.config.frozen_text:
            states = jax.lax.stop_gradient(self.bert(question_ids, real))
        else:
            states = self.bert(question_ids, real, dropout_key=text_key)  # [B, L, bert hidden]
        return self.fusion(
            jnp.tanh(self.text_adapter(states)),
            jnp.tanh(self.image_adapter(states)),
            real & ~image,
            image,
            dropout_key=fusion_key,
        )

    def answer_logits(self, latent: jax.Array) -> jax.Array:
        """latent [B, flat_out] -> [B, answers] float32; a sigmoid gives scores."""
        return self.head(latent)
