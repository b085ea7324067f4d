"""T5 (Raffel et al. 2020), T5 1.1, Flan-T5 and mT5: the encoder-decoder of UnifiedQA, KAT, MM-CoT.

Pre-norm layers without biases, relative positions in place of embedded ones (one table for all
layers of a stack, none between the stacks but in the oldest), attention scores that are not scaled.
Original: transformers models/t5/modeling_t5.py (T5ForConditionalGeneration). Generation is in
`decoding.t5_engine`.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.models.common import encoder_decoder
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.layers import (
    Embedding,
    Linear,
    dropout,
    keep,
    merge_heads,
    normal_init,
    product,
    scan_layers,
    split_heads,
    split_key,
    stack_layers,
    torch_linear,
    uniform_init,
    word_head,
)
from mmqa_jax.models.llama.norms import RMSNorm
from mmqa_jax.models.t5.config import MultimodalT5Config, T5Config


class T5Attention(nnx.Module):
    """Multi-head attention without biases or scale."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        size, width, factor = config.hidden, config.heads * config.head_size, config.init_factor
        linear = functools.partial(Linear, rngs=rngs, use_bias=False)
        into, of_query = (normal_init(factor * n**-0.5) for n in (size, size * config.head_size))
        self.query = linear(size, width, ("embed", "heads"), kernel_init=of_query)
        self.key = linear(size, width, ("embed", "heads"), kernel_init=into)
        self.value = linear(size, width, ("embed", "heads"), kernel_init=into)
        out = normal_init(factor * width**-0.5)
        self.out = linear(width, size, ("heads", "embed"), kernel_init=out)
        self.config = config

    def queries(self, x: jax.Array) -> jax.Array:
        """x [B, L, H] -> [B, L, heads, D]."""
        return split_heads(self.query(x), self.config.heads)

    def keys_values(self, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        """context [B, L, H] -> keys and values [B, L, heads, D]."""
        heads = self.config.heads
        return split_heads(self.key(context), heads), split_heads(self.value(context), heads)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        bias: jax.Array | None,
        mask: jax.Array | None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The output [B, Lq, H]; arguments as of `biased_attention`."""
        attended = encoder_decoder.biased_attention(
            q,
            k,
            v,
            bias,
            scale=1,
            mask=mask,
            dropout_rate=self.config.dropout,
            dropout_key=dropout_key,
        )
        return self.out(keep(merge_heads(attended)))


class T5Layer(nnx.Module):
    """x + attention(norm(x)), in the decoder + cross(norm(x), source), then + mlp(norm(x))."""

    def __init__(self, config: T5Config, *, cross: bool, rngs: nnx.Rngs):
        size, mlp, factor = config.hidden, config.mlp, config.init_factor
        norm = functools.partial(RMSNorm, size, config.eps, rngs=rngs)
        linear = functools.partial(Linear, rngs=rngs, use_bias=False)
        into = functools.partial(
            linear, size, mlp, ("embed", "mlp"), kernel_init=normal_init(factor * size**-0.5)
        )
        self.attention_norm = norm()
        self.attention = T5Attention(config, rngs=rngs)
        self.cross_norm = norm() if cross else None
        # Attention over the source, of a decoder's layer; None in the encoder.
        self.cross = T5Attention(config, rngs=rngs) if cross else None
        self.mlp_norm = norm()
        self.gate = into() if config.gated else None
        self.up = into()
        out = normal_init(factor * mlp**-0.5)
        self.down = linear(mlp, size, ("mlp", "embed"), kernel_init=out)
        self.config = config

    def feed_forward(self, x: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """The MLP with its norm, without what it is added to: [B, L, H] -> same."""
        y, activate = self.mlp_norm(x), ACTIVATIONS[self.config.activation]
        y = activate(self.up(y)) if self.gate is None else activate(self.gate(y)) * self.up(y)
        return self.down(dropout(y, self.config.dropout, dropout_key))

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        mask: jax.Array | None,
        source: jax.Array | None = None,
        source_mask: jax.Array | None = None,
        source_bias: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """One layer over whole sequences.

        Args:
          x: [B, L, H].
          bias: of relative positions, float32 [1, heads, L, L].
          mask: bool, broadcastable to [B, heads, L, L]: causal in the decoder; None masks nothing.
          source, source_mask: the encoded source [B, S, H], bool [B, 1, 1, S]; in the decoder.
          source_bias: see T5Stack.source_bias.

        Returns:
          [B, L, H].
        """
        rate, keys = self.config.dropout, split_key(dropout_key, 6)
        y = self.attention_norm(x)
        y = self.attention.attend(
            self.attention.queries(y), *self.attention.keys_values(y), bias, mask, keys[0]
        )
        x = x + dropout(y, rate, keys[1])
        if self.cross is not None:
            q = self.cross.queries(self.cross_norm(x))
            of_source = self.cross.keys_values(source)
            y = self.cross.attend(q, *of_source, source_bias, source_mask, keys[2])
            x = x + dropout(y, rate, keys[3])
        return x + dropout(self.feed_forward(x, keys[4]), rate, keys[5])


class T5Stack(nnx.Module):
    """Encoder or decoder: the table of relative positions, layers, the last norm."""

    def __init__(self, config: T5Config, layers: int, *, causal: bool, rngs: nnx.Rngs):
        init = normal_init(config.init_factor * config.hidden**-0.5)
        self.relative = Embedding(
            config.buckets, config.heads, (None, "heads"), rngs=rngs, init=init
        )
        self.between = (
            Embedding(config.buckets, config.heads, (None, "heads"), rngs=rngs, init=init)
            if causal and config.between
            else None
        )
        self.layers = stack_layers(lambda r: T5Layer(config, cross=causal, rngs=r), layers, rngs)
        self.norm = RMSNorm(config.hidden, config.eps, rngs=rngs)
        self.config, self.causal, self.depth = config, causal, layers

    def bias(self, length: int) -> jax.Array:
        """What scores get by relative positions, float32 [1, heads, length, length]."""
        config = self.config
        sizes = {"buckets": config.buckets, "farthest": config.farthest}
        buckets = encoder_decoder.pair_buckets(length, bidirectional=not self.causal, **sizes)
        return bias_of(self.relative, buckets)

    def source_bias(self, queries: np.ndarray, length: int) -> jax.Array | None:
        """What scores of the source get by relative positions, float32 [1, heads, n, length].

        queries: int [n], positions of decoder tokens. None for a model without `between`.
        """
        if self.between is None:
            return None
        return bias_of(self.between, self.source_buckets(queries, length))

    def source_buckets(self, queries: np.ndarray, length: int) -> np.ndarray:
        """The bucket of every decoder position with every source position, int32 [n, length]."""
        config, back = self.config, queries[:, None] - np.arange(length)
        sizes = {"buckets": config.buckets, "farthest": config.farthest}
        return encoder_decoder.relative_buckets(back, bidirectional=False, **sizes)

    def seen(self, mask: jax.Array | None, length: int) -> jax.Array | None:
        """Which keys queries see, bool [B or 1, 1, L or 1, L], by the mask [B, L] of real ones."""
        columns = None if mask is None else mask.astype(bool)[:, None, None, :]
        if not self.causal:
            return columns
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
        return causal if columns is None else causal & columns

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        source: jax.Array | None = None,
        source_mask: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Embedded tokens [B, L, H] -> normed states of the last layer; see T5.encode, .decode."""
        first, second, third = split_key(dropout_key, 3)
        length, rate = x.shape[1], self.config.dropout
        bias, seen = self.bias(length), self.seen(mask, length)
        columns = None if source_mask is None else source_mask.astype(bool)[:, None, None, :]
        between = None if source is None else self.source_bias(np.arange(length), source.shape[1])

        def body(layer: T5Layer, x, _, key):
            return layer(x, bias, seen, source, columns, between, dropout_key=key), None

        x = scan_layers(
            self.layers,
            dropout(x, rate, first),
            body,
            dropout_key=second,
            remat=self.config.remat,
            unroll=self.config.unroll,
        )[0]
        return dropout(self.norm(x), rate, third)

    def each_layer(self) -> Iterator[T5Layer]:
        """The layers one by one."""
        graphdef, params = nnx.split(self.layers)
        for number in range(self.depth):
            yield nnx.merge(graphdef, jax.tree.map(lambda p, n=number: p[n], params))


def bias_of(table: Embedding, buckets: jax.Array | np.ndarray) -> jax.Array:
    """The values of buckets [n, length] in a table: float32 [1, heads, n, length]."""
    return table(jnp.asarray(buckets)).astype(jnp.float32).transpose(2, 0, 1)[None]


class T5(encoder_decoder.EncoderDecoder):
    """Encoder, decoder and the output head."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        init = normal_init(config.init_factor)
        self.tokens = Embedding(
            config.vocab_size, config.hidden, ("vocab", "embed"), rngs=rngs, init=init
        )
        self.encoder = T5Stack(config, config.encoder_layers, causal=False, rngs=rngs)
        self.decoder = T5Stack(config, config.decoder_layers, causal=True, rngs=rngs)
        self.head = word_head(config, init, rngs)
        self.config = config

    def embed(self, ids: jax.Array) -> jax.Array:
        """int [B, L] -> token embeddings [B, L, H] in the compute dtype."""
        return self.tokens(ids).astype(self.config.dtype)

    def encode(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoded source.

        input_ids int [B, S]; attention_mask [B, S], true (or 1) at real tokens. Returns [B, S, H];
        padding's rows mean nothing.
        """
        return self.encoder(self.embed(input_ids), attention_mask, dropout_key=dropout_key)

    def decode(
        self,
        decoder_input_ids: jax.Array,
        source: jax.Array,
        attention_mask: jax.Array,
        decoder_attention_mask: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Decoder states of given tokens.

        decoder_input_ids int [B, T]; source [B, S, H] from `encode`, attention_mask [B, S] of it;
        decoder_attention_mask [B, T], needed only for padding on the left, since a token never
        sees what follows it. Returns [B, T, H].
        """
        return self.decoder(
            self.embed(decoder_input_ids),
            decoder_attention_mask,
            source,
            attention_mask,
            dropout_key,
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Decoder states [..., H] -> token logits [..., V], float32."""
        if self.config.scaled:
            hidden = hidden * self.config.hidden**-0.5
        tied = self.head is None
        weights = self.tokens.table[...] if tied else self.head.kernel[...]  # [V, H] or [H, V]
        return product(hidden, weights.astype(hidden.dtype), int(tied), jnp.float32)


# Multimodal-CoT's T5 (Zhang et al., 2023): a picture's features are fused into the encoded text.
#
# Original: amazon-science/mm-cot model.py (JointEncoder, T5ForMultimodalGeneration).


class PictureFusion(nnx.Module):
    """(1 - gate) * text + gate * picture, where each token attends over the picture's vectors."""

    def __init__(self, config: MultimodalT5Config, *, rngs: nnx.Rngs):
        size = config.hidden
        self.picture = torch_linear(config.features, size, (None, "embed"), rngs=rngs)
        # Queries of the text, keys and values of the picture, in this order. Both start as those of
        # torch's MultiheadAttention, whose biases are 0.
        xavier, uniform = jax.nn.initializers.xavier_uniform(), uniform_init(size**-0.5)
        self.attention = Linear(size, 3 * size, ("embed", None), rngs=rngs, kernel_init=xavier)
        self.out = Linear(size, size, (None, "embed"), rngs=rngs, kernel_init=uniform)
        self.gate = torch_linear(2 * size, size, (None, "embed"), rngs=rngs)

    def __call__(self, text: jax.Array, features: jax.Array) -> jax.Array:
        """text [B, L, H], features [B, P, D] -> [B, L, H]."""
        picture = self.picture(features.astype(text.dtype))
        queries = jnp.split(self.attention(text), 3, axis=-1)[0]
        _, keys, values = jnp.split(self.attention(picture), 3, axis=-1)
        seen = jax.nn.dot_product_attention(  # one head
            queries[:, :, None], keys[:, :, None], values[:, :, None]
        )[:, :, 0]
        seen = self.out(seen)
        gate = jax.nn.sigmoid(self.gate(jnp.concatenate([text, seen], axis=-1)))
        return (1 - gate) * text + gate * seen


class MultimodalT5(T5):
    """A T5 whose encoder sees a picture."""

    def __init__(self, config: MultimodalT5Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.fusion = PictureFusion(config, rngs=rngs)

    def encode_pictured(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        features: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoded source, with what each token draws from its picture.

        input_ids, attention_mask [B, S] as of `encode`; features [B, P, D], zeros where there is
        no picture. Returns [B, S, H].
        """
        text = self.encode(input_ids, attention_mask, dropout_key=dropout_key)
        return self.fusion(text, features)


# What a T5's encoder is given, and what the decoder then reads of it.
#
# `Texts` is T5 as published. `Passages` is Fusion-in-Decoder (Izacard and Grave, EACL 2021;
# original: facebookresearch/FiD src/model.py, EncoderWrapper): each passage is encoded by itself,
# and the decoder reads all of them behind each other. `PicturedTexts` is for models that fuse a
# picture's features into the encoded text (`models.t5.network`).


class Encoded(NamedTuple):
    """An encoded batch."""

    states: jax.Array  # [B, S, H]
    mask: jax.Array  # bool [B, S], true at real tokens


@flax.struct.dataclass
class Texts:
    """A text for each row."""

    input_ids: jax.Array  # int [B, L], padded on the right
    lengths: jax.Array  # int [B], tokens of each

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Self:
        """Takes the inputs of a training batch, whose lengths are `prompt_lengths`."""
        return cls(batch["input_ids"], batch["prompt_lengths"])

    @property
    def mask(self) -> jax.Array:
        """True at real tokens, of the shape of `input_ids`."""
        return jnp.arange(self.input_ids.shape[-1]) < self.lengths[..., None]

    def encode(self, model: T5, dropout_key: jax.Array | None = None) -> Encoded:
        """What the decoder reads."""
        states = model.encode(self.input_ids, self.mask, dropout_key=dropout_key)
        return Encoded(states, self.mask)


@flax.struct.dataclass
class Passages(Texts):
    """N passages for each row, read at once; those of length 0 are not there.

    Attributes:
      input_ids: int [B, N, L], padded on the right.
      lengths: int [B, N], tokens of each.
    """

    def encode(self, model: T5, dropout_key: jax.Array | None = None) -> Encoded:
        """Each passage by itself, then all of a row behind each other: S = N * L."""
        rows, mask = self.input_ids.shape[0], self.mask
        length = self.input_ids.shape[-1]
        apart = self.input_ids.reshape(-1, length), mask.reshape(-1, length)
        states = model.encode(*apart, dropout_key=dropout_key)
        return Encoded(states.reshape(rows, -1, states.shape[-1]), mask.reshape(rows, -1))


@flax.struct.dataclass
class PicturedTexts(Texts):
    """A text and a picture's features for each row; of a MultimodalT5."""

    features: jax.Array  # float [B, P, D], P vectors of a picture

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Self:
        """Takes the inputs of a training batch."""
        return cls(batch["input_ids"], batch["prompt_lengths"], batch["features"])

    def encode(self, model: MultimodalT5, dropout_key: jax.Array | None = None) -> Encoded:
        """The text with what it draws from the picture."""
        states = model.encode_pictured(
            self.input_ids, self.mask, self.features, dropout_key=dropout_key
        )
        return Encoded(states, self.mask)
