"""Atlas's augmentations as the training pipelines take them: one example in, one out."""

from __future__ import annotations

import dataclasses

import numpy as np

from mmqa_jax.data.datasets.atlas.augment import permute_palette, replace_entities
from mmqa_jax.data.datasets.atlas.factbook import place_names
from mmqa_jax.data.examples import RawExample


class AtlasAugment:
    """New names and new colors for question, sources and answer together.

    Args:
      entities: probability that an example's country and answer names are replaced, and those
        of the countries that its wrong sources speak of.
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
        # Wrong sources get new names too: else a made-up name would tell the right ones.
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
        shown = [source.pixels for source in raw.sources if source.pixels is not None]
        if not shown:
            return raw
        pixels, (question, answer, keywords) = permute_palette(
            np.stack(shown), [raw.question, raw.answer, raw.keywords], rng
        )
        recolored = iter(pixels)
        sources = tuple(
            source if source.pixels is None else dataclasses.replace(source, pixels=next(recolored))
            for source in raw.sources
        )
        return dataclasses.replace(
            raw, question=question, sources=sources, answer=answer, keywords=keywords
        )
