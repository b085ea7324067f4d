"""Generation with a masked language model, shared by VLP and Oscar.

In every step a [MASK] is appended to each beam and predicted; the token then replaces it. The
prefix (question and source, or picture) is encoded once and never attends to generated tokens.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from mmqa_jax.models.bert import Bert, BertConfig, BertLayer
from mmqa_jax.models.layers import prefix_attention, scan_layers


@flax.struct.dataclass
class Prefix:
    """The encoded prefix: once per question or picture, not per beam."""

    key: jax.Array  # [layers, B, L, heads, head_dim]
    value: jax.Array  # [layers, B, L, heads, head_dim]
    mask: jax.Array  # [B, L] bool: columns that generated tokens attend to
    next_position: jax.Array  # [B] int: position id of the first generated token


@flax.struct.dataclass
class WrittenCache:
    """Keys and values of the generated tokens ([MASK] is never cached): N = B * beams."""

    key: jax.Array  # [layers, N, T, heads, head_dim]
    value: jax.Array  # [layers, N, T, heads, head_dim]

    def select(self, rows: jax.Array) -> WrittenCache:
        """The cache of beams `rows` [N], after the beams were reordered."""
        return WrittenCache(self.key[:, rows], self.value[:, rows])


def empty_cache(config: BertConfig, rows: int, max_new_tokens: int) -> WrittenCache:
    """Zeros for `rows` = B * beams sequences of `max_new_tokens` tokens."""
    shape = (config.layers, rows, max_new_tokens, config.heads, config.hidden // config.heads)
    return WrittenCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))


def encode_prefix(
    bert: Bert, embedded: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the encoder without dropout and returns its keys and values too.

    embedded [B, L, H], mask bool broadcastable to [B, heads, L, L] -> hidden states [B, L, H],
    keys and values [layers, B, L, heads, head_dim] each.
    """

    def body(layer: BertLayer, x, _, __):
        query, key, value = layer.project(x)
        attended = layer.attend(query, key, value, mask)
        return layer.finish(x, attended), (key, value)

    hidden, (key, value) = scan_layers(bert.layers, embedded, body, unroll=bert.config.unroll)
    return hidden, key, value


def append_mask(
    bert: Bert,
    prefix: Prefix,
    cache: WrittenCache,
    generated: jax.Array,
    step: jax.Array,
    *,
    mask_id: int,
    token_type: int,
) -> tuple[jax.Array, WrittenCache]:
    """Feeds [last token, [MASK]] and returns the hidden state at [MASK].

    `generated` [N, T] int are the tokens so far, `step` is their number (the rest is ignored);
    N = B * beams, with the beams of one prefix next to each other. Returns hidden states
    [B, beams, H] and the cache with the last token added.
    """
    rows, slots = cache.key.shape[1:3]
    beams = rows // prefix.mask.shape[0]
    previous = generated[:, jnp.maximum(step - 1, 0)]
    tokens = jnp.stack([previous, jnp.full_like(previous, mask_id)], axis=1)  # [N, 2]
    start = jnp.repeat(prefix.next_position, beams)[:, None]  # [N, 1]
    positions = jnp.maximum(start + step + jnp.array([-1, 0]), 0)  # [N, 2]
    x = bert.embeddings(tokens, positions, jnp.full_like(tokens, token_type))

    # Columns: tokens before `previous`, then `previous`, then [MASK].
    earlier = jnp.arange(slots) < step - 1
    mask = jnp.stack(
        [
            jnp.concatenate([earlier, jnp.array([True, False])]),
            jnp.concatenate([earlier, jnp.stack([step > 0, jnp.array(True)])]),
        ]
    )[None, None]  # [1, 1, 2, T + 2]

    def body(layer: BertLayer, x, past, _):
        prefix_key, prefix_value, past_key, past_value = past
        query, key, value = layer.project(x)  # [N, 2, heads, head_dim]
        attended = prefix_attention(
            query,
            prefix_key,
            prefix_value,
            prefix.mask,
            jnp.concatenate([past_key, key], axis=1),
            jnp.concatenate([past_value, value], axis=1),
            mask=mask,
        )
        return layer.finish(x, attended), (key[:, :1], value[:, :1])

    # Layers read the caches; only the new token's keys and values come out of the scan and are
    # written in place: carrying the caches through ys would copy them for every token.
    x, (key, value) = scan_layers(
        bert.layers,
        x,
        body,
        xs=(prefix.key, prefix.value, cache.key, cache.value),
        unroll=bert.config.unroll,
    )
    slot = (0, 0, jnp.maximum(step - 1, 0), 0, 0)  # step 0 fills slot 0, step 1 overwrites it
    cache = WrittenCache(
        jax.lax.dynamic_update_slice(cache.key, key, slot),
        jax.lax.dynamic_update_slice(cache.value, value, slot),
    )
    return x[:, 1].reshape(-1, beams, x.shape[-1]), cache
