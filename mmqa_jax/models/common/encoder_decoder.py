"""What encoder-decoders (BART, T5) share: logits of given targets, by teacher forcing."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common.layers import split_key


def shift_tokens_right(target_ids: jax.Array, pad: int, start: int) -> jax.Array:
    """Decoder inputs for targets int [B, T]: `start`, then all but the last; -100 becomes `pad`."""
    shifted = jnp.pad(target_ids[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    return jnp.where(shifted == -100, pad, shifted)


class EncoderDecoder(nnx.Module):
    """An encoder, a decoder that reads what it gives, and an output head.

    Its `config` has the token ids `pad` and `start`.
    """

    @abc.abstractmethod
    def encode(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoded source, [B, S] -> [B, S, H]."""

    @abc.abstractmethod
    def decode(
        self,
        decoder_input_ids: jax.Array,
        source: jax.Array,
        attention_mask: jax.Array,
        decoder_attention_mask: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Decoder states of given tokens, [B, T] -> [B, T, H]."""

    @abc.abstractmethod
    def logits(self, hidden: jax.Array) -> jax.Array:
        """Decoder states [..., H] -> token logits [..., V], float32."""

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        decoder_input_ids: jax.Array,
        decoder_attention_mask: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the token after each decoder token, [B, T, V] float32.

        See `encode` and `decode` for the arguments.
        """
        first, second = split_key(dropout_key, 2)
        source = self.encode(input_ids, attention_mask, dropout_key=first)
        hidden = self.decode(
            decoder_input_ids, source, attention_mask, decoder_attention_mask, dropout_key=second
        )
        return self.logits(hidden)

    def target_logits(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        target_ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits in the place of each target token, teacher forced: [B, T, V] float32.

        target_ids int [B, T], padded on the right with the pad id or -100.
        """
        first, second = split_key(dropout_key, 2)
        source = self.encode(input_ids, attention_mask, dropout_key=first)
        return self.encoded_target_logits(source, attention_mask, target_ids, dropout_key=second)

    def encoded_target_logits(
        self,
        source: jax.Array,
        attention_mask: jax.Array,
        target_ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Computes `target_logits` of a source [B, S, H] that is encoded, with its mask [B, S]."""
        shifted = shift_tokens_right(target_ids, self.config.pad, self.config.start)
        hidden = self.decode(shifted, source, attention_mask, dropout_key=dropout_key)
        return self.logits(hidden)
