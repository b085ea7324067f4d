"""The loop of writing with a masked language model; how beams are chosen is given to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

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

    def propose(beams, cache):
        generated = beams.tokens.reshape(rows * num_beams, -1)  # [B * K, T]
        log_probs, cache = model.decode_step(prefix, cache, generated, beams.step, **tokens)
        return log_probs.reshape(rows, num_beams, -1), cache

    return beam.run(
        beam.start(rows, num_beams, max_new_tokens),
        model.empty_cache(rows * num_beams, max_new_tokens),
        propose=propose,
        advance=advance,
        reorder=lambda cache, rows: cache.select(rows),
        complete=complete,
    )
