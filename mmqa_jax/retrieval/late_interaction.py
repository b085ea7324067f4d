"""Late interaction in retrieval: rows of tokens, and fixed vectors that any index takes (MUVERA).

MUVERA (Dhulipala et al. 2024, "Multi-Vector Retrieval via Fixed Dimensional Encodings", section 2)
makes one vector of a text's many, whose product with that of a question is close to MaxSim. So the
indexes that are here find candidates, and MaxSim ranks them (indexes/max_sim.py), by the tokens'
vectors that `mmqa embed` stored (embeddings.py).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.mesh import fetch, split_over
from mmqa_jax.core.serving import AUTO, BatchSize, Serving, loading_mesh
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizers import Tokenizer, special_tokens, text_inputs
from mmqa_jax.models.common.array_layout import restacked
from mmqa_jax.models.encoders.late_interaction import (
    LateInteraction,
    TokenEncoder,
    TokenPooling,
    load_token_encoder,
    read_late_interaction,
)
from mmqa_jax.models.encoders.text_encoders import check_padding
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.two_towers.network import l2_normalize
from mmqa_jax.retrieval import embeddings
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embedder import Embedder, ReadPixels, batches_by_length
from mmqa_jax.retrieval.indexes.max_sim import MaxSimIndex, pack_queries
from mmqa_jax.retrieval.rankings import Asks
from mmqa_jax.retrieval.text_encoder import encoder_cost, length_buckets


class Side(NamedTuple):
    """How the texts of one side, questions or sources, become rows of tokens."""

    marker: tuple[int, ...]  # ids behind the tokenizer's first one
    prompt: str  # what stands before a text
    longest: int  # tokens of a row, special tokens included
    # The token and the length of expanded queries; None: rows are not expanded.
    filled: tuple[int, int] | None
    attended: bool  # whether tokens attend to those that fill a row
    skipped: np.ndarray  # ids that are not scored
    pooling: TokenPooling | None = None  # merges tokens that are alike; None: all are kept

    def pooled(self, vectors: Float32[np.ndarray, "T D"]) -> Float32[np.ndarray, "t D"]:
        """The vectors of a text's scored tokens, merged if the encoder merges them."""
        if self.pooling is None or not len(vectors):
            return vectors
        pooling = self.pooling
        vectors = embeddings.pool_tokens(
            vectors, pooling.factor, pooling.protected, pooling.normalized
        )
        if not pooling.normalized:
            return vectors
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def rows_of(
    tokens: Sequence[Sequence[int]], length: int, tokenizer: Tokenizer, side: Side
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, attended and scored columns, [B, length] each, of texts' tokens."""
    longest = min(length, side.longest)
    ids, mask, _ = text_inputs(tokens, longest, tokenizer)
    wider = ((0, 0), (0, length - longest))
    ids, mask = np.pad(ids, wider, constant_values=tokenizer.pad_id), np.pad(mask, wider)
    scored = mask.copy()
    if side.filled:
        token, least = side.filled
        fills = ~mask & (np.arange(length) < least)
        ids[fills] = token
        scored |= fills
        mask = mask | fills if side.attended else mask
    return ids, mask, scored & ~np.isin(ids, side.skipped)


def side_of(recipe: LateInteraction, tokenizer: Tokenizer, positions: int, name: str) -> Side:
    """The side "query" or "document" of an encoder that takes texts of up to `positions` tokens."""
    is_query = name == "query"
    prompt = recipe.prompts.question if is_query else recipe.prompts.source
    marker: tuple[int, ...] = ()
    if recipe.marked and prompt.split():
        for mark in (prompt, prompt.split(None, 1)[0]):
            if (known := tokenizer.token_id(mark)) is not None:
                marker, prompt = (known,), prompt[len(mark) :]
                break
    usual = recipe.max_tokens or tokenizer.max_tokens or positions
    longest = (recipe.query_length if is_query else recipe.document_length) or usual
    expansion = recipe.expansion if is_query else None
    filled = None
    if expansion is not None:
        token = tokenizer.mask_id if expansion.token is None else None
        if expansion.token is not None:
            token = tokenizer.token_id(expansion.token)
        if token is None:
            raise UserError(
                f"the tokenizer has no token {expansion.token or '[MASK]'} that expands queries; "
                "put the checkpoint's own tokenizer there."
            )
        longest = expansion.length if expansion.cuts else max(longest, expansion.length)
        filled = token, expansion.length
    skipped = [tokenizer.token_id(word) for word in recipe.skipped if name in recipe.skips]
    longest = min(longest, positions)
    ids = np.array([number for number in skipped if number is not None], np.int64)
    attended = expansion is not None and expansion.attended
    pooling = recipe.pooling if recipe.pooling and name in recipe.pooling.sides else None
    return Side(marker, prompt, longest, filled, attended, ids, pooling)


def encoded(
    texts: Sequence[str], side: Side, tokenizer: Tokenizer, serving: Serving
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Batches of texts of similar length: places in `texts`, and ids, attended and scored columns
    [B, L] each; rows behind the places are padding."""
    tokens = tokenizer.encode_batch([side.prompt + text for text in texts])
    tokens = [[*side.marker, *ids] for ids in tokens]
    least = side.filled[1] if side.filled else 0
    lengths = [max(len(ids) + special_tokens(tokenizer), least) for ids in tokens]
    buckets = length_buckets(side.longest, side.longest)
    for places, length, most in batches_by_length(lengths, buckets, serving):
        size = min(serving.size_for(len(places)), most)
        padded = [tokens[places[min(row, len(places) - 1)]] for row in range(size)]
        yield places, *rows_of(padded, max(length, least), tokenizer, side)


@dataclasses.dataclass(frozen=True)
class FixedVectors:
    """Sizes of MUVERA's vectors: repetitions * 2 ** planes * projected values."""

    repetitions: int = 20  # independent partitions of the space of tokens' vectors
    planes: int = 4  # random hyperplanes that cut it, in each of them
    projected: int = 16  # values of a token's vector after a projection by random signs
    seed: int = 0  # of all that is random

    @property
    def size(self) -> int:
        """The values of a vector."""
        return self.repetitions * (1 << self.planes) * self.projected

    def of(self, vectors: jax.Array, scored: jax.Array, is_question: bool) -> jax.Array:
        """Tokens' vectors float32 [B, L, D] and which are scored, bool [B, L] -> float32
        [B, values], of length 1.

        A cell holds the sum of a question's tokens in it, the mean of a source's; a source's empty
        cell its token of the nearest cell, by Hamming distance.
        """
        draws = np.random.default_rng(self.seed)
        size = (self.repetitions, vectors.shape[2])
        planes = draws.standard_normal((*size, self.planes)).astype(np.float32)
        signs = draws.choice([-1, 1], (*size, self.projected)).astype(np.float32)
        sides = jnp.einsum("bld,rdk->brlk", vectors, planes, precision="highest") > 0
        cell = (sides * (1 << np.arange(self.planes))).sum(-1)  # [B, R, L]
        projected = jnp.einsum("bld,rdp->brlp", vectors, signs, precision="highest")
        number = np.arange(1 << self.planes)
        inside = (cell[..., None] == number) & scored[:, None, :, None]  # [B, R, L, C]
        sums = jnp.einsum(
            "brlc,brlp->brcp", inside.astype(jnp.float32), projected, precision="highest"
        )
        if not is_question:
            count = inside.sum(2)[..., None]  # [B, R, C, 1]
            apart = jax.lax.population_count(cell[:, :, None] ^ number[:, None])  # [B, R, C, L]
            apart = jnp.where(scored[:, None, None], apart, self.planes + 1)
            nearest = jnp.take_along_axis(projected, apart.argmin(-1)[..., None], axis=2)
            sums = jnp.where(count > 0, sums / jnp.maximum(count, 1), nearest)
        return l2_normalize(sums.reshape(len(vectors), -1))


@functools.lru_cache(maxsize=8)  # encoders of one config share their programs
def make_encode_tokens(
    graphdef: nnx.GraphDef, fixed: FixedVectors, is_question: bool
) -> jax.stages.Wrapped:
    """The jitted encoder: (state, arguments of the model, scored [B, L]) -> fixed vectors
    [B, values], and the tokens' vectors [B, L, D]."""

    def encode(state: Any, inputs: Any, scored: jax.Array) -> tuple[jax.Array, jax.Array]:
        vectors = nnx.merge(graphdef, restacked(state))(*inputs)
        return fixed.of(vectors, scored, is_question), vectors

    return jax.jit(encode)


class TokenEmbedder(Embedder):
    """An Embedder by MUVERA's fixed vectors of an encoder with a vector for each token.

    Attributes:
      token_dim: values of a token's vector.
      mean: whether a score is divided by the number of the question's tokens.
    """

    mean = False

    def __init__(self, graphdef: Any, state: Any, tokenizer: Tokenizer, **options: Any):
        """As an Embedder's."""
        self._fixed = FixedVectors()
        self._programs = {
            name: make_encode_tokens(graphdef, self._fixed, name == "query") for name in _SIDES
        }
        super().__init__(graphdef, state, tokenizer, **options)

    def store_tokens(self, form: embeddings.TokenFormat) -> None:
        """Lets `embed_sources` store the vectors of tokens, too."""
        self._stored_tokens = form, self.token_dim

    def _dim(self, state: Any) -> int:
        ids = jax.ShapeDtypeStruct((1, self.buckets[0]), jnp.int32)
        mask = jax.ShapeDtypeStruct((1, self.buckets[0]), jnp.bool_)
        program = self._programs["document"]
        self.token_dim = jax.eval_shape(program, state, (ids, mask), mask)[1].shape[-1]
        return self._fixed.size

    def embed_questions(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None] | None = None
    ) -> Float32[np.ndarray, "n D"]:
        """See Embedder; pictures of questions are not read."""
        return self._embed(texts, "query")

    def embed_texts(self, texts: Sequence[str], prompt: str = "") -> Float32[np.ndarray, "n D"]:
        """Fixed vectors of sources; `prompt` is that of the encoder's folder in any case."""
        return self._embed(texts, "document")

    def embed_source_tokens(
        self, corpus: Corpus, pictures: PictureStore | None, rows: Sequence[int]
    ) -> list[Float32[np.ndarray, "tokens D"]]:
        """The vectors of the scored tokens of the sources in `rows`; `pictures`: see
        `embed_sources`."""
        tokens: list[np.ndarray] = [np.zeros((0, self.token_dim), np.float32)] * len(rows)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            inputs = self._inputs_of(corpus, pictures, rows, pool)
            for places, _, of_batch in self._encode_sources(*inputs):
                for place, vectors in zip(places, of_batch, strict=True):
                    tokens[place] = vectors
        return tokens

    def _embed(self, texts: Sequence[str], name: str) -> np.ndarray:
        check_several(texts, "Embedder.embed_texts")
        vectors = np.zeros((len(texts), self.dim), np.float32)
        encoded = (
            (places, self._call(self._programs[name], *self.serving.placement.put(batch))[0])
            for places, *batch in self._rows(texts, name)
        )
        self._collect(encoded, vectors, "texts")
        embeddings.check_finite(vectors, "embedder: the texts", embeddings.BROKEN)
        return vectors

    def _embed_rows(
        self, corpus: Corpus, pictures: Any, rows: Sequence[int], pool: concurrent.futures.Executor
    ) -> np.ndarray | embeddings.EmbeddedRows:
        form = None if self._stored_tokens is None else self._stored_tokens[0]
        vectors = np.zeros((len(rows), self.dim), np.float32)
        codes: list[np.ndarray] = [np.zeros(0)] * len(rows)
        for places, fixed, tokens in self._encode_sources(
            *self._inputs_of(corpus, pictures, rows, pool)
        ):
            vectors[places] = fixed
            if form is not None:
                merged = pool.map(
                    lambda vectors: embeddings.pool_tokens(vectors, form.pool), tokens
                )
                for place, of_source in zip(places, merged, strict=True):
                    codes[place] = form.encode(of_source)
        embeddings.check_finite(vectors, "embed: the sources", embeddings.BROKEN)
        if form is None:
            return vectors
        counts = np.array(list(map(len, codes)), np.int64)
        return embeddings.EmbeddedRows(vectors, np.concatenate(codes), counts)

    def _encode_sources(
        self, texts: Sequence[str], pictured: np.ndarray, read: ReadPixels
    ) -> Iterator[TokenBatch]:
        """What `encode_tokens` gives, of sources of which some are seen."""
        yield from self.encode_tokens(texts, "document")

    def encode_tokens(
        self,
        texts: Sequence[str],
        name: str,
        pictures: Sequence[np.ndarray | None] | None = None,
    ) -> Iterator[TokenBatch]:
        """Encodes texts of the side `name`, "query" or "document", or pictures in their place."""
        for places, inputs, scored in self._rows(texts, name, pictures):
            put = self.serving.placement.put((inputs, scored))
            fixed, tokens = map(fetch, self._call(self._programs[name], *put))
            scored = fetch(put[1])
            of_texts = [tokens[row][scored[row]] for row in range(len(places))]
            if (pooled := self._pooled(name)) is not None:
                of_texts = list(map(pooled, of_texts))
            yield TokenBatch(places, fixed[: len(places)], of_texts)

    def _pooled(self, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
        """Returns the function that merges the vectors of a text of the side `name`, or None."""
        return None

    def _rows(
        self,
        texts: Sequence[str],
        name: str,
        pictures: Sequence[np.ndarray | None] | None = None,
    ) -> Iterator[tuple[np.ndarray, tuple[Any, ...], np.ndarray]]:
        """Batches: places in `texts`, the model's arguments and the scored columns [B, L], of this
        process's rows."""
        raise NotImplementedError


class TokenBatch(NamedTuple):
    """A batch of encoded texts or pictures."""

    places: np.ndarray  # of its texts
    fixed: Float32[np.ndarray, "B values"]  # their fixed vectors
    tokens: list[Float32[np.ndarray, "tokens D"]]  # the vectors of each one's scored tokens


class LateInteractionEmbedder(TokenEmbedder):
    """A TokenEmbedder of ColBERT's kind; it takes texts alone."""

    def __init__(
        self,
        graphdef: Any,
        state: Any,
        tokenizer: Tokenizer,
        recipe: LateInteraction,
        positions: int,
        **options: Any,
    ):
        self._sides = {name: side_of(recipe, tokenizer, positions, name) for name in _SIDES}
        self.mean = recipe.mean
        described = f"{recipe} {FixedVectors()}"
        super().__init__(graphdef, state, tokenizer, image_size=0, recipe=described, **options)

    def _pooled(self, name):
        side = self._sides[name]
        return None if side.pooling is None else side.pooled

    def _rows(self, texts, name, pictures=None):
        batches = encoded(texts, self._sides[name], self.tokenizer, self.serving)
        for places, ids, mask, scored in batches:
            local_rows = self.serving.placement.rows(len(ids))
            yield places, (ids[local_rows], mask[local_rows]), scored[local_rows]


_SIDES = ("query", "document")


def open_token_encoder(
    folder: Path, mesh: Mapping[str, int] | None = None
) -> tuple[TokenEncoder, Tokenizer, LateInteraction]:
    """The encoder of a published folder, its tokenizer, and how texts are read."""
    recipe = read_late_interaction(folder)
    model = load_token_encoder(folder, recipe, loading_mesh(mesh))
    tokenizer = load_encoder_tokenizer(
        folder,
        model.config.vocab_size,
        lowercase=recipe.lowercase,
        pairs=not isinstance(model.config, LlamaConfig),
    )
    check_padding(folder, tokenizer.pad_id)
    return model, tokenizer, recipe


class MaxSimRetriever(DenseRetriever):
    """A DenseRetriever by a late-interaction encoder, over a MaxSimIndex."""

    def _vectors(self, texts: Sequence[str], pixels: Any) -> np.ndarray:
        fixed = np.zeros((len(texts), self.embedder.dim), np.float32)
        tokens: list[np.ndarray] = [np.zeros((0, self.embedder.token_dim), np.float32)] * len(texts)
        for places, of_batch, tokens_of_batch in self.embedder.encode_tokens(texts, "query"):
            fixed[places] = of_batch
            for place, of_query in zip(places, tokens_of_batch, strict=True):
                tokens[place] = of_query
        return pack_queries(fixed, tokens, self.embedder.mean)


def dense_retriever(
    corpus: Corpus, embedder: Embedder, index: Any, pictures: PictureStore, asks: Asks = "both"
) -> DenseRetriever:
    """The retriever of an embedder over an index of its vectors; MaxSim ranks what is found by
    those of a late-interaction encoder."""
    if not isinstance(embedder, TokenEmbedder):
        return DenseRetriever(corpus, embedder, index, pictures, asks)
    if not isinstance(index, MaxSimIndex):
        tokens = index.embeddings.tokens
        if tokens is None:
            encode = functools.partial(embedder.embed_source_tokens, corpus, pictures)
            tokens = embeddings.EncodedTokens(encode, embedder.token_dim)
        index = MaxSimIndex(index, tokens)
    return MaxSimRetriever(corpus, embedder, index, pictures, asks)


def load_late_interaction_embedder(
    folder: Path,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> LateInteractionEmbedder:
    """The embedder of a published late-interaction encoder's folder.

    Args:
      folder: of sentence-transformers, PyLate or Stanford's ColBERT.
      batch_size: texts per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    model, tokenizer, recipe = open_token_encoder(folder, mesh)
    devices = loading_mesh(mesh)
    return late_interaction_embedder(model, recipe, tokenizer, devices, batch_size=batch_size)


def late_interaction_embedder(
    model: TokenEncoder,
    recipe: LateInteraction,
    tokenizer: Tokenizer,
    devices: Mesh | None,
    **options: Any,
) -> LateInteractionEmbedder:
    """The embedder of an encoder with a vector for each token; `options`: of Embedder, such as
    `batch_size`."""
    positions = model.config.positions
    graphdef, state = split_over(model, devices)
    longest = side_of(recipe, tokenizer, positions, "document").longest
    return LateInteractionEmbedder(
        graphdef,
        state,
        tokenizer,
        recipe,
        positions,
        buckets=length_buckets(longest, positions),
        cost=encoder_cost(model.config, longest, "texts"),
        **options,
    )
