"""BART (Lewis et al. 2020): the encoder-decoder of BARTScore, which measures WebQA's fluency.

Post-norm layers, learned positions, one embedding table for encoder, decoder and output. Original:
transformers models/bart/modeling_bart.py (BartForConditionalGeneration), named below where a
detail is its own. It scores given texts (`Bart.log_probs`); it does not generate.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.bart.config import BartConfig
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.config_checks import check_length
from mmqa_jax.models.common.encoder_decoder import EncoderDecoder
from mmqa_jax.models.common.layers import (
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    dropout,
    normal_init,
    param,
    scan_layers,
    split_key,
    stack_layers,
    zeros_init,
)

EPS = 1e-5  # of every LayerNorm; the published configs have no entry for it
POSITION_OFFSET = 2  # row of position 0: the first rows were fairseq's padding index and below


class BartLayer(nnx.Module):
    """Post-norm layer: x = LN(x + attention), in the decoder LN(x + cross), then LN(x + mlp)."""

    def __init__(self, config: BartConfig, heads: int, mlp: int, *, cross: bool, rngs: nnx.Rngs):
        init = normal_init(config.init_stddev)
        linear = functools.partial(Linear, rngs=rngs, kernel_init=init)
        norm = functools.partial(LayerNorm, config.hidden, EPS, rngs=rngs)
        attention = functools.partial(
            Attention,
            config.hidden,
            heads,
            rngs=rngs,
            kernel_init=init,
            dropout_rate=config.attention_dropout,
            implementation=config.attention,
        )
        self.attention = attention()
        self.attention_norm = norm()
        self.cross = attention() if cross else None
        self.cross_norm = norm() if cross else None
        self.up = linear(config.hidden, mlp, ("embed", "mlp"))
        self.down = linear(mlp, config.hidden, ("mlp", "embed"))
        self.mlp_norm = norm()
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        source: jax.Array | None = None,
        source_mask: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """One layer, causal in the decoder.

        Args:
          x: [B, L, H].
          mask: bool, broadcastable to [B, heads, L, L]; None masks nothing.
          source, source_mask: the encoded source [B, S, H], bool [B, 1, 1, S]; in the decoder.

        Returns:
          [B, L, H].
        """
        config = self.config
        keys = split_key(dropout_key, 6)
        causal = self.cross is not None
        y = self.attention(x, x, mask, is_causal=causal, dropout_key=keys[0])
        x = self.attention_norm(x + dropout(y, config.dropout, keys[1]))
        if self.cross is not None:
            y = self.cross(x, source, source_mask, dropout_key=keys[2])
            x = self.cross_norm(x + dropout(y, config.dropout, keys[3]))
        y = ACTIVATIONS[config.activation](self.up(x))  # [B, L, mlp]
        y = self.down(dropout(y, config.activation_dropout, keys[4]))
        return self.mlp_norm(x + dropout(y, config.dropout, keys[5]))


class BartStack(nnx.Module):
    """Encoder or decoder: positions, LayerNorm of the embeddings, layers."""

    def __init__(
        self, config: BartConfig, layers: int, heads: int, mlp: int, *, cross: bool, rngs: nnx.Rngs
    ):
        self.positions = Embedding(
            config.positions + POSITION_OFFSET,
            config.hidden,
            ("positions", "embed"),
            rngs=rngs,
            init=normal_init(config.init_stddev),
        )
        self.norm = LayerNorm(config.hidden, EPS, rngs=rngs)
        self.layers = stack_layers(
            lambda r: BartLayer(config, heads, mlp, cross=cross, rngs=r), layers, rngs
        )
        self.config = config

    def embed(self, embedded: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Word embeddings [B, L, H] with their positions -> [B, L, H] in the compute dtype."""
        length = embedded.shape[1]
        check_length(length, self.config.positions)
        x = embedded + self.positions(jnp.arange(length) + POSITION_OFFSET)
        return dropout(self.norm(x), self.config.dropout, dropout_key).astype(self.config.dtype)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        source: jax.Array | None = None,
        source_mask: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """All layers: [B, L, H] -> same; `mask` and the others as in BartLayer."""

        def body(layer: BartLayer, x, _, key):
            return layer(x, mask, source, source_mask, dropout_key=key), None

        return scan_layers(
            self.layers,
            x,
            body,
            dropout_key=dropout_key,
            remat=self.config.remat,
            unroll=self.config.unroll,
        )[0]


class Bart(EncoderDecoder):
    """Encoder, decoder and the output product with the embedding table."""

    def __init__(self, config: BartConfig, *, rngs: nnx.Rngs):
        self.tokens = Embedding(
            config.vocab_size,
            config.hidden,
            ("vocab", "embed"),
            rngs=rngs,
            init=normal_init(config.init_stddev),
        )
        self.encoder = BartStack(
            config,
            config.encoder_layers,
            config.encoder_heads,
            config.encoder_mlp,
            cross=False,
            rngs=rngs,
        )
        self.decoder = BartStack(
            config,
            config.decoder_layers,
            config.decoder_heads,
            config.decoder_mlp,
            cross=True,
            rngs=rngs,
        )
        self.final_logits_bias = param(rngs, zeros_init, (config.vocab_size,), ("vocab",))
        self.config = config

    def embed(self, ids: jax.Array) -> jax.Array:
        """int [B, L] -> token embeddings [B, L, H], scaled if the config says so."""
        embedded = self.tokens(ids)
        return embedded * self.config.hidden**0.5 if self.config.scale_embedding else embedded

    def encode(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoded source.

        input_ids int [B, S]; attention_mask [B, S], true (or 1) at real tokens; positions count
        from 0 in every row, padding included. Returns [B, S, H]; padding's rows mean nothing.
        """
        first, second = split_key(dropout_key, 2)
        x = self.encoder.embed(self.embed(input_ids), dropout_key=first)
        return self.encoder(x, _columns(attention_mask), dropout_key=second)

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
        first, second = split_key(dropout_key, 2)
        x = self.decoder.embed(self.embed(decoder_input_ids), dropout_key=first)
        mask = None if decoder_attention_mask is None else _columns(decoder_attention_mask)
        return self.decoder(x, mask, source, _columns(attention_mask), dropout_key=second)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Decoder states [..., H] -> token logits [..., V], float32."""
        weights = self.tokens.table[...].T.astype(hidden.dtype)
        logits = jnp.matmul(hidden, weights, preferred_element_type=jnp.float32)
        # A buffer in transformers, not trained.
        return logits + jax.lax.stop_gradient(self.final_logits_bias[...].astype(jnp.float32))

    def log_probs(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        target_ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """log p(target token | source, earlier target tokens), teacher forced.

        target_ids int [B, T], padded on the right with the pad id or -100; what stands there is
        the caller's to leave out. BARTScore (Yuan et al. 2021) is the mean over a row's real
        tokens, `<s>` and `</s>` among them. Returns [B, T] float32.
        """
        logits = self.target_logits(input_ids, attention_mask, target_ids, dropout_key=dropout_key)
        wanted = jnp.maximum(target_ids, 0)[..., None]  # -100 is no token
        picked = jnp.take_along_axis(logits, wanted, axis=-1)[..., 0]
        return picked - jax.nn.logsumexp(logits, axis=-1)


def _columns(mask: jax.Array) -> jax.Array:
    """[B, L] of visible columns -> bool [B, 1, 1, L]."""
    return mask.astype(bool)[:, None, None, :]
