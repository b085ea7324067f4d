"""The eleven basic color terms of English (Berlin and Kay 1969) as features of pictures.

A detector gives VLP class probabilities beside the box of a region. Patches have no detector; the
share of each color is the part of that information that needs no training.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Float, Int, UInt8

# Term -> sRGB values of that name; a pixel has the term of the nearest value.
ANCHORS: dict[str, tuple[str, ...]] = {
    "red": ("d22f27", "ff0000", "ea5a47"),
    "white": ("ffffff",),
    "blue": ("1e50a0", "0000ff", "61b2e4", "92d3f5", "000080"),
    "green": ("5c9e31", "186648", "00ff00", "b1cc33", "008000"),
    "yellow": ("f1b31c", "fcea2b", "ffff00"),
    "black": ("000000",),
    "orange": ("e27022", "ff8000", "f4aa41"),
    "brown": ("a57939", "6a462f", "781e32"),
    "gray": ("9b9b9a", "3f3f3f", "d0cfce"),
    "purple": ("8967aa", "b399c8", "800080"),
    "pink": ("ffa7c0", "e67a94", "ff69b4"),
}
COLOR_TERMS = tuple(ANCHORS)
_BITS = 5  # per channel of the lookup table


def color_terms(pixels: UInt8[np.ndarray, "*N 3"]) -> Int[np.ndarray, "*N"]:
    """Index in COLOR_TERMS of every pixel's color, int8."""
    cell = pixels.astype(np.int32) >> (8 - _BITS)
    return _table()[(cell[..., 0] << 2 * _BITS) + (cell[..., 1] << _BITS) + cell[..., 2]]


def color_shares(patches: UInt8[np.ndarray, "R N 3"]) -> Float[np.ndarray, "R C"]:
    """Square root of each term's share of the pixels of every patch, float32 [R, C = 11].

    The root keeps a small star on a large field visible.
    """
    terms = color_terms(patches)  # [R, N]
    count = len(COLOR_TERMS)
    flat = terms + count * np.arange(len(terms))[:, None]
    shares = np.bincount(flat.ravel(), minlength=count * len(terms)) / terms.shape[1]
    return np.sqrt(shares.reshape(len(terms), count)).astype(np.float32)


@functools.cache
def _table() -> Int[np.ndarray, " cells"]:
    """Term of every cell of the color cube, by the anchor nearest to the cell's center."""
    anchors = np.array(
        [[int(h[i : i + 2], 16) for i in (0, 2, 4)] for hexes in ANCHORS.values() for h in hexes],
        np.float32,
    )
    term = np.array([i for i, hexes in enumerate(ANCHORS.values()) for _ in hexes], np.int8)
    side = (np.arange(1 << _BITS) << (8 - _BITS)) + (1 << (7 - _BITS))
    cells = np.stack(np.meshgrid(side, side, side, indexing="ij"), axis=-1).reshape(-1, 3)
    distance = np.square(cells[:, None].astype(np.float32) - anchors).sum(axis=-1)
    return term[distance.argmin(axis=1)]
