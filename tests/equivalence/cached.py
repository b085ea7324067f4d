"""Generation through the KV cache, as the engine runs it, for tests of a single model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmqa_jax.decoding import kv_cache
from mmqa_jax.decoding.kv_cache import KVCache
from mmqa_jax.models.llama.network import Llama, last_token


def prefill(
    model: Llama,
    embedded: jax.Array,
    lengths: jax.Array,
    cache: KVCache,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Prompts [R, L, H], padded on the right -> the next token's logits [R, V], cache."""
    hidden, cache = kv_cache.forward(
        model,
        embedded,
        cache,
        starts=jnp.zeros_like(lengths),
        ends=lengths,
        rows=jnp.arange(len(lengths)) if rows is None else rows,
        block=cache[0].columns,
    )
    return model.logits(last_token(hidden, lengths)), cache


def decode(
    model: Llama,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    active: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """One token per row of the cache, [B] -> the next token's logits [B, V], cache.

    Rows that are not `active` (bool [B], default all) are not written.
    """
    rows = jnp.arange(len(tokens))
    hidden, cache = kv_cache.forward(
        model,
        model.embed(tokens[:, None]),
        cache,
        starts=positions,
        ends=positions + 1,
        rows=rows if active is None else jnp.where(active, rows, len(tokens)),
        block=cache[0].columns,
        all_rows=True,
    )
    return model.logits(hidden[:, 0]), cache
