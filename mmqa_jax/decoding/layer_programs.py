"""A model's forward pass on one CPU as a small program for each layer, the same for all.

XLA unrolls layers that are not scanned, and a scan on a CPU copies each layer's weights. One
program of 30 layers takes 30 times as long to compile, and to read from the compile cache, as one
of a layer. A CPU loses nothing where a program ends; an accelerator would wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.decoding.kv_cache import KVCache, run_layers, tokens_in
from mmqa_jax.models.layer_traits import LayerTraits
from mmqa_jax.models.llama import Llama


class SplitState(NamedTuple):
    """A model's arrays, its layers by themselves."""

    outer: nnx.State  # embedding, last norm and head
    layers: tuple[tuple[nnx.GraphDef, nnx.State], ...]


def split_model(model: Llama) -> tuple[nnx.GraphDef, SplitState]:
    """The model without its layers, which are not stacked, and its arrays."""
    layers, model.layers = model.layers, nnx.List([])
    graphdef, outer = nnx.split(model)
    model.layers = layers
    return graphdef, SplitState(outer, tuple(map(nnx.split, layers)))


def encode_and_step(
    graphdef: nnx.GraphDef,
    traits: LayerTraits,
    slots: int,
    block: int,
    embed: Callable,
    next_tokens: Callable,
) -> tuple[Callable, Callable]:
    """`encode` and `step` of `slot_runner.Programs`, for a SplitState.

    Args:
      graphdef: of the model without its layers.
      traits: of its layers.
      slots: how many there are.
      block: columns that `encode` reads at a time.
      embed: (model, tokens, patches) -> [R, L, H], and what deepstack adds or None.
      next_tokens: (model, slots, normed hidden states [S, 1, H], active) -> what a step returns
        after its cache.
    """

    def enter(outer, tokens, starts, ends, rows, branches, patches, shifts):
        model = nnx.merge(graphdef, outer)
        of_tokens = tokens_in(
            model.config,
            tokens.shape[1],
            starts=starts,
            ends=ends,
            rows=rows,
            branches=branches,
            shifts=shifts,
        )
        return *embed(model, tokens, patches), of_tokens

    def enter_step(outer, state, active):
        starts = jnp.where(active, state.position, 0)
        rows = jnp.where(active, jnp.arange(slots), slots)
        shifts = None if state.shift is None else state.shift[:, None]
        x, _, of_tokens = enter(
            outer, state.token[:, None], starts, starts + 1, rows, None, None, shifts
        )
        return x, of_tokens

    def leave(outer, x):
        return nnx.merge(graphdef, outer).norm(x)

    def leave_step(outer, state, x, active):
        return next_tokens(nnx.merge(graphdef, outer), state, leave(outer, x), active)

    begin, end = jax.jit(enter), jax.jit(leave)
    begin_step, end_step = jax.jit(enter_step), jax.jit(leave_step, donate_argnums=1)

    def encode(state: SplitState, cache: KVCache, *chunk: Any) -> tuple[jax.Array, KVCache]:
        *chunk, limit = chunk
        x, deepstack, of_tokens = begin(state.outer, *chunk)
        x, cache = run_layers(
            state.layers, x, cache, of_tokens, traits, deepstack, block=block, limit=limit
        )
        return end(state.outer, x), cache

    def step(
        state: SplitState,
        cache: KVCache,
        of_slots: Any,
        active: jax.Array,
        limit: int,
        sampled: None,  # on CPUs the programs see for themselves
    ):
        x, of_tokens = begin_step(state.outer, of_slots, active)
        whole = sum(segment.columns for segment in cache[0].segments)
        x, cache = run_layers(
            state.layers, x, cache, of_tokens, traits, block=whole, all_rows=True, limit=limit
        )
        return cache, *end_step(state.outer, of_slots, x, active)

    return encode, step
