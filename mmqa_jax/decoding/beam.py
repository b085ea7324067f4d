"""Beam bookkeeping: scores, sequences and finished answers, independent of any model.

Two kinds of search keep their candidates differently.

The search of VLP and WebQA (BertForWebqaDecoder.beam_search): in every step each beam proposes
its K best tokens, the K best of the K^2 proposals survive, and a beam that ended in [SEP] gets
-10000, so that it survives only if nothing else is left. Candidates for the n-best list: for
every beam slot, the first time that the slot's beam ends in [SEP], or else the last step. That is
`advance`.

The searches of transformers (for T5's answers, and by an earlier version for Oscar's captions) let
no beam continue after its end token: the K best continuations that go on are the next beams, and
what ends becomes a hypothesis, of which the K best are kept. Its score is its summed
log-probability, end token included, over length^length_penalty. That is `advance_hypotheses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.attention.masked import Ancestry

ENDED = -10000.0


@flax.struct.dataclass
class BeamState:
    """State of a search; B questions, K beams (best first), at most T tokens."""

    step: jax.Array  # scalar int: tokens chosen so far
    tokens: jax.Array  # [B, K, T] int: the living sequences, 0 beyond `step`
    scores: jax.Array  # [B, K] float: summed log-probabilities of `tokens`
    ended: jax.Array  # [B, K] bool: the last token is the end token
    final_tokens: jax.Array  # [B, K, T] int: the candidate of each slot
    final_scores: jax.Array  # [B, K] float, with the length term
    final_lengths: jax.Array  # [B, K] int, end token included; 0 = no candidate yet


@flax.struct.dataclass
class BeamResult:
    """The n-best list of every question, best first."""

    tokens: jax.Array  # [B, K, T] int, end token included, 0 after it
    scores: jax.Array  # [B, K] float
    lengths: jax.Array  # [B, K] int, end token included


def check_size(
    *, num_beams: int, max_new_tokens: int, length: int, vocab_size: int, positions: int
) -> None:
    """Raises UserError if the beams exceed the vocabulary or an answer does not fit.

    `length` is the batch's padded length before the answer, `positions` the model's.
    """
    if not 1 <= num_beams <= vocab_size:
        raise UserError(
            f"num_beams is {num_beams}: expected 1 to the vocabulary size {vocab_size}; change it."
        )
    if not 1 <= max_new_tokens <= positions - length:
        raise UserError(
            f"max_new_tokens is {max_new_tokens}: expected 1 to {positions - length}, since the "
            f"batch is {length} tokens long and the model has {positions} positions; use shorter "
            "buckets or fewer new tokens."
        )


def start(questions: int, beams: int, max_new_tokens: int) -> BeamState:
    """An empty search. Only beam 0 is alive, so that the first step takes K different tokens."""
    shape = (questions, beams)
    tokens = jnp.zeros((*shape, max_new_tokens), jnp.int32)
    return BeamState(
        step=jnp.zeros((), jnp.int32),
        tokens=tokens,
        scores=jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf) * jnp.ones(shape),
        ended=jnp.zeros(shape, bool),
        final_tokens=tokens,
        final_scores=jnp.full(shape, -jnp.inf),
        final_lengths=jnp.zeros(shape, jnp.int32),
    )


class Cache(Protocol):
    """A model's keys and values of B * K rows."""

    def select(self, rows: jax.Array) -> Self:
        """The cache of rows [B * K], after the beams were reordered."""


@flax.struct.dataclass
class WrittenCache:
    """Keys and values of the new tokens of K sequences a prompt."""

    layers: tuple[tuple[jax.Array, jax.Array], ...]  # keys, values of B prompts and T * K tokens
    ancestry: Ancestry

    def select(self, rows: jax.Array) -> WrittenCache:
        """The cache of beams `rows` [B * K], after the beams were reordered."""
        return WrittenCache(self.layers, self.ancestry.select(rows))


def run(
    state: BeamState,
    cache: Cache,
    *,
    propose: Callable[[BeamState, Any], tuple[jax.Array, Any]],
    advance: Callable[[BeamState, jax.Array], tuple[BeamState, jax.Array]],
    complete: Callable[[BeamState], jax.Array],
) -> BeamResult:
    """Runs a search to its end, inside jit.

    Args:
      state: what the search has so far.
      propose: (state, cache) -> log-probabilities [B * K, V] of the next token, and the cache. XLA
        for TPUs sorts the whole vocabulary for the best of three dimensions, of two it does not.
      advance: (state, log-probabilities) -> the next state and parents [B, K].
      complete: state -> bool [B]: this row can stop.
    """
    questions, beams, max_new_tokens = state.tokens.shape

    def unfinished(carry):
        state, _ = carry
        return (state.step < max_new_tokens) & ~jnp.all(complete(state))

    def step(carry):
        log_probs, cache = propose(*carry)
        state, parents = advance(carry[0], log_probs)
        rows = jnp.arange(questions)[:, None] * beams + parents
        return state, cache.select(rows.reshape(-1))

    return ranked(jax.lax.while_loop(unfinished, step, (state, cache))[0])


def forbid_repeats(
    log_probs: jax.Array, tokens: jax.Array, step: jax.Array, ngram: int
) -> jax.Array:
    """VLP's forbid_duplicate_ngrams: no token that would complete an n-gram a second time.

    log_probs [B * K, V] of the next token, tokens [B, K, T] of which `step` are generated. Returns
    log_probs, 10,000 less at the forbidden tokens.
    """
    windows = tokens.shape[2] - ngram + 1
    tail = jax.lax.dynamic_slice_in_dim(
        tokens, jnp.maximum(step - ngram + 1, 0), ngram - 1, axis=2
    )  # [B, K, n - 1]: the n-gram's first tokens
    starts = jnp.arange(windows)
    seen = (starts + ngram <= step) & (step >= ngram)  # [windows]: fully generated
    for offset in range(ngram - 1):
        same = tokens[:, :, offset : offset + windows] == tail[:, :, offset, None]
        seen = seen & same  # [B, K, windows]
    closing = tokens[:, :, ngram - 1 :].reshape(len(log_probs), -1)  # [B * K, windows]
    less = jnp.where(seen, -1e4, 0.0).reshape(closing.shape)
    return log_probs.at[jnp.arange(len(closing))[:, None], closing].add(less)


def advance(
    state: BeamState, log_probs: jax.Array, *, end_id: int, length_penalty: float = 0.0
) -> tuple[BeamState, jax.Array]:
    """One step: log_probs [B * K, V] of the next token -> new state and parents.

    parents [B, K] int: which beam of the old state each new beam continues (reorder caches by
    it). A candidate's score is its summed log-probability + length_penalty * length.
    """
    questions, beams, max_new_tokens = state.tokens.shape
    best, proposed = jax.lax.top_k(log_probs.astype(jnp.float32), beams)  # [B * K, K]
    before = state.scores + jnp.where(state.ended, ENDED, 0.0)
    totals = best.reshape(questions, beams, -1) + before[:, :, None]  # [B, K, K]
    scores, choice = jax.lax.top_k(totals.reshape(questions, -1), beams)  # [B, K] of K * K
    parents = choice // beams
    chosen = jnp.take_along_axis(proposed.reshape(questions, -1), choice, axis=1)  # [B, K]
    tokens = jnp.take_along_axis(state.tokens, parents[:, :, None], axis=1)
    tokens = jax.lax.dynamic_update_slice(
        tokens, chosen[:, :, None].astype(tokens.dtype), (0, 0, state.step)
    )
    step = state.step + 1
    ended = chosen == end_id

    closes = (ended | (step == max_new_tokens)) & (state.final_lengths == 0)  # [B, K]
    new_state = BeamState(
        step=step,
        tokens=tokens,
        scores=scores,
        ended=ended,
        final_tokens=jnp.where(closes[:, :, None], tokens, state.final_tokens),
        final_scores=jnp.where(closes, scores + length_penalty * step, state.final_scores),
        final_lengths=jnp.where(closes, step, state.final_lengths),
    )
    return new_state, parents


def advance_hypotheses(
    state: BeamState,
    log_probs: jax.Array,
    *,
    ends: tuple[int, ...],
    length_penalty: float,
    candidates: int,
    closing: Callable[[jax.Array, jax.Array], jax.Array],
    stored: int | None = None,
) -> tuple[BeamState, jax.Array]:
    """One step of a search that keeps hypotheses: log_probs [B * K, V] -> new state and parents.

    `final_*` hold the K best hypotheses; among equal scores earlier ones are kept. A slot whose
    beam cannot continue is `ended`, with score -inf.

    Args:
      ends: the tokens that end an answer.
      candidates: how many continuations C of a question are looked at, best first.
      closing: (which of them [B, C] end, whether this is the last step) -> which become hypotheses.
      stored: the token in a hypothesis's last place; None: the one that was chosen.
    """
    rows, beams, most = state.tokens.shape
    step = state.step + 1
    totals = state.scores.reshape(-1, 1) + log_probs  # [B * K, V]
    best, proposed = jax.lax.top_k(totals, candidates)  # [B * K, C]: of each beam
    scores, choice = jax.lax.top_k(best.reshape(rows, -1), candidates)  # [B, C] of K * C
    parents = choice // candidates
    chosen = jnp.take_along_axis(proposed.reshape(rows, -1), choice, axis=1)
    ending = jnp.isin(chosen, jnp.array(ends))
    past = jnp.take_along_axis(state.tokens, parents[:, :, None], axis=1)  # [B, C, T]

    def with_last(chosen):
        new = chosen[:, :, None].astype(past.dtype)
        return jax.lax.dynamic_update_slice(past, new, (0, 0, state.step))

    tokens = with_last(chosen)
    closed = tokens if stored is None else with_last(jnp.full_like(chosen, stored))
    closes = closing(ending, step == most)
    of_length = jnp.where(closes, scores / step**length_penalty, -jnp.inf)
    pool = jnp.concatenate([state.final_scores, of_length], axis=1)  # [B, K + C]
    final_scores, best = jax.lax.top_k(pool, beams)
    final_tokens = jnp.concatenate([state.final_tokens, closed], axis=1)
    lengths = jnp.where(of_length > -jnp.inf, step, 0)
    final_lengths = jnp.concatenate([state.final_lengths, lengths], axis=1)

    onward = jnp.argsort(ending, axis=1, stable=True)[:, :beams]  # [B, K]
    new_state = BeamState(
        step=step,
        tokens=jnp.take_along_axis(tokens, onward[:, :, None], axis=1),
        scores=jnp.take_along_axis(jnp.where(ending, -jnp.inf, scores), onward, axis=1),
        ended=jnp.take_along_axis(ending, onward, axis=1),
        final_tokens=jnp.take_along_axis(final_tokens, best[:, :, None], axis=1),
        final_scores=final_scores,
        final_lengths=jnp.take_along_axis(final_lengths, best, axis=1),
    )
    return new_state, jnp.take_along_axis(parents, onward, axis=1)


def complete(
    state: BeamState, *, only_best: bool = False, length_penalty: float = 0.0
) -> jax.Array:
    """[B] bool: the n-best list of the question is final.

    With `only_best`, its best answer is: no living beam can still overtake it, since
    log-probabilities are never positive.
    """
    full = jnp.all(state.final_lengths > 0, axis=1)
    if not only_best:
        return full
    lengths = jnp.array([state.step + 1, state.tokens.shape[-1]])
    alive = jnp.where(state.ended, -jnp.inf, state.scores)
    reachable = alive.max(axis=1) + (length_penalty * lengths).max()
    return full | (state.final_scores.max(axis=1) >= reachable)


def ranked(state: BeamState) -> BeamResult:
    """The candidates of every question, sorted by score; ties keep the order of the slots."""
    order = jnp.argsort(-state.final_scores, axis=1, stable=True)  # [B, K]

    def sort(x):
        return jnp.take_along_axis(x, order, axis=1)

    tokens = jnp.take_along_axis(state.final_tokens, order[:, :, None], axis=1)
    return BeamResult(tokens, sort(state.final_scores), sort(state.final_lengths))
