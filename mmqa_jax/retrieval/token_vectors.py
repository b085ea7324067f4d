"""The vectors of all tokens of a corpus, as `mmqa embed` keeps them for late interaction.

A source's tokens may be merged first (`pool_tokens`), and each vector is rounded to a few bytes
(`TokenFormat`). Files have one row of bytes a token; the tokens of a source lie together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from mmqa_jax.core.errors import UserError

Precision = Literal["float16", "int8", "binary"]
_HELD = 4_096  # sources whose tokens were encoded when they were asked for


@dataclasses.dataclass(frozen=True)
class TokenFormat:
    """How the vectors of a source's tokens are stored.

    Attributes:
      precision: `float16`; `int8`, with a float16 scale for each vector; or `binary`, the sign of
        each value.
      pool: a source keeps about one vector for so many tokens; 1: all of them.
    """

    precision: Precision = "int8"
    pool: int = 1

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise UserError(
                f"--tokens={self.precision}: is no precision of tokens' vectors; use one of "
                f"{', '.join(get_args(Precision))}."
            )
        if self.pool < 1:
            raise UserError(f"--pool={self.pool}: must be 1 or more, the tokens of one vector.")

    def width(self, dim: int) -> int:
        """The bytes of a vector of `dim` values."""
        return {"float16": 2 * dim, "int8": dim + 2, "binary": -(-dim // 8)}[self.precision]

    def encode(self, vectors: Float32[np.ndarray, "T D"]) -> UInt8[np.ndarray, "T W"]:
        """The bytes of each vector."""
        if self.precision == "binary":
            return np.packbits(vectors > 0, axis=1)
        if self.precision == "float16":
            return vectors.astype("<f2").view(np.uint8)
        scales = np.maximum(np.abs(vectors).max(1, keepdims=True) / 127, 1e-6).astype("<f2")
        whole = np.clip(np.rint(vectors / scales.astype(np.float32)), -127, 127).astype(np.int8)
        return np.concatenate([whole.view(np.uint8), scales.view(np.uint8)], axis=1)

    def decode(
        self, codes: UInt8[np.ndarray, "T W"], dim: int
    ) -> tuple[Float32[np.ndarray, "T D"], Float32[np.ndarray, "T 1"] | np.float32]:
        """Vectors, and what each is to be multiplied by; those of signs get the length 1."""
        if self.precision == "binary":
            bits = np.unpackbits(codes, axis=1, count=dim)
            return 2 * bits.astype(np.float32) - 1, np.float32(dim**-0.5)
        if self.precision == "float16":
            return codes.view("<f2").astype(np.float32), np.float32(1)
        scales = np.ascontiguousarray(codes[:, dim:]).view("<f2").astype(np.float32)
        return codes[:, :dim].view(np.int8).astype(np.float32), scales


@dataclasses.dataclass(frozen=True)
class TokenVectors:
    """The tokens' vectors of every source of a corpus, by row.

    Attributes:
      codes: usually memory-mapped; `format` says what they stand for.
      ends: behind each source's last token.
      dim: the values of a vector.
    """

    codes: UInt8[np.ndarray, "T W"]
    ends: Int64[np.ndarray, " n"]
    dim: int
    format: TokenFormat

    def counts(self) -> Int64[np.ndarray, " n"]:
        """How many tokens each source has."""
        return np.diff(self.ends, prepend=0)

    def rows(self, rows: Sequence[int]) -> list[UInt8[np.ndarray, "tokens W"]]:
        """The bytes of the tokens of the sources in these rows."""
        codes = np.asarray(self.codes)  # slices of a memory map are slow
        rows = np.asarray(rows, np.int64)
        ends = self.ends[rows]
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        return [codes[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


class EncodedTokens:
    """TokenVectors of few sources that nobody stored: they are encoded when they are asked for,
    and the last `_HELD` of them stay in memory.

    Args:
      encode: rows of sources -> the vectors of their tokens, float32 [tokens, D] each.
      dim: the values of a vector.
    """

    format = TokenFormat("float16")

    def __init__(self, encode: Callable[[Sequence[int]], Sequence[np.ndarray]], dim: int):
        self._encode, self.dim = encode, dim
        self._codes: dict[int, np.ndarray] = {}

    def rows(self, rows: Sequence[int]) -> list[UInt8[np.ndarray, "tokens W"]]:
        """See TokenVectors."""
        missing = [row for row in dict.fromkeys(map(int, rows)) if row not in self._codes]
        encoded = self._encode(missing) if missing else ()
        for row, vectors in zip(missing, encoded, strict=True):
            self._codes[row] = self.format.encode(vectors)
        of_rows = [self._codes[int(row)] for row in rows]
        for row in list(self._codes)[:-_HELD]:
            del self._codes[row]
        return of_rows


def pool_tokens(
    vectors: Float32[np.ndarray, "T D"], pool: float, protected: int = 1, normalized: bool = True
) -> Float32[np.ndarray, "t D"]:
    """Merges unit vectors that are alike into T // pool means.

    Ward's clusters of 1 - cosine (Clavié et al. 2024, "Reducing the Footprint of Multi-Vector
    Retrieval"), as sentence-transformers' HierarchicalTokenPooling.

    Args:
      vectors: of the tokens of one text.
      pool: a mean stands for about so many tokens.
      protected: tokens at the beginning that stay apart, such as [CLS].
      normalized: whether means are scaled to length 1.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    first, merged = vectors[:protected], vectors[protected:]
    clusters = max(int(len(merged) // pool), 1)
    if clusters >= len(merged):
        return vectors
    distances = squareform(np.clip(1 - merged @ merged.T, 0, 2), checks=False)
    tree = hierarchy.linkage(distances, method="ward")
    _, cluster = np.unique(hierarchy.fcluster(tree, clusters, "maxclust"), return_inverse=True)
    means = np.zeros((cluster.max() + 1, vectors.shape[1]), np.float32)
    np.add.at(means, cluster, merged)
    if normalized:
        means /= np.linalg.norm(means, axis=1, keepdims=True)
    else:
        means /= np.bincount(cluster)[:, None]
    return np.concatenate([first, means])
