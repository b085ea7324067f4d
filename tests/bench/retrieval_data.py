"""Generated inputs of `python -m tests.bench retrieval`: vectors, snippets and pictures."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_BLOCK = 65_536  # vectors generated at a time
_TOPICS = 300
_CLUSTER = 100  # vectors of a cluster, on average
_LATENT = 64  # dimensions that hold most of a cluster's spread
_VOCABULARY = 200_000
_SNIPPET_WORDS, _QUERY_WORDS = 38, 18  # table 3: snippets 36 to 45 words, questions 14 to 19
# The most common words of English prose, in order; synthetic words follow.
_COMMON = (
    *("the", "of", "and", "in", "to", "a", "is", "was", "it", "for", "on", "as", "with", "by"),
    *("at", "from", "that", "are", "he", "his", "an", "this", "be", "which", "or", "were"),
    *("its", "have", "had", "but", "their", "not", "they", "one"),
)


class ClusteredVectors:
    """Unit vectors as an encoder gives them: topics, clusters in topics, spread in clusters.

    A vector is (topic + cluster + spread), scaled to length 1; the spread is mostly in few
    dimensions, as that of real embeddings is, and partly in all. Queries are drawn the same
    way: they are near their cluster, but equal to no vector.
    """

    def __init__(self, rows: int, dim: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.rows, self.dim, self.seed = rows, dim, seed
        topics = _normal(rng, _TOPICS, dim)
        clusters = max(1, rows // _CLUSTER)
        self._centers = topics[rng.integers(_TOPICS, size=clusters)] + 0.7 * _normal(
            rng, clusters, dim
        )
        self._basis = _normal(rng, _LATENT, dim) * np.float32(np.sqrt(dim / _LATENT))

    def blocks(self) -> Iterator[np.ndarray]:
        """The vectors, float32[<= 65,536, dim] at a time."""
        for number, start in enumerate(range(0, self.rows, _BLOCK)):
            yield self._draw(min(_BLOCK, self.rows - start), [self.seed, 1, number])

    def queries(self, count: int) -> np.ndarray:
        """float32[count, dim]."""
        return self._draw(count, [self.seed, 2])

    def _draw(self, count: int, seed: list[int]) -> np.ndarray:
        rng = np.random.default_rng(seed)
        vectors = self._centers[rng.integers(len(self._centers), size=count)]
        latent = rng.standard_normal((count, _LATENT), np.float32) / np.float32(np.sqrt(self.dim))
        vectors = vectors + 0.7 * (latent @ self._basis) + 0.3 * _normal(rng, count, self.dim)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_vectors(path: Path, vectors: ClusteredVectors) -> None:
    """Writes all vectors as one .npy file, block by block."""
    shape = (vectors.rows, vectors.dim)
    file = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    start = 0
    for block in vectors.blocks():
        file[start : start + len(block)] = block
        start += len(block)
    file.flush()


@functools.cache
def vocabulary(size: int) -> list[str]:
    """`size` different words, the most common ones of English prose first."""
    return [*_COMMON, *(_word(number) for number in range(size - len(_COMMON)))]


def snippets(count: int, seed: int = 0, words: int = _SNIPPET_WORDS) -> list[str]:
    """Texts of about `words` words, drawn by Zipf's law; the most common ones are English."""
    rng = np.random.default_rng(seed)
    drawn_from = np.array(vocabulary(_VOCABULARY))
    ends = np.cumsum(1 / np.arange(1, _VOCABULARY + 1))
    texts = []
    for start in range(0, count, 50_000):
        lengths = rng.integers(words // 2, words * 3 // 2 + 1, min(50_000, count - start))
        ranks = np.searchsorted(ends, rng.random(lengths.sum()) * ends[-1])
        drawn = drawn_from[ranks].tolist()
        end = 0
        for length in lengths.tolist():
            texts.append(" ".join(drawn[end : end + length]))
            end += length
    return texts


def queries(count: int, seed: int = 1) -> list[str]:
    """Questions drawn as `snippets` are."""
    return snippets(count, seed, _QUERY_WORDS)


def write_pictures(folder: Path, count: int, distinct: int = 64) -> list[bytes]:
    """Writes imgs.tsv and imgs.lineidx with `count` JPEGs of web size; returns the JPEGs.

    The `distinct` pictures repeat: the amount that is read and decoded is the same.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(min(distinct, count)):
        width, height = (int(side) for side in rng.integers(400, 1000, 2))
        coarse = rng.integers(0, 256, (height // 40 + 2, width // 40 + 2, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        grain = rng.normal(0, 8, (height, width, 1))
        pixels = np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
        encoded.append(buffer.getvalue())
    lines = [base64.b64encode(data) for data in encoded]
    offset = 0
    with open(folder / "imgs.tsv", "wb") as tsv, open(folder / "imgs.lineidx", "w") as lineidx:
        for row in range(count):
            lineidx.write(f"{offset}\n")
            line = b"%d\t%s\n" % (30_000_000 + row, lines[row % len(lines)])
            offset += tsv.write(line)
    return [encoded[row % len(encoded)] for row in range(count)]


def _normal(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Random directions of length about 1."""
    return rng.standard_normal((count, dim), np.float32) / np.float32(np.sqrt(dim))


def _word(number: int) -> str:
    """A different pronounceable word for every number."""
    syllables = []
    while True:
        number, rest = divmod(number, 85)
        syllables.append("bcdfghklmnprstvwz"[rest % 17] + "aeiou"[rest // 17])
        if not number:
            return "".join(syllables) + "x"
