"""The sigmoid loss (SigLIP, Zhai et al. 2023, section 3): each pair is a decision of its own.

No row or column is normalized, so that no device needs all logits: each keeps its sources, the
questions go around the devices, and each meets them one chunk at a time (section 3.3, figure 1).
A chunk's logits and their gradient are made together and forgotten: what a device holds beside the
embeddings is one block [B / n, S / n]. The questions' gradient travels with them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from mmqa_jax.core.mesh import batch_sharding

Vectors = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # queries, sources, scale, bias
Links = tuple[jax.Array, jax.Array, jax.Array]  # positive, source_rows, gold_rows


def sigmoid_loss(
    queries: jax.Array,
    sources: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    positive: jax.Array,
    source_rows: jax.Array,
    gold_rows: jax.Array,
    *,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum over the sources of -log sigmoid(z * (scale * cosine + bias)), mean over the questions.

    z is 1 for a question's positive and -1 for all other sources but its other gold ones, which
    count for nothing. Loss and gradients are those of one device. Of B questions with one source
    each, all different, it is SigLIP's loss.

    Args:
      queries, sources: [B, D] and [S, D] float32, of length 1.
      scale, bias: of the logits.
      positive, source_rows, gold_rows: as of `objectives.contrastive_loss`.
      mesh: over whose batch axes B and S are split.

    Returns:
      The loss, and how often the positive has the highest logit of its question.
    """
    return _loss((queries, sources, scale, bias), (positive, source_rows, gold_rows), mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _loss(vectors: Vectors, links: Links, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    return _around(vectors, links, mesh, gradient=False)[0]


def _forward(
    vectors: Vectors, links: Links, mesh: Mesh | None
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    return _around(vectors, links, mesh, gradient=True)


def _backward(mesh: Mesh | None, gradients: Any, cotangents: Any) -> tuple[Any, None]:
    return jax.tree.map(lambda x: cotangents[0] * x, gradients), None


_loss.defvjp(_forward, _backward)


def _around(
    vectors: Vectors, links: Links, mesh: Mesh | None, *, gradient: bool
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """(loss, accuracy) and, with `gradient`, the loss's gradient with respect to the vectors."""
    if mesh is None:
        return _ring(vectors, links, axes=(), parts=1, gradient=gradient)
    rows, whole = batch_sharding(mesh).spec, PartitionSpec()
    (axes,) = rows
    of_vectors = rows, rows, whole, whole
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    ring = functools.partial(_ring, axes=axes, parts=parts, gradient=gradient)
    return jax.shard_map(
        ring,
        mesh=mesh,
        in_specs=(of_vectors, (rows, rows, rows)),
        out_specs=((whole, whole), of_vectors if gradient else None),
        check_vma=False,  # what is the same on all devices is summed below, not by the types
    )(vectors, links)


def _ring(
    vectors: Vectors, links: Links, *, axes: tuple[str, ...], parts: int, gradient: bool
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """One device's b = B / n questions and s = S / n sources; sums are over all devices."""
    queries, sources, scale, bias = vectors
    positive, source_rows, gold_rows = links
    here = jax.lax.axis_index(axes) if axes else 0
    columns = here * len(sources) + jnp.arange(len(sources))  # of the sources here, among all
    onward = [(part, (part + 1) % parts) for part in range(parts)]

    def chunk(vectors: Vectors, positive: jax.Array, golds: jax.Array) -> tuple[jax.Array, Any]:
        return _chunk(vectors, positive, golds, source_rows, columns)

    def meet(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        (queries, positive, golds, best, d_queries), (total, d_others) = state
        at = (queries, sources, scale, bias), positive, golds
        if gradient:
            (loss, found), (d_chunk, *d_here) = jax.value_and_grad(chunk, has_aux=True)(*at)
            d_queries = d_queries + d_chunk
            d_others = jax.tree.map(jnp.add, d_others, tuple(d_here))
        else:
            loss, found = chunk(*at)
        best = jax.tree.map(jnp.maximum, best, found)
        travelling = queries, positive, golds, best, d_queries
        if axes:
            travelling = jax.lax.ppermute(travelling, axes, onward)
        return travelling, (total + loss, d_others)

    lowest = jnp.full(len(queries), -jnp.inf)
    d_queries, d_others = jnp.zeros_like(queries), jax.tree.map(jnp.zeros_like, vectors[1:])
    state = (queries, positive, gold_rows, (lowest, lowest), d_queries), (0.0, d_others)
    # After as many steps as there are devices everything is where it began.
    travelled, (total, d_others) = jax.lax.fori_loop(0, parts, meet, state)
    (_, _, _, (own, other), d_queries) = travelled

    def over_all(x: Any) -> Any:
        return jax.lax.psum(x, axes) if axes else x

    count = parts * len(queries)
    correct = (own > other).astype(jnp.float32).sum()
    values = over_all(total) / count, over_all(correct) / count
    if not gradient:
        return values, None
    d_sources, *d_shared = d_others
    made = d_queries, d_sources, *over_all(d_shared)
    return values, jax.tree.map(lambda x: x / count, made)


def _chunk(
    vectors: Vectors,
    positive: jax.Array,
    gold_rows: jax.Array,
    source_rows: jax.Array,
    columns: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss of b questions against s sources; each one's positive and best other logit [b]."""
    queries, sources, scale, bias = vectors
    # An accelerator would round float32 to bfloat16 or TF32 otherwise.
    cosines = jnp.matmul(queries, sources.T, precision=jax.lax.Precision.HIGHEST)
    logits = scale * cosines + bias  # [b, s]
    is_positive = positive[:, None] == columns
    gold = (source_rows[None, :, None] == gold_rows[:, None, :]).any(axis=-1)
    is_negative = ~is_positive & ~gold
    likelihood = jax.nn.log_sigmoid(jnp.where(is_positive, logits, -logits))
    loss = -jnp.where(is_positive | is_negative, likelihood, 0.0).sum()
    own, other = (
        jnp.where(those, logits, -jnp.inf).max(axis=1) for those in (is_positive, is_negative)
    )
    return loss, (own, other)
