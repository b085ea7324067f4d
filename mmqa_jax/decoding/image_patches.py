"""Pictures in the engine's prompts: LLaVA's patches under token ids of their own.

A patch gets a negative id that encodes its picture's content and its position. A prompt with
pictures is then a sequence of ids like any other: it is split into chunks, which prompts that begin
with the same picture share. What a chunk's patches are is looked up in `image_features`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llava import LlavaConfig

_DIGEST = 16  # bytes of SHA-256 that number a picture


class PatchIds:
    """Numbers pictures by their content, and their patches by picture and position.

    Args:
      config: of the model.
    """

    def __init__(self, config: LlavaConfig):
        vision = config.vision
        self.token, self.patches = config.image_token, vision.patches
        self._shape = (vision.image_size, vision.image_size, 3)

    def expand(
        self, request_id: object, tokens: Sequence[int], images: Sequence[np.ndarray]
    ) -> tuple[list[int], dict[int, np.ndarray]]:
        """Replaces every placeholder by its picture's patches.

        Args:
          request_id: for messages.
          tokens: with one placeholder (`token`) per picture, in order.
          images: uint8 [S, S, 3] each, S the vision tower's.

        Returns:
          Token ids, negative for patches, and the pictures by number.

        Raises:
          UserError: placeholders and pictures differ in number, or a picture's shape is wrong.
        """
        found = sum(token == self.token for token in tokens)
        if found != len(images):
            raise UserError(
                f"request {request_id!r}: its prompt has {found} image placeholders (token "
                f"{self.token}) for {len(images)} pictures; put one into the prompt for each."
            )
        pictures, expanded, waiting = {}, [], iter(images)
        for token in tokens:
            if token != self.token:
                expanded.append(token)
                continue
            image = np.asarray(next(waiting))
            if image.shape != self._shape or image.dtype != np.uint8:
                raise UserError(
                    f"request {request_id!r}: a picture is {image.dtype} {list(image.shape)}, "
                    f"expected uint8 {list(self._shape)}; use data.llava_images.llava_pixels."
                )
            digest = hashlib.sha256(np.ascontiguousarray(image)).digest()[:_DIGEST]
            number = int.from_bytes(digest, "big")
            pictures[number] = image
            first = -1 - number * self.patches
            expanded.extend(range(first, first - self.patches, -1))
        return expanded, pictures

    def of(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where the patches among tokens are: (position, number of the picture, patch) of each."""
        return [
            (position, *divmod(-1 - token, self.patches))
            for position, token in enumerate(tokens)
            if token < 0
        ]

    def in_chunk(self, tokens: int) -> int:
        """The most pictures of which so many consecutive tokens can have patches."""
        return 1 + -(-(tokens - 1) // self.patches)


def marked(tokens: Sequence[int]) -> list[int]:
    """The ids as the device gets them: -1 for every patch."""
    return [max(token, -1) for token in tokens]
