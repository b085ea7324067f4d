"""What a T5's encoder is given, and what the decoder then reads of it.

`Texts` is T5 as published. `Passages` is Fusion-in-Decoder (Izacard and Grave, EACL 2021; original:
facebookresearch/FiD src/model.py, EncoderWrapper): each passage is encoded by itself, and the
decoder reads all of them behind each other. `PicturedTexts` is for models that fuse a picture's
features into the encoded text (`models.multimodal_t5.network`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp

from mmqa_jax.models.multimodal_t5.network import MultimodalT5
from mmqa_jax.models.t5.network import T5


class Encoded(NamedTuple):
    """An encoded batch.

    Attributes:
      states: [B, S, H].
      mask: bool [B, S], true at real tokens.
    """

    states: jax.Array
    mask: jax.Array


@flax.struct.dataclass
class Texts:
    """A text for each row.

    Attributes:
      input_ids: int [B, L], padded on the right.
      lengths: int [B], tokens of each.
    """

    input_ids: jax.Array
    lengths: jax.Array

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Self:
        """Takes the inputs of a training batch, whose lengths are `prompt_lengths`."""
        return cls(batch["input_ids"], batch["prompt_lengths"])

    @property
    def mask(self) -> jax.Array:
        """True at real tokens, of the shape of `input_ids`."""
        return jnp.arange(self.input_ids.shape[-1]) < self.lengths[..., None]

    def encode(self, model: T5, dropout_key: jax.Array | None = None) -> Encoded:
        """What the decoder reads."""
        states = model.encode(self.input_ids, self.mask, dropout_key=dropout_key)
        return Encoded(states, self.mask)


@flax.struct.dataclass
class Passages(Texts):
    """N passages for each row, read at once; those of length 0 are not there.

    Attributes:
      input_ids: int [B, N, L], padded on the right.
      lengths: int [B, N], tokens of each.
    """

    def encode(self, model: T5, dropout_key: jax.Array | None = None) -> Encoded:
        """Each passage by itself, then all of a row behind each other: S = N * L."""
        rows, mask = self.input_ids.shape[0], self.mask
        length = self.input_ids.shape[-1]
        apart = self.input_ids.reshape(-1, length), mask.reshape(-1, length)
        states = model.encode(*apart, dropout_key=dropout_key)
        return Encoded(states.reshape(rows, -1, states.shape[-1]), mask.reshape(rows, -1))


@flax.struct.dataclass
class PicturedTexts(Texts):
    """A text and a picture's features for each row; of a MultimodalT5.

    Attributes:
      features: float [B, P, D], P vectors of a picture.
    """

    features: jax.Array

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Self:
        """Takes the inputs of a training batch."""
        return cls(batch["input_ids"], batch["prompt_lengths"], batch["features"])

    def encode(self, model: MultimodalT5, dropout_key: jax.Array | None = None) -> Encoded:
        """The text with what it draws from the picture."""
        states = model.encode_pictured(
            self.input_ids, self.mask, self.features, dropout_key=dropout_key
        )
        return Encoded(states, self.mask)
