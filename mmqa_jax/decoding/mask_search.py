"""The loop of writing with a masked language model; how beams are chosen is given to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from mmqa_jax.decoding import beam
from mmqa_jax.decoding.beam import BeamState


class MaskWriter(Protocol):
    """A model that reads the next word at an appended [MASK] (VLP, Oscar)."""

    def empty_cache(self, rows: int, max_new_tokens: int) -> Any: ...

    def decode_step(
        self, prefix: Any, cache: Any, generated: jax.Array, step: jax.Array, **tokens: int
    ) -> tuple[jax.Array, Any]: ...


def search(
    model: MaskWriter,
    prefix: Any,
    *,
    rows: int,
    num_beams: int,
    max_new_tokens: int,
    advance: Callable[[BeamState, jax.Array], tuple[BeamState, jax.Array]],
    complete: Callable[[BeamState], jax.Array],
    **tokens: int,
) -> BeamState:
    """Writes to the end, inside jit.

    Args:
      model: its `decode_step` gets `tokens` (mask_id, token_type) too.
      prefix: what it made of `rows` questions or pictures.
      rows, num_beams, max_new_tokens: sizes B, K, T of the search.
      advance: (state, log-probabilities [B, K, V]) -> the next state and parents [B, K].
      complete: state -> bool [B]: this row can stop.
    """

    def unfinished(carry):
        beams, _ = carry
        return (beams.step < max_new_tokens) & ~jnp.all(complete(beams))

    def step(carry):
        beams, cache = carry
        generated = beams.tokens.reshape(rows * num_beams, -1)  # [B * K, T]
        log_probs, cache = model.decode_step(prefix, cache, generated, beams.step, **tokens)
        beams, parents = advance(beams, log_probs.reshape(rows, num_beams, -1))
        chosen = (jnp.arange(rows)[:, None] * num_beams + parents).reshape(-1)
        return beams, cache.select(chosen)

    carry = (
        beam.start(rows, num_beams, max_new_tokens),
        model.empty_cache(rows * num_beams, max_new_tokens),
    )
    return jax.lax.while_loop(unfinished, step, carry)[0]
