"""Search by MaxSim over the tokens' vectors of late interaction.

Candidates are found by fixed vectors (MUVERA) in any index, and ranked by MaxSim itself; or every
source is ranked so, on all devices. A query is one row: its fixed vector, and behind it the vectors
of its tokens, zeros where it has fewer, which add nothing to MaxSim. On a TPU every source is
scored in bfloat16, and the best of them again in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import BFloat16, Float32, Int32, UInt8

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import fetch, make_mesh, platform
from mmqa_jax.core.serving import free_bytes
from mmqa_jax.retrieval.embeddings import (
    BROKEN,
    EncodedTokens,
    TokenFormat,
    TokenVectors,
    check_finite,
)
from mmqa_jax.retrieval.indexes.exact import SHARE, index_manifest
from mmqa_jax.retrieval.manifest import replace_folder
from mmqa_jax.retrieval.rankings import candidate_rows, check_top_k

KIND = "maxsim"
_CANDIDATES = 800  # of fixed vectors, which MaxSim ranks
_ENCODED = 32  # the same where nobody stored their tokens
_TOGETHER = 64  # candidates of a program's call
_LENGTHS, _QUERY_LENGTHS = 64, 32  # sources and queries are padded to multiples of them
_ROUNDED = 4  # per result, candidates by vectors in bfloat16 that are scored again
_TILE = 32  # tokens that a CPU multiplies at once
_BLOCK = 1 << 16  # tokens of a device that are scored at once


def pack_queries(
    fixed: Float32[np.ndarray, "n F"], tokens: Sequence[Float32[np.ndarray, "t D"]], mean: bool
) -> Float32[np.ndarray, "n width"]:
    """Queries as MaxSimIndex takes them; `mean` divides by the number of a query's tokens.

    They are padded to few lengths, for each of which a program is compiled.
    """
    most = max((len(of_query) for of_query in tokens), default=0)
    most = -(-most // _QUERY_LENGTHS) * _QUERY_LENGTHS
    dim = tokens[0].shape[1] if tokens else 0
    padded = np.zeros((len(tokens), most, dim), np.float32)
    for row, of_query in enumerate(tokens):
        padded[row, : len(of_query)] = of_query / max(len(of_query), 1) if mean else of_query
    return np.concatenate([fixed, padded.reshape(len(tokens), most * dim)], axis=1)


class MaxSimIndex:
    """Ranks sources by MaxSim; see the module.

    Args:
      candidates: an index over the sources' fixed vectors.
      tokens: the vectors of their tokens.
      exhaustive: whether every source is scored, and not candidates alone.
    """

    def __init__(
        self, candidates: Any, tokens: TokenVectors | EncodedTokens, *, exhaustive: bool = False
    ):
        self.embeddings, self.tokens = candidates.embeddings, tokens
        self.is_exact = exhaustive
        self.kind = KIND if exhaustive else candidates.kind
        self._candidates = candidates
        self._on_device: dict[int, tuple[jax.Array, jax.Array]] = {}  # number of a block -> it

    def __len__(self) -> int:
        return len(self._candidates)

    def search(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None = None
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """See DenseIndex; queries are those of `pack_queries`."""
        check_top_k(top_k, len(self), allowed, "index")
        if self.is_exact:
            return self._search_all(queries, top_k, allowed)
        available = len(self) if allowed is None else int(np.count_nonzero(allowed))
        usual = _CANDIDATES if isinstance(self.tokens, TokenVectors) else _ENCODED
        most = min(available, max(usual, 2 * top_k))
        rows = self._find(*self._split(queries), most, allowed)
        return self.search_within(queries, rows, top_k)

    def _find(
        self, fixed: np.ndarray, tokens: np.ndarray, most: int, allowed: np.ndarray | None
    ) -> list[np.ndarray]:
        """At most `most` candidate rows of each query."""
        rows, _ = self._candidates.search(fixed, most, allowed)
        return [row[row >= 0] for row in rows]

    def search_within(
        self, queries: np.ndarray, rows: Sequence[Sequence[int]], top_k: int
    ) -> tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
        """See DenseIndex.search_within."""
        _, tokens = self._split(queries)
        best = np.full((len(tokens), top_k), -1, np.int32)
        scores = np.full((len(tokens), top_k), -np.inf, np.float32)
        for number, (query, candidates) in enumerate(zip(tokens, rows, strict=True)):
            candidates = candidate_rows(candidates, len(self), "index")
            of_query = self._scores(query, candidates)
            order = np.argsort(-of_query, kind="stable")[:top_k]
            best[number, : len(order)] = np.asarray(candidates)[order]
            scores[number, : len(order)] = of_query[order]
        return best, scores

    def save(self, folder: Any) -> None:
        """Writes what `load_index` opens, of an index that scores every source."""
        with replace_folder(folder, index_manifest(self.embeddings, KIND)):
            pass

    def _split(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The fixed vectors [n, F] of packed queries, and their tokens' vectors [n, Q, D]."""
        size = self.embeddings.vectors.shape[1]
        if queries.ndim != 2 or (queries.shape[1] - size) % self.tokens.dim:
            raise UserError(
                f"index: queries of shape {queries.shape} are no fixed vectors of {size} and "
                f"tokens of {self.tokens.dim} values; embed them with the index's encoder."
            )
        check_finite(queries, "index: the queries", BROKEN)
        return queries[:, :size], queries[:, size:].reshape(len(queries), -1, self.tokens.dim)

    def _scores(self, query: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        """MaxSim of a query's tokens [Q, D] and the sources in `rows`: float32 [rows]."""
        if _is_one_cpu():
            return self._flat_scores(query[None], rows)[0]
        scores = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _TOGETHER):
            codes, counts = _padded(self.tokens.rows(rows[start : start + _TOGETHER]), _TOGETHER)
            part = _score(query[None], codes, counts, self.tokens.format, self.tokens.dim)
            scores[start : start + _TOGETHER] = np.asarray(part)[0, : len(rows) - start]
        return scores

    def _search_all(
        self, queries: np.ndarray, top_k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores every source, block by block; equal scores in row order."""
        _, tokens = self._split(queries)
        if on_tpu := platform() == "tpu":
            result, top_k = top_k, _ROUNDED * top_k
        best = np.full((len(queries), 0), -1, np.int32)
        scores = np.zeros((len(queries), 0), np.float32)
        for rows, part in self._block_scores(tokens):
            if allowed is not None:
                part = np.where(allowed[rows], part, -np.inf)
            best = np.concatenate([best, np.broadcast_to(rows, part.shape)], axis=1)
            scores = np.concatenate([scores, part], axis=1)
            order = np.lexsort((best, -scores), axis=1)[:, :top_k]
            best = np.take_along_axis(best, order, 1)
            scores = np.take_along_axis(scores, order, 1)
        if not on_tpu:
            return best, scores
        allowed_rows = [row[score > -np.inf] for row, score in zip(best, scores, strict=True)]
        return self.search_within(queries, allowed_rows, result)

    def _block_scores(self, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows in blocks, and MaxSim of the queries' tokens [n, Q, D] and them: [n, rows]."""
        if _is_one_cpu():
            yield from ((rows, self._flat_scores(tokens, rows)) for rows in self._block_rows(1))
            return
        score = _score if platform() != "tpu" else functools.partial(_rounded_scores, self._mesh)
        for rows, codes, counts in self._all_blocks():
            part = fetch(score(tokens, codes, counts, self.tokens.format, self.tokens.dim))
            yield rows, part[:, : len(rows)]

    def _flat_scores(self, tokens: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        """What `_score` computes of the sources in `rows`, without padding: float32 [n, rows].

        Sources have any number of tokens, so that a CPU multiplies them one behind the other.
        """
        sources = self.tokens.rows(rows)
        counts = np.array([len(codes) for codes in sources])
        scores = np.full((len(tokens), len(rows)), np.finfo(np.float32).min, np.float32)
        if not counts.any():
            return scores
        vectors, scales = self.tokens.format.decode(np.concatenate(sources), self.tokens.dim)
        first = (np.cumsum(counts) - counts)[counts > 0]
        for row, of_query in enumerate(tokens):
            products = _products(vectors, of_query[of_query.any(axis=1)]) * scales
            scores[row, counts > 0] = np.maximum.reduceat(products, first).sum(axis=1)
        return scores

    def _all_blocks(self) -> Iterator[tuple[np.ndarray, jax.Array, jax.Array]]:
        """Rows of similar length, their tokens' bytes [B, L, W] split over all devices, and their
        counts; blocks stay on the devices while they fit into a share of their memory."""
        mesh, split = self._mesh, NamedSharding(self._mesh, PartitionSpec("data"))
        room = SHARE * free_bytes(jax.local_devices()[0]) * mesh.size
        room -= sum(codes.nbytes for codes, _ in self._on_device.values())
        for number, rows in enumerate(self._block_rows(mesh.size)):
            block = self._on_device.get(number)
            if block is None:
                a_device = 1 << (-(-len(rows) // mesh.size) - 1).bit_length()  # few programs
                padded = _padded(self.tokens.rows(rows), a_device * mesh.size)
                block = jax.device_put(padded, split)
                if block[0].nbytes <= room:
                    self._on_device[number] = block
                    room -= block[0].nbytes
            yield rows, *block

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """All devices."""
        return make_mesh({"data": len(jax.devices())})

    def _block_rows(self, devices: int) -> list[np.ndarray]:
        """All rows in blocks of similar length, of about _BLOCK tokens a device with padding."""
        counts = self.tokens.counts()
        order = np.argsort(counts, kind="stable")
        lengths = -(-np.maximum(counts[order], 1) // _LENGTHS) * _LENGTHS
        blocks, start = [], 0
        while start < len(order):
            stop = int(np.searchsorted(lengths, lengths[start], side="right"))
            stop = min(stop, start + max(1, _BLOCK // int(lengths[start])) * devices)
            blocks.append(np.sort(order[start:stop]).astype(np.int32))
            start = stop
        return blocks


def _products(
    vectors: Float32[np.ndarray, "T D"], query: Float32[np.ndarray, "Q D"]
) -> Float32[np.ndarray, "T Q"]:
    """All products, in tiles so small that BLAS starts no threads, which would cost more time than
    the products."""
    products = np.empty((len(vectors), len(query)), np.float32)
    whole = len(vectors) // _TILE * _TILE
    tiles = vectors[:whole].reshape(-1, _TILE, vectors.shape[1])
    np.matmul(tiles, query.T, out=products[:whole].reshape(-1, _TILE, len(query)))
    products[whole:] = vectors[whole:] @ query.T
    return products


def _is_one_cpu() -> bool:
    return platform() == "cpu" and len(jax.devices()) == 1


def _padded(
    sources: Sequence[UInt8[np.ndarray, "tokens W"]], size: int
) -> tuple[UInt8[np.ndarray, "size L W"], Int32[np.ndarray, " size"]]:
    """The bytes of sources' tokens, padded to `size` sources and one of few lengths; the counts.

    A shorter source repeats its first token, which changes no largest product.
    """
    counts = np.zeros(size, np.int32)
    counts[: len(sources)] = [len(codes) for codes in sources]
    length = -(-max(int(counts.max(initial=1)), 1) // _LENGTHS) * _LENGTHS
    codes = np.zeros((size, length, sources[0].shape[1]), np.uint8)
    for row, of_source in enumerate(sources):
        codes[row, : len(of_source)] = of_source
        if len(of_source):
            codes[row, len(of_source) :] = of_source[0]
    return codes, counts


@functools.partial(jax.jit, static_argnames=("mesh", "form", "dim", "interpret"))
def _rounded_scores(
    mesh: Mesh,
    queries: jax.Array,
    codes: jax.Array,
    counts: jax.Array,
    form: TokenFormat,
    dim: int,
    interpret: bool = False,
) -> jax.Array:
    """Computes `_score` of vectors in bfloat16: the TPU's kernel runs on each device's sources."""
    number, length, _ = queries.shape
    flat = queries.reshape(-1, dim).astype(jnp.bfloat16)
    flat = jnp.pad(flat, ((0, -len(flat) % COLUMNS), (0, 0)))

    def of_sources(flat: jax.Array, codes: jax.Array, counts: jax.Array) -> jax.Array:
        vectors = decoded(form, codes, dim).astype(jnp.bfloat16)
        best = largest_products(flat, vectors, interpret=interpret)  # [B, C]
        scores = best[:, : number * length].reshape(-1, number, length).sum(-1)
        return jnp.where(counts[:, None] > 0, scores, jnp.finfo(jnp.float32).min)

    split, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        of_sources, mesh=mesh, in_specs=(whole, split, split), out_specs=split, check_vma=False
    )
    return sharded(flat, codes, counts).T


def decoded(form: TokenFormat, codes: jax.Array, dim: int) -> Float32[jax.Array, "... D"]:
    """The vectors that a format's bytes [..., W] stand for; those of signs have the length 1."""
    if form.precision == "binary":
        signs = jnp.unpackbits(codes, axis=-1, count=dim).astype(jnp.float32)
        return (2 * signs - 1) * np.float32(dim**-0.5)
    if form.precision == "float16":
        return _float16(codes.reshape(*codes.shape[:-1], dim, 2))
    whole = jax.lax.bitcast_convert_type(codes[..., :dim], jnp.int8)
    return whole.astype(jnp.float32) * _float16(codes[..., None, dim:])


def _float16(pairs: jax.Array) -> jax.Array:
    """The values of pairs of bytes [..., 2], which little-endian float16 have."""
    return jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("form", "dim"))
def _score(
    queries: jax.Array, codes: jax.Array, counts: jax.Array, form: TokenFormat, dim: int
) -> jax.Array:
    """MaxSim of queries' tokens [n, Q, D] and sources' bytes [B, L, W]: float32 [n, B].

    A source without tokens has the smallest float32. One query at a time, so that its products
    [Q, B, L] stay in fast memory.
    """
    vectors = decoded(form, codes, dim)  # [B, L, D]
    least = jnp.finfo(jnp.float32).min
    is_token = jnp.arange(codes.shape[1]) < counts[:, None]  # [B, L]

    def of_query(query: jax.Array) -> jax.Array:
        products = jnp.einsum("qd,bld->bql", query, vectors, precision="highest")
        best = jnp.where(is_token[:, None], products, least).max(-1)  # [B, Q]
        return jnp.where(counts > 0, best.sum(-1), least)

    return jax.lax.map(of_query, queries)


# A TPU's kernel for MaxSim: products of tokens are reduced where they are made.


COLUMNS = 512  # tokens of queries that are multiplied at once


def largest_products(
    queries: BFloat16[jax.Array, "C D"],
    sources: BFloat16[jax.Array, "B L D"],
    *,
    interpret: bool = False,
) -> Float32[jax.Array, "B C"]:
    """The largest product of each query's token with any token of each source.

    Args:
      queries: vectors of tokens, as many as COLUMNS divides.
      sources: vectors of the sources' tokens; a shorter source repeats one of its own.
      interpret: whether Python runs the kernel, on any device.
    """
    (count, dim), (rows, length, _) = queries.shape, sources.shape
    best = pl.pallas_call(
        _kernel,
        grid=(rows, count // COLUMNS),  # a source's tokens stay while all queries pass
        in_specs=[
            pl.BlockSpec((COLUMNS, dim), lambda row, column: (column, 0)),
            pl.BlockSpec((1, length, dim), lambda row, column: (row, 0, 0)),
        ],
        out_specs=pl.BlockSpec((1, 1, COLUMNS), lambda row, column: (row, 0, column)),
        out_shape=jax.ShapeDtypeStruct((rows, 1, count), jnp.float32),
        interpret=interpret,
    )(queries, sources)
    return best[:, 0]


def _kernel(queries: jax.Array, source: jax.Array, best: jax.Array) -> None:
    over_values = (((1,), (1,)), ((), ()))
    products = jax.lax.dot_general(
        source[0], queries[...], over_values, preferred_element_type=jnp.float32
    )  # [L, COLUMNS]
    best[0] = products.max(0, keepdims=True)
