"""Pictures in the engine's prompts: LLaVA's patches under token ids of their own.

A patch gets a negative id that encodes its picture and position. A prompt with pictures is then a
sequence of ids like any other: it is split into chunks, which prompts that begin with the same
picture share.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.clip import normalize_pixels
from mmqa_jax.models.llava import Llava

_CACHED = 64  # pictures whose features stay in host memory


class PatchEncoder:
    """Numbers pictures by content, and encodes each once.

    Args:
      model: its vision tower and projector are used; its LLaMA is the engine's.
      put: moves inputs to the device (or mesh) of the model.
    """

    def __init__(self, model: Llava, put: Callable[[Any], Any]):
        self.token = model.config.image_token
        vision = model.config.vision
        self._patches, self._shape = vision.patches, (vision.image_size, vision.image_size, 3)
        self._put = put
        # Without the LLaMA, whose weights are the engine's.
        parts = nnx.Dict(vision=model.vision, projector=model.projector)
        graphdef, self._state = nnx.split(parts)
        layer, dtype = model.config.feature_layer, model.config.llama.dtype

        def encode(state, pixels):
            parts = nnx.merge(graphdef, state)
            states = parts.vision.patch_features(normalize_pixels(pixels[None]), layer)
            return parts.projector(states.astype(dtype))[0].astype("float32")

        self._encode = jax.jit(encode)
        self._numbers: dict[bytes, int] = {}  # content -> number
        self._features: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

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
            content = hashlib.sha256(image.tobytes()).digest()
            number = self._numbers.setdefault(content, len(self._numbers))
            pictures[number] = image
            first = -1 - number * self._patches
            expanded.extend(range(first, first - self._patches, -1))
        return expanded, pictures

    def features(self, tokens: Sequence[int], pictures: Mapping[int, np.ndarray]) -> np.ndarray:
        """The embeddings of a chunk's patches, float32 [L, H]; zeros at text tokens."""
        rows = None
        for position, token in enumerate(tokens):
            if token >= 0:
                continue
            number, patch = divmod(-1 - token, self._patches)
            of_picture = self._features_of(number, pictures)
            if rows is None:
                rows = np.zeros((len(tokens), of_picture.shape[1]), np.float32)
            rows[position] = of_picture[patch]
        assert rows is not None, "a chunk without patches"
        return rows

    def _features_of(self, number: int, pictures: Mapping[int, np.ndarray]) -> np.ndarray:
        if number not in self._features:
            encoded = self._encode(self._state, self._put(pictures[number]))
            self._features[number] = jax.device_get(encoded)
            if len(self._features) > _CACHED:
                self._features.popitem(last=False)
        self._features.move_to_end(number)
        return self._features[number]
