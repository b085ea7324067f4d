"""LLaVA-OneVision (Li et al. 2024): a LLaVA whose pictures are shown in tiles too.

SigLIP's tower and a projector give states of each tile; of these come the tokens
that take the place of a picture's placeholder in Qwen2's input.
Original: transformers models/llava_onevision/modeling_llava_onevision.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32, Int32, UInt8

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import normal_init, param
from mmqa_jax.models.llama.config import RELATIVES
from mmqa_jax.models.llava.config import LlavaConfig, PictureKind, base
from mmqa_jax.models.llava.connectors import Connector
from mmqa_jax.models.llava.families import ALL
from mmqa_jax.models.llava.network import FeaturedLlava, picture_features
from mmqa_jax.models.two_towers.config import SiglipVisionConfig
from mmqa_jax.models.two_towers.network import VisionTower

# LLaVA-OneVision's pictures as tiles, and its tokens as sums of states of these tiles.
#
# A picture that is alone in its prompt is shown whole and in tiles, that is on a canvas of the
# best of some resolutions (anyres). Of the canvas what lies on padding is left out, and where
# more is left than `most_tiles` have, it is resized (bilinear); each row then ends in a vector of
# its own, the newline. Several pictures in a prompt are shown whole, each with one newline. So
# every token is a sum of up to four states with weights that follow from the picture's size:
# these are computed on the host, and a tower has one program for each bucket of numbers of tiles,
# whatever pictures come. Original: transformers
# models/llava_onevision/modeling_llava_onevision.py (`pack_image_features`).


_MORE = 1.1  # times the side of `most_tiles` before a picture is resized, as in the original
_TAPS = 4  # of a bilinear sum
_GROWTH = 4 / 3  # of each bucket over the one before, at least

Resolution = tuple[int, int]  # height and width


@dataclasses.dataclass(frozen=True)
class TiledPicture:
    """A picture as the engine takes it."""

    # Uint8 [tiles, S, S, 3]: the whole, then its tiles, if it has any.
    pixels: UInt8[np.ndarray, "tiles S S 3"]
    size: tuple[int, int]  # height and width of the picture as it was

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(tiles, height, width, 3), of the picture as it was: what its tokens follow from."""
        return (len(self.pixels), *self.size, 3)

    @property
    def dtype(self) -> np.dtype:
        """The type of the pixels."""
        return self.pixels.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.pixels, dtype)


@flax.struct.dataclass
class TileBatch:
    """B pictures of one bucket of N tiles, with T tokens each; padding weighs nothing."""

    pixels: np.ndarray | jax.Array  # uint8 [B, N, S, S, 3]
    # Of each token, in [newline, states of tile 0, of tile 1, ...].
    rows: np.ndarray | jax.Array  # int32 [B, T, 4]
    weights: np.ndarray | jax.Array  # float32 [B, T, 4]


class TileSizes(NamedTuple):
    """What the tiles of pictures follow from."""

    image_size: int  # side of a tile in pixels
    side: int  # the same in states of the tower
    resolutions: tuple[Resolution, ...]  # of canvases, multiples of `image_size`
    most: int  # tiles whose states a picture may have before it is resized

    @property
    def states(self) -> int:
        """The number of a tile's states."""
        return self.side**2

    def grid(self, resolution: Resolution) -> tuple[int, int]:
        """Rows and columns of tiles of a canvas."""
        return resolution[0] // self.image_size, resolution[1] // self.image_size


def best_resolution(size: tuple[int, int], resolutions: Sequence[Resolution]) -> Resolution:
    """The canvas on which a picture of `size` (height, width) keeps the most pixels; of several the
    smallest, of these the first."""
    height, width = size

    def kept_and_spare(resolution: Resolution) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - resolution[0] * resolution[1]

    return max(resolutions, key=kept_and_spare)


def tokens_of(shape: Sequence[int], sizes: TileSizes) -> int:
    """Returns the tokens of a picture of `TiledPicture.shape`; 0: there is none of this shape."""
    if len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        return 0
    count, size = shape[0], (shape[1], shape[2])
    if count == 1:
        return sizes.states + 1
    rows, columns = sizes.grid(best_resolution(size, sizes.resolutions))
    if count != 1 + rows * columns:
        return 0
    place = _shown(size, sizes)
    return sizes.states + place.out_rows * (place.out_columns + 1)


def buckets(sizes: TileSizes) -> tuple[int, ...]:
    """Numbers of tiles for which there are programs."""
    counts = sorted({1 + math.prod(sizes.grid(resolution)) for resolution in sizes.resolutions})
    chosen = [counts[-1]]
    for count in reversed(counts):
        if count * _GROWTH <= chosen[-1]:
            chosen.append(count)
    return (1, *reversed(chosen))


def bucket_of(count: int, sizes: TileSizes) -> int:
    """The smallest bucket that holds a picture's tiles."""
    return next(bucket for bucket in buckets(sizes) if bucket >= count)


def most_tokens(bucket: int, sizes: TileSizes) -> int:
    """Returns an upper bound of the tokens of a bucket's pictures."""
    if bucket == 1:
        return sizes.states + 1
    grids = [sizes.grid(resolution) for resolution in sizes.resolutions]
    fitting = [(rows, columns) for rows, columns in grids if 1 + rows * columns <= bucket]
    most = int(_MORE**2 * sizes.most * sizes.states) + 1
    return sizes.states + max(
        min(rows * columns * sizes.states, most) + rows * sizes.side for rows, columns in fitting
    )


def lay_out(pictures: Sequence[TiledPicture], sizes: TileSizes, bucket: int) -> TileBatch:
    """Pictures, of which none has more than `bucket` tiles, as a batch."""
    length = most_tokens(bucket, sizes)
    side = sizes.image_size
    made = TileBatch(
        np.zeros((len(pictures), bucket, side, side, 3), np.uint8),
        np.zeros((len(pictures), length, _TAPS), np.int32),
        np.zeros((len(pictures), length, _TAPS), np.float32),
    )
    for number, picture in enumerate(pictures):
        rows, weights = mixture(picture.shape, sizes)
        made.pixels[number, : len(picture.pixels)] = picture.pixels
        made.rows[number, : len(rows)], made.weights[number, : len(rows)] = rows, weights
    return made


def mixture(
    shape: Sequence[int], sizes: TileSizes
) -> tuple[Int32[np.ndarray, "T 4"], Float32[np.ndarray, "T 4"]]:
    """Rows and weights of each token of a picture of `TiledPicture.shape`, see TileBatch."""
    whole = np.zeros((sizes.states, _TAPS), np.int32)
    whole[:, 0] = 1 + np.arange(sizes.states)
    once = np.array([1, 0, 0, 0], np.float32)
    if shape[0] == 1:
        rows = np.concatenate([whole, np.zeros((1, _TAPS), np.int32)])
        return rows, np.tile(once, (len(rows), 1))
    size = (shape[1], shape[2])
    columns_of_tiles = sizes.grid(best_resolution(size, sizes.resolutions))[1]
    place = _shown(size, sizes)
    down, of_down = _taps(place.top, place.rows, place.out_rows)  # [rows, 2]
    across, of_across = _taps(place.left, place.columns, place.out_columns)  # [columns, 2]
    row, column = down[:, None, :, None], across[None, :, None, :]
    tile = 1 + row // sizes.side * columns_of_tiles + column // sizes.side
    within = row % sizes.side * sizes.side + column % sizes.side
    without_newline = place.out_rows, place.out_columns
    cells = (place.out_rows, place.out_columns + 1, _TAPS)
    rows, weights = np.zeros(cells, np.int32), np.zeros(cells, np.float32)
    rows[:, :-1] = (1 + tile * sizes.states + within).reshape(*without_newline, _TAPS)
    weighed = of_down[:, None, :, None] * of_across[None, :, None, :]
    weights[:, :-1] = weighed.reshape(*without_newline, _TAPS)
    weights[:, -1] = once  # of the newline, row 0
    weights = np.concatenate([np.tile(once, (sizes.states, 1)), weights.reshape(-1, _TAPS)])
    return np.concatenate([whole, rows.reshape(-1, _TAPS)]), weights


class _Shown(NamedTuple):
    """Which states of a canvas show the picture, and how many are made of them."""

    top: int
    left: int
    rows: int
    columns: int
    out_rows: int
    out_columns: int


def _shown(size: tuple[int, int], sizes: TileSizes) -> _Shown:
    height, width = size
    grid = sizes.grid(best_resolution(size, sizes.resolutions))
    rows, columns = (count * sizes.side for count in grid)
    top = left = 0
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
    rows, columns = rows - 2 * top, columns - 2 * left
    ratio = math.sqrt(rows * columns / (sizes.most * sizes.states))
    if ratio <= _MORE:
        return _Shown(top, left, rows, columns, rows, columns)
    return _Shown(top, left, rows, columns, int(rows // ratio), int(columns // ratio))


def _taps(
    first: int, count: int, out: int
) -> tuple[Int32[np.ndarray, "out 2"], Float32[np.ndarray, "out 2"]]:
    """Finds for each of `out` places the two of `count` from `first` on between which it lies, and
    their weights; as torch's `interpolate`."""
    center = np.maximum((np.arange(out) + 0.5) * (count / max(out, 1)) - 0.5, 0)
    low = center.astype(np.int32)
    high = np.minimum(low + 1, count - 1)
    part = center - low
    return first + np.stack([low, high], 1), np.stack([1 - part, part], 1).astype(np.float32)


# The published tower: SigLIP so400m without its last layer and its head.
SIGLIP = ALL["onevision"].vision
RESOLUTIONS = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))


@dataclasses.dataclass(frozen=True)
class OnevisionConfig(LlavaConfig):
    """A LLaVA's with defaults of its own, and how pictures are shown.

    `vision`: a SigLIP; all of its states are read.
    """

    feature_layer: int = -1
    select: str = "full"
    resize: str = "squash"
    image_token: int = 151646
    family: str = "onevision"
    # Heights and widths of canvases, of which a picture takes the best.
    resolutions: tuple[tuple[int, int], ...] = RESOLUTIONS
    most_tiles: int = 9  # tiles whose states a picture may have (`anyres_max_9`: 9)
    video_token: int = 151647  # what stands for a video in prompts; none is read here

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.vision, SiglipVisionConfig) or self.select != "full":
            raise UserError(
                "model.vision and model.select: expected a SigLIP and 'full', all states of a "
                "square; use a LLaVA-OneVision as it was published."
            )
        side, least = self.vision.image_size, min(map(min, self.resolutions), default=0)
        if not least or any(length % side for pair in self.resolutions for length in pair):
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
    def picture_kind(self) -> PictureKind:
        """See PictureConfig."""
        return "anyres"

    @property
    def expected_pixels(self) -> str:
        """See PictureConfig."""
        return "a models.onevision.network.TiledPicture, uint8 [tiles, H, W, 3]"

    def picture_tokens(self, shape: Sequence[int]) -> int:
        """See `tokens_of`."""
        return tokens_of(shape, self.tiles)


class Onevision(FeaturedLlava):
    """Vision tower, projector, newline and decoder."""

    def __init__(self, config: OnevisionConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.llama.hidden
        self.newline = param(rngs, normal_init(width**-0.5), (width,), ("embed",))

    def encode_images(self, pictures: TileBatch) -> jax.Array:
        """Pictures -> [B, T, H]."""
        return tile_features(self.vision, self.projector, self.newline[...], pictures, self.config)


def tile_features(
    vision: VisionTower,
    projector: Connector,
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
BASE = base("LLaVA-OneVision", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf", OnevisionConfig)
