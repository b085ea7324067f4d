"""An encoder of words in place of MiniLM: texts without a common word have cosine 0."""

import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from mmqa_jax.data.documents.chunks import TokenLimit
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import source_text
from mmqa_jax.runs import ask_folder


class WordEncoder:
    """Vectors of the words that a text has: texts without a common word have cosine 0."""

    fingerprint, image_size, text_of = "words", 0, staticmethod(source_text)
    token_limit = TokenLimit(40, "words", lambda texts: [len(text.split()) for text in texts])

    def __init__(self):
        self.embedded: list[str] = []

    def embed_questions(self, texts, pixels=None):
        assert pixels is None or not any(picture is not None for picture in pixels)
        self.embedded += texts
        vectors = np.zeros((len(texts), 512), np.float32)
        for row, text in enumerate(texts):
            for word in set(re.findall(r"\w+", text.lower())):
                vectors[row, zlib.crc32(word.encode()) % 512] = 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    embed_passages = embed_questions


def install(patch: pytest.MonkeyPatch, cache: Path) -> WordEncoder:
    """Has folders asked with it, and what is kept of them in `cache`."""
    patch.setenv("MMQA_CACHE", str(cache))
    encoder = WordEncoder()
    opened = lambda name, corpus: (encoder, PictureStore(corpus, size=1))  # noqa: E731
    patch.setattr(ask_folder, "_open_encoder", opened)
    return encoder
