"""The KV cache and the forward pass over it: written in place.

Columns lie in pages, of which each row has a list (its table; vLLM's paged attention, Kwon et al.
2023): rows take as many as they need, and share those of a common prefix. Attention runs over the
pages with a running maximum (online softmax, Milakov and Gimelshein 2018), and only over as many as
the longest row needs. Masked columns add exactly zero, so a row's bits do not depend on how long
its neighbors are.

Beside the pages a slot holds one state for each recurrent layer (the gated delta rule, short
convolutions), which the chunks of its prompt and its steps carry on; the
first chunk of a prompt begins with zeros. States cannot be cut at a column, so that prompts which
begin alike share no pages, and no step takes several tokens.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import batch_blocks, partition_spec
from mmqa_jax.decoding.cached_attention import (
    Branches,
    LayerCache,
    attend,
    attend_to_rows,
)
from mmqa_jax.models.attention.flash import implementation_for
from mmqa_jax.models.attention.masked import last_of_pictures
from mmqa_jax.models.llama import network
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.gated_delta import ConvState, DeltaState, State, state_shapes
from mmqa_jax.models.llama.lora import with_chosen

# Logical axes, for core.mesh.partition_spec.
_OF_INPUTS = ("batch", "positions", "heads")
_OF_DELTA = DeltaState(("batch", "heads", "head_dim", "head_dim"), *[_OF_INPUTS] * 3)


def _names(state: State) -> State:
    return _OF_DELTA if isinstance(state, DeltaState) else ConvState(_OF_INPUTS)


def state_layout(config: LlamaConfig, slots: int, mesh: Mesh | None = None) -> State:
    """ShapeDtypeStructs of one layer's states of all slots, which are split like the slots."""

    def placed(shape: jax.ShapeDtypeStruct, names: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        spec = mesh and NamedSharding(mesh, partition_spec(names, shape.shape, mesh))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=spec)

    shapes = state_shapes(config, slots)
    return jax.tree.map(placed, shapes, _names(shapes))


def continued(
    layer: network.LlamaLayer,
    x: jax.Array,
    held: State,
    *,
    starts: jax.Array,
    ends: jax.Array,
    rows: jax.Array | None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, State]:
    """A recurrent layer on tokens x [R, L, H] that follow what their slots hold.

    Args:
      held: of all slots.
      starts, ends: int [R], columns of each row's first token, and behind its last real one; a row
        that starts at 0 begins with zeros, one that ends where it starts changes nothing.
      rows: int32 [R], slots; a number beyond all is a row of padding. None: the rows are the slots.
      mesh: where the states lie. If their rows are split, the R rows are split alike.
    """
    counts = jnp.clip(ends - starts, 0, x.shape[1])
    before = held if rows is None else _on_own_rows(_taken, held, mesh)(held, rows)
    begins = (starts == 0) & (counts > 0)

    def begun(state: jax.Array) -> jax.Array:
        return jnp.where(begins.reshape(-1, *[1] * (state.ndim - 1)), 0, state)

    x, new = layer.continued(x, jax.tree.map(begun, before), ends=counts)
    new = jax.tree.map(lambda x, before: x.astype(before.dtype), new, held)
    if rows is None:
        return x, new
    return x, _on_own_rows(_put, held, mesh)(held, rows, new)


def _taken(held: State, rows: jax.Array) -> State:
    return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), held)


def _put(held: State, rows: jax.Array, new: State) -> State:
    return jax.tree.map(lambda x, values: x.at[rows].set(values, mode="drop"), held, new)


def _on_own_rows(
    function: Callable[..., State], held: State, mesh: Mesh | None
) -> Callable[..., State]:
    """The function, each device with its own slots and rows; XLA else exchanges all states."""
    names = _names(held)
    specs = mesh and jax.tree.map(lambda x, n: partition_spec(n, x.shape, mesh), held, names)
    axes = specs and jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))[0][0]
    if axes is None:
        return function

    def local(held: State, rows: jax.Array, *new: State) -> State:
        count = len(jax.tree.leaves(held)[0])
        rows = rows - jax.lax.axis_index(axes) * count
        return function(held, jnp.where((rows < 0) | (rows > count), count, rows), *new)

    def split(held: State, rows: jax.Array, *new: State) -> State:
        in_specs = (specs, PartitionSpec(axes), *(specs for _ in new))
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False
        )
        return mapped(held, rows, *new)

    return split


# Logical axes, for `core.mesh.partition_spec`.
_KEY_NAMES = ("batch", "heads", "head_dim", "positions")
_VALUE_NAMES = ("batch", "heads", "positions", "head_dim")
_SCALE_NAMES = ("batch", "heads", "positions")


KVCache = tuple[LayerCache | State, ...]  # not one stack: a donated cache is then updated in place


def layout(
    config: LlamaConfig,
    pages: int,
    columns: int,
    dtype: str,
    mesh: Mesh | None = None,
    slots: int = 0,
) -> KVCache:
    """ShapeDtypeStructs of a cache of `pages` pages of `columns` tokens.

    dtype: of keys and values; "int8" adds scales.
    mesh: pages are sharded like the batch, heads like the model's.
    slots: have a state each in recurrent layers.
    """

    def array(kind: str, names: tuple[str, ...], *shape: int) -> jax.ShapeDtypeStruct:
        spec = mesh and NamedSharding(mesh, partition_spec(names, shape, mesh))
        return jax.ShapeDtypeStruct(shape, kind, sharding=spec)

    def of_layer(config: LlamaConfig) -> LayerCache | State | None:
        if config.borrows:
            return None
        if config.recurrent:
            return state_layout(config, slots, mesh)
        head = (pages, config.kv_heads)
        scale = array("float32", _SCALE_NAMES, *head, columns) if dtype == "int8" else None
        key = array(dtype, _KEY_NAMES, *head, config.head_size, columns)
        value = array(dtype, _VALUE_NAMES, *head, columns, config.head_size)
        return LayerCache(key, value, scale, scale)

    return tuple(map(of_layer, config.places)) * (config.layers // config.period)


def page_each(rows: int, mesh: Mesh | None = None) -> np.ndarray:
    """The table, int32 [rows, 1], of a cache that has one page for each of its rows."""
    shards = 1 if mesh is None else batch_blocks(mesh)
    of_shard = rows if rows % shards else rows // shards
    return np.arange(rows, dtype=np.int32)[:, None] % of_shard


def ragged_fits(config: LlamaConfig, page: int, chunk: int, dtype: str, device: jax.Device) -> bool:
    """Whether `forward` on the device, present or not, can attend by "ragged".

    page: columns of a page. chunk: of tokens, the smallest. dtype: of the cache.
    """
    sizes, kind = {config.of_layer(n).head_size for n in range(config.layers)}, config.dtype
    half = kind in ("bfloat16", "float16") and dtype in (kind, "int8")
    fits = all(16 <= size <= 256 and size & (size - 1) == 0 for size in sizes)
    fits &= page % 16 == chunk % 16 == 0
    return implementation_for(device) == "cudnn" and half and fits


def empty(*sizes: Any, **options: Any) -> KVCache:
    """A cache of zeros; arguments are those of `layout`."""
    return zeros(layout(*sizes, **options))


def zeros(arrays: Any) -> Any:
    """Zeros in the place of ShapeDtypeStructs, each device making its own."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), arrays)


def forward(
    model: network.Llama,
    embedded: jax.Array,
    cache: KVCache,
    *,
    table: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    branches: Branches | None = None,
    shifts: jax.Array | None = None,
    deepstack: jax.Array | None = None,
    adapters: jax.Array | None = None,
    pictures: jax.Array | None = None,
    rows: jax.Array | None = None,
    limit: int | None = None,
    implementation: str = "blocks",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs the decoder on tokens that follow what their rows hold, and caches keys and values.

    Args:
      model: best with unstacked layers.
      embedded: [R, L, H]; padding after a row's last real token is cached too, and overwritten
        before any token attends to it.
      cache: donate it.
      table: int32 [R, M], each row's pages in the order of its columns. What is no column of these
        is written to page 0.
      starts: int [R], column of each row's first token. Where L > 1 the tokens lie in whole pages,
        or within one.
      ends: int [R], column after each row's last real token; nothing beyond is read.
      branches: of the tokens; None: every row is one sequence, position and column are the same.
      shifts: int [R, L, 3], or [R, L] where the three are the same, by how much rotary positions
        are beyond that (M-RoPE); None: not at all.
      deepstack: [n, R, L, H], added to what the first n layers give; None: nothing.
      adapters: int [R, 1], the rows' numbers of `lora.add_adapters`; None: the model has none.
      pictures: bool [R, L], of tokens of pictures that are seen whole, of which none is cut; needs
        branches. None: none.
      rows: int32 [R], the slots whose recurrent states are continued; None: the rows are the slots.
      limit: columns of the table that may be read; None is all. "blocks" reads no further than the
        longest row anyway; what the "ragged" kernels say of their costs is of so many columns.
      implementation: "blocks" reads a page of each row at a time; "cudnn", on a GPU, takes the rows
        out of the cache and hands them to `layers.attention`; "ragged", for one token of each row
        or multiples of 16 on a GPU (see `ragged_fits`), reads each row's own columns in place, by
        kernels.
      mesh: where the cache lies. If its pages are split, the R rows are split alike, and the
        numbers in their tables count within the shard.

    Returns:
      Normed hidden states [R, L, H] and the cache.
    """
    of_tokens = tokens_in(
        model.config,
        embedded.shape[1],
        table=table,
        starts=starts,
        ends=ends,
        branches=branches,
        shifts=shifts,
        adapters=adapters,
        pictures=pictures,
        rows=rows,
    )
    options = {"limit": limit, "implementation": implementation, "mesh": mesh}
    width = next(held.value.shape[2] for held in cache if isinstance(held, LayerCache))
    traits = network.layer_traits(model.config, table.shape[1] * width)
    layers = map(nnx.split, model.each_layer())
    x, side = model.parted(embedded)
    of_tokens = of_tokens.replace(side=side)
    x, cache = run_layers(layers, x, cache, of_tokens, traits, deepstack, **options)
    return model.norm(x), cache


def seen_whole(
    config: LlamaConfig,
    tokens: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    branches: Branches | None,
    patches: jax.Array | None,
) -> jax.Array | None:
    """`pictures` of `forward`: of tokens int [R, L] the negative ones; of a model that sees prompts
    whole those of the prompt, which lies in one chunk."""
    if config.picture_sight != "prompt":
        return None if patches is None else tokens < 0
    columns = starts[:, None] + jnp.arange(tokens.shape[1])
    of_prompt = (starts[:, None] == 0) & (columns < ends[:, None])
    return of_prompt if branches is None else of_prompt & (branches.begin == 0)


@flax.struct.dataclass
class Tokens:
    """Where the tokens are whose keys and values every layer writes and reads."""

    columns: jax.Array  # int32 [R, L]
    cos: jax.Array  # float32 [R, L, 1, D / 2], of their positions
    sin: jax.Array
    table: jax.Array  # int32 [R, M]
    starts: jax.Array  # int [R]
    ends: jax.Array  # int [R]: nothing from this column on is read
    branches: Branches | None
    adapters: jax.Array | None  # int [R, 1]
    rows: jax.Array | None  # int32 [R]: slots of recurrent states
    side: jax.Array | None = None  # [N, R, L, P]: of `LlamaConfig.side`
    # Of each layer the one whose keys and values it reads.
    lenders: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())


def tokens_in(
    config: LlamaConfig,
    length: int,
    *,
    table: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    branches: Branches | None,
    shifts: jax.Array | None = None,
    adapters: jax.Array | None = None,
    rows: jax.Array | None = None,
    pictures: jax.Array | None = None,
) -> Tokens:
    """What `run_layers` needs to know of the tokens; `length` is L, the rest as in `forward`."""
    columns = starts[:, None] + jnp.arange(length)  # [R, L]
    positions = columns if branches is None else branches.positions(columns)
    angles = network.rotary_angles(config, network.shifted(positions, shifts))
    cos, sin = network.rotation(config, jnp.cos(angles), jnp.sin(angles))
    if pictures is not None and config.picture_sight != "causal":
        whole = pictures if config.picture_sight == "prompt" else None
        branches = branches.replace(last=starts[:, None] + last_of_pictures(pictures), whole=whole)
    lenders = tuple(map(config.lender, range(config.layers)))
    where = (columns, cos, sin, table, starts, ends, branches, adapters, rows)
    return Tokens(*where, lenders=lenders)


def run_layers(
    layers: Iterable[tuple[nnx.GraphDef, nnx.State]],
    x: jax.Array,
    cache: KVCache,
    of_tokens: Tokens,
    traits: network.LayerTraits,
    deepstack: jax.Array | None = None,
    program: Callable[..., tuple[jax.Array, LayerCache]] | None = None,
    **options: Any,
) -> tuple[jax.Array, KVCache]:
    """x [R, L, H] through all layers, each split by nnx; `options` are those of `_layer`.

    traits: of all layers; deepstack: see `forward`.

    program: of `layer_program`, which every layer runs by itself and which takes over its cache;
      None within a program.
    """
    written, program, lenders = [*cache], program or _inlined, of_tokens.lenders
    traits, of_tokens = traits.replace(side=of_tokens.side), of_tokens.replace(side=None)
    for number, (graphdef, params) in enumerate(layers):
        of_layer, held = traits.of(number), written[lenders[number]]
        x, held = program(params, x, held, of_tokens, of_layer, graphdef=graphdef, **options)
        x = network.added(x, deepstack, number)
        written[lenders[number]] = held
    return x, tuple(written)


def _layer(
    params: nnx.State,
    x: jax.Array,
    held: LayerCache,
    of_tokens: Tokens,
    traits: network.LayerTraits,
    *,
    graphdef: nnx.GraphDef,
    limit: int | None = None,
    implementation: str = "blocks",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, LayerCache]:
    layer = with_chosen(nnx.merge(graphdef, params), of_tokens.adapters)
    if isinstance(held, State):
        where = {"starts": of_tokens.starts, "ends": of_tokens.ends, "rows": of_tokens.rows}
        return continued(layer, x, held, **where, mesh=mesh)
    q, k, v = layer.project(x, of_tokens.cos, of_tokens.sin, traits)
    cap = layer.config.attention_cap

    def write_and_attend(q, k, v, held, sinks, table, starts, ends, columns, branches, window=None):
        held = held if k is None else write(held, k, v, table, starts)
        width = held.value.shape[2]
        read = table.shape[1] * width if limit is None else limit
        options = {"window": window, "cap": cap, "sinks": sinks}
        # The kernels know nothing of hidden columns.
        if implementation == "ragged" and (branches is None or branches.hidden is None):
            from mmqa_jax.decoding import ragged_triton  # Pallas takes long to import

            of_layer = {**options, "read": read}
            if q.shape[1] == 1:
                out = ragged_triton.attend_to_own(q, held, table, starts + 1, **of_layer)
            else:
                out = ragged_triton.attend_in_place(q, held, table, starts, branches, **of_layer)
        elif implementation in ("blocks", "ragged"):
            out = attend(q, held, columns, branches, table, ends.max(), **options)
        else:
            table = table[:, : -(-read // width)]
            out = attend_to_rows(q, held, columns, branches, table, implementation, **options)
        return out, held

    of_pages = _axes_of_pages(held, mesh)
    # XLA does not split a kernel by itself.
    if of_pages is not None or (implementation == "ragged" and mesh is not None):
        write_and_attend = on_own_pages(write_and_attend, _specs(held, mesh), of_pages, mesh)
    where = (of_tokens.table, of_tokens.starts, of_tokens.ends, of_tokens.columns)
    branches = of_tokens.branches
    if branches is not None and layer.config.picture_sight == "causal":
        branches = branches.replace(last=None, whole=None)
    where = (*where, branches)
    if traits.window is not None:
        where = (*where, jnp.full_like(of_tokens.starts, traits.window))
    attended, held = write_and_attend(q, k, v, held, layer.sink_logits, *where)
    return layer.finish(x, attended, traits), held


@functools.cache
def layer_program(
    options: tuple[tuple[str, bool | str], ...],
) -> Callable[..., tuple[jax.Array, LayerCache]]:
    """`_layer` as a program of its own on a CPU, by options of the compiler."""
    return _compiled(compiler_options=dict(options))


_compiled = functools.partial(
    jax.jit,
    _layer,
    static_argnames=("graphdef", "limit", "implementation", "mesh"),
    donate_argnames="held",
)
_inlined = _compiled()  # within a program: all layers are then traced and lowered once


def _specs(layer: LayerCache, mesh: Mesh) -> LayerCache:
    """How the mesh splits a layer's arrays, as `layout` says."""
    names = LayerCache(_KEY_NAMES, _VALUE_NAMES, _SCALE_NAMES, _SCALE_NAMES)
    if layer.key_scale is None:
        names = names.replace(key_scale=None, value_scale=None)
    return layer.map(lambda x, of_array: partition_spec(of_array, x.shape, mesh), names)


def _axes_of_pages(layer: LayerCache, mesh: Mesh | None) -> Any:
    """The mesh axes that a cache's pages are split over; None if they are not."""
    return None if mesh is None else _specs(layer, mesh).key[0]


def write(
    layer: LayerCache, k: jax.Array, v: jax.Array, table: jax.Array, starts: jax.Array
) -> LayerCache:
    """k, v [R, L, kv_heads, D] into columns starts[r].. of row r, as `forward` says."""
    length, width = k.shape[1], layer.value.shape[2]
    pages, columns = places(table, starts, length, width)  # [R, n] each
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)  # [R, kv, D, L], [R, kv, L, D]
    key_scale = value_scale = None
    if layer.key_scale is not None:
        k, key_scale = quantize(k, axis=2)
        v, value_scale = quantize(v, axis=3)

    def put(x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        parts = jnp.stack(jnp.split(new.astype(x.dtype), pages.shape[1], axis), axis=1)
        parts = parts.reshape(-1, *parts.shape[2:])
        return _set(x, axis, parts, pages.reshape(-1), columns.reshape(-1))

    scaled = layer.key_scale is not None
    return LayerCache(
        put(layer.key, k, 3),
        put(layer.value, v, 2),
        put(layer.key_scale, key_scale, 2) if scaled else None,
        put(layer.value_scale, value_scale, 2) if scaled else None,
    )


def places(
    table: jax.Array, starts: jax.Array, length: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Finds where `length` tokens of each row go, in parts within one page of `width` columns.

    Returns:
      int32 [R, n] twice: the page of each part, 0 where the table has none, and its first column
      there.
    """
    columns = starts[:, None] + jnp.arange(0, length, min(length, width))
    pages = jnp.take_along_axis(table, columns // width, axis=1, mode="fill", fill_value=0)
    return pages, columns % width


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Rounded to -127..127 with one scale per vector along `axis`; the scales lack that axis."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(axis, keepdims=True), 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale.squeeze(axis)


def _set(x: jax.Array, axis: int, new: jax.Array, pages: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes new[r] ([R, ...], `axis` shorter) into page pages[r] from column starts[r] on.

    A scatter of whole windows: XLA keeps it in place. A window must end within the page, or it is
    dropped.
    """
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, x.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, axis),
    )
    return jax.lax.scatter(
        x,
        jnp.stack([pages, starts], axis=1),
        new,
        dimensions,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )


# A cache whose pages are split over devices: each reads and writes its own alone.
#
# Left to itself, XLA would exchange pages, since it does not know which device a page's number is
# on.

C = TypeVar("C")
Axes = str | tuple[str, ...]  # of the mesh, that pages are split over


def on_own_pages(
    attend: Callable[..., tuple[jax.Array, C]], specs: C, axes: Axes | None, mesh: Mesh
) -> Callable[..., tuple[jax.Array, C]]:
    """`attend(q, k, v, held, sinks, *more)` -> (attended, held), each device its rows, pages and
    heads; sinks [heads] or None.

    Args:
      specs: the PartitionSpec of each array of a layer `held`, [pages, kv_heads, ...].
      axes: None where heads alone are split, and every device has all rows.
    """
    row, of_heads = PartitionSpec(axes), jax.tree.leaves(specs, is_leaf=_is_spec)[0][1]
    of_token = PartitionSpec(axes, None, of_heads)  # [R, L, heads, D]

    def split(q, k, v, held, sinks, *more):
        function = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(*[of_token] * 3, specs, PartitionSpec(of_heads), *(row for _ in more)),
            out_specs=(of_token, specs),
            check_vma=False,
        )
        return function(q, k, v, held, sinks, *more)

    return split


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
