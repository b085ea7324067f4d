"""How batches of the task `vision_language` hold pictures: a layout for each kind of models.

A row of a batch has so many slots for pictures, each of so many units, by which batches have few
shapes. What is a unit the layout says.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.onevision import network as onevision
from mmqa_jax.models.qwen_vl import network as qwen_vl
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.picture_format import Shown

Shape = tuple[int, ...]
Arrays = dict[str, np.ndarray]


class Expanded(NamedTuple):
    """Rows of tokens with one placeholder for each token of their pictures."""

    input_ids: np.ndarray  # int32 [B, L]
    rows: np.ndarray  # int32 [B, L], which of its row's features a token takes, -1: none
    positions: np.ndarray | None = None  # int32 [B, L, 3], of a Qwen-VL


class Layout(abc.ABC):
    """A kind of models that see.

    Attributes:
      config: of the model.
    """

    def __init__(self, config: Any):
        self.config = config

    @abc.abstractmethod
    def shape(self, picture_format: Any, picture: Picture) -> Shape:
        """What a picture's tokens follow from, by its header; raises PictureError."""

    def among(self, shape: Shape) -> Shape:
        """That of a picture which is not alone in its prompt."""
        return shape

    @abc.abstractmethod
    def units(self, shape: Shape) -> int:
        """Units of the smallest slot that holds a picture."""

    @property
    @abc.abstractmethod
    def largest(self) -> int:
        """Units of the largest slot."""

    def room(self, units: int) -> int:
        """Tokens that a slot's picture has at most."""
        return units

    @abc.abstractmethod
    def blank(self) -> Any:
        """What fills a slot without a picture."""

    @abc.abstractmethod
    def lay_out(self, pictures: Sequence[Any], units: int) -> Arrays:
        """Arrays [N, ...] of slots, by the names that VisionLanguageObjective reads."""

    def expand(
        self,
        rows: Sequence[Sequence[int]],
        shapes: Sequence[Sequence[Shape]],
        units: int,
        length: int,
    ) -> Expanded:
        """Rows of tokens, with one placeholder for each picture of a shape, to `length` columns."""
        made = Expanded(*(np.full((len(rows), length), fill, np.int32) for fill in (0, -1)))
        for number, (row, of_row) in enumerate(zip(rows, shapes, strict=True)):
            ids, column = np.asarray(row, np.int32), 0
            firsts = iter(range(0, len(of_row) * self.room(units), self.room(units)))
            pictured = iter(of_row)
            for token in ids:
                count = 1
                if token == self.config.image_token:
                    count, first = self.config.picture_tokens(next(pictured)), next(firsts)
                    taken = np.arange(first, first + count)
                    made.rows[number, column : column + count] = taken
                made.input_ids[number, column : column + count] = token
                column += count
        return made


class QwenLayout(Layout):
    """A Qwen-VL's pictures of any size: a unit is a token, those of windows' padding among them."""

    config: qwen_vl.QwenVLConfig

    def shape(self, picture_format, picture):
        return picture_format.shape(picture)

    def units(self, shape):
        vision = self.config.vision
        return qwen_vl.bucket_of(qwen_vl.grid_of(shape, vision), vision)

    @property
    def largest(self) -> int:
        vision, side = self.config.vision, math.isqrt(self.config.vision.most_units)
        return qwen_vl.bucket_of(qwen_vl.Grid(side, side), vision)

    def blank(self):
        return np.zeros((self.config.vision.unit, self.config.vision.unit, 3), np.uint8)

    def lay_out(self, pictures, units):
        return vars(qwen_vl.lay_out(pictures, self.config.vision, units))

    def expand(self, rows, shapes, units, length):
        # A row has its own features, each picture `units` of them.
        firsts: Iterator[int] = (
            number * units for of_row in shapes for number in range(len(of_row))
        )
        made = qwen_vl.expand_pictures(rows, shapes, self.config, first_rows=firsts, length=length)
        return Expanded(made.input_ids, made.rows, made.positions)


class SquareLayout(Layout):
    """A LLaVA's squares, which have one size; a picture is one unit."""

    config: LlavaConfig

    def shape(self, picture_format, picture):
        side = self.config.vision.image_size
        return side, side, 3

    def units(self, shape):
        return 1

    @property
    def largest(self) -> int:
        return 1

    def room(self, units):
        return self.config.features * units

    def blank(self):
        side = self.config.vision.image_size
        return np.zeros((side, side, 3), np.uint8)

    def lay_out(self, pictures, units):
        return {"pixels": np.stack(pictures)}


class TilesLayout(Layout):
    """A LLaVA-OneVision's pictures, in tiles where one is alone; a tile is a unit."""

    config: onevision.OnevisionConfig

    def shape(self, picture_format, picture):
        return picture_format.shape(Shown(picture, alone=True))

    def among(self, shape):
        return 1, *shape[1:]

    def units(self, shape):
        return onevision.bucket_of(shape[0], self.config.tiles)

    @property
    def largest(self) -> int:
        return onevision.buckets(self.config.tiles)[-1]

    def room(self, units):
        return onevision.most_tokens(units, self.config.tiles) if units else 0

    def blank(self):
        side = self.config.vision.image_size
        return onevision.TiledPicture(np.zeros((1, side, side, 3), np.uint8), (side, side))

    def lay_out(self, pictures, units):
        made = onevision.lay_out(pictures, self.config.tiles, units)
        return {"pixels": made.pixels, "tile_rows": made.rows, "tile_weights": made.weights}


def layout_of(config: Any) -> Layout:
    """The layout of a model's pictures; UserError for models that are not trained here."""
    if isinstance(config, qwen_vl.QwenVLConfig):
        return QwenLayout(config)
    kinds: Mapping[str, type[Layout]] = {"square": SquareLayout, "anyres": TilesLayout}
    causal = config.llama.picture_sight == "causal"
    if config.picture_kind not in kinds or not causal:
        raise UserError(
            f"config key init: a {config.family} shows pictures by {config.picture_kind!r}, which "
            "is not trained here; use a Qwen-VL, a LLaVA-1.5 or a LLaVA-OneVision."
        )
    return kinds[config.picture_kind](config)


def shapes_of_slots(layout: Layout, count: int, units: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of `lay_out` of so many slots."""
    made = layout.lay_out([layout.blank()], units)
    return {
        name: jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype)
        for name, array in made.items()
    }
