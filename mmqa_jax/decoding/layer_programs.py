"""A model's forward pass on one CPU as a small program for each layer, the same for all.

XLA unrolls layers that are not scanned, and a scan on a CPU copies each layer's weights. One
program of 30 layers takes 30 times as long to compile, and to read from the compile cache, as
one of a layer. A CPU loses nothing where a program ends; an accelerator would wait for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from mmqa_jax.decoding.kv_cache import (
    KVCache,
    layer_program,
    run_layers,
    seen_whole,
    tokens_in,
)
from mmqa_jax.decoding.sampling import Shaping
from mmqa_jax.decoding.slots import Slots, step_ends, token_rows
from mmqa_jax.decoding.speculation import proposals
from mmqa_jax.models.llama.network import LayerTraits, Llama


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
    speculate: int,
    embed: Callable,
    next_tokens: Callable,
    options: Mapping[str, bool | str] | None,
) -> tuple[Callable, Callable]:
    """`encode` and `step` of `slot_runner.Programs`, for a SplitState.

    Args:
      graphdef: of the model without its layers.
      traits: of its layers.
      speculate: tokens of a slot in a step, where nothing proposes them from outside.
      embed: (model, tokens, patches) -> [R, L, H], and what deepstack adds or None.
      next_tokens: (model, slots, normed hidden states [R, 1, H], active, sampled, proposed,
        shaping) -> what a step returns after its cache.
      options: of the compiler.
    """
    options = tuple(sorted((options or {}).items()))
    layer, (leave, leave_step) = layer_program(options), _last_programs(options)

    def encode(state: SplitState, cache: KVCache, *chunk: Any) -> tuple[jax.Array, KVCache]:
        *chunk, _ = chunk
        x, deepstack, of_tokens = _enter(state.outer, *chunk, graphdef=graphdef, embed=embed)
        x, cache = run_layers(state.layers, x, cache, of_tokens, traits, deepstack, layer)
        return leave(state.outer, x, graphdef=graphdef), cache

    def step(
        state: SplitState,
        cache: KVCache,
        of_slots: Slots,
        table: jax.Array,
        active: jax.Array,
        adapters: jax.Array | None,
        _: int,
        sampled: bool | None,
        proposed: jax.Array | None = None,
        shaping: Shaping | None = None,
    ):
        inputs = (of_slots, table, active, adapters, proposed)
        x, of_tokens, proposed = _enter_step(
            state.outer, *inputs, graphdef=graphdef, speculate=speculate, embed=embed
        )
        x, cache = run_layers(state.layers, x, cache, of_tokens, traits, program=layer)
        options = {"graphdef": graphdef, "next_tokens": next_tokens, "sampled": sampled}
        return cache, *leave_step(state.outer, of_slots, x, active, proposed, shaping, **options)

    return encode, step


# By shapes, so that engines of other sizes share them where these are the same.
@functools.partial(jax.jit, static_argnames=("graphdef", "embed"))
def _enter(
    outer: nnx.State,
    tokens: jax.Array,
    table: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    branches: Any,
    patches: jax.Array | None,
    shifts: jax.Array | None,
    adapters: jax.Array | None,
    rows: jax.Array | None,
    *,
    graphdef: nnx.GraphDef,
    embed: Callable,
) -> tuple[Any, ...]:
    """Computes what the layers take: tokens [R, L] embedded, deepstack, and their places."""
    model = nnx.merge(graphdef, outer)
    whole = (model.config, tokens, starts, ends, branches, patches)
    of_tokens = tokens_in(
        model.config,
        tokens.shape[1],
        table=table,
        starts=starts,
        ends=ends,
        branches=branches,
        shifts=shifts,
        adapters=adapters,
        pictures=None if branches is None else seen_whole(*whole),  # of a step: none
        rows=rows,
    )
    embedded, deepstack = embed(model, tokens, patches)
    x, side = model.parted(embedded)
    return x, deepstack, of_tokens.replace(side=side)


@functools.partial(jax.jit, static_argnames=("graphdef", "speculate", "embed"))
def _enter_step(
    outer: nnx.State,
    of_slots: Slots,
    table: jax.Array,
    active: jax.Array,
    adapters: jax.Array | None,
    proposed: jax.Array | None,
    *,
    graphdef: nnx.GraphDef,
    speculate: int,
    embed: Callable,
) -> tuple[Any, ...]:
    """`_enter` of the last token of every slot, and of what is proposed; returns that as well."""
    proposed = proposals(of_slots, speculate) if proposed is None else proposed
    rows = token_rows(of_slots, table, active, adapters, proposed)
    tokens, table, starts, shifts, adapters = rows
    ends = step_ends(nnx.merge(graphdef, outer).config, starts, active)
    chunk = (tokens, table, starts, ends, None, None, shifts, adapters, None)
    x, _, of_tokens = _enter(outer, *chunk, graphdef=graphdef, embed=embed)
    return x, of_tokens, proposed


def _leave(outer: nnx.State, x: jax.Array, *, graphdef: nnx.GraphDef) -> jax.Array:
    return nnx.merge(graphdef, outer).norm(x)


def _leave_step(
    outer: nnx.State,
    of_slots: Slots,
    x: jax.Array,
    active: jax.Array,
    proposed: jax.Array | None,
    shaping: Shaping | None,
    *,
    graphdef: nnx.GraphDef,
    next_tokens: Callable,
    sampled: bool | None,
) -> Any:
    model = nnx.merge(graphdef, outer)
    return next_tokens(model, of_slots, model.norm(x), active, sampled, proposed, shaping)


@functools.cache
def _last_programs(options: tuple[tuple[str, bool | str], ...]) -> tuple[Callable, Callable]:
    """`_leave` and `_leave_step`, compiled."""
    jit = functools.partial(jax.jit, compiler_options=dict(options))
    of_step = ("graphdef", "next_tokens", "sampled")
    return (
        jit(_leave, static_argnames="graphdef"),
        jit(_leave_step, static_argnames=of_step, donate_argnums=1),
    )
