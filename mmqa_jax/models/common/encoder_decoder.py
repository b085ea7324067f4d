"""What encoder-decoders (BART, T5) share: relative positions, and logits of given targets."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.models.attention.masked import MASKED
from mmqa_jax.models.common.layers import dropout, split_key

# Relative positions as T5 and MPNet have them: distances in buckets, a bias on attention scores.
#
# Near distances have a bucket each, farther ones share buckets that widen logarithmically.
# Original: transformers models/t5/modeling_t5.py (T5Attention._relative_position_bucket).


def relative_buckets(
    back: np.ndarray, *, buckets: int, farthest: int, bidirectional: bool
) -> np.ndarray:
    """The bucket of every distance, int32 of the same shape.

    Args:
      back: int, position of a query less that of a key.
      buckets: how many there are; both directions have half of them each.
      farthest: distance from which on all share a bucket.
      bidirectional: whether keys after a query have buckets of their own; otherwise they count as
        distance 0, since a causal model never sees them.
    """
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    far = np.abs(back) if bidirectional else np.maximum(back, 0)
    # In float32, as the original: powers of two lie on the edges of buckets.
    scale = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    scale = scale / np.float32(np.log(farthest / exact)) * np.float32(side - exact)
    large = np.minimum(exact + scale.astype(np.int32), side - 1)
    bucket = np.where(far < exact, far, large).astype(np.int32)
    return bucket + np.where(back < 0, side, 0).astype(np.int32) if bidirectional else bucket


def pair_buckets(
    length: int, *, buckets: int, farthest: int, bidirectional: bool = True
) -> np.ndarray:
    """The bucket of every pair (query, key) of positions: int32[length, length]."""
    position = np.arange(length, dtype=np.int32)
    back = position[:, None] - position[None]
    return relative_buckets(back, buckets=buckets, farthest=farthest, bidirectional=bidirectional)


def biased_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    *,
    scale: float,
    mask: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Attention whose scores have a bias, softmax in float32.

    Args:
      q: [B, Lq, heads, D].
      k, v: [B, Lk, heads, D].
      bias: float32, broadcastable to [B, heads, Lq, Lk]; None adds nothing.
      scale: factor on the scores, before the bias.
      mask: bool, broadcastable to [B, heads, Lq, Lk], false where a key is not seen; None masks
        nothing.
      dropout_rate, dropout_key: of the attention weights.

    Returns:
      [B, Lq, heads, D].
    """
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # [B, heads, L, D]
    scores = jnp.matmul(q, k.swapaxes(2, 3), preferred_element_type=jnp.float32)
    scores = scores if scale == 1 else scores * scale
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, MASKED)
    weights = dropout(jax.nn.softmax(scores, axis=-1), dropout_rate, dropout_key)
    return jnp.matmul(weights.astype(v.dtype), v).swapaxes(1, 2)


def shift_tokens_right(target_ids: jax.Array, pad: int, start: int) -> jax.Array:
    """Decoder inputs for targets int [B, T]: `start`, then all but the last; -100 becomes `pad`."""
    shifted = jnp.pad(target_ids[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    return jnp.where(shifted == -100, pad, shifted)


class EncoderDecoder(nnx.Module):
    """An encoder, a decoder that reads what it gives, and an output head.

    Its `config` has the token ids `pad` and `start`. A subclass defines `encode` (source tokens
    [B, S] -> [B, S, H]), `decode` (target tokens [B, T] -> [B, T, H]) and `logits` ([..., H] ->
    [..., V], float32), as `models.bart.network.Bart` does.
    """

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
