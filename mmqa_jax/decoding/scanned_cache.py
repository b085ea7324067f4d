"""The KV cache of a model whose layers are scanned: one array of all layers, as a TPU wants it.

One layer is compiled, whatever their number. The scan reads the cache and never carries it (a
carried cache would be copied); a new token's keys and values come out of the scan, are attended to
directly, and are written for all layers at once. The slice of a layer is part of the product that
reads it: it must be one slice, of layer and columns, straight from the array (a slice that the scan
itself makes would be copied first). Tests hold the compiled programs to this. A TPU decodes by a
kernel that alone reads and writes the cache (`ragged_attention`): there the scan carries it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import (
    batch_axes,
    columns_over_tensor,
    heads_over_tensor,
    partition_spec,
    split_rows,
    tensor_columns,
)
from mmqa_jax.decoding.cached_attention import Branches, first_seen
from mmqa_jax.decoding.kv_cache import places
from mmqa_jax.decoding.kv_cache import quantize as rounded_vectors
from mmqa_jax.models.attention.masked import MASKED, capped, last_of_pictures, sink_rows
from mmqa_jax.models.common.layers import attention
from mmqa_jax.models.llama import experts, quantize
from mmqa_jax.models.llama import network as llama
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import with_chosen
from mmqa_jax.models.llama.network import LayerTraits, layer_traits

# Rows of queries that make attention a matrix product on a TPU: with one alone (every head has keys
# of its own) XLA multiplies and adds on the vector unit.
_QUERY_ROWS = 8
_IN_PARTS = 2048  # tokens of a device: half of them take longer to multiply than a matrix to read
_NAMES = ("layers", "batch", "heads", "positions", "head_dim")  # for core.mesh.partition_spec
_LANES = 128  # of a TPU, which pads rows of another size, and whose programs would copy them


@flax.struct.dataclass
class ScannedCache:
    """Pages of all layers: column t of a row is column t % P of the page t // P in its table.

    int8 caches hold round(x / scale) as in `kv_cache.LayerCache`. Heads whose size is no multiple
    of a TPU's lanes have key and value beside each other.
    """

    key: jax.Array  # [N, pages, kv_heads, P, D], or [N, pages, kv_heads, P, `token_width`]
    value: jax.Array | None  # [N, pages, kv_heads, P, D]; None: beside the keys
    key_scale: jax.Array | None  # [N, pages, kv_heads, P] float32
    value_scale: jax.Array | None

    def map(self, function: Callable[..., jax.Array], *others: ScannedCache) -> ScannedCache:
        """The function of every array (and its counterparts in the others)."""
        return jax.tree.map(function, self, *others)

    def apart(self, size: int) -> ScannedCache:
        """The same with keys and values [..., D = size] in arrays of their own."""
        if self.value is not None:
            return self
        key, value = self.key[..., :size], self.key[..., size : 2 * size]
        return self.replace(key=key, value=value)

    def beside(self, width: int) -> ScannedCache:
        """The reverse of `apart`: one array [..., width]."""
        both = jnp.concatenate([self.key, self.value], -1)
        unused = [(0, 0)] * (both.ndim - 1) + [(0, width - both.shape[-1])]
        return self.replace(key=jnp.pad(both, unused), value=None)


def token_width(size: int) -> int:
    """Numbers that a token's key and value of `size` each take together."""
    return -(-2 * size // _LANES) * _LANES


def layout(
    config: LlamaConfig, pages: int, columns: int, dtype: str, mesh: Mesh | None = None
) -> ScannedCache:
    """ShapeDtypeStructs of a cache of `pages` pages of `columns` tokens, as `kv_cache.layout`.

    The last axis of keys and values is the head: a token is then written as whole vectors.
    """

    def array(kind: str, *shape: int) -> jax.ShapeDtypeStruct:
        spec = mesh and NamedSharding(mesh, partition_spec(_NAMES[: len(shape)], shape, mesh))
        return jax.ShapeDtypeStruct(shape, kind, sharding=spec)

    of_token = (config.layers, pages, config.kv_heads, columns)
    size = config.head_size
    scale = array("float32", *of_token) if dtype == "int8" else None
    if size % _LANES:
        return ScannedCache(array(dtype, *of_token, token_width(size)), None, scale, scale)
    both = array(dtype, *of_token, size)
    return ScannedCache(both, both, scale, scale)


def serves(device: jax.Device) -> bool:
    """Whether the device wants tokens as rows, also in caches of layers that are not scanned."""
    return device.platform == "tpu"


def ragged_fits(page: int, device: jax.Device) -> bool:
    """Whether `decode` on the device, present or not, can read each row's own columns, which lie in
    pages of so many."""
    return device.platform == "tpu" and page % 128 == 0


def decode(
    model: llama.Llama,
    embedded: jax.Array,
    cache: ScannedCache,
    *,
    table: jax.Array,
    positions: jax.Array,
    limit: int,
    shifts: jax.Array | None = None,
    adapters: jax.Array | None = None,
    mesh: Mesh | None = None,
    ragged: bool = False,
) -> tuple[jax.Array, ScannedCache]:
    """One token of every row; several where the kernel attends.

    Args:
      model: with stacked layers.
      embedded: [S, L, H], of the rows' next tokens.
      cache: donate it.
      table: int32 [S, M], each row's pages. Of rows whose results mean nothing it is 0, the page
        that no row reads, and so are their positions.
      positions: int [S], of the first of these tokens: what is cached before them.
      limit: columns read; no row's position is beyond.
      shifts: int [S], by how much rotary positions differ from these; None: not at all.
      adapters: int [S, 1], the rows' numbers of `lora.add_adapters`; None: the model has none.
      mesh: where the cache lies.
      ragged: attend by a kernel for TPU that reads each row's own columns, whatever `limit` is;
        see `ragged_fits`.

    Returns:
      Normed hidden states [S, L, H] and the cache.
    """

    if ragged:
        return _decode_ragged(
            model, embedded, cache, table, positions, limit, shifts, adapters, mesh
        )
    attend = token_attention(model.config, cache, table, positions, limit, mesh)
    traits = layer_traits(model.config, table.shape[1] * cache.key.shape[3])
    turned = llama.shifted(positions[:, None], None if shifts is None else shifts[:, None])
    hidden, ((k, v),) = _run(model, embedded, turned, attend, traits, adapters=adapters)
    return hidden, write(cache, k, v, table, positions, mesh)


def token_attention(
    config: LlamaConfig,
    cache: ScannedCache,
    table: jax.Array,
    positions: jax.Array,
    limit: int,
    mesh: Mesh | None,
) -> Callable[..., jax.Array]:
    """Returns the attention of one token of each row, where no kernel serves; arguments and result
    are those of `decode` and `prompt_attention`."""
    read = _reader(cache, mesh)
    pages = table[:, : -(-limit // cache.key.shape[3])]

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array | int,
        window: jax.Array | None,
        sinks: jax.Array | None,
        _: Callable | None = None,
    ) -> jax.Array:
        held = read(cache, layer, pages).apart(q.shape[-1])
        return _one_token(q, k, v, held, positions, window, config.attention_cap, sinks)

    return attend


def _decode_ragged(
    model: llama.Llama,
    embedded: jax.Array,
    cache: ScannedCache,
    table: jax.Array,
    positions: jax.Array,
    limit: int,
    shifts: jax.Array | None,
    adapters: jax.Array | None,
    mesh: Mesh | None,
) -> tuple[jax.Array, ScannedCache]:
    """`decode` by a kernel that rotates and writes the token, too: the scan carries a cache that it
    alone touches, and XLA does not copy that."""
    # Pallas takes long to import.
    from mmqa_jax.decoding.ragged_attention import attend_on, turns_of

    cos, sin = rotation_of(model.config, positions, embedded.shape[1], shifts)
    attend = attend_on(
        table,
        positions,
        cap=model.config.attention_cap,
        read=limit,
        mesh=mesh,
        specs=specs_of(cache, mesh),
    )
    traits = layer_traits(model.config, table.shape[1] * cache.key.shape[3])
    embedded, side = model.parted(embedded)
    traits = traits.replace(side=side)
    layers, stacked = experts.apart(model.layers, embedded)
    layers, in_codes = quantize.apart(layers, embedded)
    graphdef, params = nnx.split(layers)

    def body(carry, of_layer):
        (x, cache, number), (params, traits) = carry, of_layer
        layer = with_chosen(nnx.merge(graphdef, params), adapters)
        quantize.put_back(layer, in_codes, number)
        if stacked is not None:
            layer.experts = functools.partial(stacked, layer=number)
        q, k, v = layer.products(split_rows(x), traits, apart=True)
        turns = turns_of(*layer.turned(*traits.turned(cos, sin)))
        attended, cache = attend(q, k, v, turns, cache, number, traits.window, layer.sink_logits)
        return (layer.finish(x, attended, traits), cache, number + 1), None

    (x, cache, _), _ = jax.lax.scan(body, (embedded, cache, jnp.int32(0)), (params, traits))
    return model.norm(x), cache


def prefill(
    model: llama.Llama,
    embedded: jax.Array,
    cache: ScannedCache,
    *,
    table: jax.Array,
    starts: jax.Array,
    limit: int,
    branches: Branches | None = None,
    shifts: jax.Array | None = None,
    deepstack: jax.Array | None = None,
    adapters: jax.Array | None = None,
    pictures: jax.Array | None = None,
    implementation: str = "blocks",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, ScannedCache]:
    """Tokens that follow what their rows hold.

    Args:
      model: with stacked layers.
      embedded: [R, L, H]; padding after a row's last real token is cached too, and overwritten
        before any token attends to it.
      cache: donate it.
      table: int32 [R, M], each row's pages. What is no column of these is written to page 0.
      starts: int [R], column of each row's first token; the tokens lie in whole pages, or within
        one.
      limit: cached columns read, 0 if all start at 0; no start is beyond.
      branches: of the tokens; None: every row is one sequence.
      shifts, deepstack, adapters: see `kv_cache.forward`.
      pictures: bool [R, L], see `kv_cache.forward`.
      implementation: of `layers.attention`, "blocks" or "splash" (not for branches).
      mesh: where the cache lies. If its pages are split, the R rows are split alike, and the
        numbers in their tables count within the shard.

    Returns:
      Normed hidden states [R, L, H] and the cache.
    """
    attend = prompt_attention(
        model.config,
        cache,
        embedded.shape[1],
        table=table,
        starts=starts,
        limit=limit,
        branches=branches,
        pictures=pictures,
        implementation=implementation,
        mesh=mesh,
    )
    columns = starts[:, None] + jnp.arange(embedded.shape[1])  # [R, L]
    positions = columns if branches is None else branches.positions(columns)
    traits = layer_traits(model.config, table.shape[1] * cache.key.shape[3])
    turned = llama.shifted(positions, shifts)
    hidden, parts = _run(model, embedded, turned, attend, traits, deepstack, adapters)
    for n, (k, v) in enumerate(parts):
        of_part = (_part(x, n, len(parts)) for x in (table, starts))
        cache = write(cache, k, v, *of_part, mesh)
    return hidden, cache


def prompt_attention(
    config: LlamaConfig,
    cache: ScannedCache,
    length: int,
    *,
    table: jax.Array,
    starts: jax.Array,
    limit: int,
    branches: Branches | None,
    pictures: jax.Array | None,
    implementation: str,
    mesh: Mesh | None,
) -> Callable[..., jax.Array]:
    """Returns the attention of `length` tokens of each row to what is cached and to each other.

    Args:
      config: of the model, or of a layer whose kind has a sight of pictures of its own.
      cache: read before the tokens are written.
      length: tokens of a row.
      table, starts, limit, branches, pictures, implementation, mesh: of `prefill`.

    Returns:
      A function of q [r, L, heads, D], k and v [r, L, kv_heads, D], the layer's number in the
      cache, window and `sinks`, and of what takes the rows r of all R; it gives [r, L, heads, D].
    """
    columns = starts[:, None] + jnp.arange(length)  # [R, L]
    mask = jnp.arange(limit) < starts[:, None]  # [R, limit]
    mask = jnp.pad(mask, ((0, 0), (0, length)), constant_values=True)[:, None, None]
    cached = jnp.broadcast_to(jnp.arange(limit), (len(starts), limit))
    column = jnp.concatenate([cached, columns], axis=1)[:, None]  # [R, 1, limit + L]
    whole = pictures is not None and config.picture_sight in ("both", "prompt")
    if whole:
        last = starts[:, None] + last_of_pictures(pictures)
        mask = mask & (column <= last[:, :, None])[:, None]
    if branches is not None:
        of_trunk = column < branches.trunk[:, None, None]
        mask = mask & branches.in_sight(column, of_trunk)[:, None]  # [R, 1, L, limit + L]

    read = _reader(cache, mesh)
    pages = table[:, : -(-limit // cache.key.shape[3])]

    def near(window: jax.Array) -> jax.Array:  # int [] -> bool [R, 1, L, limit + L]
        first, in_trunk = first_seen(columns, branches, jnp.full_like(starts, window))
        first = first[:, :, None]
        if branches is not None:
            in_trunk = in_trunk[:, :, None]
            first = jnp.where(column < branches.trunk[:, None, None], in_trunk, first)
        seen = column >= first
        if whole and config.picture_sight == "prompt":  # whose tokens have no window
            seen = seen | pictures[:, :, None]
        return seen[:, None]

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array | int,
        window: jax.Array | None,
        sinks: jax.Array | None,
        part: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> jax.Array:
        seen = part(mask if window is None else mask & near(window))
        if limit:
            held = read(cache, layer, part(pages)).map(lambda x: x[:, :, :limit])
            held = held.apart(q.shape[-1])
            k, v = _behind(held.key, held.key_scale, k), _behind(held.value, held.value_scale, v)
        return attention(
            q,
            k,
            v,
            mask=seen,
            is_causal=not whole,
            implementation=implementation,
            mesh=mesh,
            cap=config.attention_cap,
            sinks=sinks,
        )

    return attend


def _reader(cache: ScannedCache, mesh: Mesh | None) -> Callable[..., ScannedCache]:
    """A function of the cache, a layer's number and pages [R, n]: the layer's columns in these,
    [R, kv, n * P, ...]; where pages are split, each device takes its own."""

    def read(cache: ScannedCache, layer: jax.Array, pages: jax.Array) -> ScannedCache:
        return cache.map(lambda x: _taken(x, layer, pages))

    specs = specs_of(cache, mesh)
    if specs is None or specs.key[1] is None:
        return read
    return jax.shard_map(
        read,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), PartitionSpec(specs.key[1])),
        out_specs=specs.map(lambda spec: PartitionSpec(*spec[1:])),
        check_vma=False,
    )


def rotation_of(
    config: LlamaConfig, positions: jax.Array, length: int, shifts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [S, L, 1, D / 2], of `length` tokens of each row from `positions`
    int [S] on, which are moved by `shifts` [S]."""
    columns = positions[:, None] + jnp.arange(length)
    angles = llama.rotary_angles(
        config, llama.shifted(columns, None if shifts is None else shifts[:, None])
    )
    return llama.rotation(config, jnp.cos(angles), jnp.sin(angles))


def _run(
    model: llama.Llama,
    embedded: jax.Array,
    positions: jax.Array,
    attend: Callable[..., jax.Array],
    traits: LayerTraits,
    deepstack: jax.Array | None = None,
    adapters: jax.Array | None = None,
) -> tuple[jax.Array, tuple[tuple[jax.Array, jax.Array], ...]]:
    """The decoder on [R, L, H]; `attend(q, k, v, layer's number, window, sinks, part)` gives
    [r, L, heads, D] of the rows r that `part` takes of all R.

    Returns normed hidden states, and keys and values [N, r, L, kv_heads, D] of all layers, of each
    part of the rows.
    """
    angles = llama.rotary_angles(model.config, positions)
    cos, sin = llama.rotation(model.config, jnp.cos(angles), jnp.sin(angles))

    embedded, side = model.parted(embedded)
    traits = traits.replace(side=side)
    layers, stacked = experts.apart(model.layers, embedded)
    layers, in_codes = quantize.apart(layers, embedded)
    graphdef, params = nnx.split(layers)

    count = 1 if side is not None else _parts(model.config, embedded)

    def body(states, of_layer):
        params, number, traits = of_layer
        done = []
        for n, x in enumerate(states):
            part = functools.partial(_part, n=n, count=count)
            of_rows, *turns = jax.tree.map(part, (adapters, cos, sin))
            layer = with_chosen(nnx.merge(graphdef, params), of_rows)
            quantize.put_back(layer, in_codes, number)
            if stacked is not None:
                layer.experts = functools.partial(stacked, layer=number)
            x = columns_over_tensor(x)
            q, k, v = layer.project(x, *turns, traits, apart=True)
            if count > 1:  # else XLA splits keys and values by columns, and gathers their matrices
                q, k, v = map(heads_over_tensor, (q, k, v))
            attended = attend(q, k, v, number, traits.window, layer.sink_logits, part)
            x = layer.finish(x, attended, traits)
            of_pictures = None if deepstack is None else jax.vmap(part)(deepstack)
            done.append((columns_over_tensor(llama.added(x, of_pictures, number)), (k, v)))
        return tuple(zip(*done, strict=True))

    xs = params, jnp.arange(model.config.layers), traits
    embedded = split_rows(embedded)
    states = tuple(_part(embedded, n, count) for n in range(count))
    states, written = jax.lax.scan(body, states, xs)
    x = states[0] if count == 1 else jnp.stack(states, axis=1).reshape(embedded.shape)
    return model.norm(x), written


def _parts(config: LlamaConfig, x: jax.Array) -> int:
    """Into how many parts the rows of x [R, L, H] are split, each gathered over `tensor` beside the
    other's products. Their matrices are read for each: of few tokens, and of few for each expert,
    that would take longer."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, length = x.shape[:2]
    if config.experts or tensor_columns(length) == 1:
        return 1
    axes = batch_axes(mesh, rows) or ()
    rows //= math.prod(mesh.shape[axis] for axis in axes)  # of a device
    return 2 if rows % 2 == 0 and rows * length >= _IN_PARTS else 1


def _part(x: jax.Array, n: int, count: int) -> jax.Array:
    """Rows n, n + count, ... of x [R, ...]: of each device as many."""
    return x if count == 1 else x.reshape(-1, count, *x.shape[1:])[:, n]


def specs_of(cache: ScannedCache, mesh: Mesh | None) -> ScannedCache | None:
    """How a mesh splits the cache: a PartitionSpec in the place of each array."""
    if mesh is None:
        return None
    return cache.map(lambda x: partition_spec(_NAMES[: x.ndim], x.shape, mesh))


def _taken(x: jax.Array, layer: jax.Array, pages: jax.Array) -> jax.Array:
    """[N, pages, kv, P, ...] -> the columns of pages [R, n] of one layer, [R, kv, n * P, ...]."""
    size, rest = (1, 1, *x.shape[2:]), (0,) * (x.ndim - 2)
    # Page by page: for a vmapped slice XLA on TPU copies a cache that has one head a chip.
    rows = [
        [jax.lax.dynamic_slice(x, (layer, page, *rest), size)[0] for page in row] for row in pages
    ]
    taken = jnp.concatenate([jnp.concatenate(row, axis=2) for row in rows])
    # Else XLA takes the layout that a product of a half of it wants for the cache, and copies that.
    return with_layout_constraint(taken, Layout(tuple(range(taken.ndim))))


def _behind(x: jax.Array, scale: jax.Array | None, new: jax.Array) -> jax.Array:
    """new [R, L, kv, D] behind what is cached, [R, kv, T, D]: [R, T + L, kv, D] in new's type.

    Joined as it is cached: TPU's kernel wants that order, and XLA drops the two exchanges.
    """
    if scale is not None:
        x = x * scale[..., None]
    return jnp.concatenate([x.astype(new.dtype), new.swapaxes(1, 2)], axis=2).swapaxes(1, 2)


def _one_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    held: ScannedCache,
    positions: jax.Array,
    window: jax.Array | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one token per row to `held` ([S, kv, T, D]) before its position, and to itself.

    q [S, 1, heads, D]; k, v [S, 1, kv_heads, D]. window: how many tokens it sees, itself included;
    None is all. cap, sinks: of `layers.attention`. The query heads of one key head are rows of one
    product. Returns [S, 1, heads, D].
    """
    rows, _, kv_heads, size = k.shape
    grouped = q.reshape(rows, kv_heads, -1, size)  # [S, kv, G, D]
    groups = grouped.shape[2]
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, max(0, _QUERY_ROWS - groups)), (0, 0)))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2).astype(jnp.float32)  # [S, kv, 1, D]
    dtype = q.dtype if held.key_scale is not None else jnp.promote_types(q.dtype, held.key.dtype)

    def product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(dtype), y.astype(dtype)
        return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)

    scores = product("skgd,sktd->skgt", grouped, held.key)
    if held.key_scale is not None:
        scores *= held.key_scale[:, :, None]
    visible = jnp.arange(held.key.shape[2]) < positions[:, None, None, None]
    if window is not None:
        visible &= jnp.arange(held.key.shape[2]) > positions[:, None, None, None] - window
    scores = jnp.where(visible, capped(scores * size**-0.5, cap), MASKED)
    of_token = jnp.sum(grouped.astype(jnp.float32) * k, -1, keepdims=True) * size**-0.5
    of_token = capped(of_token, cap)
    top = jnp.maximum(scores.max(-1, keepdims=True), of_token)
    if sinks is not None:
        sinks = jnp.pad(sink_rows(sinks, kv_heads, 1), ((0, 0), (0, top.shape[2] - groups), (0, 0)))
        top = jnp.maximum(top, sinks)
    weights, of_own = jnp.exp(scores - top), jnp.exp(of_token - top)
    total = weights.sum(-1, keepdims=True) + of_own
    if sinks is not None:
        total += jnp.exp(sinks - top)
    if held.value_scale is not None:
        weights *= held.value_scale[:, :, None]
    out = product("skgt,sktd->skgd", weights, held.value) + of_own * v
    return (out / total)[:, :, :groups].astype(q.dtype).reshape(q.shape)


def write(
    cache: ScannedCache,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    starts: jax.Array,
    mesh: Mesh | None,
) -> ScannedCache:
    """k, v [N, R, L, kv_heads, D] into columns starts[r].. of row r, as `prefill` says.

    One update in place per row and page: XLA on TPU makes a loop of a scatter.
    """
    k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)  # [N, R, kv, L, D]
    scales = [None, None]
    if cache.key_scale is not None:
        (k, scales[0]), (v, scales[1]) = (rounded_vectors(x, axis=-1) for x in (k, v))
    new = ScannedCache(k.astype(cache.key.dtype), v.astype(cache.key.dtype), *scales)
    new = new if cache.value is not None else new.beside(cache.key.shape[-1])
    if mesh is None:
        return _write_pages(cache, new, table, starts)
    specs = specs_of(cache, mesh)
    per_row = PartitionSpec(specs.key[1])
    write = jax.shard_map(
        _write_pages,
        mesh=mesh,
        in_specs=(specs, specs, per_row, per_row),
        out_specs=specs,
        check_vma=False,
    )
    return write(cache, new, table, starts)


def _write_pages(
    cache: ScannedCache, new: ScannedCache, table: jax.Array, starts: jax.Array
) -> ScannedCache:
    """`write` on one device."""
    length, width = new.key.shape[3], cache.key.shape[3]
    pages, columns = places(table, starts, length, width)  # [R, n] each
    part = min(length, width)

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        # Else XLA takes the new tokens' layout for the cache, too, and copies it.
        new = with_layout_constraint(new, Layout(tuple(range(new.ndim))))
        for row in range(pages.shape[0]):
            for n in range(pages.shape[1]):
                written = new[:, row : row + 1, :, n * part : (n + 1) * part]
                at = (0, pages[row, n], 0, columns[row, n], *(0,) * (x.ndim - 4))
                x = jax.lax.dynamic_update_slice(x, written, at)
        return x

    return cache.map(put, new)
