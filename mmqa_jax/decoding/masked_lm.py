"""Beam search with a masked language model: the loop, and VLP's search, entirely inside one jit.

In every step a [MASK] is appended to each beam and the model predicts the token there; the token
then replaces it (decode_webqa.py). Source and question are encoded once, their keys and values
cached once per question; so are the few generated tokens of all its beams, which are never copied
when beams are reordered: each beam sees its own (an ancestry mask).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import beam
from mmqa_jax.decoding.beam import BeamResult, BeamState
from mmqa_jax.models.vlp import VLPInputs


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
        log_probs, cache = model.decode_step(prefix, cache, generated, beams.step, **tokens)
        return log_probs.reshape(rows, num_beams, -1), cache

    return beam.ranked(
        beam.run(
            beam.start(rows, num_beams, max_new_tokens),
            model.empty_cache(rows, num_beams, max_new_tokens),
            propose=propose,
            advance=advance,
            reorder=lambda cache, rows: cache.select(rows),
            complete=complete,
        )
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
