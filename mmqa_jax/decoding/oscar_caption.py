"""Oscar's beam search for captions: length-normalized hypotheses, entirely inside one jit.

Unlike in VLP's search (beam.advance), a beam never continues after its end token: the best
continuations are read in order until K of them continue; those read that end become hypotheses,
scored by summed log-probability / length^length_penalty ([SEP] counted). The last token that fits
is always [SEP], scored as the token it replaces. One beam is greedy and stops at its first end
token. Original:
microsoft/Oscar oscar/modeling/modeling_utils.py (_generate_beam_search, BeamHypotheses,
_generate_no_beam_search).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.beam import BeamResult, BeamState
from mmqa_jax.decoding.masked_lm import search
from mmqa_jax.models.oscar import OscarInputs


@functools.partial(
    jax.jit,
    static_argnames=(
        "mask_id",
        "sep_id",
        "pad_id",
        "num_beams",
        "max_new_tokens",
        "length_penalty",
        "only_best",
    ),
)
def write_captions(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    inputs: OscarInputs,
    *,
    mask_id: int = 103,
    sep_id: int = 102,
    pad_id: int = 0,
    num_beams: int = 5,
    max_new_tokens: int = 19,
    length_penalty: float = 1.0,
    only_best: bool = False,
) -> BeamResult:
    """Captions a batch of pictures; (graphdef, state) = nnx.split(Oscar model).

    Defaults are run_captioning.py's (max_gen_length 20 counts [CLS] too). `inputs` are
    OscarLayout.prompt's, whose labels follow the longest caption. One compilation per batch
    shape. Tokens end in [SEP]; exp(score) is what the original calls confidence.
    `only_best` stops a picture once its best caption is certain: row 0 of the result is then
    exact (the original's num_keep_best = 1), the other rows are not.
    """
    model = nnx.merge(graphdef, state)
    config = model.config.bert
    most = config.vocab_size // 3  # see advance: up to three continuations per beam are read
    if not 1 <= num_beams <= most:
        raise UserError(
            f"num_beams is {num_beams}: expected 1 to a third of the vocabulary, {most}; change it."
        )
    if not 1 <= max_new_tokens < config.positions:
        raise UserError(
            f"max_new_tokens is {max_new_tokens}: expected 1 to {config.positions - 1}, since the "
            f"model has {config.positions} positions and [CLS] takes one; change it."
        )
    if length_penalty < 0:
        raise UserError(f"length_penalty is {length_penalty}: expected 0 or more; change it.")
    ends = (sep_id, pad_id)
    return search(
        model,
        model.prefill(inputs),
        rows=inputs.input_ids.shape[0],
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        advance=functools.partial(advance, ends=ends, length_penalty=length_penalty),
        complete=functools.partial(complete, length_penalty=length_penalty, only_best=only_best),
        mask_id=mask_id,
    )


def advance(
    state: BeamState, log_probs: jax.Array, *, ends: tuple[int, ...], length_penalty: float
) -> tuple[BeamState, jax.Array]:
    """One step: log_probs [B, K, V] of the next token -> new state and parents [B, K].

    `ends` are the tokens that end a caption; the first of them is what is stored. A slot whose
    beam cannot continue is `ended`, with score -inf. `final_*` hold the K best hypotheses.
    """
    rows, beams, most = state.tokens.shape
    vocabulary = log_probs.shape[-1]
    totals = (state.scores[:, :, None] + log_probs).reshape(rows, -1)  # [B, K * V]
    # Enough to contain K that continue, whatever ends. Greedy looks only at its best token.
    count = 1 if beams == 1 else (1 + len(ends)) * beams
    scores, choice = jax.lax.top_k(totals, count)  # [B, C]
    parents, chosen = choice // vocabulary, choice % vocabulary
    ending = jnp.isin(chosen, jnp.array(ends))
    step = state.step + 1

    continuing_before = jnp.cumsum(~ending, axis=1) - ~ending
    closes = jnp.where(step == most, True, ending & (continuing_before < beams))
    past = jnp.take_along_axis(state.tokens, parents[:, :, None], axis=1)  # [B, C, T]
    slot = (0, 0, state.step)
    closed = jax.lax.dynamic_update_slice(
        past, jnp.full((rows, count, 1), ends[0], past.dtype), slot
    )
    # Earlier hypotheses come first: among equal scores they are kept.
    of_length = jnp.where(closes, scores / step**length_penalty, -jnp.inf)
    pool = jnp.concatenate([state.final_scores, of_length], axis=1)  # [B, K + C]
    final_scores, kept = jax.lax.top_k(pool, beams)  # [B, K]
    final_tokens = jnp.concatenate([state.final_tokens, closed], axis=1)
    lengths = jnp.where(of_length > -jnp.inf, step, 0)  # [B, C]
    final_lengths = jnp.concatenate([state.final_lengths, lengths], axis=1)

    onward = jnp.argsort(ending, axis=1, stable=True)[:, :beams]  # [B, K]
    ended = jnp.take_along_axis(ending, onward, axis=1)
    tokens = jax.lax.dynamic_update_slice(past, chosen[:, :, None].astype(past.dtype), slot)
    new_state = BeamState(
        step=step,
        tokens=jnp.take_along_axis(tokens, onward[:, :, None], axis=1),
        scores=jnp.where(ended, -jnp.inf, jnp.take_along_axis(scores, onward, axis=1)),
        ended=ended,
        final_tokens=jnp.take_along_axis(final_tokens, kept[:, :, None], axis=1),
        final_scores=final_scores,
        final_lengths=jnp.take_along_axis(final_lengths, kept, axis=1),
    )
    return new_state, jnp.take_along_axis(parents, onward, axis=1)


def complete(state: BeamState, *, length_penalty: float, only_best: bool) -> jax.Array:
    """[B] bool: no living beam can yield a better hypothesis (BeamHypotheses.is_done).

    Sums only decrease, and the longest caption divides them by the largest length.
    """
    reachable = state.scores.max(axis=1) / state.tokens.shape[-1] ** length_penalty
    found = state.final_scores.max(axis=1) if only_best else state.final_scores.min(axis=1)
    return found >= reachable
