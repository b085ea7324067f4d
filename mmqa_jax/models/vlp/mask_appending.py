"""Generation with a masked language model, shared by VLP and Oscar.

In every step a [MASK] is appended to each beam and predicted; the token then replaces it. The
prefix (question and source, or picture) is encoded once and never attends to generated tokens.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from mmqa_jax.core.mesh import platform
from mmqa_jax.models.attention.ancestry import Ancestry
from mmqa_jax.models.bert.network import Bert, BertConfig, BertLayer
from mmqa_jax.models.common.layers import merge_heads, prefix_attention, scan_layers, split_heads


@flax.struct.dataclass
class Prefix:
    """The encoded prefix: once per question or picture, not per beam."""

    key: jax.Array  # [layers, B, L, H], the heads side by side
    value: jax.Array  # [layers, B, L, H]
    mask: jax.Array  # [B, L] bool: columns that generated tokens attend to
    next_position: jax.Array  # [B] int: position id of the first generated token


@flax.struct.dataclass
class WrittenCache:
    """Keys and values of the generated tokens ([MASK] is never cached) of K beams a prefix."""

    key: jax.Array  # [layers, B, T * K, H]
    value: jax.Array  # [layers, B, T * K, H]
    ancestry: Ancestry

    def select(self, rows: jax.Array) -> WrittenCache:
        """The cache of beams `rows` [B * K], after the beams were reordered."""
        return WrittenCache(self.key, self.value, self.ancestry.select(rows))

    def write(self, key: jax.Array, value: jax.Array, number: jax.Array) -> WrittenCache:
        """Adds every beam's token `number`: key, value [layers, B, K, H]."""
        column = (0, 0, number * key.shape[2], 0)
        return WrittenCache(
            jax.lax.dynamic_update_slice(self.key, key, column),
            jax.lax.dynamic_update_slice(self.value, value, column),
            self.ancestry.written(number),
        )


def empty_cache(config: BertConfig, rows: int, beams: int, max_new_tokens: int) -> WrittenCache:
    """Zeros for `beams` sequences of `max_new_tokens` tokens for each of `rows` prefixes."""
    shape = (config.layers, rows, beams * max_new_tokens, config.hidden)
    zeros = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
    return WrittenCache(*zeros, Ancestry.empty(rows, beams, max_new_tokens))


def encode_prefix(
    bert: Bert, embedded: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the encoder without dropout and returns its keys and values too.

    embedded [B, L, H], mask bool broadcastable to [B, heads, L, L] -> hidden states [B, L, H],
    keys and values [layers, B, L, H] each.
    """

    def body(layer: BertLayer, x, _, __):
        query, key, value = layer.project(x)
        attended = layer.attend(query, key, value, mask)
        return layer.finish(x, attended), (merge_heads(key), merge_heads(value))

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
    N = B * K, with the K beams of one prefix next to each other. Returns hidden states [B, K, H]
    and the cache with the last token added.
    """
    prefixes, beams, _ = cache.ancestry.slots.shape
    previous = generated[:, jnp.maximum(step - 1, 0)]
    tokens = jnp.stack([previous, jnp.full_like(previous, mask_id)], axis=1)  # [N, 2]
    start = jnp.repeat(prefix.next_position, beams)[:, None]  # [N, 1]
    positions = jnp.maximum(start + step + jnp.array([-1, 0]), 0)  # [N, 2]
    # All tokens as one sequence, for what works on each alone: [1, 2 N, H].
    tokens, positions = tokens.reshape(1, -1), positions.reshape(1, -1)
    x = bert.embeddings(tokens, positions, jnp.full_like(tokens, token_type))

    # Columns: the beams' tokens before `previous`, then [previous, [MASK]] of every beam.
    earlier = jnp.repeat(cache.ancestry.visible(step - 1), 2, axis=1)  # [B, 2 K, T * K]
    pair = jnp.stack([jnp.array([True, False]), jnp.stack([step > 0, jnp.array(True)])])
    beam = jnp.arange(2 * beams) // 2
    new = jnp.tile(pair, (beams, beams)) & (beam[:, None] == beam)  # [2 K, 2 K]
    new = jnp.broadcast_to(new, (prefixes, *new.shape))
    mask = jnp.concatenate([earlier, new], axis=2)  # [B, 2 K, T * K + 2 K]

    # Layers read the caches; only the new tokens' keys and values come out of the scan and are
    # written in place: carrying the caches through ys would copy them for every token.
    caches = (prefix.key, prefix.value, cache.key, cache.value)  # [layers, B, columns, H] each
    in_kernel = _in_kernel(bert.config, x, caches)

    def attend(query, key, value, past):
        if in_kernel:
            from mmqa_jax.models.attention.fused_prefix import fused_prefix_attention

            pairs = (caches[:2], prefix.mask, caches[2:], (key, value))
            return fused_prefix_attention(past, query, *pairs, mask)
        prefix_key, prefix_value, past_key, past_value = (
            split_heads(columns, bert.config.heads) for columns in past
        )
        return prefix_attention(
            query,
            prefix_key,
            prefix_value,
            prefix.mask,
            jnp.concatenate([past_key, key], axis=1),
            jnp.concatenate([past_value, value], axis=1),
            mask=mask[:, None],
        )

    def body(layer: BertLayer, x, past, _):
        # The beams of a prefix are rows of one product: [B, 2 K, heads, head_dim].
        projected = layer.project(x)
        query, key, value = (p.reshape(prefixes, -1, *p.shape[2:]) for p in projected)
        attended = attend(query, key, value, past).reshape(projected[0].shape)
        return layer.finish(x, attended), (merge_heads(key[:, ::2]), merge_heads(value[:, ::2]))

    x, (key, value) = scan_layers(
        bert.layers,
        x,
        body,
        xs=jnp.arange(bert.config.layers) if in_kernel else caches,
        unroll=bert.config.unroll,
    )
    # Step 0 writes token 0, which step 1 overwrites.
    cache = cache.write(key, value, jnp.maximum(step - 1, 0))
    return x.reshape(prefixes, beams, 2, -1)[:, :, 1], cache


def _in_kernel(config: BertConfig, x: jax.Array, caches: tuple[jax.Array, ...]) -> bool:
    """Whether beams attend in the TPU's kernel, which reads the caches of all layers in place."""
    if platform() != "tpu" or x.dtype != jnp.bfloat16 or config.attention != "auto":
        return False
    from mmqa_jax.models.attention.fused_prefix import (
        fused_prefix_fits,  # Pallas takes half a second
    )

    columns = caches[0].shape[2] + caches[2].shape[2]
    return fused_prefix_fits(config.heads, config.hidden // config.heads, columns)
