"""Beam search with a masked language model: the loop, and VLP's search, entirely inside one jit.

In every step a [MASK] is appended to each beam and the model predicts the token there; the token
then replaces it (decode_webqa.py). Source and question are encoded once, their keys and values
cached once per question; so are the few generated tokens of all its beams, which are never copied
when beams are reordered: each beam sees its own (an ancestry mask).
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import beam
from mmqa_jax.decoding.beam import BeamResult, BeamState
from mmqa_jax.models.oscar.network import OscarInputs
from mmqa_jax.models.vlp.network import VLPInputs


class MaskedLM(Protocol):
    """A model that predicts the next token at an appended [MASK] (VLP, Oscar)."""

    def empty_cache(self, rows: int, beams: int, max_new_tokens: int) -> Any: ...

    def decode_step(
        self, prefix: Any, cache: Any, generated: jax.Array, step: jax.Array, **tokens: int
    ) -> tuple[jax.Array, Any]: ...


def search(
    model: MaskedLM,
    prefix: Any,
    *,
    rows: int,
    num_beams: int,
    max_new_tokens: int,
    advance: Callable[[BeamState, jax.Array], tuple[BeamState, jax.Array]],
    complete: Callable[[BeamState], jax.Array],
    **tokens: int,
) -> BeamResult:
    """Runs a whole search, inside jit.

    Args:
      model: its `decode_step` also gets `tokens` (mask_id, token_type).
      prefix: the model's encoding of `rows` questions or pictures.
      rows, num_beams, max_new_tokens: sizes B, K, T of the search.
      advance, complete: see `beam.run`.
    """

    def propose(beams, cache):
        generated = beams.tokens.reshape(rows * num_beams, -1)  # [B * K, T]
        return model.decode_step(prefix, cache, generated, beams.step, **tokens)

    return beam.run(
        beam.start(rows, num_beams, max_new_tokens),
        model.empty_cache(rows, num_beams, max_new_tokens),
        propose=propose,
        advance=advance,
        complete=complete,
    )


@functools.partial(
    jax.jit,
    static_argnames=(
        "mask_id",
        "sep_id",
        "num_beams",
        "max_new_tokens",
        "token_type",
        "length_penalty",
        "no_repeat_ngram",
        "only_best",
    ),
)
def beam_search(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    inputs: VLPInputs,
    *,
    mask_id: int,
    sep_id: int,
    num_beams: int = 5,
    max_new_tokens: int = 30,
    token_type: int = 5,
    length_penalty: float = 0.0,
    no_repeat_ngram: int = 0,
    only_best: bool = False,
) -> BeamResult:
    """Answers a batch of questions; (graphdef, state) = nnx.split(VLP model).

    Defaults are WebQA's. Generated tokens get the position ids after the question's last token
    and `token_type` (the question's segment). One compilation per batch shape.
    `no_repeat_ngram` = n forbids a second occurrence of any n-gram (VLP's
    forbid_duplicate_ngrams; 0: all may repeat). `only_best` stops a question once its best
    answer is certain: row 0 of the result is then exact, the other rows are not.
    """
    model = nnx.merge(graphdef, state)
    config = model.config.bert
    beam.check_size(
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        length=inputs.input_ids.shape[1],
        vocab_size=config.vocab_size,
        positions=config.positions,
    )
    if not (no_repeat_ngram == 0 or 2 <= no_repeat_ngram <= max_new_tokens):
        raise UserError(
            f"no_repeat_ngram is {no_repeat_ngram}: expected 0 (repeats allowed) or 2 to "
            f"max_new_tokens = {max_new_tokens}; change it."
        )
    if not 0 <= token_type < config.types:
        raise UserError(
            f"token_type is {token_type}: expected 0 to {config.types - 1}, the model's token "
            "types; change it."
        )

    def advance(beams: BeamState, log_probs: jax.Array) -> tuple[BeamState, jax.Array]:
        if no_repeat_ngram:
            log_probs = beam.forbid_repeats(log_probs, beams.tokens, beams.step, no_repeat_ngram)
        return beam.advance(beams, log_probs, end_id=sep_id, length_penalty=length_penalty)

    return search(
        model,
        model.prefill(inputs),
        rows=inputs.input_ids.shape[0],
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        advance=advance,
        complete=functools.partial(
            beam.complete, only_best=only_best, length_penalty=length_penalty
        ),
        mask_id=mask_id,
        token_type=token_type,
    )


# Oscar's beam search for captions: length-normalized hypotheses, entirely inside one jit.
#
# Unlike in VLP's search (beam.advance), a beam never continues after its end token: the best
# continuations are read in order until K of them continue; those read that end become hypotheses,
# scored by summed log-probability / length^length_penalty ([SEP] counted). The last token that
# fits is always [SEP], scored as the token it replaces. One beam is greedy and stops at its first
# end token. Original: microsoft/Oscar oscar/modeling/modeling_utils.py (_generate_beam_search,
# BeamHypotheses, _generate_no_beam_search).


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
    """One step: log_probs [B * K, V] of the next token -> new state and parents [B, K].

    `ends` are the tokens that end a caption; the first of them is what is stored.
    """
    beams = state.tokens.shape[1]

    def closing(ending, last):
        continuing_before = jnp.cumsum(~ending, axis=1) - ~ending
        return jnp.where(last, True, ending & (continuing_before < beams))

    return beam.advance_hypotheses(
        state,
        log_probs,
        ends=ends,
        length_penalty=length_penalty,
        # Enough to contain K that continue, whatever ends. Greedy looks only at its best token.
        candidates=1 if beams == 1 else (1 + len(ends)) * beams,
        closing=closing,
        stored=ends[0],
    )


def complete(state: BeamState, *, length_penalty: float, only_best: bool) -> jax.Array:
    """[B] bool: no living beam can yield a better hypothesis (BeamHypotheses.is_done).

    Sums only decrease, and the longest caption divides them by the largest length.
    """
    reachable = state.scores.max(axis=1) / state.tokens.shape[-1] ** length_penalty
    held = state.final_scores.max(axis=1) if only_best else state.final_scores.min(axis=1)
    return held >= reachable
