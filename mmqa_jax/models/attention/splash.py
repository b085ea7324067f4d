"""JAX's splash attention: a Pallas kernel for TPU, whose memory is linear in the lengths.

A file of its own because Pallas takes half a second to import.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import SEQUENCE, column_shards, partition_spec

_LANES = 128  # queries and keys come in multiples of this
_MOST_PARTS = 4  # of the queries' gradient, see _block_sizes


def splash_fits(length: int, columns: int, shards: int = 1) -> bool:
    """Whether `splash_attention` takes so many queries, split over `shards` devices, and keys."""
    least = _LANES if shards == 1 else 2 * _LANES * shards  # two blocks of queries a device
    return length % least == 0 and columns % _LANES == 0


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None = None,
    *,
    key_mask: jax.Array | None,
    segments: jax.Array | None = None,
    is_causal: bool,
    mesh: Mesh | None,
    interpret: bool = False,
    cap: float | None = None,
    residual_name: str | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """JAX's Pallas kernel for TPU (flash attention that skips blocks of a sparse mask).

    q [B, Lq, heads, D]; k, v [B, Lk, kv_heads, D]; key_mask bool [B, Lk] of keys that are seen; a
    row must see at least one. segments int [B, L] (Lq == Lk), in place of key_mask: a token sees
    those of its own segment. window: tokens that a query sees, of `masked.Window`; blocks of keys
    outside of it are skipped. On a mesh (None: that of `jax.set_mesh`) rows are split as a batch
    is, and heads as the model's, where these divide. Over `sequence` a device has some columns of
    the queries (Lq == Lk) and gathers all keys and values.
    `interpret` runs the kernel without a TPU, slowly, for tests; `cap` and `sinks` are those of
    `layers.attention`; `residual_name` names what its backward pass needs for `jax.checkpoint`.
    Returns [B, Lq, heads, D].
    """
    length, size = q.shape[1], q.shape[3]
    columns, kv_heads = k.shape[1:3]

    mesh = mesh or jax.sharding.get_abstract_mesh()
    shards = column_shards(length, mesh) if length == columns else 1

    balanced = is_causal and shards > 1  # over `sequence`, where each part sees other keys

    def make_kernel(heads, queries):
        offset = columns - length
        if window is not None:
            sides = window - 1, 0 if is_causal else window - 1
            mask = masks.LocalMask((queries, columns), sides, offset=offset)
        elif is_causal:
            mask = masks.CausalMask((queries, columns), offset=offset)
        else:
            mask = masks.FullMask((queries, columns))
        if balanced:
            mask.q_sequence = balanced_order(length, shards)
        return splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=_block_sizes(
                length // (1 if shards == 1 else 2 * shards),
                columns,
                whole=window is None and shards == 1,
            ),
            head_shards=1,
            q_seq_shards=shards if balanced else 1,
            interpret=interpret,
            attn_logits_soft_cap=cap,
            residual_checkpoint_name=residual_name,
        )

    def attend(q, k, v, of_queries, of_keys, sinks, kernel=None):
        def attend_sequence(q, k, v, of_queries, of_keys):
            # Of one sequence: [heads, Lq, D], [kv_heads, Lk, D] twice, int32 [Lq], [Lk].
            made = kernel or make_kernel(*q.shape[:2])
            return made(q, k, v, splash.SegmentIds(of_queries, of_keys), sinks)

        return jax.vmap(attend_sequence)(q, k, v, of_queries, of_keys)

    def attend_part(q, k, v, of_queries, of_keys, sinks, kernel=None):
        k, v = (jax.lax.all_gather(x, SEQUENCE, axis=2, tiled=True) for x in (k, v))
        q = _balanced(q, shards) if balanced else q
        out = attend(q, k, v, of_queries, of_keys, sinks, kernel)
        return _balanced(out, shards) if balanced else out

    kernels, run = (), attend
    if mesh.shape and not mesh.manual_axes:  # XLA does not split a kernel by itself
        spec = partition_spec(("batch", "heads"), (len(q), kv_heads), mesh)
        rows = PartitionSpec(spec[0])
        specs = (spec, spec, spec, rows, rows, PartitionSpec(spec[1]))
        if shards > 1:
            spec = PartitionSpec(*spec, SEQUENCE)
            specs = (spec, spec, spec, PartitionSpec(spec[0], SEQUENCE), *specs[4:])
        if balanced:  # the kernel is an argument, since it holds what each part sees
            kernels = (make_kernel(q.shape[2] // (mesh.shape["tensor"] if spec[1] else 1), length),)
            split = NamedSharding(mesh, PartitionSpec(None, SEQUENCE))
            specs = (*specs, kernels[0].manual_sharding_spec(split))
        run = jax.shard_map(
            attend if shards == 1 else attend_part,
            mesh=mesh,
            in_specs=specs,
            out_specs=spec,
            check_vma=False,
        )
    if segments is not None:
        ids = (segments.astype(jnp.int32),) * 2
    else:
        seen = jnp.ones((len(q), columns), bool) if key_mask is None else key_mask
        ids = jnp.ones((len(q), length), jnp.int32), seen.astype(jnp.int32)
    if balanced:
        ids = ids[0][:, balanced_order(length, shards)], ids[1]
    heads_first = ((q * size**-0.5).astype(q.dtype), k, v)
    out = run(*(x.swapaxes(1, 2) for x in heads_first), *ids, sinks, *kernels)
    return out.swapaxes(1, 2)


def balanced_order(length: int, shards: int) -> np.ndarray:
    """The columns of the queries in the order of the devices that attend with them, int32 [Lq].

    Under a causal mask later queries see more keys. So device i of n attends with the first half
    of its own columns and the second half of those of device n - 1 - i: all see equally many.
    """
    halves = np.arange(length, dtype=np.int32).reshape(shards, 2, -1)
    return np.stack([halves[:, 0], halves[::-1, 1]], axis=1).reshape(-1)


def _balanced(x: jax.Array, shards: int) -> jax.Array:
    """A device's part of [B, heads, L, D] in `balanced_order`, or from there back."""
    first, second = jnp.split(x, 2, axis=2)
    mirrored = [(n, shards - 1 - n) for n in range(shards)]
    return jnp.concatenate([first, jax.lax.ppermute(second, SEQUENCE, mirrored)], axis=2)


@functools.cache
def _block_sizes(length: int, columns: int, *, whole: bool) -> splash.BlockSizes:
    """Blocks of at most 512 queries and keys; forward and backward.

    Backward one kernel makes the scores once for all three gradients. It writes the queries' once
    for every block of keys, and skips no block's turn: so it is for rows of few blocks that see
    each other on one device (`whole`). Elsewhere two kernels make the scores twice.
    """

    def divisor(total: int, sizes: tuple[int, ...] = (512, 256, _LANES)) -> int:
        return next(size for size in sizes if total % size == 0)

    q, kv = divisor(length), divisor(columns)
    wide = divisor(columns, (1024, kv))
    fused = whole and columns <= _MOST_PARTS * wide
    return splash.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=wide if fused else kv,
        block_kv_dkv_compute=kv,
        block_q_dq=None if fused else q,
        block_kv_dq=None if fused else kv,
        use_fused_bwd_kernel=fused,
    )
