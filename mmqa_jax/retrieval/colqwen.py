"""ColQwen 2, 2.5 and 3 as an embedder: pages as they look, and texts, by a vector for each token.

A picture stands in a prompt of its own, and all tokens of a prompt are scored. transformers' class
(ColQwen2ForRetrieval) writes `Query: ` before a question and a line's end behind it, colpali_engine
neither; both put ten padding tokens behind it, in which the model goes on thinking.
Originals: transformers' processing_colqwen2.py and colpali_engine/models/qwen2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import split_over
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.encoders.vlm_keys import load_colqwen
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.retrieval.late_interaction import FixedVectors, TokenBatch, TokenEmbedder
from mmqa_jax.retrieval.picture_batches import HELD, PicturePrompt, prompt_batches
from mmqa_jax.retrieval.text_encoder import encoder_cost
from mmqa_jax.retrieval.vlm_encoder import LONGEST, picture_options, prompt_lengths

_PAGE = (
    "<|im_start|>",
    "user\n",
    "<|vision_start|>",
    None,
    "<|vision_end|>",
    "Describe the image.",
    "<|im_end|>",
    "<|endoftext|>",
)
_AUGMENTATION = "<|endoftext|>", 10  # a token behind a question, and how often


class ColQwenEmbedder(TokenEmbedder):
    """A TokenEmbedder of pictures, and of texts; captions of pictures are not read.

    Args:
      config: the model's.
      of_transformers: whether questions are written as transformers' class does; see the module.
    """

    def __init__(
        self,
        graphdef: Any,
        state: Any,
        tokenizer: Tokenizer,
        config: QwenVLConfig,
        of_transformers: bool,
        **options: Any,
    ):
        self._config, self._of_transformers = config, of_transformers
        pieces = [
            [config.image_token] if piece is None else _ids(tokenizer, piece) for piece in _PAGE
        ]
        self._page = [number for piece in pieces for number in piece]
        token, times = _AUGMENTATION
        self._augmentation = _ids(tokenizer, token) * times
        described = f"{config} {of_transformers} {FixedVectors()}"
        super().__init__(
            graphdef, state, tokenizer, recipe=described, **picture_options(config), **options
        )

    def _rows(self, texts, name, pictures=None):
        prompts = self._questions(texts) if name == "query" else self._sources(texts, pictures)
        pad = self.tokenizer.pad_id
        for places, batch in prompt_batches(prompts, self._config, self.serving, self.buckets, pad):
            yield places, tuple(batch), batch.mask

    def _encode_sources(self, texts, pictured, read) -> Iterator[TokenBatch]:
        snippets, pages = np.flatnonzero(~pictured), np.flatnonzero(pictured)
        for batch in self.encode_tokens([texts[i] for i in snippets], "document"):
            yield batch._replace(places=snippets[batch.places])
        for start in range(0, len(pages), HELD):
            rows = pages[start : start + HELD]
            for batch in self.encode_tokens([texts[i] for i in rows], "document", read(rows)):
                yield batch._replace(places=rows[batch.places])

    def _questions(self, texts: Sequence[str]) -> list[PicturePrompt]:
        before, behind = ("Query: ", "\n") if self._of_transformers else ("", "")
        end = self._augmentation + (_ids(self.tokenizer, behind) if behind else [])
        most = self.buckets[-1] - len(end)
        encoded = self.tokenizer.encode_batch([before + text for text in texts])
        return [PicturePrompt([*ids[:most], *end]) for ids in encoded]

    def _sources(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None] | None
    ) -> list[PicturePrompt]:
        """A picture, or of a source without one its text, such as a broken picture's caption."""
        encoded = self.tokenizer.encode_batch(list(texts))
        written = [ids[: self.buckets[-1]] or [self.tokenizer.pad_id] for ids in encoded]
        return [
            PicturePrompt(ids) if picture is None else PicturePrompt(self._page, (picture,))
            for ids, picture in zip(written, pictures or [None] * len(texts), strict=True)
        ]


def _ids(tokenizer: Tokenizer, piece: str) -> list[int]:
    """The token that a piece of a prompt is, or the tokens of its words."""
    number = tokenizer.token_id(piece)
    if number is None and piece.startswith("<|"):
        raise UserError(
            f"the tokenizer lacks {piece}, which stands in a ColQwen's prompts; put the "
            "checkpoint's own tokenizer there."
        )
    return tokenizer.encode_batch([piece])[0] if number is None else [number]


def load_colqwen_embedder(
    folder: Path, *, batch_size: BatchSize = AUTO, mesh: Mapping[str, int] | None = None
) -> ColQwenEmbedder:
    """The embedder of a ColQwen's folder, merged with its adapter.

    Args:
      folder: of transformers (ColQwen2ForRetrieval) or colpali_engine.
      batch_size: texts or pictures per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    devices = loading_mesh(mesh)
    model, of_transformers = load_colqwen(folder, devices)
    config = model.config
    tokenizer = load_encoder_tokenizer(folder, config.llama.vocab_size, pairs=False)
    buckets = prompt_lengths(folder, config, LONGEST)
    graphdef, state = split_over(model, devices)
    return ColQwenEmbedder(
        graphdef,
        state,
        tokenizer,
        config,
        of_transformers,
        buckets=buckets,
        batch_size=batch_size,
        cost=encoder_cost(config.llama, buckets[-1], "sources"),
    )
