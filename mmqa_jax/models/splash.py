"""JAX's splash attention: a Pallas kernel for TPU, whose memory is linear in the lengths.

A file of its own because Pallas takes half a second to import.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec

from mmqa_jax.core.mesh import partition_spec

_LANES = 128  # queries and keys come in multiples of this


def splash_fits(length: int, columns: int) -> bool:
    """Whether `splash_attention` takes so many queries and keys."""
    return length % _LANES == 0 and columns % _LANES == 0


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    key_mask: jax.Array | None,
    segments: jax.Array | None = None,
    is_causal: bool,
    mesh: Mesh | None,
    interpret: bool = False,
    cap: float | None = None,
) -> jax.Array:
    """JAX's Pallas kernel for TPU (flash attention that skips blocks of a sparse mask).

    q [B, Lq, heads, D]; k, v [B, Lk, kv_heads, D]; key_mask bool [B, Lk] of keys that are seen; a
    row must see at least one. segments int [B, L] (Lq == Lk), in place of key_mask: a token sees
    those of its own segment. On a mesh (None: that of `jax.set_mesh`) rows are split as a batch
    is, and heads as the model's, where these divide.
    `interpret` runs the kernel without a TPU, slowly, for tests; `cap` is that of
    `layers.attention`. Returns [B, Lq, heads, D].
    """
    length, size = q.shape[1], q.shape[3]
    columns, kv_heads = k.shape[1:3]

    def one(q, k, v, of_queries, of_keys):
        # Of one sequence: [heads, Lq, D], [kv_heads, Lk, D] twice, int32 [Lq], [Lk].
        if is_causal:
            mask = masks.CausalMask((length, columns), offset=columns - length)
        else:
            mask = masks.FullMask((length, columns))
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * q.shape[0]),
            block_sizes=_block_sizes(length, columns),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
            attn_logits_soft_cap=cap,
        )
        return kernel(q, k, v, splash.SegmentIds(of_queries, of_keys))

    def attend(q, k, v, of_queries, of_keys):
        return jax.vmap(one)(q, k, v, of_queries, of_keys)

    mesh = mesh or jax.sharding.get_abstract_mesh()
    if mesh.shape and not mesh.manual_axes:  # XLA does not split a kernel by itself
        spec = partition_spec(("batch", "heads"), (len(q), kv_heads), mesh)
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(spec, spec, spec, *(PartitionSpec(spec[0]),) * 2),
            out_specs=spec,
            check_vma=False,
        )
    if segments is not None:
        ids = (segments.astype(jnp.int32),) * 2
    else:
        seen = jnp.ones((len(q), columns), bool) if key_mask is None else key_mask
        ids = jnp.ones((len(q), length), jnp.int32), seen.astype(jnp.int32)
    heads_first = ((q * size**-0.5).astype(q.dtype), k, v)
    out = attend(*(x.swapaxes(1, 2) for x in heads_first), *ids)
    return out.swapaxes(1, 2)


@functools.cache
def _block_sizes(length: int, columns: int) -> splash.BlockSizes:
    """Blocks of at most 512 queries and keys; forward and backward."""

    def divisor(total: int) -> int:
        return next(size for size in (512, 256, _LANES) if total % size == 0)

    q, kv = divisor(length), divisor(columns)
    return splash.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_kv_dkv_compute=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
