"""Which parts of a page a question's tokens match: the terms of MaxSim, at their places.

ColPali's maps of similarity (Faysse et al. 2024, section 5.3): the products of a question's tokens
with those of a page's picture, each of which stands for a rectangle of the page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Float64
from PIL import Image, ImageDraw

from mmqa_jax.data.pictures.resize import Canvas
from mmqa_jax.models.qwen_vl.network import QwenVLConfig, grid_of
from mmqa_jax.retrieval.page_embedder import PageTokenEmbedder, picture_shape
from mmqa_jax.retrieval.picture_batches import SeeingConfig

_STRONGEST = 150  # of 255, the red of the place that matches best


@dataclasses.dataclass(frozen=True)
class PageMatches:
    """A question's tokens beside the rectangles of a page.

    Attributes:
      tokens: spellings of the question's tokens.
      are_words: which of them are words, of the text or of the prompt around it; others are marks.
      similarity: products of their vectors with those of the page's picture.
      boxes: left, top, right and bottom of each rectangle, as shares of the page's sides.
    """

    tokens: list[str]
    are_words: np.ndarray  # bool [Q]
    similarity: Float32[np.ndarray, "Q P"]
    boxes: Float64[np.ndarray, "P 4"]

    def rows(self) -> list[dict[str, object]]:
        """Of each word its best rectangle, for JSON."""
        best = self.similarity.argmax(1)
        return [
            {
                "token": self.tokens[number],
                "similarity": round(float(self.similarity[number, best[number]]), 6),
                "box": [round(float(side), 4) for side in self.boxes[best[number]]],
            }
            for number in np.flatnonzero(self.are_words)
        ]

    def drawn_on(self, page: Image.Image) -> Image.Image:
        """The page in RGB, the redder the better a place matches any word, and around the best
        rectangle of each word a frame."""
        similarity = self.similarity[self.are_words]
        if not len(similarity):
            return page.convert("RGB")
        best = similarity.max(0)  # [P]
        spread = max(float(np.ptp(best)), 1e-9)
        heat = np.zeros((page.height, page.width))
        corners = np.rint(self.boxes * np.tile(page.size, 2)).astype(int)
        for (left, top, right, bottom), value in zip(corners, best, strict=True):
            part = heat[top:bottom, left:right]
            np.maximum(part, ((value - best.min()) / spread) ** 2, out=part)
        red = Image.new("RGB", page.size, (220, 30, 30))
        strength = Image.fromarray((heat * _STRONGEST).astype(np.uint8))
        made = Image.composite(red, page.convert("RGB"), strength)
        pen = ImageDraw.Draw(made)
        for number in set(similarity.argmax(1).tolist()):
            left, top, right, bottom = corners[number].tolist()
            pen.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), outline="blue")
        return made


def page_matches(embedder: PageTokenEmbedder, question: str, pixels: np.ndarray) -> PageMatches:
    """Matches a question with a page.

    Args:
      embedder: of a retriever with a vector for each token.
      question: its text.
      pixels: of the page, as the embedder's PictureStore gives them.
    """
    (asked,) = embedder.writer.questions([question])
    (page,) = embedder.writer.sources([""], [pixels])
    ((_, _, (of_question,)),) = embedder.encode_tokens([question], "query")
    ((_, _, (of_page,)),) = embedder.encode_tokens([""], "document", [pixels])
    config, tokenizer = embedder.config, embedder.tokenizer
    counts = [
        config.picture_tokens(page.pictures[0].shape) if token == config.image_token else 1
        for token in page.tokens
    ]
    of_picture = np.repeat(np.equal(page.tokens, config.image_token), counts)
    published = tokenizer.pieces.published
    marks = set(tokenizer.pieces.marks.values())
    return PageMatches(
        [published.decode([token]) or tokenizer.token(token) for token in asked.tokens],
        np.array([token not in marks for token in asked.tokens]),
        of_question @ of_page[of_picture].T,
        page_boxes(config, pixels.shape),
    )


def page_boxes(config: SeeingConfig, shape: Sequence[int]) -> Float64[np.ndarray, "P 4"]:
    """The rectangles that a picture's tokens stand for, in their order: left, top, right and bottom
    as shares of its sides.

    shape: [H, W, 3] of the resized picture.
    """
    if isinstance(config, QwenVLConfig):
        grid = grid_of(shape, config.vision)
        return _grid(grid.rows, grid.columns)
    side = math.isqrt(config.features)
    of_square, canvas = _grid(side, side), picture_shape(config)
    if not isinstance(canvas, Canvas):
        return of_square
    tiles = _grid(shape[0] // canvas.side, shape[1] // canvas.side)
    if len(tiles) == 1:
        return of_square
    sizes = tiles[:, 2:] - tiles[:, :2]  # [tiles, 2]
    within = of_square * np.tile(sizes, 2)[:, None] + np.tile(tiles[:, :2], 2)[:, None]
    return np.concatenate([*within, of_square])  # the whole comes last


def _grid(rows: int, columns: int) -> Float64[np.ndarray, "P 4"]:
    """The rectangles of a grid, row by row."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    sides = np.array([columns, rows] * 2)
    return np.stack([column, row, column + 1, row + 1], axis=1) / sides
