"""Pictures in the engine's prompts: their tokens under ids of their own.

A patch (what becomes one token) gets a negative id that encodes its picture's content and its
position. A prompt with pictures is then a sequence of ids like any other: it is split into chunks,
which prompts that begin with the same picture share. What a chunk's patches are is looked up in
`image_features`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.pictures import PictureConfig

_DIGEST = 16  # bytes of SHA-256 that number a picture
_MOST = 1 << 32  # patches of a picture


class PatchIds:
    """Numbers pictures by their content, and their patches by picture and position.

    Args:
      config: of the model.
    """

    def __init__(self, config: PictureConfig):
        self.token, self._config = config.image_token, config

    def expand(
        self, request_id: object, tokens: Sequence[int], images: Sequence[np.ndarray]
    ) -> tuple[list[int], dict[int, np.ndarray]]:
        """Replaces every placeholder by its picture's patches.

        Args:
          request_id: for messages.
          tokens: with one placeholder (`token`) per picture, in order.
          images: uint8 each, as the config expects them.

        Returns:
          Token ids, negative for patches, and the pictures by number.
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
            image = next(waiting)
            count = self._config.picture_tokens(image.shape)
            if not count or image.dtype != np.uint8:
                raise UserError(
                    f"request {request_id!r}: a picture is {image.dtype} {list(image.shape)}, "
                    f"expected {self._config.expected_pixels}."
                )
            digest = hashlib.sha256(repr(image.shape).encode())
            digest.update(np.ascontiguousarray(image))
            number = int.from_bytes(digest.digest()[:_DIGEST], "big")
            pictures[number] = image
            first = -1 - number * _MOST
            expanded.extend(range(first, first - count, -1))
        return expanded, pictures

    def shifts(self, tokens: Sequence[int], images: Sequence[np.ndarray]) -> np.ndarray | None:
        """Shifts positions of the tokens that `expand` gives (`PictureConfig.position_shifts`)."""
        return self._config.position_shifts(tokens, [np.shape(image) for image in images])

    def of(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where the patches among tokens are: (position, number of the picture, patch) of each."""
        return [
            (position, *divmod(-1 - token, _MOST))
            for position, token in enumerate(tokens)
            if token < 0
        ]


def marked(tokens: Sequence[int]) -> list[int]:
    """The ids as the device gets them: -1 for every patch."""
    return [max(token, -1) for token in tokens]
