"""Beam search for LLaMA, entirely inside one jit; the bookkeeping is VLP's (`decoding.beam`).

A prompt is encoded and its keys and values cached once; only the few new tokens have a cache per
beam, reordered as the beams are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.decoding import beam, kv_cache
from mmqa_jax.decoding.beam import BeamResult
from mmqa_jax.decoding.kv_cache import KVCache
from mmqa_jax.models.layers import prefix_attention
from mmqa_jax.models.llama import Llama, inverse_frequencies, last_token


@functools.partial(
    jax.jit,
    static_argnames=("end_id", "num_beams", "max_new_tokens", "length_penalty", "only_best"),
)
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
      only_best: stops once every prompt's best answer is certain; the order of the others is not.

    One compilation per batch shape.

    Raises:
      UserError: the beams exceed the vocabulary, or the answer does not fit after the longest
        prompt.
    """
    model = nnx.merge(graphdef, state)
    config, (prompts, length) = model.config, input_ids.shape
    beam.check_size(
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        length=length,
        vocab_size=config.vocab_size,
        positions=config.positions,
    )
    hidden, prefix = kv_cache.forward(
        model,
        model.embed(input_ids),
        kv_cache.empty(config, prompts, length, config.dtype),
        starts=jnp.zeros_like(lengths),
        ends=lengths,
        rows=jnp.arange(prompts),
        block=length,
        all_rows=True,
    )
    first = jax.nn.log_softmax(model.logits(last_token(hidden, lengths)))  # [B, V]
    mask = jnp.arange(length) < lengths[:, None]

    advance = functools.partial(beam.advance, end_id=end_id, length_penalty=length_penalty)

    def propose(beams, cache):
        tokens = beams.tokens[:, :, beams.step - 1].reshape(-1)  # [B * K]
        log_probs, cache = _decode(model, prefix, mask, lengths, cache, tokens, beams.step - 1)
        return log_probs.reshape(prompts, num_beams, -1), cache

    log_probs = jnp.broadcast_to(first[:, None], (prompts, num_beams, first.shape[-1]))
    begun, _ = advance(beam.start(prompts, num_beams, max_new_tokens), log_probs)
    beams = beam.run(
        begun,
        kv_cache.empty(config, prompts * num_beams, max_new_tokens, config.dtype),
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
    prefix: KVCache,
    prefix_mask: jax.Array,
    lengths: jax.Array,
    cache: KVCache,
    tokens: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """One token per beam, the `step`-th after its prompt: tokens [B * K] -> log-probs, cache."""
    config = model.config
    rows, beams = tokens.shape[0], tokens.shape[0] // lengths.shape[0]
    positions = jnp.repeat(lengths + step, beams)
    angles = positions[:, None, None, None] * inverse_frequencies(config)
    own_mask = jnp.arange(cache[0].columns) <= step
    every_row, column = jnp.arange(rows), jnp.full(rows, step)
    x, written = model.embed(tokens[:, None]), []
    for layer, of_prompt, own in zip(model.each_layer(), prefix, cache, strict=True):
        q, k, v = layer.project(x, jnp.cos(angles), jnp.sin(angles))
        own = kv_cache.write(own, k, v, every_row, column)
        # The query heads of one key head become queries of one head: [B * K, groups, kv_heads, D].
        grouped = q.reshape(rows, config.kv_heads, -1, config.head_size).swapaxes(1, 2)
        attended = prefix_attention(
            grouped, *of_prompt.by_token(), prefix_mask, *own.by_token(), mask=own_mask
        )
        x = layer.finish(x, attended.swapaxes(1, 2).reshape(q.shape))
        written.append(own)
    return jax.nn.log_softmax(model.logits(model.norm(x)[:, 0])), tuple(written)
