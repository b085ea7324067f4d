"""Answers from a masked language model: VLP's beam search, wholly inside one jit.

In every step a [MASK] is appended to each beam and the model reads the word there; the word then
takes its place (`reference.md` 2.4). Source and question are encoded once, their keys and values
kept once per question; only the few generated tokens have a cache per beam.
"""

from __future__ import annotations

import functools

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import beam
from mmqa_jax.decoding.beam import BeamResult, BeamState
from mmqa_jax.decoding.mask_search import search
from mmqa_jax.models.vlp import VLPInputs


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
    """Answer a batch of questions; (graphdef, state) = nnx.split(VLP model).

    Defaults are WebQA's. Generated tokens get the position ids after the question's last token
    and `token_type` (the question's segment). One compilation per batch shape.
    `no_repeat_ngram` = n forbids a second occurrence of any n words in a row (VLP's
    forbid_duplicate_ngrams; 0: all may repeat). `only_best` stops a question once its best
    answer is certain: row 0 of the result is then exact, the other rows are not.

    Raises UserError when the beams exceed the vocabulary or the answer does not fit behind the
    batch's longest sequence.
    """
    config = nnx.merge(graphdef, state).config.bert
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
    return _search(
        graphdef,
        state,
        inputs,
        mask_id=mask_id,
        sep_id=sep_id,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        token_type=token_type,
        length_penalty=length_penalty,
        no_repeat_ngram=no_repeat_ngram,
        only_best=only_best,
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
def _search(
    graphdef,
    state,
    inputs,
    *,
    mask_id,
    sep_id,
    num_beams,
    max_new_tokens,
    token_type,
    length_penalty,
    no_repeat_ngram,
    only_best,
) -> BeamResult:
    model = nnx.merge(graphdef, state)

    def advance(beams: BeamState, log_probs: jax.Array) -> tuple[BeamState, jax.Array]:
        if no_repeat_ngram:
            log_probs = beam.forbid_repeats(log_probs, beams.tokens, beams.step, no_repeat_ngram)
        return beam.advance(beams, log_probs, end_id=sep_id, length_penalty=length_penalty)

    beams = search(
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
    return beam.ranked(beams)
