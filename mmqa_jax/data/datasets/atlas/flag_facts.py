"""What can be said for sure about a flag from its pixels: stripes, corners, halves, colors."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from mmqa_jax.data.datasets.atlas.pictures import (
    COLORS,
    PALETTE,
    PRESENT,
    SHADE_COLOR,
    Picture,
    color_map,
    color_shares,
    decode,
    shade_map,
)


@dataclasses.dataclass(frozen=True, slots=True)
class FlagFacts:
    """Color facts of one flag; None or empty where the pixels are ambiguous.

    Attributes:
      shares: share of every color (see `color_shares`), largest first.
      present: colors that cover at least PRESENT, in the order of `shares`.
      clear: no color lies between absent and PRESENT.
      one_shade: no color word stands for two different fills.
      main: the color that covers clearly most.
      direction: `horizontally` or `vertically` where the flag has stripes.
      stripes: their colors, top to bottom or left to right.
      whole: the stripes run over the whole flag (no triangle, canton or band beside them).
      corners: color of each uniform corner, by name (`upper left`).
      center: color of the uniform middle.
      halves: color -> `left`, `right`, `upper` or `lower`: the half that holds most of it,
        keyed by (color, axis).
    """

    shares: dict[str, float]
    present: tuple[str, ...]
    clear: bool
    one_shade: bool
    main: str | None
    direction: str | None
    stripes: tuple[str, ...]
    whole: bool
    corners: dict[str, str]
    center: str | None
    halves: dict[tuple[str, str], str]

    def absent(self, color: str) -> bool:
        """Whether not one pixel of the flag has this color."""
        return color not in self.shares


def flag_facts(picture: Picture) -> FlagFacts:
    """The facts of a flag picture of the corpus."""
    return pixel_facts(decode(picture.png), picture.fills)


def pixel_facts(pixels: np.ndarray, fills: frozenset[str] | None = None) -> FlagFacts:
    """The facts in a flag's pixels, uint8 [H, W, 3]; `fills` limits the colors looked for."""
    colors = color_map(pixels, fills)
    shares = color_shares(colors)
    present = tuple(color for color, share in shares.items() if share >= PRESENT)
    by_share = [*sorted(shares.values(), reverse=True), 0.0]
    main = max(shares, key=lambda c: shares[c]) if by_share[0] - by_share[1] >= 0.08 else None
    across, across_whole = _bands(colors)
    down, down_whole = _bands(colors.T)
    direction, stripes, whole = None, (), False
    if bool(across) != bool(down):
        direction = "horizontally" if across else "vertically"
        stripes, whole = (across, across_whole) if across else (down, down_whole)
    return FlagFacts(
        shares=shares,
        present=present,
        clear=all(share >= PRESENT for share in shares.values()),
        one_shade=_one_shade(pixels, present),
        main=main,
        direction=direction,
        stripes=stripes,
        whole=whole,
        corners=_corners(colors),
        center=_patch(colors, 0.46, 0.54, 0.46, 0.54),
        halves=_halves(colors),
    )


def _one_shade(pixels: np.ndarray, present: tuple[str, ...]) -> bool:
    shades = shade_map(pixels)
    counts = np.bincount(shades[shades >= 0], minlength=len(SHADE_COLOR)) / shades.size
    return all(
        (counts[COLORS.index(c) == SHADE_COLOR] >= PRESENT / 2).sum() <= 1
        for c in present
        if len(PALETTE[c]) > 1
    )


def _bands(colors: np.ndarray) -> tuple[tuple[str, ...], bool]:
    """Stripes as rows of one color in the far 40 % of the map [H, W]; () where they are ambiguous.

    The near side may hold a triangle or a canton; then the stripes are not `whole`. A bar
    across all of them (a Nordic cross, a band at the hoist) makes them no stripes.
    """
    height, width = colors.shape
    if any((column == column[0]).mean() > 0.98 for column in colors.T if column[0] >= 0):
        return (), False
    far = _sequence(colors[:, int(0.6 * width) : int(0.98 * width)], max(4, height // 25))
    if far is None or len(far) < 2:
        return (), False
    near = _sequence(colors[:, int(0.005 * width) : max(int(0.03 * width), 3)], 2)
    return tuple(COLORS[c] for c in far), near == far


def _sequence(region: np.ndarray, least: int) -> list[int] | None:
    """Colors of the uniform row bands of a region, top down; None if rows are mixed."""
    rows: list[int] = []
    for row in region:
        clean = row[row >= 0]
        if len(clean) < len(row) / 2:
            continue  # the blended row at an edge
        rows.append(int(np.bincount(clean).argmax()))
        if (clean == rows[-1]).sum() < 0.97 * len(clean):
            return None
    runs = [(color, len(list(run))) for color, run in itertools.groupby(rows)]
    if not runs or any(thickness < least for _, thickness in runs):
        return None
    return [color for color, _ in runs]


def _patch(colors: np.ndarray, top: float, bottom: float, left: float, right: float) -> str | None:
    height, width = colors.shape
    patch = colors[int(top * height) : int(bottom * height), int(left * width) : int(right * width)]
    color = patch[0, 0]
    return COLORS[color] if color >= 0 and (patch == color).mean() >= 0.99 else None


def _corners(colors: np.ndarray) -> dict[str, str]:
    spans = {"upper": (0.0, 0.12), "lower": (0.88, 1.0), "left": (0.0, 0.1), "right": (0.9, 1.0)}
    found = {
        f"{row} {side}": _patch(colors, *spans[row], *spans[side])
        for row in ("upper", "lower")
        for side in ("left", "right")
    }
    return {corner: color for corner, color in found.items() if color}


def _halves(colors: np.ndarray) -> dict[tuple[str, str], str]:
    height, width = colors.shape
    parts = {
        "left": colors[:, : width // 2],
        "right": colors[:, -(width // 2) :],
        "upper": colors[: height // 2],
        "lower": colors[-(height // 2) :],
    }
    found = {}
    for index in np.unique(colors[colors >= 0]):
        share = {name: float((part == index).mean()) for name, part in parts.items()}
        for axis, pair in {"side": ("left", "right"), "level": ("upper", "lower")}.items():
            big, small = sorted(pair, key=share.__getitem__, reverse=True)
            if share[big] >= 0.06 and share[big] >= 3 * share[small]:
                found[COLORS[index], axis] = big
    return found
