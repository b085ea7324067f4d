"""Answers from a masked language model: VLP's beam search, wholly inside one jit.

In every step a [MASK] is appended to each beam and the model reads the word there; the word then
takes its place (`reference.md` 2.4). Source and question are encoded once, their keys and values
kept once per question; only the few generated tokens have a cache per beam.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import beam
from mmqa_jax.decoding.beam import BeamResult
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
    only_best: bool = False,
) -> BeamResult:
    """Answer a batch of questions; (graphdef, state) = nnx.split(VLP model).

    Defaults are WebQA's. Generated tokens get the position ids after the question's last token
    and `token_type` (the question's segment). One compilation per batch shape.
    `only_best` stops a question once its best answer is certain: row 0 of the result is then
    exact, the other rows are not.

    Raises UserError when the beams exceed the vocabulary or the answer does not fit behind the
    batch's longest sequence.
    """
    config = nnx.merge(graphdef, state).config.bert
    length = inputs.input_ids.shape[1]
    if not 1 <= num_beams <= config.vocab_size:
        raise UserError(
            f"num_beams is {num_beams}: expected 1 to the vocabulary size {config.vocab_size}"
        )
    if max_new_tokens < 1 or length + max_new_tokens > config.positions:
        raise UserError(
            f"max_new_tokens is {max_new_tokens}: expected 1 to {config.positions - length}, since "
            f"the batch is {length} tokens long and the model has {config.positions} positions; "
            "use shorter buckets or fewer new tokens"
        )
    if not 0 <= token_type < config.types:
        raise UserError(
            f"token_type is {token_type}: expected 0 to {config.types - 1}, the model's token types"
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
    only_best,
) -> BeamResult:
    model = nnx.merge(graphdef, state)
    questions = inputs.input_ids.shape[0]
    prefix = model.prefill(inputs)

    def unfinished(carry):
        beams, _ = carry
        complete = beam.complete(beams, only_best=only_best, length_penalty=length_penalty)
        return (beams.step < max_new_tokens) & ~jnp.all(complete)

    def step(carry):
        beams, cache = carry
        previous = beams.tokens[:, :, jnp.maximum(beams.step - 1, 0)].reshape(-1)  # [B * K]
        log_probs, cache = model.decode_step(
            prefix, cache, previous, beams.step, mask_id=mask_id, token_type=token_type
        )
        log_probs = log_probs.reshape(questions, num_beams, -1)
        beams, parents = beam.advance(
            beams, log_probs, end_id=sep_id, length_penalty=length_penalty
        )
        rows = (jnp.arange(questions)[:, None] * num_beams + parents).reshape(-1)
        return beams, cache.select(rows)

    carry = (
        beam.start(questions, num_beams, max_new_tokens),
        model.empty_cache(questions * num_beams, max_new_tokens),
    )
    beams, _ = jax.lax.while_loop(unfinished, step, carry)
    return beam.ranked(beams)
