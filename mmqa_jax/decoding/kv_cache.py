"""The KV cache and the forward pass over it: written in place.

Columns lie in segments, arrays of their own, so that a program reads the first few of them in
place: XLA on CPU copies a slice of an array before it multiplies by it. Attention runs over
segments, or blocks of them, with a running maximum (online softmax, Milakov and Gimelshein 2018),
and only over as many as the longest row needs. Masked columns add exactly zero, so a row's bits do
not depend on how long its neighbors are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import batch_blocks, partition_spec
from mmqa_jax.decoding.cached_attention import (
    Branches,
    LayerCache,
    Segment,
    attend,
    attend_to_rows,
    count_blocks,
    read_columns,
)
from mmqa_jax.models.attention.flash import implementation_for
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import with_chosen
from mmqa_jax.models.llama.network import (
    LayerTraits,
    Llama,
    added,
    layer_traits,
    rotary_angles,
    rotation,
    shifted,
)

# Logical axes, for `core.mesh.partition_spec`.
_KEY_NAMES = ("batch", "heads", "head_dim", "positions")
_VALUE_NAMES = ("batch", "heads", "positions", "head_dim")
_SCALE_NAMES = ("batch", "heads", "positions")


KVCache = tuple[LayerCache, ...]  # not one stack: a donated cache is then updated in place


def layout(
    config: LlamaConfig,
    rows: int,
    columns: int,
    dtype: str,
    mesh: Mesh | None = None,
    segment: int | None = None,
) -> KVCache:
    """ShapeDtypeStructs of a cache for `rows` sequences of `columns` tokens.

    dtype: of keys and values; "int8" adds scales.
    mesh: rows are sharded like the batch, heads like the model's.
    segment: columns of a segment, the last may have fewer; None is all.
    """

    def array(kind: str, names: tuple[str, ...], *shape: int) -> jax.ShapeDtypeStruct:
        spec = mesh and NamedSharding(mesh, partition_spec(names, shape, mesh))
        return jax.ShapeDtypeStruct(shape, kind, sharding=spec)

    def one(size: int) -> Segment:
        head = (rows, config.kv_heads)
        scale = array("float32", _SCALE_NAMES, *head, size) if dtype == "int8" else None
        return Segment(
            array(dtype, _KEY_NAMES, *head, config.head_size, size),
            array(dtype, _VALUE_NAMES, *head, size, config.head_size),
            scale,
            scale,
        )

    segment = segment or columns
    sizes = [min(segment, columns - start) for start in range(0, columns, segment)]
    return (LayerCache(tuple(map(one, sizes))),) * config.layers


def ragged_fits(
    config: LlamaConfig, columns: int, chunk: int, dtype: str, device: jax.Device
) -> bool:
    """Whether `forward` on the device, present or not, can attend by "ragged".

    columns: of a row, in one segment. chunk: of tokens, the smallest. dtype: of the cache.
    """
    size, kind = config.head_size, config.dtype
    half = kind in ("bfloat16", "float16") and dtype in (kind, "int8")
    fits = 16 <= size <= 256 and size & (size - 1) == 0 and columns % 16 == chunk % 16 == 0
    # The kernels know neither windows nor caps.
    fits = fits and not config.windowed(columns) and config.attention_cap is None
    return implementation_for(device) == "cudnn" and half and fits


def empty(*sizes: Any, **options: Any) -> KVCache:
    """A cache of zeros; arguments are those of `layout`."""
    return zeros(layout(*sizes, **options))


def zeros(arrays: Any) -> Any:
    """Zeros in the place of ShapeDtypeStructs, each device making its own."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), arrays)


def forward(
    model: Llama,
    embedded: jax.Array,
    cache: KVCache,
    *,
    starts: jax.Array,
    ends: jax.Array,
    rows: jax.Array,
    block: int,
    all_rows: bool = False,
    branches: Branches | None = None,
    shifts: jax.Array | None = None,
    deepstack: jax.Array | None = None,
    adapters: jax.Array | None = None,
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
      starts: int [R], column of each row's first token.
      ends: int [R], column after each row's last real token; nothing beyond is read.
      rows: int [R], their cache rows; a row index out of range is not written.
      block: columns read at a time, of segments that are longer; a divisor of those.
      all_rows: the R rows are the cache's rows in order (`rows` then only says which are written).
      branches: of the tokens; None: every row is one sequence, position and column are the same.
      shifts: int [R, L, 3], or [R, L] where the three are the same, by how much rotary positions
        are beyond that (M-RoPE); None: not at all.
      deepstack: [n, R, L, H], added to what the first n layers give; None: nothing.
      adapters: int [R, 1], the rows' numbers of `lora.add_adapters`; None: the model has none.
      limit: segments from this column on are not read, where no row reaches them; None reads all.
      implementation: "blocks" reads the cache in place; "cudnn", for many tokens of few rows on a
        GPU, takes the rows out and hands them to `layers.attention`; "ragged", for one token of
        all rows or multiples of 16 of some on a GPU (see `ragged_fits`), reads each row's own
        columns of one segment in place, by kernels, whatever `limit` is: their stated costs are
        those of so many columns.
      mesh: where the cache lies. If its rows are split, the R rows are split alike and of the same
        device's cache rows.

    Returns:
      Normed hidden states [R, L, H] and the cache.
    """
    of_tokens = tokens_in(
        model.config,
        embedded.shape[1],
        starts=starts,
        ends=ends,
        rows=rows,
        branches=branches,
        shifts=shifts,
        adapters=adapters,
    )
    options = {
        "deepstack": deepstack,
        "block": block,
        "all_rows": all_rows,
        "limit": limit,
        "mesh": mesh,
    }
    options["implementation"] = implementation
    traits = layer_traits(model.config, cache[0].columns)
    layers = map(nnx.split, model.each_layer())
    x, cache = run_layers(layers, embedded, cache, of_tokens, traits, **options)
    return model.norm(x), cache


@flax.struct.dataclass
class Tokens:
    """Where the tokens are whose keys and values every layer writes and reads."""

    columns: jax.Array  # int32 [R, L]
    cos: jax.Array  # float32 [R, L, 1, D / 2], of their positions
    sin: jax.Array
    starts: jax.Array  # int [R]
    ends: jax.Array  # int [R]: nothing from this column on is read
    rows: jax.Array  # int [R]
    branches: Branches | None
    adapters: jax.Array | None  # int [R, 1]


def tokens_in(
    config: LlamaConfig,
    length: int,
    *,
    starts: jax.Array,
    ends: jax.Array,
    rows: jax.Array,
    branches: Branches | None,
    shifts: jax.Array | None = None,
    adapters: jax.Array | None = None,
) -> Tokens:
    """What `run_layers` needs to know of the tokens; `length` is L, the rest as in `forward`."""
    columns = starts[:, None] + jnp.arange(length)  # [R, L]
    positions = columns if branches is None else branches.positions(columns)
    angles = rotary_angles(config, shifted(positions, shifts))
    cos, sin = rotation(config, jnp.cos(angles), jnp.sin(angles))
    return Tokens(columns, cos, sin, starts, ends, rows, branches, adapters)


def run_layers(
    layers: Iterable[tuple[nnx.GraphDef, nnx.State]],
    x: jax.Array,
    cache: KVCache,
    of_tokens: Tokens,
    traits: LayerTraits,
    deepstack: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, KVCache]:
    """x [R, L, H] through all layers, each split by nnx; `options` are those of `_layer`.

    traits: of all layers; deepstack: see `forward`.

    Outside of a program every layer runs one of its own, the same for all, and takes over its
    cache.
    """
    written = []
    for number, ((graphdef, params), held) in enumerate(zip(layers, cache, strict=True)):
        of_layer = traits.of(number)
        x, held = _layer(params, x, held, of_tokens, of_layer, graphdef=graphdef, **options)
        x = added(x, deepstack, number)
        written.append(held)
    return x, tuple(written)


# Within a program too: all layers are then traced and lowered once, and XLA inlines them.
@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "block", "all_rows", "limit", "implementation", "mesh"),
    donate_argnames="held",
)
def _layer(
    params: nnx.State,
    x: jax.Array,
    held: LayerCache,
    of_tokens: Tokens,
    traits: LayerTraits,
    *,
    graphdef: nnx.GraphDef,
    block: int,
    all_rows: bool = False,
    limit: int | None = None,
    implementation: str = "blocks",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, LayerCache]:
    layer = with_chosen(nnx.merge(graphdef, params), of_tokens.adapters)
    q, k, v = layer.project(x, *traits.turned(of_tokens.cos, of_tokens.sin))
    cap = layer.config.attention_cap

    def write_and_attend(q, k, v, held, rows, starts, ends, columns, branches, window=None):
        held = write(held, k, v, rows, starts, limit)
        read = None if all_rows else rows
        segments = held.within(limit)
        if implementation == "ragged":
            from mmqa_jax.decoding import ragged_triton  # Pallas takes long to import

            ((_, segment),) = segments
            costs = {"read": limit or segment.columns}
            if all_rows and q.shape[1] == 1:
                out = ragged_triton.attend_to_own(q, segment, starts + 1, **costs)
            else:
                out = ragged_triton.attend_in_place(q, segment, rows, starts, branches, **costs)
        elif implementation == "blocks":
            end = ends.max()
            out = attend(
                q, segments, columns, branches, read, block=block, end=end, window=window, cap=cap
            )
        else:
            out = attend_to_rows(
                q, segments, columns, branches, read, implementation, limit, window, cap
            )
        return out, held

    of_rows = _axes_of_rows(held, mesh)
    # XLA does not split a kernel by itself.
    if of_rows is not None or (implementation == "ragged" and mesh is not None):
        write_and_attend = on_own_rows(write_and_attend, _specs(held, mesh), of_rows, mesh)
    where = (of_tokens.rows, of_tokens.starts, of_tokens.ends, of_tokens.columns)
    where = (*where, of_tokens.branches)
    if traits.window is not None:
        where = (*where, jnp.full_like(of_tokens.starts, traits.window))
    attended, held = write_and_attend(q, k, v, held, *where)
    return layer.finish(x, attended), held


def _specs(layer: LayerCache, mesh: Mesh) -> LayerCache:
    """How the mesh splits a layer's arrays, as `layout` says."""

    names = (_KEY_NAMES, _VALUE_NAMES, _SCALE_NAMES, _SCALE_NAMES)

    def of(one: Segment) -> Segment:
        arrays = zip((one.key, one.value, one.key_scale, one.value_scale), names, strict=True)
        return Segment(*(x if x is None else partition_spec(n, x.shape, mesh) for x, n in arrays))

    return LayerCache(tuple(map(of, layer.segments)))


def _axes_of_rows(layer: LayerCache, mesh: Mesh | None) -> Any:
    """The mesh axes that a cache's rows are split over; None if they are not."""
    return None if mesh is None else _specs(layer, mesh).segments[0].key[0]


def copy(
    cache: KVCache,
    source: jax.Array,
    target: jax.Array,
    end: jax.Array,
    block: int,
    mesh: Mesh | None = None,
) -> KVCache:
    """Row `source`'s columns below `end`, in whole blocks, into row `target`; donate the cache.

    mesh: where the cache lies; if its rows are split, both are on the same device.
    """
    of_rows = _axes_of_rows(cache[0], mesh)
    copied = functools.partial(_copy, block=block)
    if of_rows is not None:
        specs = (_specs(cache[0], mesh),) * len(cache)
        count = cache[0].segments[0].key.shape[0] // batch_blocks(mesh)
        copied = copy_within(copied, specs, of_rows, count, mesh)
    return copied(cache, source, target, end)


def _copy(
    cache: KVCache, source: jax.Array, target: jax.Array, end: jax.Array, block: int
) -> KVCache:
    """`copy` on one device."""

    def move(x: jax.Array | None, axis: int, first: jax.Array, size: int) -> jax.Array | None:
        if x is None:
            return None
        return _set(
            x, axis, read_columns(x, axis, first, size, source[None]), target[None], first[None]
        )

    def copied(start: int, of_layers: tuple[Segment, ...]) -> tuple[Segment, ...]:
        size = min(block, of_layers[0].columns)

        def one(n: jax.Array, of_layers: tuple[Segment, ...]) -> tuple[Segment, ...]:
            first = n * size
            return tuple(
                Segment(
                    move(segment.key, 3, first, size),
                    move(segment.value, 2, first, size),
                    move(segment.key_scale, 2, first, size),
                    move(segment.value_scale, 2, first, size),
                )
                for segment in of_layers
            )

        return jax.lax.fori_loop(0, count_blocks(end, start, of_layers[0], size), one, of_layers)

    starts = [start for start, _ in cache[0].within(None)]
    of_layers = zip(*(layer.segments for layer in cache), strict=True)  # segment by segment
    done = [copied(*pair) for pair in zip(starts, of_layers, strict=True)]
    return tuple(LayerCache(segments) for segments in zip(*done, strict=True))


def write(
    layer: LayerCache,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    limit: int | None = None,
) -> LayerCache:
    """k, v [R, L, kv_heads, D] into columns starts[r].. of rows[r], all within one segment.

    limit: segments from this column on are left as they are.
    """
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)  # [R, kv, D, L], [R, kv, L, D]
    key_scale = value_scale = None
    if layer.segments[0].key_scale is not None:
        k, key_scale = quantize(k, axis=2)
        v, value_scale = quantize(v, axis=3)

    def put(x: jax.Array | None, axis: int, new: jax.Array | None, start: int) -> jax.Array | None:
        return None if x is None else _set(x, axis, new.astype(x.dtype), rows, starts - start)

    written = tuple(
        Segment(
            put(segment.key, 3, k, start),
            put(segment.value, 2, v, start),
            put(segment.key_scale, 2, key_scale, start),
            put(segment.value_scale, 2, value_scale, start),
        )
        for start, segment in layer.within(limit)
    )
    return LayerCache(written + layer.segments[len(written) :])


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Rounded to -127..127 with one scale per vector along `axis`; the scales lack that axis."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(axis, keepdims=True), 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale.squeeze(axis)


def _set(x: jax.Array, axis: int, new: jax.Array, rows: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes new[r] ([R, ...], `axis` shorter) into row rows[r] from column starts[r] on.

    A scatter of whole windows: XLA keeps it in place and shards it over a mesh, and it drops
    rows out of range. A window must end within the columns, or it is dropped as well.
    """
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, x.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, axis),
    )
    return jax.lax.scatter(
        x,
        jnp.stack([rows, starts], axis=1),
        new,
        dimensions,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )


# A cache whose rows are split over devices: each reads, writes and copies its own rows alone.
#
# Left to itself, XLA would exchange rows, since it does not know which device a row's number is
# on.

C = TypeVar("C")
Axes = str | tuple[str, ...]  # of the mesh, that rows are split over


def first_row(axes: Axes, count: int) -> jax.Array:
    """Within a shard_map: the number of this device's first row, of `count` to each."""
    return jax.lax.axis_index(axes) * count


def on_own_rows(
    attend: Callable[..., tuple[jax.Array, C]], specs: C, axes: Axes | None, mesh: Mesh
) -> Callable[..., tuple[jax.Array, C]]:
    """`attend(q, k, v, held, rows, *more)` -> (attended, held), each device its rows and heads.

    Args:
      specs: the PartitionSpec of each array of a layer `held`, [S, kv_heads, ...].
      axes: None where heads alone are split, and every device has all rows.
    """
    row, of_heads = PartitionSpec(axes), jax.tree.leaves(specs, is_leaf=_is_spec)[0][1]
    of_token = PartitionSpec(axes, None, of_heads)  # [R, L, heads, D]

    def local(q, k, v, held, rows, *more):
        count = jax.tree.leaves(held)[0].shape[0]
        first = 0 if axes is None else first_row(axes, count)
        return attend(q, k, v, held, rows - first, *more)

    def split(q, k, v, held, rows, *more):
        function = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(of_token, of_token, of_token, specs, row, *(row for _ in more)),
            out_specs=(of_token, specs),
            check_vma=False,
        )
        return function(q, k, v, held, rows, *more)

    return split


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def copy_within(
    copy: Callable[[C, jax.Array, jax.Array, jax.Array], C],
    specs: C,
    axes: Axes,
    count: int,
    mesh: Mesh,
) -> Callable[[C, jax.Array, jax.Array, jax.Array], C]:
    """`copy(cache, source, target, end)` of two rows that are on the same device, which does it.

    Args:
      specs: the PartitionSpec of each array of the cache.
      count: rows of a device.
    """

    def local(cache: C, source: jax.Array, target: jax.Array, end: jax.Array) -> C:
        first = first_row(axes, count)
        own = (source >= first) & (source < first + count)
        # Elsewhere nothing is copied, from row 0 to itself.
        source, target = jnp.where(own, source - first, 0), jnp.where(own, target - first, 0)
        return copy(cache, source, target, jnp.where(own, end, 0))

    whole = PartitionSpec()
    return jax.shard_map(
        local, mesh=mesh, in_specs=(specs, whole, whole, whole), out_specs=specs, check_vma=False
    )
