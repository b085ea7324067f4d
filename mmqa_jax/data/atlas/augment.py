"""Augmentation at training time: other names, other colors; question, sources, answer together.

A model that sees each of 170 countries a thousand times memorizes them; one that sees every
question under new names and colors must read its sources and look at its pictures. Both
functions are pure and take their randomness from the generator that they are given.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

from mmqa_jax.data.atlas.factbook import place_names
from mmqa_jax.data.atlas.pictures import COLORS, SHADE_COLOR, SHADES, shade_map
from mmqa_jax.data.batches.packing import RawExample

# The colors that are exchanged; gray, maroon, brown, purple and pink are too rare on flags.
PERMUTED = ("red", "white", "blue", "green", "yellow", "black", "orange")
# The shades that flags are drawn in (pictures.PALETTE holds emoji's too).
_FLAG_SHADES = {
    "red": ("d22f27",),
    "white": ("ffffff",),
    "blue": ("1e50a0", "61b2e4"),
    "green": ("5c9e31", "186648"),
    "yellow": ("f1b31c", "fcea2b"),
    "black": ("000000",),
    "orange": ("e27022",),
}
_COLOR_WORD = re.compile(rf"\b({'|'.join(PERMUTED)})\b", re.IGNORECASE)


class AtlasAugment:
    """New names and new colors for question, sources and answer together.

    Args:
      entities: probability that an example's country and answer names are replaced, and those
        of the countries that its negatives are about.
      palette: probability that the colors of an example's flags are exchanged, where its
        answer stays true (`palette_safe`).
    """

    def __init__(self, entities: float = 0.0, palette: float = 0.0):
        self._entities, self._palette = entities, palette
        self._names = place_names() if entities else ()

    def __call__(self, raw: RawExample, rng: np.random.Generator) -> RawExample:
        """The example under new names and colors, or as it is."""
        rename, recolor = rng.random(2) < (self._entities, self._palette)
        extra = raw.record.extra
        if rename and extra.get("entities"):
            raw = self._renamed(raw, extra["entities"], rng)
        if recolor and extra.get("palette_safe"):
            raw = self._recolored(raw, rng)
        return raw

    def _renamed(
        self, raw: RawExample, entities: list[str], rng: np.random.Generator
    ) -> RawExample:
        # Negatives get new names too; otherwise a new name would give the gold sources away.
        entities = [*entities, *(s.title for s in raw.sources if s.title and s.title in s.text)]
        texts = [text for source in raw.sources for text in (source.text, source.title)]
        question, texts, answer, keywords = replace_entities(
            raw.question, texts, raw.answer, raw.keywords, entities, self._names, rng
        )
        sources = tuple(
            dataclasses.replace(source, text=texts[2 * i], title=texts[2 * i + 1])
            for i, source in enumerate(raw.sources)
        )
        return dataclasses.replace(
            raw, question=question, sources=sources, answer=answer, keywords=keywords
        )

    def _recolored(self, raw: RawExample, rng: np.random.Generator) -> RawExample:
        pictures = [source.pixels for source in raw.sources if source.pixels is not None]
        if not pictures:
            return raw
        pixels, (question, answer, keywords) = permute_palette(
            np.stack(pictures), [raw.question, raw.answer, raw.keywords], rng
        )
        recolored = iter(pixels)
        sources = tuple(
            source if source.pixels is None else dataclasses.replace(source, pixels=next(recolored))
            for source in raw.sources
        )
        return dataclasses.replace(
            raw, question=question, sources=sources, answer=answer, keywords=keywords
        )


def replace_entities(
    question: str,
    sources: Sequence[str],
    answer: str,
    keywords: str,
    entities: Sequence[str],
    names: Sequence[str],
    rng: np.random.Generator,
) -> tuple[str, list[str], str, str]:
    """Gives every entity a new random name, the same in all texts.

    Args:
      question, answer, keywords: texts of the datum.
      sources: the texts of its sources (gold, and negatives if they are used), with titles.
      entities: the datum's `entities`; an entry `the Bahamas` also stands for `Bahamas`.
      names: names to draw from (`place_names()`).
      rng: source of randomness.

    Returns:
      (question, sources, answer, keywords) with whole words replaced; an article that belongs
      to a country's name goes with it. Names that already occur in a text are not drawn.
    """
    texts = [question, answer, keywords, *sources]
    joined = "\n".join(texts).lower()
    table: dict[str, str] = {}
    for entity in entities:
        bare = re.sub(r"^the ", "", entity)
        for _ in range(20):
            name = names[int(rng.integers(len(names)))]
            if name.lower() not in joined and name not in table.values():
                break
        table[bare] = name
    if not table:
        return question, list(sources), answer, keywords
    articled = {re.sub(r"^the ", "", e) for e in entities if e.startswith("the ")}
    # Longest first, so that "Guatemala City" is not read as the country in it.
    parts = [
        (r"(?:[Tt]he )?" if bare in articled else "") + re.escape(bare)
        for bare in sorted(table, key=len, reverse=True)
    ]
    pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(parts)})(?![\w-])")

    def renamed(match: re.Match) -> str:
        name = match[0]
        return table[name] if name in table else table[re.sub(r"^[Tt]he ", "", name)]

    question, answer, keywords, *sources = (pattern.sub(renamed, text) for text in texts)
    return question, sources, answer, keywords


def permute_palette(
    pixels: np.ndarray, texts: Sequence[str], rng: np.random.Generator
) -> tuple[np.ndarray, list[str]]:
    """Recolors flags by a random permutation of PERMUTED and renames the colors in the texts.

    Args:
      pixels: uint8 [H, W, 3], or [N, H, W, 3] for several pictures of one question (they
        get the same permutation). Any size: blended pixels are re-blended.
      texts: question, answer, keywords of a datum whose `palette_safe` is true.
      rng: source of randomness.

    Returns:
      (recolored pixels, renamed texts). Answers stay true: colors are one-to-one, so every
      yes, no, count, place, share and order holds for the new picture.
    """
    order = rng.permutation(len(PERMUTED))
    new_word = {PERMUTED[i]: PERMUTED[j] for i, j in enumerate(order)}
    # One shade for every word, so that a picture never shows two shades where it had one.
    new_rgb = SHADES.astype(np.float32)  # [shade, rgb]
    for old, new in new_word.items():
        shade = _FLAG_SHADES[new][int(rng.integers(len(_FLAG_SHADES[new])))]
        new_rgb[COLORS.index(old) == SHADE_COLOR] = [int(shade[i : i + 2], 16) for i in (0, 2, 4)]
    batch = pixels if pixels.ndim == 4 else pixels[None]
    recolored = np.stack([_recolor(picture, new_rgb) for picture in batch])

    def renamed(match: re.Match) -> str:
        word = new_word[match[0].lower()]
        return word.capitalize() if match[0][0].isupper() else word

    return (
        recolored if pixels.ndim == 4 else recolored[0],
        [_COLOR_WORD.sub(renamed, text) for text in texts],
    )


def _recolor(pixels: np.ndarray, new_rgb: np.ndarray) -> np.ndarray:
    """Maps shades to `new_rgb` [shade, 3]; a blend of two shades becomes their new blend."""
    shades = shade_map(pixels)  # [H, W], -1 at edges
    out = new_rgb[shades]
    counts = np.bincount(shades[shades >= 0], minlength=len(SHADES))
    present = np.flatnonzero(counts > 0.001 * shades.size)
    blended = shades < 0
    if not blended.any():
        return np.rint(out).astype(np.uint8)
    if len(present) == 0:
        return pixels
    edge = pixels[blended].astype(np.float32)  # [edge, rgb]
    best = np.full(len(edge), np.inf, np.float32)
    new_edge = np.zeros_like(edge)
    pairs = list(itertools.combinations(present, 2)) or [(present[0], present[0])]
    for a, b in pairs:
        start, step = SHADES[a].astype(np.float32), (SHADES[b] - SHADES[a]).astype(np.float32)
        t = np.clip((edge - start) @ step / max(float(step @ step), 1.0), 0, 1)[:, None]
        error = np.square(edge - (start + t * step)).sum(axis=-1)
        closer = error < best
        mixed = new_rgb[a] + t * (new_rgb[b] - new_rgb[a])
        new_edge[closer] = mixed[closer]
        best = np.minimum(best, error)
    out[blended] = new_edge
    return np.clip(np.rint(out), 0, 255).astype(np.uint8)
