"""Layers that are compiled one by one: on a CPU, and on a TPU where they are of several kinds.

XLA unrolls layers that are not scanned, and a scan on a CPU copies each layer's weights. One
program of 30 layers takes 30 times as long to compile, and to read from the compile cache, as
one of a layer. A CPU loses nothing where a program ends; an accelerator would wait for the host.

On a TPU each attention layer has a cache of its own, as `scanned_cache` has one of all layers: the
same kernel reads and writes it in place in a step, and prompts are attended to by splash attention.
Recurrent layers have their states. A layer that borrows keys and values is given those of its
lender for the new tokens, and reads the others in its lender's cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import columns_over_tensor, split_rows
from mmqa_jax.decoding import kv_cache, scanned_cache
from mmqa_jax.decoding.kv_cache import (
    KVCache,
    Tokens,
    layer_program,
    run_layers,
    seen_whole,
    tokens_in,
)
from mmqa_jax.decoding.sampling import Shaping
from mmqa_jax.decoding.scanned_cache import ScannedCache
from mmqa_jax.decoding.slots import Slots, step_ends, token_rows
from mmqa_jax.decoding.speculation import proposals
from mmqa_jax.models.llama import network as llama
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.gated_delta import State
from mmqa_jax.models.llama.lora import with_chosen
from mmqa_jax.models.llama.network import LayerTraits, Llama, LlamaLayer, layer_traits

LayeredCache = tuple[ScannedCache | State | None, ...]  # None: the layer borrows
_Lent = tuple[jax.Array, jax.Array]  # keys and values of the new tokens, [R, L, kv_heads, D] each


def layout(
    config: LlamaConfig,
    pages: int,
    columns: int,
    dtype: str,
    mesh: Mesh | None = None,
    slots: int = 0,
) -> LayeredCache:
    """ShapeDtypeStructs of a cache of `pages` pages of `columns` tokens; see `kv_cache.layout`."""

    def of_layer(config: LlamaConfig) -> ScannedCache | State | None:
        if config.borrows:
            return None
        if config.recurrent:
            return kv_cache.state_layout(config, slots, mesh)
        return scanned_cache.layout(config, pages, columns, dtype, mesh)

    single = [dataclasses.replace(config.of_layer(n), layers=1) for n in range(config.layers)]
    return tuple(map(of_layer, single))


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How every layer reads its cache; static for the compiler."""

    limit: int  # columns read
    # Tokens follow what their slots hold, and a slot's are few; else they are of prompts.
    in_step: bool
    ragged: bool = False  # a step attends by the TPU's kernel, see `scanned_cache.decode`
    implementation: str = "blocks"  # of `layers.attention`, of prompts
    mesh: Mesh | None = None  # where the cache lies


def decode(
    model: llama.Llama,
    embedded: jax.Array,
    cache: LayeredCache,
    *,
    table: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    limit: int,
    shifts: jax.Array | None = None,
    adapters: jax.Array | None = None,
    mesh: Mesh | None = None,
    ragged: bool = False,
) -> tuple[jax.Array, LayeredCache]:
    """The next tokens of every row, as `scanned_cache.decode` takes and gives them.

    ends: int [S], the column behind each row's tokens; a recurrent state of a row that ends where
      it starts stays as it is.
    """
    of_tokens = tokens_in(
        model.config,
        embedded.shape[1],
        table=table,
        starts=positions,
        ends=ends,
        branches=None,
        shifts=None if shifts is None else shifts[:, None],
        adapters=adapters,
    )
    reading = _Reading(limit, in_step=True, ragged=ragged, mesh=mesh)
    return _run(model, split_rows(embedded), cache, of_tokens, reading)


def prefill(
    model: llama.Llama,
    embedded: jax.Array,
    cache: LayeredCache,
    *,
    limit: int,
    deepstack: jax.Array | None = None,
    pictures: jax.Array | None = None,
    implementation: str = "blocks",
    mesh: Mesh | None = None,
    **of_rows: jax.Array | None,
) -> tuple[jax.Array, LayeredCache]:
    """Tokens that follow what their rows hold, as `scanned_cache.prefill` takes and gives them.

    of_rows: `table`, `starts`, `ends`, `branches`, `shifts`, `adapters` and `rows` of
      `kv_cache.forward`.
    """
    of_tokens = tokens_in(model.config, embedded.shape[1], **of_rows)
    reading = _Reading(limit, in_step=False, implementation=implementation, mesh=mesh)
    return _run(model, embedded, cache, of_tokens, reading, deepstack, pictures)


def _run(
    model: llama.Llama,
    embedded: jax.Array,
    cache: LayeredCache,
    of_tokens: Tokens,
    reading: _Reading,
    deepstack: jax.Array | None = None,
    pictures: jax.Array | None = None,
) -> tuple[jax.Array, LayeredCache]:
    """Normed hidden states [R, L, H] of all layers one after another, and the cache."""
    config, written = model.config, [*cache]
    width = next(held.key.shape[3] for held in cache if isinstance(held, ScannedCache))
    traits = layer_traits(config, of_tokens.table.shape[1] * width)
    x, side = model.parted(embedded)
    traits = traits.replace(side=side)
    lent: dict[int, _Lent] = {}
    for number, layer in enumerate(model.each_layer()):
        lender, of_layer = of_tokens.lenders[number], traits.of(number)
        of_reading, window = reading, config.windows[number] if config.windows else 0
        if not window:
            of_layer = of_layer.replace(window=None)  # some layers have one, and this one has none
        elif reading.ragged:  # the kernel reads no more than a window and the page that it ends in
            of_reading = dataclasses.replace(reading, limit=min(reading.limit, window + width))
        graphdef, params = nnx.split(layer)
        x, written[lender], lent[lender] = _layer(
            params,
            x,
            written[lender],
            of_tokens,
            of_layer,
            lent.get(lender),
            pictures,
            graphdef=graphdef,
            reading=of_reading,
        )
        x = llama.added(x, deepstack, number)
    return model.norm(x), tuple(written)


@functools.partial(jax.jit, static_argnames=("graphdef", "reading"))  # like layers are traced once
def _layer(
    params: nnx.State,
    x: jax.Array,
    held: ScannedCache | State,
    of_tokens: Tokens,
    traits: LayerTraits,
    lent: _Lent | None,
    pictures: jax.Array | None,
    *,
    graphdef: nnx.GraphDef,
    reading: _Reading,
) -> tuple[jax.Array, ScannedCache | State, _Lent | None]:
    """One layer: x [R, L, H], what it holds, and the keys and values of the new tokens, which a
    borrower gets from its lender."""
    layer, mesh = with_chosen(nnx.merge(graphdef, params), of_tokens.adapters), reading.mesh
    x = x if reading.in_step else columns_over_tensor(x)
    if isinstance(held, State):
        where = {"starts": of_tokens.starts, "ends": of_tokens.ends, "rows": of_tokens.rows}
        return *kv_cache.continued(layer, x, held, **where, mesh=mesh), None
    if reading.ragged:
        attended, held, lent = _by_kernel(layer, x, held, of_tokens, traits, lent, reading)
        return layer.finish(x, attended, traits), held, lent
    q, *projected = layer.project(x, of_tokens.cos, of_tokens.sin, traits, apart=True)
    new = lent if layer.config.borrows else tuple(projected)
    assert new is not None
    attend = _attention(layer.config, held, of_tokens, pictures, q.shape[1], reading)
    attended = attend(q, *new, 0, traits.window, layer.sink_logits)
    if not layer.config.borrows:
        of_layer = (array[None] for array in new)
        held = scanned_cache.write(held, *of_layer, of_tokens.table, of_tokens.starts, mesh)
    return layer.finish(x, attended, traits), held, new


def _attention(
    config: LlamaConfig,
    held: ScannedCache,
    of_tokens: Tokens,
    pictures: jax.Array | None,
    length: int,
    reading: _Reading,
) -> Any:
    """The attention of a layer's new tokens to what it holds and each other, by XLA or splash."""
    of_rows = {"table": of_tokens.table, "limit": reading.limit, "mesh": reading.mesh}
    if reading.in_step:
        return scanned_cache.token_attention(config, held, positions=of_tokens.starts, **of_rows)
    return scanned_cache.prompt_attention(
        config,
        held,
        length,
        starts=of_tokens.starts,
        branches=of_tokens.branches,
        pictures=pictures,
        implementation=reading.implementation,
        **of_rows,
    )


def _by_kernel(
    layer: LlamaLayer,
    x: jax.Array,
    held: ScannedCache,
    of_tokens: Tokens,
    traits: LayerTraits,
    lent: _Lent | None,
    reading: _Reading,
) -> tuple[jax.Array, ScannedCache, _Lent]:
    """What the TPU's kernel gives for a step: [S, L, heads, D], and the cache with the tokens.

    A borrower writes what its lender has written, once more: that is one tile of a slot.
    """
    # Pallas takes long to import.
    from mmqa_jax.decoding.ragged_attention import attend_on, turns_of

    attend = attend_on(
        of_tokens.table,
        of_tokens.starts,
        cap=layer.config.attention_cap,
        read=reading.limit,
        mesh=reading.mesh,
        specs=scanned_cache.specs_of(held, reading.mesh),
    )
    q, *projected = layer.products(split_rows(x), traits, apart=True)
    new = lent if layer.config.borrows else tuple(projected)
    assert new is not None
    turns = turns_of(*layer.turned(*traits.turned(of_tokens.cos, of_tokens.sin)))
    number = jnp.int32(0)
    attended, held = attend(q, *new, turns, held, number, traits.window, layer.sink_logits)
    return attended, held, new


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
