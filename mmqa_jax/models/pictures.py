"""What a vision-language model's config says to whoever feeds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from mmqa_jax.models.llama.config import LlamaConfig


@runtime_checkable
class PictureConfig(Protocol):
    """The config of a model whose pictures become tokens of its language model.

    Attributes:
      llama: of the language model.
      image_token: the placeholder in a prompt, one for each picture.
      expected_pixels: what pictures are, for messages.
    """

    llama: LlamaConfig
    image_token: int

    @property
    def expected_pixels(self) -> str: ...

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """Tokens of a picture whose pixels have this shape; 0: it cannot be one."""

    def position_shifts(
        self, tokens: Sequence[int], shapes: Sequence[Sequence[int]]
    ) -> np.ndarray | None:
        """Returns how much each token's three positions differ from its column, int32 [L + 1, 3].

        Args:
          tokens: a prompt, one placeholder for each picture.
          shapes: of the pictures' pixels.

        Returns:
          Of every token of the prompt in which each placeholder is repeated once for each token of
          its picture; the last row is that of all that follow. None: positions are columns.
        """
