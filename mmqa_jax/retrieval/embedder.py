"""Embeds questions, and every source of a corpus, with a dual encoder."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float32, Int, Int32

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.mesh import fetch, platform
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import BatchSize, RowCost, Serving, serve, tower_bytes
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.documents.chunks import TokenLimit
from mmqa_jax.data.pictures.decode import Alpha
from mmqa_jax.data.pictures.resize import NaFlex, PictureShape, cut_patches
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Source, source_text
from mmqa_jax.data.tokenizers import Tokenizer, special_tokens
from mmqa_jax.models.common.array_layout import restacked, unstacked
from mmqa_jax.models.encoders.dual_encoder import DualEncoderConfig
from mmqa_jax.models.encoders.sentence_pooling import Prompts
from mmqa_jax.retrieval import embeddings
from mmqa_jax.retrieval.embeddings import TokenFormat

if TYPE_CHECKING:
    from mmqa_jax.models.bert.network import BertConfig
    from mmqa_jax.models.llama.config import LlamaConfig
    from mmqa_jax.models.modernbert.network import ModernBertConfig

    TextEncoderConfig = BertConfig | ModernBertConfig | LlamaConfig

ReadPixels = Callable[[Sequence[int]], list[np.ndarray | None]]

_SMALL_BATCH = 8  # a few questions (`mmqa ask`) should not cost a whole batch
_ON_CPU = 8  # texts of a call: of 128 tokens, more do not fit a CPU's caches
# Tokens of padding that are worth a program: a CPU embeds 4,000 tokens of MiniLM's a second and
# compiles a program in .9 seconds, or finds a kept one in .2.
_PROGRAM_ON_CPU, _PROGRAM = 1_024, 4_096
_MANY = 2_000  # texts or pictures, from which on their progress is shown
_NO_PROMPTS = Prompts()
FULL_LENGTH = 512  # tokens; of longer texts a batch has fewer
_ANY_COST = RowCost("texts", 64, 64, 1 << 24)  # of an encoder whose caller names a size
_IN_FLIGHT = 3  # batches that the device may lag behind the tokenizer and picture decoder


@functools.lru_cache(maxsize=8)  # encoders of one config share their programs
def make_encode_text(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted encoder of texts: (state, ids, mask) -> vectors [B, D]."""

    def encode(state: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, restacked(state)).encode_text(ids, mask)

    return jax.jit(encode)


@functools.lru_cache(maxsize=8)
def make_encode_image(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted encoder of pictures alone: (state, pixels) -> vectors [B, D]."""
    return jax.jit(lambda state, pixels: nnx.merge(graphdef, restacked(state)).encode_image(pixels))


@functools.lru_cache(maxsize=8)
def make_encode_source(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted encoder of sources: (state, ids, mask, pixels, has_image) -> vectors [B, D]."""

    def encode(
        state: Any, ids: jax.Array, mask: jax.Array, pixels: jax.Array, has_image: jax.Array
    ):
        return nnx.merge(graphdef, restacked(state)).encode_source(ids, mask, pixels, has_image)

    return jax.jit(encode)


class Embedder:
    """Holds the encoder's parameters and its jitted functions.

    Texts are padded to the smallest bucket that fits them and batches to a fixed size (beyond 512
    tokens to a smaller one), so that a model compiles once per bucket and kind of input. Texts
    longer than the longest bucket are truncated, as by CLIP's `tokenize(truncate=True)`.

    Args:
      graphdef, state: `nnx.split` of a dual encoder (models/encoders/dual_encoder.py), which takes
        pictures as uint8. The state may be abstract if `use` gives the parameters.
      tokenizer: of the texts, with the special tokens around one.
      image_size: side of the pictures in pixels; 0: it takes texts alone.
      buckets: lengths in tokens, including special tokens, increasing.
      batch_size: texts or pictures per call, over all devices, or `auto`.
      cost: of a source, for `auto`.
      text_of: the text of a source, as the encoder was trained on it.
      fingerprint: of the encoder; None: computed from all of the above when it is asked for.
      resize, alpha: how pictures are to be made ready for it, see data/pictures/decode.py.
      prompts: before the texts of questions and of sources.
      recipe: what else decides a vector and is no parameter (config, pooling), for the fingerprint.
      questions: what embeds the texts of questions, if they have parameters of their own.
    """

    def __init__(
        self,
        graphdef: Any,
        state: Any,
        tokenizer: Tokenizer,
        *,
        image_size: int,
        buckets: Sequence[int] = (16, 32, 64, 96),
        batch_size: BatchSize = 64,
        cost: RowCost = _ANY_COST,
        text_of: Callable[[Source], str] = source_text,
        fingerprint: str | None = None,
        resize: PictureShape = "crop",
        alpha: Alpha = "dropped",
        prompts: Prompts = _NO_PROMPTS,
        recipe: str = "",
        questions: Embedder | None = None,
    ):
        if not buckets or buckets[0] < 3 or sorted(set(buckets)) != list(buckets):
            raise UserError(
                f"embedder: buckets={tuple(buckets)} must increase and start at 3 or more."
            )
        self.tokenizer = tokenizer
        self.image_size, self.resize, self.alpha = image_size, resize, alpha
        self.buckets = tuple(buckets)
        self.prompts, self._questions = prompts, questions
        self._recipe = f"{recipe} {questions.fingerprint}" if questions else recipe
        self._given, self._cost = batch_size, cost
        self.text_of = text_of
        self._state = unstacked(state)
        self.serving = serve(batch_size, cost, state)  # its devices and batches
        self._graphdef = graphdef
        self._encode_text = make_encode_text(graphdef)
        self._encode_image = make_encode_image(graphdef)
        self._encode_source = make_encode_source(graphdef)
        self.dim = self._dim(state)
        self._fingerprint = fingerprint
        self._stored_tokens: tuple[TokenFormat, int] | None = None  # of late interaction

    def _dim(self, state: Any) -> int:
        """The values of a vector."""
        token = jax.ShapeDtypeStruct((1, self.buckets[0]), jnp.int32)
        mask = jax.ShapeDtypeStruct((1, self.buckets[0]), jnp.bool_)
        return jax.eval_shape(self._encode_text, state, token, mask).shape[-1]

    @property
    def fingerprint(self) -> str:
        """Hash of all that determines an embedding: parameters, tokenizer, sizes, prompts."""
        if self._fingerprint is None:
            self._fingerprint = self._hash()
        return self._fingerprint

    @property
    def token_limit(self) -> TokenLimit:
        """What it reads of a source's text."""
        around = special_tokens(self.tokenizer)
        prompt = self.prompts.source
        before = len(self.tokenizer.encode_batch([prompt])[0]) if prompt else 0
        return token_limit(self.tokenizer, self.buckets[-1] - around - before)

    def unscaled(self) -> Embedder:
        """Returns the dual encoder with vectors as its towers give them, of any length.

        Of questions (without pictures), texts and pictures; sources keep their unit vectors.
        """
        graphdef, other = self._graphdef, copy.copy(self)
        other._encode_text = jax.jit(
            lambda state, ids, mask: nnx.merge(graphdef, restacked(state)).text_features(ids, mask)
        )
        other._encode_image = jax.jit(
            lambda state, pixels: nnx.merge(graphdef, restacked(state)).image_features(pixels)
        )
        other._fingerprint = f"unscaled {self.fingerprint}"
        return other

    def use(self, model: nnx.Module) -> None:
        """Continues with the parameters of another model of the same config; compiles nothing."""
        _, state = nnx.split(model)
        self._state = unstacked(state)
        self.serving = serve(self._given, self._cost, state, beside_training=True)
        self._fingerprint = None

    def embed_questions(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None] | None = None
    ) -> Float32[np.ndarray, "n D"]:
        """Unit vectors of n questions.

        Args:
          texts: the questions.
          pictures: uint8[S, S, 3] (of any shape for NaFlex) or None per question. A question with
            a picture is the mean of both embeddings, scaled back to length 1.

        Raises:
          TypeError: one text in place of several.
        """
        pictures = one_picture_each(texts, pictures)
        vectors = (self._questions or self).embed_texts(texts, self.prompts.question)
        pictured = np.array([i for i, picture in enumerate(pictures) if picture is not None], int)
        if len(pictured):
            both = vectors[pictured] + self.embed_pictures([pictures[i] for i in pictured])
            length = np.linalg.norm(both, axis=1, keepdims=True)
            vectors[pictured] = both / np.maximum(length, 1e-12)
        return vectors

    def embed_passages(self, texts: Sequence[str]) -> Float32[np.ndarray, "n D"]:
        """Unit vectors of the texts of sources, as those of snippets in `embed_sources`."""
        return self.embed_texts(texts, self.prompts.source)

    def embed_texts(self, texts: Sequence[str], prompt: str = "") -> Float32[np.ndarray, "n D"]:
        """Unit vectors of texts with `prompt` before each.

        Raises:
          TypeError: one text in place of several.
        """
        check_several(texts, "Embedder.embed_texts")
        vectors = np.zeros((len(texts), self.dim), np.float32)
        encoded = (
            (indices, self._call(self._encode_text, *self._put(ids, mask)))
            for indices, ids, mask in self._text_batches(texts, prompt)
        )
        self._collect(encoded, vectors, "texts")
        embeddings.check_finite(vectors, "embedder: the texts", embeddings.BROKEN)
        return vectors

    def embed_pictures(self, pictures: Sequence[np.ndarray]) -> Float32[np.ndarray, "n D"]:
        """Unit vectors of pictures, uint8[S, S, 3] each."""
        vectors = np.zeros((len(pictures), self.dim), np.float32)
        self._collect(self._picture_batches(pictures), vectors, "pictures")
        embeddings.check_finite(vectors, "embedder: the pictures", embeddings.BROKEN)
        return vectors

    def embed_sources(
        self,
        corpus: Corpus,
        pictures: PictureStore | None,
        out: str | os.PathLike,
        *,
        shard_rows: int = 4096,
        part: tuple[int, int] | None = None,
        overwrite: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> embeddings.Embeddings | None:
        """Embeds every source into folder `out` (see retrieval/embeddings.py), resumable.

        A snippet is embedded from its text, a picture from its caption and pixels. A picture that
        cannot be decoded is embedded from its caption alone (the store counts it).

        Args:
          pictures: pixels by row; None, or an encoder of texts alone: pictures are embedded from
            their captions.
          part: (i, n): this process is the i-th of n that share the job; by default, JAX's process
            index and count.

        Returns:
          The embeddings; None while other processes still have shards to write.
        """
        if self.image_size and pictures is not None and pictures.size != self.image_size:
            raise UserError(
                f"embedder: the pictures are {pictures.size} pixels wide, the encoder takes "
                f"{self.image_size}; set the same size for both."
            )
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return embeddings.write_embeddings(
                out,
                lambda rows: self._embed_rows(corpus, pictures, rows, pool),
                rows=len(corpus.sources),
                dim=self.dim,
                model_fingerprint=self.fingerprint,
                corpus_fingerprint=corpus.fingerprint,
                tokens=self._stored_tokens,
                shard_rows=shard_rows,
                part=part or (jax.process_index(), jax.process_count()),
                overwrite=overwrite,
                on_progress=on_progress,
            )

    def embed_rows(
        self, corpus: Corpus, pictures: PictureStore | None, rows: Sequence[int]
    ) -> Float32[np.ndarray, "n D"]:
        """Unit vectors of the sources in these rows, as `embed_sources` computes them."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return self._embed_rows(corpus, pictures, rows, pool)

    def _embed_rows(
        self,
        corpus: Corpus,
        pictures: PictureStore | None,
        rows: Sequence[int],
        pool: concurrent.futures.Executor,
    ) -> Float32[np.ndarray, "n D"]:
        texts, pictured, read = self._inputs_of(corpus, pictures, rows, pool)
        vectors = np.zeros((len(rows), self.dim), np.float32)
        self._collect(self._source_batches(texts, pictured, read), vectors)
        if len(bad := embeddings.not_finite(vectors)):
            first = rows[bad[0]]
            raise UserError(
                f"embed: the vectors of {len(bad)} of {len(vectors)} sources are not finite, the "
                f"first is that of source {corpus.sources[first].id!r} (row {first}); "
                f"{embeddings.BROKEN}."
            )
        return vectors

    def _inputs_of(
        self,
        corpus: Corpus,
        pictures: PictureStore | None,
        rows: Sequence[int],
        pool: concurrent.futures.Executor,
    ) -> tuple[list[str], Bool[np.ndarray, " n"], ReadPixels]:
        """Texts of the sources in `rows`, which of them are embedded with their pixels, and what
        reads these by place in `rows`."""
        sources = [corpus.sources[row] for row in rows]
        sees = pictures is not None and self.image_size > 0
        pictured = np.array([sees and source.modality == "image" for source in sources])

        def read(indices: Sequence[int]) -> list[np.ndarray | None]:
            return list(pool.map(pictures.pixels, [rows[i] for i in indices]))

        return [self.text_of(source) for source in sources], pictured, read

    def _source_batches(
        self,
        texts: Sequence[str],
        pictured: Bool[np.ndarray, " n"],
        read: ReadPixels,
    ) -> Iterator[tuple[np.ndarray, jax.Array]]:
        """Encoded batches of sources, with their places in `texts`.

        `read` gives the pixels of those in some places that are `pictured`, None for a broken one.
        """
        snippets, captions = np.flatnonzero(~pictured), np.flatnonzero(pictured)
        prompt = self.prompts.source
        for indices, ids, mask in self._text_batches([texts[i] for i in snippets], prompt):
            yield snippets[indices], self._call(self._encode_text, *self._put(ids, mask))
        for indices, ids, mask in self._text_batches([texts[i] for i in captions], prompt):
            local_rows = self.serving.placement.rows(len(ids))
            decoded = read([captions[indices[n]] for n in local_rows if n < len(indices)])
            pixels, has_image = self._stack(decoded, len(local_rows))
            batch = (ids[local_rows], mask[local_rows], pixels, has_image)
            batch = self.serving.placement.put(batch)
            yield captions[indices], self._call(self._encode_source, *batch)

    def _text_batches(
        self, texts: Sequence[str], prompt: str
    ) -> Iterator[tuple[np.ndarray, Int32[np.ndarray, "B L"], Bool[np.ndarray, "B L"]]]:
        """Batches of texts of similar length: (indices into `texts`, ids, attention mask)."""
        before, after = self.tokenizer.before, self.tokenizer.after
        longest = self.buckets[-1] - len(before) - len(after)
        whole = self.tokenizer.encode_batch([prompt + text for text in texts])
        tokens = [[*before, *ids[:longest], *after] for ids in whole]
        empty = [*before, *after] or [self.tokenizer.pad_id]
        batches = batches_by_length([len(ids) for ids in tokens], self.buckets, self.serving)
        for indices, length, most in batches:
            size = min(self._padded_size(len(indices)), most)
            if len(texts) == 1 and platform() == "cpu":  # others compute a few rows as fast
                size = self.serving.placement.padded(1)
            ids = np.full((size, length), self.tokenizer.pad_id, np.int32)
            ids[:, : len(empty)] = empty  # padding rows too: no empty softmax
            lengths = np.full(size, len(empty))
            for i, index in enumerate(indices):
                text_tokens = tokens[index] or empty
                ids[i, : len(text_tokens)], lengths[i] = text_tokens, len(text_tokens)
            yield indices, ids, np.arange(length) < lengths[:, None]

    def _picture_batches(
        self, pictures: Sequence[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, jax.Array]]:
        for start in range(0, len(pictures), self.serving.batch_size):
            indices = np.arange(start, min(start + self.serving.batch_size, len(pictures)))
            size = self._padded_size(len(indices))
            local_rows = self.serving.placement.rows(size)
            chosen = [pictures[indices[n]] for n in local_rows if n < len(indices)]
            pixels, _ = self._stack(chosen, len(local_rows))
            yield indices, self._call(self._encode_image, self.serving.placement.put(pixels))

    def _padded_size(self, count: int) -> int:
        small = self.serving.placement.padded(_SMALL_BATCH)
        if count <= _SMALL_BATCH < self.serving.batch_size:
            return small
        return self.serving.size_for(count)

    def _stack(
        self, pictures: Sequence[np.ndarray | None], size: int
    ) -> tuple[Any, Bool[np.ndarray, " B"]]:
        """uint8[B, S, S, 3], zeros where there is no picture, and which rows have one.

        For NaFlex uint8[B, P, patch * patch * 3] and int32[B, 2] in place of the former.
        """
        if isinstance(self.resize, NaFlex):
            return stack_patches(pictures, size, self.resize)
        side = self.image_size
        pixels = np.zeros((size, side, side, 3), np.uint8)
        has_image = np.zeros(size, bool)
        for i, picture in enumerate(pictures):
            if picture is None:
                continue
            if picture.shape != (side, side, 3) or picture.dtype != np.uint8:
                raise UserError(
                    f"embedder: a picture is {picture.dtype}{list(picture.shape)}, "
                    f"uint8[{side}, {side}, 3] was expected; resize it first."
                )
            pixels[i], has_image[i] = picture, True
        return pixels, has_image

    def _put(self, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
        """The whole batch's arrays [B, ...] on the devices."""
        local_rows = self.serving.placement.rows(len(arrays[0]))
        return self.serving.placement.put(tuple(array[local_rows] for array in arrays))

    def _call(self, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        return self.serving.placement.call(function, self._state, *arrays)

    @staticmethod
    def _collect(
        encoded: Iterator[tuple[np.ndarray, jax.Array]],
        vectors: np.ndarray,
        unit: str | None = None,
    ) -> None:
        """Writes encoded batches into `vectors`, a few batches behind the device.

        unit: what is encoded; the progress of many is shown.
        """
        waiting: collections.deque[tuple[np.ndarray, jax.Array]] = collections.deque()
        is_long = unit is not None and len(vectors) >= _MANY

        with Progress(
            f"Embedding {unit}", len(vectors), unit or "", quiet=None if is_long else True
        ) as progress:

            def write() -> None:
                indices, batch = waiting.popleft()
                vectors[indices] = fetch(batch)[: len(indices)]
                progress.advance(len(indices))

            for item in encoded:
                waiting.append(item)
                if len(waiting) > _IN_FLIGHT:
                    write()
            while waiting:
                write()

    def _hash(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.tokenizer.fingerprint} {self.image_size} {self.buckets[-1]}".encode())
        if self.prompts != _NO_PROMPTS or self._recipe:
            digest.update(f"{self.prompts} {self._recipe}".encode())
        for name, leaf in sorted(flatten_named(restacked(self._state)).items()):
            array = np.asarray(jax.device_get(leaf))
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def token_limit(tokenizer: Tokenizer, most: int) -> TokenLimit:
    """Describes an encoder that reads so many tokens of a text."""

    def count(texts: Sequence[str]) -> list[int]:
        return list(map(len, tokenizer.encode_batch(texts)))

    return TokenLimit(most, tokenizer.fingerprint, count)


def one_picture_each(
    texts: Sequence[str], pictures: Sequence[np.ndarray | None] | None
) -> list[np.ndarray | None]:
    """The pictures of questions, None where there is none; errors as of `embed_questions`."""
    check_several(texts, "Embedder.embed_questions")
    if pictures is None:
        return [None] * len(texts)
    if len(pictures) != len(texts):
        raise UserError(f"embedder: {len(texts)} questions but {len(pictures)} pictures.")
    return list(pictures)


def stack_patches(
    pictures: Sequence[np.ndarray | None], size: int, naflex: NaFlex
) -> tuple[tuple[np.ndarray, np.ndarray], Bool[np.ndarray, " B"]]:
    """Pictures of any shape as one batch for NaFlex, and which of its `size` rows have one.

    The batch is uint8[B, most, patch * patch * 3] and int32[B, 2], rows and columns of patches. A
    row without a picture has one patch: no empty softmax.
    """
    patches = np.zeros((size, naflex.most, naflex.patch**2 * 3), np.uint8)
    shapes, has_image = np.ones((size, 2), np.int32), np.zeros(size, bool)
    for i, picture in enumerate(pictures):
        if picture is not None:
            cut = cut_patches(picture, naflex.patch)
            patches[i, : len(cut)], has_image[i] = cut, True
            shapes[i] = [side // naflex.patch for side in picture.shape[:2]]
    return (patches, shapes), has_image


# What an example costs an encoder's program, for `auto` batch sizes.
#
# Activations are estimated from the sizes of one layer: the scores of its attention (float32, and
# once more as weights) and what is live beside its MLP, without the fusions of a compiler. Compiled
# for a v5e the programs of configs/webqa use 0.7 to 0.9 of that (`mmqa plan`,
# memory_gib.temporaries over the examples).


def rows_of_length(serving: Serving, length: int) -> int:
    """Texts of `length` tokens in a call: attention's scores are quadratic in it."""
    share = min(1.0, (FULL_LENGTH / length) ** 2)
    size = serving.batch_size
    return size if share == 1 else serving.placement.padded(max(1, int(size * share)))


def batches_by_length(
    lengths: Sequence[int], buckets: Sequence[int], serving: Serving
) -> list[tuple[Int[np.ndarray, " rows"], int, int]]:
    """Cuts texts, the longest first, into batches that are full but for the last one.

    Args:
      lengths: of the texts in tokens; what is longer than the longest bucket is cut by the caller.
      buckets: lengths to which texts are padded, increasing.
      serving: says how many texts a batch has (`rows_of_length`).

    Returns:
      Of every batch its places in `lengths`, the bucket of its longest text, and the most rows that
      a batch of that bucket has.
    """
    cut = np.minimum(np.asarray(lengths, int), buckets[-1])
    bucket = np.searchsorted(buckets, cut)
    worth = _PROGRAM_ON_CPU if platform() == "cpu" else _PROGRAM
    for number, longer in enumerate(buckets[1:]):
        few = np.flatnonzero(bucket == number)
        if (longer - cut[few]).sum() < worth and (bucket > number).any():
            bucket[few] += 1  # a program more would take longer than the padding
    order = np.argsort(-cut, kind="stable")
    batches, start = [], 0
    while start < len(order):
        length = buckets[bucket[order[start]]]
        most = rows_of_length(serving, length)
        batches.append((order[start : start + most], length, most))
        start += most
    return batches


def dual_encoder_cost(model: DualEncoderConfig, length: int) -> RowCost:
    """Sources with a picture and a text of `length` tokens; the towers run one after the other."""
    pixels = model.vision.image_size**2 * 3 * 5.0  # bytes, and floats
    picture_bytes = tower_bytes(model.vision, model.vision.patches + 1)
    return RowCost("sources", 64, 256, max(picture_bytes, tower_bytes(model.text, length)) + pixels)


def text_cost(model: TextEncoderConfig, length: int) -> RowCost:
    """Texts of `length` tokens."""
    return RowCost("texts", _ON_CPU, 512, tower_bytes(model, length))
