"""Retrievers that see pages as embedders: a vector for each token (ColPali and its like), or one.

A page stands in a prompt of its own, and all tokens of a prompt are scored. Behind a question stand
tokens in which the model goes on thinking. `models.encoders.page_retrievers` says what each class
of retrievers writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import split_over
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh
from mmqa_jax.data.pictures.resize import Canvas
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.encoders.page_retrievers import (
    PICTURE,
    TEXT,
    PageRetriever,
    load_page_retriever,
)
from mmqa_jax.models.encoders.sentence_pooling import Prompts
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.late_interaction import FixedVectors, TokenBatch, TokenEmbedder
from mmqa_jax.retrieval.picture_batches import HELD, PicturePrompt, SeeingConfig, prompt_batches
from mmqa_jax.retrieval.text_encoder import encoder_cost
from mmqa_jax.retrieval.vlm_encoder import (
    LONGEST,
    VLMEmbedder,
    picture_options,
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
        retriever: PageRetriever,
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
        before, behind = prompt.split(TEXT)
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
            text = self._retriever.page.replace(PICTURE, self._picture(*grid))
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
    retriever: PageRetriever,
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
    model = load_page_retriever(folder, retriever, devices)
    tokenizer = load_encoder_tokenizer(folder, _text(model.config).vocab_size, pairs=False)
    buckets = prompt_lengths(folder, model.config, LONGEST)
    return page_embedder(
        model, retriever, tokenizer, devices, buckets=buckets, batch_size=batch_size
    )


def page_embedder(
    model: Any,
    retriever: PageRetriever,
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
