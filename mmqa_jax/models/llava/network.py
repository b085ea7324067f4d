"""LLaVA (Liu et al. 2023): a decoder that reads a vision tower's patches as if they were tokens.

LLaVA-1.5's are CLIP-L/336's hidden states after its second-to-last layer, without the class token:
576 vectors per picture. A projector (linear, GELU, linear) maps them to the decoder's width, where
they replace the embeddings of the picture's placeholder; the rest is the decoder alone. The tower
is a CLIP or a SigLIP, the decoder a LLaMA or one of its relatives (`llama/families.py`).
Originals: haotian-liu/LLaVA llava/model/llava_arch.py, multimodal_encoder/clip_encoder.py and
multimodal_projector/builder.py; transformers models/llava/modeling_llava.py.

Shapes are static: `expand_images` repeats every placeholder once per patch on the host and pads
the rows to a bucket; `Llava.embed` then substitutes the patches. Generation runs the LLaMA on
those embeddings (`decoding.kv_cache.forward`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.connectors import KINDS, Connector
from mmqa_jax.models.llava.gemma4_patches import Gemma4Patches, Gemma4PatchesConfig
from mmqa_jax.models.llava.gemma4_vision import Gemma4Vision, Gemma4VisionConfig
from mmqa_jax.models.llava.intern_vit import InternVision, InternVisionConfig
from mmqa_jax.models.llava.llama4_vision import Llama4Vision, Llama4VisionConfig
from mmqa_jax.models.llava.pixtral import PixtralVision, PixtralVisionConfig
from mmqa_jax.models.qwen_vl.network import PatchBatch
from mmqa_jax.models.two_towers import network
from mmqa_jax.models.two_towers.config import SiglipVisionConfig, VisionConfig


class UnitSiglip(network.VisionTower):
    """SigLIP's blocks on the patches of pictures of any size, unit by unit (`PatchBatch`)."""

    def normalize(self, pictures: PatchBatch) -> PatchBatch:
        """Patches as uint8 0..255 -> what the tower takes."""
        pixels = pictures.patches.reshape(*pictures.patches.shape[:2], -1, 3)
        pixels = network.normalize_pixels(pixels, self.config.pixel_mean, self.config.pixel_std)
        return pictures.replace(patches=pixels.reshape(pictures.patches.shape))

    def embed(self, pictures: PatchBatch) -> tuple[jax.Array, jax.Array]:
        """Normalized patches -> [B, N, width], and which are there, bool [B, N]."""
        c, places = self.config, jnp.asarray(pictures.places)
        grid = self.positions[...].reshape(c.side, c.side, c.width)
        positions = network.positions_at(grid, jnp.maximum(places, 0), jnp.asarray(pictures.grid))
        x = self.patch(jnp.asarray(pictures.patches).astype(c.dtype))
        return x + positions.astype(x.dtype), places[..., 0] >= 0


class LlavaVision(network.VisionTower):
    """CLIP's vision tower without its projection.

    The layers after `feature_layer` and the last norm are not used. They are kept, as in both
    published layouts, so that conversion loses no tensor of a checkpoint.
    """

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        del self.proj


_TOWERS = {
    VisionConfig: LlavaVision,
    SiglipVisionConfig: network.VisionTower,
    InternVisionConfig: InternVision,
    PixtralVisionConfig: PixtralVision,
    Gemma4VisionConfig: Gemma4Vision,
    Gemma4PatchesConfig: Gemma4Patches,
    Llama4VisionConfig: Llama4Vision,
}


def _tower_of(config: Any) -> type[nnx.Module]:
    if isinstance(config, SiglipVisionConfig) and config.flexible:
        return UnitSiglip
    return _TOWERS[type(config)]


def picture_features(
    vision: LlavaVision | network.VisionTower,
    projector: Connector,
    pixels: jax.Array,
    config: LlavaConfig,
) -> jax.Array:
    """[N, S, S, 3] normalized pixels (the tower's `normalize`) -> [N, features, H]."""
    states = vision.states_of(pixels, config.feature_layer)
    if config.normed:
        states = vision.ln_post(states)
    if config.select != "full":
        states = states[:, 1:] if config.select == "default" else states[:, :-1]
    features = projector(states.astype(config.llama.dtype))
    return features if config.feature_scale == 1 else features * config.feature_scale


def among_words(tokens: jax.Array, features: jax.Array, placeholder: jax.Array) -> jax.Array:
    """Puts each row's pictures' tokens in the places of its placeholders, in their order.

    Args:
      tokens: [B, L, H] of words.
      features: [B * K, features, H], K pictures of each row.
      placeholder: bool [B, L].

    Returns:
      [B, L, H]; a placeholder without a picture is NaN.
    """
    of_row = features.reshape(len(tokens), -1, features.shape[-1]).astype(tokens.dtype)
    place = jnp.maximum(jnp.cumsum(placeholder, axis=1) - 1, 0)[..., None]  # [B, L, 1]
    places = jnp.take_along_axis(of_row, place, axis=1, mode="fill", fill_value=jnp.nan)
    return jnp.where(placeholder[..., None], places, tokens)


class Llava(nnx.Module):
    """Vision tower, connector and decoder."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        self.vision = _tower_of(config.vision)(config.vision, rngs=rngs)
        self.projector = KINDS[config.connector](config, rngs=rngs)
        self.llama = Llama(config.llama, rngs=rngs)
        self.config = config

    def tower(self) -> nnx.Dict:
        """What is computed of a picture: the tower up to the layer that is read, the projector, and
        the newline of a model that has one. The model keeps its own."""
        names = ("vision", "projector", "newline")
        parts = {name: getattr(self, name) for name in names if hasattr(self, name)}
        parts = nnx.merge(*nnx.split(nnx.Dict(**parts)))
        if not self.config.vision.layers:
            return parts
        graphdef, layers = nnx.split(parts.vision.layers)
        count = network.blocks_before(self.config.feature_layer, self.config.vision.layers)
        # Cut once, not in every call; in one program, not in one for each shape.
        cut = jax.jit(lambda layers: jax.tree.map(lambda x: x[:count], layers))
        parts.vision.layers = nnx.merge(graphdef, cut(layers))
        if hasattr(parts.vision, "ln_post") and not self.config.normed:
            del parts.vision.ln_post
        if hasattr(parts.vision, "head"):
            del parts.vision.head
        return parts

    def encode_images(self, pixels: jax.Array) -> jax.Array:
        """See `picture_features`."""
        return picture_features(self.vision, self.projector, pixels, self.config)

    def embed(self, input_ids: jax.Array, features: jax.Array | None = None) -> jax.Array:
        """Token embeddings, with every placeholder replaced by its picture's patches.

        Args:
          input_ids: int [B, L] from `expand_images`.
          features: [N, features, H] from `encode_images`, pictures in the order of their
            placeholders, row after row; extra pictures at the end (padding to a fixed N) are
            ignored. None if no row has a picture.

        Returns:
          [B, L, H] in the LLaMA's compute dtype. A placeholder without a picture is NaN, which
          cannot go unnoticed; `expand_images` rejects it on the host.
        """
        placeholder = input_ids == self.config.image_token  # [B, L]
        words = jnp.where(placeholder, 0, input_ids)
        tokens = self.llama.words_of(words)
        if features is None:
            patches = jnp.full_like(tokens, jnp.nan)
        else:
            # Index of the patch that each placeholder takes, counted row after row.
            index = jnp.cumsum(placeholder.reshape(-1)).reshape(placeholder.shape) - 1
            flat = features.reshape(-1, features.shape[-1]).astype(tokens.dtype)  # [N * patches, H]
            patches = flat.at[index].get(mode="fill", fill_value=jnp.nan)  # [B, L, H]
        merged = jnp.where(placeholder[..., None], patches, tokens)
        return self.llama.with_side(merged, words)

    def seen_whole(
        self, input_ids: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """`pictures` of `Llama.encode` of a text that is all prompt, bool [B, L]."""
        if self.config.llama.picture_sight != "prompt":
            return input_ids == self.config.image_token
        if attention_mask is None:
            return jnp.ones(input_ids.shape, bool)
        return attention_mask.astype(bool)

    def __call__(
        self,
        input_ids: jax.Array,
        pixels: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token at every position, [B, L, V] float32.

        Args:
          input_ids: int [B, L] from `expand_images`.
          pixels: [N, S, S, 3], see `embed` and `encode_images`.
          attention_mask, positions, dropout_key: see `Llama.encode`.
        """
        features = None if pixels is None else self.encode_images(pixels)
        hidden = self.llama.encode(
            self.embed(input_ids, features),
            attention_mask,
            positions,
            pictures=self.seen_whole(input_ids, attention_mask),
            dropout_key=dropout_key,
        )
        return self.llama.logits(hidden)


class FeaturedLlava(Llava):
    """One whose pictures have several sizes: `embed` and `__call__` take [1, all tokens of
    pictures, H] of `encode_images`, without padding."""

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


class Prompts(NamedTuple):
    """A padded batch of prompts."""

    input_ids: np.ndarray  # int32 [B, L], one placeholder per patch
    mask: np.ndarray  # bool [B, L], true at real tokens

    @property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row, int32 [B]: with padding on the right, for `last_token`."""
        return self.mask.sum(axis=1, dtype=np.int32)


def expand_images(
    rows: Sequence[Sequence[int]],
    pictures: Sequence[int],
    config: LlavaConfig,
    *,
    length: int | None = None,
    pad_token: int = 0,
    pad_left: bool = False,
) -> Prompts:
    """Repeats every placeholder once per patch, and pads the rows to one length.

    The sequence then has its final length before the model runs, as in transformers'
    LlavaProcessor; the original inserts the patches inside the model (llava_arch.py
    `prepare_inputs_labels_for_multimodal`), which is equivalent.

    Args:
      rows: token ids of each prompt, with one `config.image_token` per picture.
      pictures: number of pictures of each prompt.
      config: of the model.
      length: L, a bucket; None is the longest row's.
      pad_token: any id but the placeholder's.
      pad_left: pad on the left, as transformers does for generation; `decoding.kv_cache` needs
        padding on the right.
    """
    assert pad_token != config.image_token, f"pad_token is {pad_token}, the placeholder's id"
    patches = config.features
    expanded = []
    for number, (row, picture_count) in enumerate(zip(rows, pictures, strict=True)):
        ids = np.asarray(row, np.int32)
        placeholder = ids == config.image_token
        if placeholder.sum() != picture_count:
            raise UserError(
                f"prompt {number}: {placeholder.sum()} image placeholders (token "
                f"{config.image_token}) for {picture_count} pictures; put exactly one into the "
                "prompt for each picture."
            )
        expanded.append(np.repeat(ids, np.where(placeholder, patches, 1)))
    length = max(map(len, expanded)) if length is None else length
    input_ids = np.full((len(expanded), length), pad_token, np.int32)
    mask = np.zeros(input_ids.shape, bool)
    for number, row in enumerate(expanded):
        if len(row) > length:
            raise UserError(
                f"prompt {number}: {len(row)} tokens with its pictures ({patches} each), the "
                f"batch holds {length}; shorten the prompt or use longer batches."
            )
        positions = slice(length - len(row), None) if pad_left else slice(len(row))
        input_ids[number, positions] = row
        mask[number, positions] = True
    return Prompts(input_ids, mask)
