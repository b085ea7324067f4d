"""Retrievers that see pages as embedders: a vector for each token (ColPali and its like), or one.

A page stands in a prompt of its own, and all tokens of a prompt are scored. Behind a question stand
tokens in which the model goes on thinking. `models.encoders.page_retrievers` says what each class
of retrievers writes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Float64
from PIL import Image, ImageDraw

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import split_over
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh
from mmqa_jax.data.pictures.resize import Canvas
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.encoders import page_retrievers
from mmqa_jax.models.encoders.sentence_pooling import Prompts
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.models.qwen_vl.network import QwenVLConfig, grid_of
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.late_interaction import FixedVectors, TokenBatch, TokenEmbedder
from mmqa_jax.retrieval.text_encoder import encoder_cost
from mmqa_jax.retrieval.vlm_encoder import (
    HELD,
    LONGEST,
    PicturePrompt,
    SeeingConfig,
    VLMEmbedder,
    picture_options,
    prompt_batches,
    prompt_lengths,
)

_MARK = re.compile(r"<[^<>\s]+>")
_QUESTION = "question"  # what stands for an instruction before texts that ask


class PageWriter:
    """Writes the prompts of a class of retrievers.

    Args:
      retriever: the class.
      config: of the model.
      tokenizer: of a published folder.
      longest: tokens of a prompt; longer texts are cut.
    """

    def __init__(
        self,
        retriever: page_retrievers.PageRetriever,
        config: SeeingConfig,
        tokenizer: Tokenizer,
        longest: int,
    ):
        self._retriever, self._config, self._tokenizer = retriever, config, tokenizer
        self._longest, self._marks = longest, tokenizer.pieces
        self._placeholder = tokenizer.token(config.image_token)
        self._pages: dict[tuple[int, int], list[int]] = {}
        written = retriever.page + retriever.question + retriever.source + self._placeholder
        needed = {*_MARK.findall(written)} - {*retriever.optional}
        if missing := sorted(needed - self._marks.marks.keys()):
            raise UserError(
                f"the tokenizer lacks {', '.join(missing)}, which stand in the prompts of "
                f"{retriever.title}; put the checkpoint's own tokenizer there."
            )

    def questions(self, texts: Sequence[str]) -> list[PicturePrompt]:
        """The prompts of questions."""
        return self._of_texts(texts, self._retriever.question)

    def sources(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None] | None = None
    ) -> list[PicturePrompt]:
        """The prompts of pages. A source without a picture is asked by its text, a page whose
        picture is broken by its caption."""
        of_texts = self._of_texts(texts, self._retriever.source)
        return [
            of_text if picture is None else self._page(picture)
            for of_text, picture in zip(of_texts, pictures or [None] * len(texts), strict=True)
        ]

    def _of_texts(self, texts: Sequence[str], prompt: str) -> list[PicturePrompt]:
        before, behind = prompt.split(page_retrievers.TEXT)
        if self._retriever.strips:
            texts = [text.rstrip() for text in texts]
        first, last = ([], [])
        if self._retriever.around:
            first, last = self._tokenizer.before, self._tokenizer.after
        end = [*(self._encoded([behind])[0] if behind else ()), *last]
        most = self._longest - len(first) - len(end)
        encoded = self._encoded([before + self._marks.shield(text) for text in texts])
        empty = [self._tokenizer.pad_id]
        return [PicturePrompt([*first, *ids[:most], *end] or empty) for ids in encoded]

    def _page(self, pixels: np.ndarray) -> PicturePrompt:
        squares = squares_of(pixels, self._config)
        grid = 1, 1
        if (shape := picture_shape(self._config)) and isinstance(shape, Canvas):
            grid = pixels.shape[0] // shape.side, pixels.shape[1] // shape.side
        if grid not in self._pages:
            text = self._retriever.page.replace(page_retrievers.PICTURE, self._picture(*grid))
            first, last = self._tokenizer.before, self._tokenizer.after
            (ids,) = self._encoded([text])
            self._pages[grid] = [*first, *ids, *last] if self._retriever.around else ids
        return PicturePrompt(self._pages[grid], tuple(squares))

    def _picture(self, rows: int, columns: int) -> str:
        """Writes the text that stands in a prompt for a picture of so many tiles."""
        config, placeholder = self._config, self._placeholder
        if isinstance(config, QwenVLConfig):
            return placeholder
        if config.split is not None:
            return config.split.written(placeholder, rows, columns)
        if isinstance(config, LlavaConfig) and config.before_token is not None:
            first, last = map(self._tokenizer.token, (config.before_token, config.after_token))
            return f"\n\n{first}{placeholder}{last}\n\n"
        return placeholder

    def _encoded(self, prompts: Sequence[str]) -> list[list[int]]:
        return self._marks.encode_prompts(prompts)


def picture_shape(config: SeeingConfig) -> Any:
    """What pictures are resized to for a model."""
    return picture_options(config)["resize"]


def squares_of(pixels: np.ndarray, config: SeeingConfig) -> Sequence[np.ndarray]:
    """What a model takes of one resized picture: itself, or the squares of a canvas."""
    shape = picture_shape(config)
    return list(shape.tiles_of(pixels)) if isinstance(shape, Canvas) else [pixels]


class PageTokenEmbedder(TokenEmbedder):
    """A TokenEmbedder of pictures, and of texts; captions of pictures are not read.

    Args:
      config: the model's.
      writer: of its prompts.
    """

    def __init__(
        self,
        graphdef: Any,
        state: Any,
        tokenizer: Tokenizer,
        config: SeeingConfig,
        writer: PageWriter,
        **options: Any,
    ):
        self.config, self.writer = config, writer
        recipe = f"{options.pop('recipe')} {FixedVectors()}"
        super().__init__(
            graphdef, state, tokenizer, recipe=recipe, **picture_options(config), **options
        )

    def _rows(self, texts, name, pictures=None):
        is_question = name == "query"
        written = self.writer.questions(texts) if is_question else None
        prompts = self.writer.sources(texts, pictures) if written is None else written
        pad = self.tokenizer.pad_id
        for places, batch in prompt_batches(prompts, self.config, self.serving, self.buckets, pad):
            arrays = tuple(array for array in batch if array is not None)
            yield places, arrays, batch.mask

    def _encode_sources(self, texts, pictured, read) -> Iterator[TokenBatch]:
        snippets, pages = np.flatnonzero(~pictured), np.flatnonzero(pictured)
        for batch in self.encode_tokens([texts[i] for i in snippets], "document"):
            yield batch._replace(places=snippets[batch.places])
        for start in range(0, len(pages), HELD):
            rows = pages[start : start + HELD]
            for batch in self.encode_tokens([texts[i] for i in rows], "document", read(rows)):
                yield batch._replace(places=rows[batch.places])


class PageEmbedder(VLMEmbedder):
    """An Embedder of pictures, and of texts, by one vector each; captions and pictures of questions
    are not read.

    Args:
      config: the model's.
      writer: of its prompts.
    """

    def __init__(
        self,
        graphdef: Any,
        state: Any,
        tokenizer: Tokenizer,
        config: SeeingConfig,
        writer: PageWriter,
        **options: Any,
    ):
        prompts = Prompts(question=_QUESTION)
        super().__init__(
            graphdef, state, None, config, tokenizer=tokenizer, prompts=prompts, **options
        )
        self.writer = writer

    def _prompts(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None], instruction: str
    ) -> list[PicturePrompt]:
        if instruction == _QUESTION:
            return self.writer.questions(texts)
        return self.writer.sources(texts, pictures)


def load_page_embedder(
    folder: Path,
    retriever: page_retrievers.PageRetriever,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> Embedder:
    """The embedder of a page retriever's folder, merged with its adapter.

    Args:
      folder: of transformers or colpali_engine.
      retriever: its entry in RETRIEVERS.
      batch_size: texts or pictures per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    devices = loading_mesh(mesh)
    model = page_retrievers.load_page_retriever(folder, retriever, devices)
    tokenizer = load_encoder_tokenizer(folder, _text(model.config).vocab_size, pairs=False)
    buckets = prompt_lengths(folder, model.config, LONGEST)
    return page_embedder(
        model, retriever, tokenizer, devices, buckets=buckets, batch_size=batch_size
    )


def page_embedder(
    model: Any,
    retriever: page_retrievers.PageRetriever,
    tokenizer: Tokenizer,
    devices: Mesh | None,
    *,
    buckets: Sequence[int],
    **options: Any,
) -> PageTokenEmbedder | PageEmbedder:
    """The embedder of a page retriever's model; `options`: of Embedder, such as `batch_size`."""
    config = model.config
    writer = PageWriter(retriever, config, tokenizer, buckets[-1])
    graphdef, state = split_over(model, devices)
    return (PageEmbedder if retriever.pooling else PageTokenEmbedder)(
        graphdef,
        state,
        tokenizer,
        config,
        writer,
        buckets=buckets,
        cost=encoder_cost(_text(config), buckets[-1], "sources"),
        recipe=f"{config} {retriever}",
        **options,
    )


def _text(config: SeeingConfig) -> Any:
    return config.text if isinstance(config, ModernVBertConfig) else config.llama


# Which parts of a page a question's tokens match: the terms of MaxSim, at their places.


_STRONGEST = 150  # of 255, the red of the place that matches best


@dataclasses.dataclass(frozen=True)
class PageMatches:
    """A question's tokens beside the rectangles of a page."""

    tokens: list[str]  # spellings of the question's tokens
    # Which of them are words, of the text or of the prompt around it; others are marks.
    are_words: np.ndarray  # bool [Q]
    # Products of their vectors with those of the page's picture.
    similarity: Float32[np.ndarray, "Q P"]
    # Left, top, right and bottom of each rectangle, as shares of the page's sides.
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
