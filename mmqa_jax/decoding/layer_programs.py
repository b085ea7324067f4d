"""A model's forward pass on one CPU as a small program for each layer, the same for all.

XLA unrolls layers that are not scanned, and a scan on a CPU copies each layer's weights. One
program of 30 layers takes 30 times as long to compile, and to read from the compile cache, as one
of a layer. A CPU loses nothing where a program ends; an accelerator would wait for the host.
"""

from __future__ import annotations

import functools
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
    block: int,
    embed: Callable,
    next_tokens: Callable,
) -> tuple[Callable, Callable]:
    """`encode` and `step` of `slot_runner.Programs`, for a SplitState.

    Args:
      graphdef: of the model without its layers.
      traits: of its layers.
      block: columns that `encode` reads at a time.
      embed: (model, tokens, patches) -> [R, L, H], and what deepstack adds or None.
      next_tokens: (model, slots, normed hidden states [S, 1, H], active, sampled) -> what a step
        returns after its cache.
    """

    def encode(state: SplitState, cache: KVCache, *chunk: Any) -> tuple[jax.Array, KVCache]:
        *chunk, limit = chunk
        x, deepstack, of_tokens = _enter(state.outer, *chunk, graphdef=graphdef, embed=embed)
        x, cache = run_layers(
            state.layers, x, cache, of_tokens, traits, deepstack, block=block, limit=limit
        )
        return _leave(state.outer, x, graphdef=graphdef), cache

    def step(
        state: SplitState,
        cache: KVCache,
        of_slots: Any,
        active: jax.Array,
        adapters: jax.Array | None,
        limit: int,
        sampled: bool | None,
    ):
        x, of_tokens = _enter_step(
            state.outer, of_slots, active, adapters, graphdef=graphdef, embed=embed
        )
        whole = sum(segment.columns for segment in cache[0].segments)
        x, cache = run_layers(
            state.layers, x, cache, of_tokens, traits, block=whole, all_rows=True, limit=limit
        )
        options = {"graphdef": graphdef, "next_tokens": next_tokens, "sampled": sampled}
        return cache, *_leave_step(state.outer, of_slots, x, active, **options)

    return encode, step


# By shapes, so that engines of other sizes share them where these are the same.
@functools.partial(jax.jit, static_argnames=("graphdef", "embed"))
def _enter(
    outer: nnx.State,
    tokens: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    rows: jax.Array,
    branches: Any,
    patches: jax.Array | None,
    shifts: jax.Array | None,
    adapters: jax.Array | None,
    *,
    graphdef: nnx.GraphDef,
    embed: Callable,
) -> tuple[Any, ...]:
    """What comes before the layers: tokens [R, L] embedded, deepstack, and where they are."""
    model = nnx.merge(graphdef, outer)
    of_tokens = tokens_in(
        model.config,
        tokens.shape[1],
        starts=starts,
        ends=ends,
        rows=rows,
        branches=branches,
        shifts=shifts,
        adapters=adapters,
    )
    return *embed(model, tokens, patches), of_tokens


@functools.partial(jax.jit, static_argnames=("graphdef", "embed"))
def _enter_step(
    outer: nnx.State,
    of_slots: Any,
    active: jax.Array,
    adapters: jax.Array | None,
    *,
    graphdef: nnx.GraphDef,
    embed: Callable,
) -> tuple[Any, ...]:
    """`_enter` of the last token of every slot; inactive ones are not written."""
    slots = active.shape[0]
    starts = jnp.where(active, of_slots.position, 0)
    rows = jnp.where(active, jnp.arange(slots), slots)
    shifts = None if of_slots.shift is None else of_slots.shift[:, None]
    chunk = (of_slots.token[:, None], starts, starts + 1, rows, None, None, shifts, adapters)
    x, _, of_tokens = _enter(outer, *chunk, graphdef=graphdef, embed=embed)
    return x, of_tokens


@functools.partial(jax.jit, static_argnames="graphdef")
def _leave(outer: nnx.State, x: jax.Array, *, graphdef: nnx.GraphDef) -> jax.Array:
    return nnx.merge(graphdef, outer).norm(x)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "next_tokens", "sampled"), donate_argnums=1
)
def _leave_step(
    outer: nnx.State,
    of_slots: Any,
    x: jax.Array,
    active: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    next_tokens: Callable,
    sampled: bool | None,
) -> Any:
    model = nnx.merge(graphdef, outer)
    return next_tokens(model, of_slots, model.norm(x), active, sampled)
