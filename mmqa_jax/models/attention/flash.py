"""Attention whose memory is linear in the lengths: block by block, or cuDNN's.

Both are reached through `layers.attention(..., implementation=...)`, which says what they compute,
as is the TPU's (see splash.py).
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mmqa_jax.core.mesh import SEQUENCE, column_shards, partition_spec, platform
from mmqa_jax.models.attention.masked import MASKED, Window, capped

_LONG = 2048  # keys from which on scores are not made whole
# On a TPU, where gathers of weights run beside the products of shorter rows, but not of a kernel.
_LONG_FOR_A_KERNEL = 1024
_TRITON_BLOCK = 128  # queries and keys of JAX's kernel for GPUs
_OLDEST_CUDNN_GPU = 8.0  # compute capability (Ampere) from which cuDNN has flash attention


def implementation_for(device: jax.Device) -> str:
    """The implementation of `layers.attention` for long sequences on a device, present or not."""
    if device.platform == "tpu":
        return "splash"
    # Of an AMD GPU it is a name, such as gfx90a.
    capability = str(getattr(device, "compute_capability", ""))
    if capability.replace(".", "").isdigit() and float(capability) >= _OLDEST_CUDNN_GPU:
        return "cudnn"
    return "blocks"


def auto_implementation(
    q: jax.Array,
    k: jax.Array,
    mask: jax.Array | None,
    *,
    segmented: bool = False,
    windowed: bool = False,
    is_causal: bool,
    drops: bool,
    capped: bool = False,
    sinks: bool = False,
) -> str:
    """What `layers.attention` means by "auto" for q [B, Lq, heads, D] and k where it is traced.

    On a TPU that is one kernel for all scores of a head where these fit its memory, and splash for
    longer rows; on a GPU cuDNN's flash attention. Elsewhere XLA's products,
    and from _LONG keys on blocks.

    Args:
      segmented, windowed: there are `segments`, a `window` of `layers.attention`.
      drops: attention weights are dropped, which only "fused" and "xla" do.
      capped, sinks: scores are bent, have sinks, which "fused" and "cudnn" do not do.

    A mask has to be the same for all heads, and for cuDNN lengths even: odd ones have no gradient.
    What `sequence` splits goes to splash, XLA or blocks.
    """
    length, columns = q.shape[1], k.shape[1]
    shards = column_shards(length) if length == columns else 1
    half_on_tpu = platform() == "tpu" and q.dtype == jnp.bfloat16
    capped |= sinks
    if half_on_tpu and not capped and not segmented and shards == 1:
        from mmqa_jax.models.attention.fused import (
            fused_fits,  # Pallas takes half a second to import
        )

        whole = jax.ShapeDtypeStruct((1, 1, length, columns), bool)
        if fused_fits(q, k, whole if windowed and mask is None else mask, is_causal):
            return "fused"
    plain = mask is None or (mask.ndim == 4 and mask.shape[1] == 1)
    if drops or not plain:
        return "xla"
    even = length % 2 == 0 and columns % 2 == 0
    kind = {"segmented": segmented, "windowed": windowed, "is_causal": is_causal}
    if even and not capped and shards == 1 and cudnn_fits(q, k, mask, **kind):
        return "cudnn"
    is_long = columns >= _LONG_FOR_A_KERNEL
    if half_on_tpu and is_long and (mask is None or mask.shape[2] == 1):
        from mmqa_jax.models.attention.splash import splash_fits

        if splash_fits(length, columns, shards):
            return "splash"
    return "blocks" if columns >= _LONG else "xla"


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None,
    segments: jax.Array | None = None,
    window: Window | None = None,
    is_causal: bool,
    block: int = 512,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention over blocks of keys with a running maximum (Milakov and Gimelshein 2018).

    q [B, Lq, heads, D]; k, v [B, Lk, kv_heads, D]; mask bool, broadcastable to [B, 1, Lq, Lk].
    cap, segments, window, sinks: of `layers.attention`. No array is larger than Lq times a
    block; the backward pass computes the scores of a block again. Over the mesh axis `sequence` a
    device has some columns of the queries (Lq == Lk) and gathers all keys and values.
    Returns [B, Lq, heads, D].
    """
    length, columns, kv_heads = q.shape[1], *k.shape[1:3]
    attend = functools.partial(_blocks, is_causal=is_causal, block=block, cap=cap)
    if length != columns or column_shards(length) == 1:
        return attend(q, k, v, mask, segments, segments, window, sinks, columns - length)

    def attend_part(q, k, v, mask, of_queries, of_keys, window, sinks):
        k, v = (jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True) for x in (k, v))
        first = jax.lax.axis_index(SEQUENCE) * q.shape[1]
        return attend(q, k, v, mask, of_queries, of_keys, window, sinks, first)

    mesh = jax.sharding.get_abstract_mesh()
    rows, heads = partition_spec(("batch", "heads"), (len(q), kv_heads), mesh)
    spec, of_mask, whole = PartitionSpec(rows, SEQUENCE, heads), PartitionSpec(), PartitionSpec()
    if mask is not None:
        is_split = mask.shape[0] > 1, mask.shape[2] > 1
        of_mask = PartitionSpec(
            rows if is_split[0] else None, None, SEQUENCE if is_split[1] else None
        )
    return jax.shard_map(
        attend_part,
        in_specs=(
            *(spec, spec, spec, of_mask),
            *(PartitionSpec(rows, SEQUENCE), PartitionSpec(rows), whole, PartitionSpec(heads)),
        ),
        out_specs=spec,
        check_vma=False,
    )(q, k, v, mask, segments, segments, window, sinks)


def _blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    segments: jax.Array | None,
    key_segments: jax.Array | None,
    window: Window | None,
    sinks: jax.Array | None,
    first_query: jax.Array | int,
    *,
    is_causal: bool,
    block: int,
    cap: float | None,
) -> jax.Array:
    """`block_attention` on one device; first_query: the key column of the first query, int."""
    batch, length, heads, size = q.shape
    columns, kv_heads = k.shape[1:3]
    groups = heads // kv_heads
    q = q.reshape(batch, length, kv_heads, groups, size).transpose(0, 2, 3, 1, 4)
    q = q * size**-0.5  # [B, kv, G, Lq, D]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, kv, Lk, D]
    block = min(block, columns)
    padding = -columns % block
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (k, v))
    if mask is not None and mask.shape[-1] > 1:
        mask = jnp.pad(mask, ((0, 0),) * 3 + ((0, padding),))
    last = jnp.arange(length) + first_query  # a query's own column, and the last that it sees
    if key_segments is not None:
        key_segments = jnp.pad(key_segments, ((0, 0), (0, padding)))

    def attend(carry, first):
        top, total, out = carry  # float32 [B, kv, G, Lq, 1] twice and [B, kv, G, Lq, D]
        key, value = (jax.lax.dynamic_slice_in_dim(x, first, block, 2) for x in (k, v))
        scores = jnp.einsum("bkgqd,bktd->bkgqt", q, key, preferred_element_type=jnp.float32)
        column = first + jnp.arange(block)
        visible = column < columns
        if is_causal:
            visible &= column <= last[:, None]  # [Lq, block]
        if window is not None:
            visible &= window.sees(last[:, None], column, is_causal=is_causal)
        visible = jnp.broadcast_to(visible, (1, 1, 1, length, block))
        if mask is not None:
            part = mask
            if mask.shape[-1] > 1:
                part = jax.lax.dynamic_slice_in_dim(mask, first, block, 3)
            visible &= part[:, :, None]
        if segments is not None:
            part = jax.lax.dynamic_slice_in_dim(key_segments, first, block, 1)  # [B, block]
            visible &= (segments[:, :, None] == part[:, None])[:, None, None]
        scores = jnp.where(visible, capped(scores, cap), MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, decay = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        read = jnp.einsum(
            "bkgqt,bktd->bkgqd", weights.astype(v.dtype), value, preferred_element_type=jnp.float32
        )
        total = total * decay + weights.sum(-1, keepdims=True)
        return (new_top, total, out * decay + read), None

    shape = (batch, kv_heads, groups, length)
    start = (jnp.full((*shape, 1), MASKED), jnp.zeros((*shape, 1)), jnp.zeros((*shape, size)))
    if sinks is not None:
        top = jnp.broadcast_to(sinks.reshape(kv_heads, groups, 1, 1), (*shape, 1))
        start = (top, jnp.ones((*shape, 1)), start[2])
    blocks = jnp.arange(0, columns + padding, block)
    (_, total, out), _ = jax.lax.scan(jax.checkpoint(attend, prevent_cse=False), start, blocks)
    out = (out / total).astype(q.dtype)  # [B, kv, G, Lq, D]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, size)


def cudnn_fits(
    q: jax.Array,
    k: jax.Array,
    mask: jax.Array | None,
    *,
    is_causal: bool,
    segmented: bool = False,
    windowed: bool = False,
) -> bool:
    """Whether `cudnn_attention` takes these queries [B, Lq, heads, D] and keys, where it is traced.

    Heads of up to 128 are what all its GPUs take; with a mask odd lengths have no gradient.
    Segments and windows are taken alone, windows under a causal mask.
    """
    half = q.dtype == k.dtype and q.dtype in (jnp.bfloat16, jnp.float16)
    length, columns, size = q.shape[1], k.shape[1], q.shape[3]
    fits = platform() == "gpu" and half and size % 8 == 0 and size <= 128
    if segmented:
        return fits and mask is None and not windowed and length % _TRITON_BLOCK == 0
    if windowed:
        return fits and mask is None and is_causal and length == columns
    return fits and (mask is None or (length % 2 == 0 and columns % 2 == 0))


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None = None,
    *,
    mask: jax.Array | None,
    segments: jax.Array | None = None,
    is_causal: bool,
) -> jax.Array:
    """cuDNN's flash attention, by `jax.nn.dot_product_attention`; of segments `triton_attention`.

    q [B, Lq, heads, D]; k, v [B, Lk, kv_heads, D]; mask bool, broadcastable to [B, 1, Lq, Lk]; a
    query must see at least one key. window: tokens that a query sees, of `masked.Window` (Lq ==
    Lk). On a mesh rows and heads are split as q's are; the mask, which cuDNN adds to the scores as
    [B or 1, 1, Lq, Lk] of q's type, is not repeated for the heads. Returns [B, Lq, heads, D].
    """
    if segments is not None:
        return triton_attention(q, k, v, segments=segments, is_causal=is_causal)
    length, columns = q.shape[1], k.shape[1]
    if is_causal and length != columns:  # cuDNN aligns its own with the first key
        causal = jnp.tril(jnp.ones((length, columns), bool), columns - length)
        mask, is_causal = causal if mask is None else mask & causal, False
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*jnp.shape(mask)[:-2], length, columns))
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=is_causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def triton_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array,
    is_causal: bool,
    interpret: bool = False,
) -> jax.Array:
    """JAX's Pallas kernel for GPUs (FlashAttention-2), for several texts in a row.

    For these cuDNN would add a mask of [B, 1, L, L]. q [B, L, heads, D]; k, v [B, L, kv_heads, D];
    segments int [B, L]; L a multiple of 128. The kernel has no grouped heads: those of k and v are
    repeated. On a mesh rows and heads are split as q's are. `interpret` runs the kernel without a
    GPU, slowly, for tests. Returns [B, L, heads, D].
    """
    from jax.experimental.pallas.ops.gpu import attention as pallas  # takes half a second

    def attend(q, k, v, segments):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scale = q.shape[-1] ** -0.5
        return pallas.mha(q, k, v, segments, scale, causal=is_causal, interpret=interpret)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape and not mesh.manual_axes:  # XLA does not split a kernel by itself
        rows, heads = partition_spec(("batch", "heads"), (len(q), k.shape[2]), mesh)
        spec, of_rows = PartitionSpec(rows, None, heads), PartitionSpec(rows)
        attend = jax.shard_map(
            attend, in_specs=(spec, spec, spec, of_rows), out_specs=spec, check_vma=False
        )
    return attend(q, k, v, segments.astype(jnp.int32))
