"""Beam search for LLaMA, wholly inside one jit; the bookkeeping is VLP's (`decoding.beam`).

A prompt is encoded once and its keys and values kept once; only the few new tokens have a cache
per beam, reordered as the beams are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import beam
from mmqa_jax.decoding.beam import BeamResult
from mmqa_jax.models.layers import prefix_attention
from mmqa_jax.models.llama import Llama, inverse_frequencies, last_token

Cache = tuple[tuple[jax.Array, jax.Array], ...]  # per layer keys, values [rows, T, kv_heads, D]


def beam_search(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    input_ids: jax.Array,
    lengths: jax.Array,
    *,
    end_id: int,
    num_beams: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 0.0,
    only_best: bool = False,
) -> BeamResult:
    """Continues a batch of prompts; (graphdef, state) = nnx.split(Llama).

    Args:
      input_ids: int [B, L], padded on the right.
      lengths: int [B], tokens of each prompt.
      end_id: ends an answer.
      length_penalty: added to a finished answer's score per token (end token included).
      only_best: stops once every prompt's best answer is certain; the others' order then is not.

    One compilation per batch shape. Raises UserError when the beams exceed the vocabulary or the
    answer does not fit behind the longest prompt.
    """
    config = nnx.merge(graphdef, state).config
    if not 1 <= num_beams <= config.vocab_size:
        raise UserError(
            f"num_beams is {num_beams}: expected 1 to the vocabulary size {config.vocab_size}."
        )
    room = config.positions - input_ids.shape[1]
    if not 1 <= max_new_tokens <= room:
        raise UserError(
            f"max_new_tokens is {max_new_tokens}: expected 1 to {room}, since the batch is "
            f"{input_ids.shape[1]} tokens long and the model has {config.positions} positions; "
            "use shorter buckets or fewer new tokens."
        )
    return _search(
        graphdef,
        state,
        input_ids,
        lengths,
        end_id=end_id,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        length_penalty=length_penalty,
        only_best=only_best,
    )


@functools.partial(
    jax.jit,
    static_argnames=("end_id", "num_beams", "max_new_tokens", "length_penalty", "only_best"),
)
def _search(
    graphdef,
    state,
    input_ids,
    lengths,
    *,
    end_id,
    num_beams,
    max_new_tokens,
    length_penalty,
    only_best,
) -> BeamResult:
    model = nnx.merge(graphdef, state)
    prompts = input_ids.shape[0]
    hidden, prefix = model.prefill(model.embed(input_ids))
    first = jax.nn.log_softmax(model.logits(last_token(hidden, lengths)))  # [B, V]
    held = tuple(  # [B, L, kv_heads, D]
        (key.transpose(0, 3, 1, 2), value.swapaxes(1, 2))
        for key, value in zip(prefix.key, prefix.value, strict=True)
    )
    mask = jnp.arange(input_ids.shape[1]) < lengths[:, None]

    def advance(beams, log_probs, cache):
        beams, parents = beam.advance(
            beams, log_probs, end_id=end_id, length_penalty=length_penalty
        )
        rows = (jnp.arange(prompts)[:, None] * num_beams + parents).reshape(-1)
        return beams, jax.tree.map(lambda x: x[rows], cache)

    def unfinished(carry):
        beams, _ = carry
        complete = beam.complete(beams, only_best=only_best, length_penalty=length_penalty)
        return (beams.step < max_new_tokens) & ~jnp.all(complete)

    def step(carry):
        beams, cache = carry
        tokens = beams.tokens[:, :, beams.step - 1].reshape(-1)  # [B * K]
        log_probs, cache = _decode(model, held, mask, lengths, cache, tokens, beams.step - 1)
        return advance(beams, log_probs.reshape(prompts, num_beams, -1), cache)

    log_probs = jnp.broadcast_to(first[:, None], (prompts, num_beams, first.shape[-1]))
    cache = _empty(model, prompts * num_beams, max_new_tokens)
    carry = advance(beam.start(prompts, num_beams, max_new_tokens), log_probs, cache)
    beams, _ = jax.lax.while_loop(unfinished, step, carry)
    return beam.ranked(beams)


def _decode(
    model: Llama,
    prefix: Cache,
    prefix_mask: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    tokens: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, Cache]:
    """One token per beam, the `step`-th behind its prompt: tokens [B * K] -> log-probs, cache."""
    config = model.config
    rows, beams = tokens.shape[0], tokens.shape[0] // lengths.shape[0]
    positions = jnp.repeat(lengths + step, beams)
    angles = positions[:, None, None, None] * inverse_frequencies(config)
    own_mask = jnp.arange(cache[0][0].shape[1]) <= step
    x, written = model.embed(tokens[:, None]), []
    for layer, (old_key, old_value), (key, value) in zip(
        model.each_layer(), prefix, cache, strict=True
    ):
        q, k, v = layer.project(x, jnp.cos(angles), jnp.sin(angles))
        key = jax.lax.dynamic_update_slice_in_dim(key, k, step, 1)
        value = jax.lax.dynamic_update_slice_in_dim(value, v, step, 1)
        # The query heads of one key head become queries of one head: [B * K, groups, kv_heads, D].
        grouped = q.reshape(rows, config.kv_heads, -1, config.head_size).swapaxes(1, 2)
        attended = prefix_attention(
            grouped, old_key, old_value, prefix_mask, key, value, mask=own_mask
        )
        attended = attended.swapaxes(1, 2).reshape(q.shape)
        x = layer.finish(x, attended)
        written.append((key, value))
    return jax.nn.log_softmax(model.logits(model.norm(x)[:, 0])), tuple(written)


def _empty(model: Llama, rows: int, length: int) -> Cache:
    config = model.config
    shape = (rows, length, config.kv_heads, config.head_size)
    return tuple(
        (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))
        for _ in range(config.layers)
    )
