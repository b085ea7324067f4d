"""Losses of a reranker: logits of a question's sources beside their labels, [B, G] each."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from mmqa_jax.tasks.contrastive_losses import margin_mse


def pointwise(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Binary cross-entropy of every pair; labels in 0..1."""
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def listwise(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """ListNet (Cao et al. 2007, section 4.3): cross-entropy with the softmax of the labels."""
    return optax.softmax_cross_entropy(logits, jax.nn.softmax(labels)).mean()


def lambda_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """LambdaLoss with the weights NDCG-Loss2++ (Wang et al. 2018, equation 17; mu is 10).

    As sentence-transformers computes it: the mean over the pairs of a better and a worse source, in
    bits.
    """
    order = jnp.argsort(-logits, axis=1)
    logits, true = (jnp.take_along_axis(x, order, axis=1) for x in (logits, labels))  # [B, G]
    places = jnp.arange(logits.shape[1])
    discount = jnp.log2(2.0 + places)  # [G]
    gains = 2 ** jnp.maximum(true, 0) - 1
    ideal = 2 ** jnp.maximum(-jnp.sort(-labels, axis=1), 0) - 1
    best = jnp.maximum((ideal / discount).sum(axis=1), 1e-10)
    gain = gains / best[:, None]

    def apart(x: jax.Array) -> jax.Array:  # [..., G] -> differences [..., G, G]
        return x[..., :, None] - x[..., None, :]

    distance = jnp.abs(apart(places))
    step = jnp.abs(1 / discount[distance - 1] - 1 / discount[distance])
    step = jnp.where(distance > 0, step, 0)
    weights = (10 * step + jnp.abs(apart(1 / discount))) * jnp.abs(apart(gain))
    counted = apart(true) > 0
    losses = weights * jax.nn.log_sigmoid(apart(logits)) / jnp.log(2.0)
    return -losses.sum(where=counted) / jnp.maximum(counted.sum(), 1)


# By the values of the config key `loss`.
RANKING_LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "pointwise": pointwise,
    "listwise": listwise,
    "lambda": lambda_loss,
    "margin_mse": margin_mse,
}
