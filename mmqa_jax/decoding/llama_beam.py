"""Beam search for LLaMA, wholly inside one jit; the bookkeeping is VLP's (`decoding.beam`).

A prompt is encoded once and its keys and values kept once; only the few new tokens have a cache
per beam, reordered as the beams are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

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
    beam.check_size(
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        length=input_ids.shape[1],
        vocab_size=config.vocab_size,
        positions=config.positions,
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

    advance = functools.partial(beam.advance, end_id=end_id, length_penalty=length_penalty)

    def propose(beams, cache):
        tokens = beams.tokens[:, :, beams.step - 1].reshape(-1)  # [B * K]
        log_probs, cache = _decode(model, held, mask, lengths, cache, tokens, beams.step - 1)
        return log_probs.reshape(prompts, num_beams, -1), cache

    log_probs = jnp.broadcast_to(first[:, None], (prompts, num_beams, first.shape[-1]))
    begun, _ = advance(beam.start(prompts, num_beams, max_new_tokens), log_probs)
    beams = beam.run(
        begun,
        _empty(model, prompts * num_beams, max_new_tokens),
        propose=propose,
        advance=advance,
        reorder=lambda cache, rows: jax.tree.map(lambda x: x[rows], cache),
        complete=functools.partial(
            beam.complete, only_best=only_best, length_penalty=length_penalty
        ),
    )
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
