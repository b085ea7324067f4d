"""Beam search as transformers' `generate` does it, on the state of `decoding.beam`.

Unlike in VLP's search (beam.advance), a beam never continues after its end token: of the 2 K best
continuations the K best that go on are the next beams, and those among the first K that end become
hypotheses, of which the K best are kept. A hypothesis's score is its summed log-probability, end
token included, over length^length_penalty. Original: transformers generation/utils.py
(GenerationMixin._beam_search), one end token, no processors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmqa_jax.decoding.beam import BeamState


def advance(
    state: BeamState,
    log_probs: jax.Array,
    *,
    end_id: int,
    length_penalty: float = 0.0,
    early_stopping: bool = False,
) -> tuple[BeamState, jax.Array]:
    """One step: log_probs [B, K, V] of the next token -> new state and parents [B, K].

    V is at least 2 K. `final_*` hold the K best hypotheses. A row that is complete stays so: its
    beams get the score -inf.
    """
    rows, beams, most = state.tokens.shape
    vocabulary, step = log_probs.shape[-1], state.step + 1
    totals = (state.scores[:, :, None] + log_probs).reshape(rows, -1)  # [B, K * V]
    scores, choice = jax.lax.top_k(totals, 2 * beams)  # [B, 2 K]
    parents, chosen = choice // vocabulary, choice % vocabulary
    tokens = jnp.take_along_axis(state.tokens, parents[:, :, None], axis=1)  # [B, 2 K, T]
    new = chosen[:, :, None].astype(tokens.dtype)
    tokens = jax.lax.dynamic_update_slice(tokens, new, (0, 0, state.step))
    ending = (chosen == end_id) | (step == most)

    # What is not finite goes on from no beam: the row is complete.
    closes = ending & (jnp.arange(2 * beams) < beams) & jnp.isfinite(scores)
    of_length = jnp.where(closes, scores / step**length_penalty, -jnp.inf)
    pool = jnp.concatenate([state.final_scores, of_length], axis=1)  # [B, K + 2 K]
    final_scores, kept = jax.lax.top_k(pool, beams)
    final_tokens = jnp.concatenate([state.final_tokens, tokens], axis=1)
    final_lengths = jnp.concatenate([state.final_lengths, jnp.where(closes, step, 0)], axis=1)

    onward = jnp.argsort(ending, axis=1, stable=True)[:, :beams]  # [B, K]
    new_state = BeamState(
        step=step,
        tokens=jnp.take_along_axis(tokens, onward[:, :, None], axis=1),
        scores=jnp.take_along_axis(jnp.where(ending, -jnp.inf, scores), onward, axis=1),
        ended=jnp.take_along_axis(ending, onward, axis=1),
        final_tokens=jnp.take_along_axis(final_tokens, kept[:, :, None], axis=1),
        final_scores=final_scores,
        final_lengths=jnp.take_along_axis(final_lengths, kept, axis=1),
    )
    done = complete(new_state, length_penalty=length_penalty, early_stopping=early_stopping)
    new_state = new_state.replace(scores=jnp.where(done[:, None], -jnp.inf, new_state.scores))
    return new_state, jnp.take_along_axis(parents, onward, axis=1)


def complete(
    state: BeamState, *, length_penalty: float = 0.0, early_stopping: bool = False
) -> jax.Array:
    """[B] bool: the hypotheses of a row are final.

    With `early_stopping` once there are K; otherwise once the best beam, were it to end now, would
    not be better than the worst of them. With a positive length penalty that is a guess, since
    longer ones count for more; it is transformers' own.
    """
    full = jnp.all(state.final_lengths > 0, axis=1)
    if early_stopping:
        return full
    reachable = state.scores.max(axis=1) / jnp.maximum(state.step, 1) ** length_penalty
    return full & (reachable <= state.final_scores.min(axis=1))
