"""How a picture is cut into tiles: each tile, and the whole picture behind them, is a picture of
its own with a placeholder of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError

Size = tuple[int, int]  # width and height in pixels
_EVEN = 2  # the shorter side of a picture that Idefics3's processor has scaled


class UnitSizes(NamedTuple):
    """What of a tower's sizes a picture's size depends on; `qwen_vl.network.lay_out` reads them."""

    patch: int  # side of a patch in pixels
    merge: int  # side in patches of the square that becomes one token
    window_units: int = 1  # side of a window in units
    side: int = 0  # of a square picture in pixels; 0: pictures have any size

    @property
    def unit(self) -> int:
        """Side in pixels of what becomes one token."""
        return self.patch * self.merge


class Cut(NamedTuple):
    """How a picture of one size is cut."""

    steps: tuple[Size, ...]  # sizes to which the picture is resized one after the other
    canvas: Size  # the size that is cut; a picture that is smaller lies at its top left, on black
    tile: Size  # the size of a tile, which divides the canvas
    # The size of the whole picture behind the tiles; None: it does not follow them.
    whole: Size | None

    @property
    def rows(self) -> int:
        """Rows of tiles."""
        return self.canvas[1] // self.tile[1]

    @property
    def columns(self) -> int:
        """Columns of tiles."""
        return self.canvas[0] // self.tile[0]

    @property
    def sizes(self) -> list[Size]:
        """The sizes of all pieces: of the tiles row by row, then of the whole."""
        return [self.tile] * (self.rows * self.columns) + ([self.whole] if self.whole else [])


def _squares(steps: Sequence[Size], canvas: Size, side: int) -> Cut:
    """Squares of a canvas, and the whole as one more where the squares are several."""
    square = side, side
    return Cut(tuple(steps), canvas, square, None if canvas == square else square)


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Idefics3's tiles: a picture is scaled until its longer side has a length, then to a canvas
    of whole tiles; where these are several, the canvas as one more square follows them.

    Original: transformers models/idefics3/image_processing_pil_idefics3.py.
    """

    longest: int = 2048  # of the longer side in pixels
    resample: ClassVar[str] = "lanczos"
    whole_of_canvas: ClassVar[bool] = True
    _LARGEST: ClassVar[int] = 4096  # a canvas has no longer side

    def __post_init__(self):
        if not 1 <= self.longest <= self._LARGEST:
            raise UserError(
                f"model.split.longest is {self.longest}: expected 1 to {self._LARGEST} pixels; "
                "use a checkpoint as it was published."
            )

    @classmethod
    def usual(cls, side: int) -> RowTiles:
        """Returns the split that published models with squares of `side` pixels use."""
        return cls(longest=4 * side)

    def steps(self, width: int, height: int, side: int) -> list[Size]:
        """Widths and heights to which a picture is resized one after the other; the last is that
        of the canvas of squares with `side` pixels."""
        ratio = width / height
        if width >= height:
            scaled = self.longest, _to_even(int(self.longest / ratio))
        else:
            scaled = _to_even(int(self.longest * ratio)), self.longest
        wide, high = (max(length, 1) for length in scaled)
        ratio = wide / high
        if wide >= high:
            wide = math.ceil(wide / side) * side
            high = math.ceil(int(wide / ratio) / side) * side
        else:
            high = math.ceil(high / side) * side
            wide = math.ceil(int(high * ratio) / side) * side
        return [(max(scaled[0], 1), max(scaled[1], 1)), (max(wide, side), max(high, side))]

    def cut(self, width: int, height: int, units: UnitSizes) -> Cut:
        """The cut of a picture of so many pixels."""
        steps = self.steps(width, height, units.side)
        return _squares(steps, steps[-1], units.side)

    def most_tiles(self, side: int) -> int:
        """The most tiles of a canvas."""
        return math.ceil(self.longest / side) ** 2

    @staticmethod
    def written(placeholder: str, rows: int, columns: int) -> str:
        """The text of a picture of so many tiles: each stands behind a token of its row and column,
        the whole behind that of all.

        Original: transformers models/idefics3/processing_idefics3.py.
        """
        around, text = "<fake_token_around_image>", ""
        for row in range(rows if rows * columns > 1 else 0):
            tiles = (f"<row_{row + 1}_col_{column + 1}>" for column in range(columns))
            text += "".join(f"{around}{tile}{placeholder}" for tile in tiles) + "\n"
        text += "\n" if text else ""
        return f"{text}{around}<global-img>{placeholder}{around}"


def _to_even(length: int) -> int:
    return length + length % _EVEN


@dataclasses.dataclass(frozen=True)
class RatioTiles:
    """InternVL's tiles: a picture is scaled to the canvas whose ratio of sides is the nearest to
    its own; where that has several tiles, the picture as one more square follows them.

    Original: transformers models/got_ocr2/image_processing_pil_got_ocr2.py
    (`get_optimal_tiled_canvas`).
    """

    # least, most: tiles of a canvas.
    least: int = 1
    most: int = 12
    resample: ClassVar[str] = "bicubic"
    whole_of_canvas: ClassVar[bool] = False
    _MOST: ClassVar[int] = 64

    def __post_init__(self):
        if not 1 <= self.least <= self.most <= self._MOST:
            raise UserError(
                f"model.split.least and most are {self.least} and {self.most}: expected 1 to "
                f"{self._MOST} tiles, the first at most the second; use a checkpoint as it was "
                "published."
            )

    @classmethod
    def usual(cls, side: int) -> RatioTiles:
        """See RowTiles."""
        return cls()

    def cut(self, width: int, height: int, units: UnitSizes) -> Cut:
        """See RowTiles."""
        columns, rows = self.grid(width, height, units.side)
        canvas = columns * units.side, rows * units.side
        return _squares([canvas], canvas, units.side)

    def grid(self, width: int, height: int, side: int) -> tuple[int, int]:
        """Columns and rows of the canvas; of two that are equally near, the larger one for a
        picture that fills half of it."""
        grids = [
            (columns, rows)
            for columns in range(1, self.most + 1)
            for rows in range(1, self.most + 1)
            if self.least <= columns * rows <= self.most
        ]
        best, nearest = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            difference = abs(width / height - columns / rows)
            is_large = width * height > 0.5 * side * side * columns * rows
            if difference < nearest or (difference == nearest and is_large):
                best, nearest = (columns, rows), difference
        return best

    def most_tiles(self, side: int) -> int:
        """The most tiles of a canvas."""
        return self.most

    def written(self, placeholder: str, rows: int, columns: int) -> str:
        """The text of a picture of so many tiles: all, and the whole, stand between two tokens.

        Original: transformers models/internvl/processing_internvl.py.
        """
        tiles = rows * columns
        return f"<img>{placeholder * (tiles + (tiles > 1))}</img>"


@dataclasses.dataclass(frozen=True)
class UnitTiles(RatioTiles):
    """LFM2-VL's tiles: a picture of up to a number of tokens is scaled to whole units and stays in
    one piece; a larger one is cut as InternVL's, and follows its tiles in whole units, not as a
    square.

    Original: transformers models/lfm2_vl/image_processing_lfm2_vl.py (`resize_and_split`).
    """

    # least, most: tiles of a canvas; 1 and 1: no picture is cut.
    least: int = 2
    most: int = 10
    side: int = 512  # of a tile in pixels
    # least_tokens, most_tokens: of a picture in one piece.
    least_tokens: int = 64
    most_tokens: int = 256
    tolerance: float = 2.0  # a picture is cut if it has so many times the most tokens
    has_whole: bool = True  # whether the whole picture follows its tiles
    resample: ClassVar[str] = "bilinear"

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.least_tokens <= self.most_tokens or self.side < 1:
            raise UserError(
                f"model.split.least_tokens, most_tokens and side are {self.least_tokens}, "
                f"{self.most_tokens} and {self.side}: expected at least 1, the first at most the "
                "second; use a checkpoint as it was published."
            )

    def cut(self, width: int, height: int, units: UnitSizes) -> Cut:
        """See RowTiles."""
        unit, size = units.unit, self._in_units(width, height, units.unit)
        near = [max(round(length / unit) * unit, units.patch) for length in (width, height)]
        is_large = math.prod(near) > self.most_tokens * unit**2 * self.tolerance
        if not is_large or self.most == 1:
            return Cut((size,), size, size, None)
        columns, rows = self.grid(width, height, self.side)
        canvas = columns * self.side, rows * self.side
        has_whole = self.has_whole and columns * rows > 1
        return Cut((canvas,), canvas, (self.side, self.side), size if has_whole else None)

    def _in_units(self, width: int, height: int, unit: int) -> Size:
        """The size of a picture in one piece; a long and thin one has more than the most tokens."""
        least, most = (tokens * unit**2 for tokens in (self.least_tokens, self.most_tokens))
        size = [max(round(length / unit), 1) * unit for length in (width, height)]
        if math.prod(size) > most:
            shrunk = math.sqrt(height * width / most)
            size = [max(math.floor(side / shrunk / unit), 1) * unit for side in (width, height)]
        elif math.prod(size) < least:
            grown = math.sqrt(least / (height * width))
            size = [math.ceil(side * grown / unit) * unit for side in (width, height)]
        return size[0], size[1]

    def written(self, placeholder: str, rows: int, columns: int) -> str:
        """The text of a picture of so many tiles: each stands behind a token of its row and column,
        the whole behind a token of its own.

        Original: transformers models/lfm2_vl/processing_lfm2_vl.py.
        """
        text = placeholder
        if rows * columns > 1:
            places = [(row + 1, column + 1) for row in range(rows) for column in range(columns)]
            tiles = (f"<|img_row_{row}_col_{column}|>{placeholder}" for row, column in places)
            text = "".join(tiles) + (f"<|img_thumbnail|>{placeholder}" if self.has_whole else "")
        return f"<|image_start|>{text}<|image_end|>"


@dataclasses.dataclass(frozen=True)
class CanvasTiles:
    """Llama 4's tiles: a picture is scaled, but hardly up, until it touches the canvas of whole
    tiles on which it keeps the most pixels, and lies at its top left; where the tiles are several,
    the picture as one more square follows them.

    Original: transformers models/llama4/image_processing_llama4.py.
    """

    tiles: int = 16  # of a canvas, the most
    resample: ClassVar[str] = "bilinear"
    whole_of_canvas: ClassVar[bool] = False
    _MOST: ClassVar[int] = 64

    def __post_init__(self):
        if not 1 <= self.tiles <= self._MOST:
            raise UserError(
                f"model.split.tiles is {self.tiles}: expected 1 to {self._MOST} tiles; use a "
                "checkpoint as it was published."
            )

    @classmethod
    def usual(cls, side: int) -> CanvasTiles:
        """See RowTiles."""
        return cls()

    def cut(self, width: int, height: int, units: UnitSizes) -> Cut:
        """See RowTiles."""
        side = units.side
        grids = [
            (columns, rows)
            for columns in range(1, self.tiles + 1)
            for rows in range(1, self.tiles // columns + 1)
        ]
        # In float32, as there.
        scales = (np.float32(side) * np.array(grids, np.float32) / (width, height)).min(1)
        scales = np.float32(scales)
        larger = scales[scales >= 1]
        scale = larger.min() if larger.size else scales.max()
        fitting = [grid for grid, fits in zip(grids, scales == scale, strict=True) if fits]
        canvas = tuple(side * count for count in min(fitting, key=math.prod))
        wide, high = (
            min(max(length, side), most)
            for length, most in zip((width, height), canvas, strict=True)
        )
        if wide / width < high / height:
            size = wide, min(math.floor(height * (wide / width)), high)
        else:
            size = min(math.floor(width * (high / height)), wide), high
        return _squares([(max(size[0], 1), max(size[1], 1))], canvas, side)

    def most_tiles(self, side: int) -> int:
        """The most tiles of a canvas."""
        return self.tiles

    @staticmethod
    def written(placeholder: str, rows: int, columns: int) -> str:
        """The text of a picture of so many tiles: tokens stand between the tiles of a row, behind
        each row, and before the whole or the only tile.

        Original: transformers models/llama4/processing_llama4.py.
        """
        row = "<|tile_x_separator|>".join([placeholder] * columns) + "<|tile_y_separator|>"
        tiles = row * rows if rows * columns > 1 else ""
        return f"<|image_start|>{tiles}<|image|>{placeholder}<|image_end|>"


Split = RowTiles | RatioTiles | UnitTiles | CanvasTiles
