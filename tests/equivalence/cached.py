"""Generation through the KV cache, as the engine runs it, for tests of a single model."""

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
    pages: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Prompts [R, L, H], padded on the right -> the next token's logits [R, V], cache.

    pages: int [R], of each row; by default the first ones.
    """
    hidden, cache = kv_cache.forward(
        model,
        embedded,
        cache,
        table=kv_cache.page_each(len(lengths)) if pages is None else pages[:, None],
        starts=jnp.zeros_like(lengths),
        ends=lengths,
    )
    return model.logits(last_token(hidden, lengths)), cache


def decode(
    model: Llama,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    active: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """One token per page of the cache, [B] -> the next token's logits [B, V], cache.

    Pages that are not `active` (bool [B], default all) are not written; what stands for them is
    written to page 0, at position 0.
    """
    table = kv_cache.page_each(len(tokens))
    hidden, cache = kv_cache.forward(
        model,
        model.embed(tokens[:, None]),
        cache,
        table=table if active is None else jnp.where(active[:, None], table, 0),
        starts=positions,
        ends=positions + 1,
    )
    return model.logits(hidden[:, 0]), cache
