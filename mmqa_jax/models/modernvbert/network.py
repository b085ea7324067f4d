"""ModernVBERT (Teiletche et al. 2025): an encoder that sees both ways, with a SigLIP in front.

A picture is cut into tiles as by Idefics3. The states of each square of patches become one token,
which stands among the table's rows. Original: transformers models/modernvbert.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import Linear, normal_init
from mmqa_jax.models.llava.connectors import side_by_side
from mmqa_jax.models.llava.network import among_words
from mmqa_jax.models.llava.tiles import RowTiles
from mmqa_jax.models.modernbert.network import ModernBert, ModernBertConfig
from mmqa_jax.models.two_towers.config import SiglipVisionConfig
from mmqa_jax.models.two_towers.network import VisionTower


@dataclasses.dataclass(frozen=True)
class ModernVBertConfig:
    """Tower and encoder.

    Attributes:
      vision: a tower without a head.
      text: the encoder.
      merge: side of the square of states that become one token.
      image_token: id of a picture's placeholder.
      split: how a picture is cut into tiles.
    """

    vision: SiglipVisionConfig
    text: ModernBertConfig
    merge: int = 4
    image_token: int = 50407
    split: RowTiles = dataclasses.field(default_factory=RowTiles)

    def __post_init__(self):
        if self.merge < 1 or self.vision.side % self.merge:
            raise UserError(
                f"model.merge is {self.merge}: expected a divisor of the {self.vision.side} "
                "patches of a square's side; change it or the tower's sizes."
            )

    @property
    def features(self) -> int:
        """The tokens of a square."""
        return (self.vision.side // self.merge) ** 2

    @property
    def most_squares(self) -> int:
        """How many squares a picture has at most."""
        return self.split.most_tiles(self.vision.image_size) + 1

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """The tokens of a square's pixels [S, S, 3]; 0 for another shape."""
        size = self.vision.image_size
        return self.features if tuple(shape) == (size, size, 3) else 0


class ModernVBert(nnx.Module):
    """Tower, connector and encoder."""

    def __init__(self, config: ModernVBertConfig, *, rngs: nnx.Rngs):
        self.vision = VisionTower(config.vision, rngs=rngs)
        self.projector = Linear(
            config.vision.width * config.merge**2,
            config.text.hidden,
            ("mlp", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=normal_init(config.text.init_stddev / math.sqrt(2 * config.text.layers)),
        )
        self.text = ModernBert(config.text, rngs=rngs)
        self.config, self.width = config, config.text.hidden

    def encode_images(self, pixels: jax.Array) -> jax.Array:
        """[N, S, S, 3] normalized pixels (the tower's `normalize`) -> [N, features, H]."""
        states = self.vision.ln_post(self.vision.states_of(pixels, -1))
        return self.projector(side_by_side(states, self.config.merge))

    def states(
        self, input_ids: jax.Array, mask: jax.Array, pictures: jax.Array | None = None
    ) -> jax.Array:
        """Right-padded prompts -> the normed states of their tokens [B, L, H].

        Args:
          input_ids: int [B, L], one placeholder for each token of a picture.
          mask: bool [B, L], true at real tokens.
          pictures: uint8 [B, K, S, S, 3], squares in the order of their placeholders; None: none.
        """
        placeholder = input_ids == self.config.image_token  # [B, L]
        tokens = self.text.tokens(input_ids)
        if pictures is not None:
            flat = pictures.reshape(-1, *pictures.shape[2:])  # [B * K, S, S, 3]
            features = self.encode_images(self.vision.normalize(flat))
            tokens = among_words(tokens, features, placeholder)
        return self.text.encode(self.text.normed(tokens), mask)
