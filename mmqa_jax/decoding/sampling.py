"""Sampling the next token, each row with its own parameters and seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mmqa_jax.core.mesh import platform
from mmqa_jax.decoding.requests import MOST_TOP, Request


@flax.struct.dataclass
class SamplingParameters:
    """How the next token of every row is drawn; [S] each."""

    temperature: jax.Array  # float32; 0 is greedy
    top_k: jax.Array  # int32; 0 keeps all
    top_p: jax.Array  # float32 in (0, 1]
    key: jax.Array  # uint32 [S, 2]: a row's seed, see `draw_key`


@flax.struct.dataclass
class Shaping:
    """What changes the logits of rows before a token is chosen, [S, ...] each.

    A row that asks for nothing has zeros, ones as `repetition` and in all bits of `allowed`.
    """

    bias: jax.Array  # float32 [S, V]: added
    seen: (
        jax.Array
    )  # int32 [S, V]: 0 of tokens that the text lacks, else 1 + times they were written
    allowed: jax.Array  # uint32 [S, ceil(V / 32)]: bits of the tokens that may come next
    repetition: jax.Array  # float32 [S]
    presence: jax.Array  # float32 [S]
    frequency: jax.Array  # float32 [S]
    min_p: jax.Array  # float32 [S]: of the likeliest token's probability
    is_shaped: jax.Array  # bool [S]


class TopLogprobs(NamedTuple):
    """Log-probabilities under softmax(logits), which no shaping has changed."""

    chosen: jax.Array  # float32 [S]
    tokens: jax.Array  # int32 [S, MOST_TOP]: the likeliest
    of_tokens: jax.Array  # float32 [S, MOST_TOP]: theirs


def draw_key(seed: int, draw: int) -> np.ndarray:
    """uint32 [2]: the key of a request's `draw`-th sample, the same on every host and device."""
    return np.random.SeedSequence([seed, draw]).generate_state(2, np.uint32)


def parameters_of(rows: int, drawn: Mapping[int, tuple[Request, int]]) -> SamplingParameters:
    """The parameters of so many rows, from the request and draw of each that is used."""
    parameters = SamplingParameters(
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int32),
        np.ones(rows, np.float32),
        np.zeros((rows, 2), np.uint32),
    )
    for row, (request, draw) in drawn.items():
        parameters.temperature[row] = request.temperature
        parameters.top_k[row] = request.top_k
        parameters.top_p[row] = request.top_p
        parameters.key[row] = draw_key(request.seed, draw)
    return parameters


def choose(
    logits: jax.Array,
    parameters: SamplingParameters,
    count: jax.Array,
    active: jax.Array,
    sampled: bool | None = None,
    shaping: Shaping | None = None,
) -> tuple[jax.Array, jax.Array | TopLogprobs]:
    """The next token of every row.

    Args:
      logits: [S, V] float32.
      parameters: of the rows.
      count: int [S], how many tokens the row has already; with its key it decides the draw.
      active: bool [S], rows whose result is used (the others' may be anything).
      sampled: whether some active row is not greedy; None: found out on the device, which does no
        more than the rows ask for.
      shaping: of the rows; None: none of them has any.

    Returns:
      Tokens int32 [S], and their log-probabilities float32 [S] under softmax(logits), with those of
      the likeliest tokens where there is shaping.
    """
    plain, min_p = logits, None
    if shaping is not None:
        logits, min_p = shaped(logits, shaping), shaping.min_p
    greedy = logits.argmax(-1)
    samples = active & (parameters.temperature > 0)

    def draw(_):
        noise = jax.vmap(_gumbel, (0, 0, None))(parameters.key, count, logits.shape[-1])
        scores = _kept(logits, parameters, samples, branch=sampled is None)
        if min_p is not None:
            scores = jnp.where(
                scores >= scores.max(-1, keepdims=True) + jnp.log(min_p)[:, None], scores, -jnp.inf
            )
        noisy = scores + noise
        return jnp.where(samples, noisy.argmax(-1), greedy)

    if sampled is None:
        tokens = jax.lax.cond(samples.any(), draw, lambda _: greedy, None)
    else:
        tokens = draw(None) if sampled else greedy
    chosen = jnp.take_along_axis(plain, tokens[:, None], axis=1)[:, 0]
    total = jax.nn.logsumexp(plain, axis=-1)
    logprobs = chosen - total
    if shaping is not None:
        values, likeliest = jax.lax.top_k(plain, min(MOST_TOP, plain.shape[-1]))
        logprobs = TopLogprobs(logprobs, likeliest, values - total[:, None])
    return tokens.astype(jnp.int32), logprobs


def shaped(logits: jax.Array, shaping: Shaping) -> jax.Array:
    """Logits [S, V] as vLLM changes them, in its order: tokens that may come, bias, penalties.

    A repeated token's logit is divided by the repetition penalty where it is positive, multiplied
    where it is not (Keskar et al. 2019); what the model wrote costs its presence once, and its
    frequency each time.
    """
    bit = jnp.arange(32, dtype=jnp.uint32)
    bits = (shaping.allowed[:, :, None] >> bit) & 1  # [S, W, 32]
    allowed = bits.reshape(len(logits), -1)[:, : logits.shape[-1]] > 0
    scores = logits + shaping.bias
    repetition = jnp.where(shaping.seen > 0, shaping.repetition[:, None], 1.0)
    scores = jnp.where(scores > 0, scores / repetition, scores * repetition)
    written = jnp.maximum(shaping.seen - 1, 0)
    scores = scores - shaping.frequency[:, None] * written
    scores = scores - shaping.presence[:, None] * (written > 0)
    return jnp.where(allowed, scores, -jnp.inf)


def _kept(
    logits: jax.Array, parameters: SamplingParameters, samples: jax.Array, *, branch: bool
) -> jax.Array:
    """Logits over temperature [S, V]; -inf where top_k or top_p drop a token.

    branch: leave out, on the device, what no row asks for.
    """
    scores = logits / jnp.where(samples, parameters.temperature, 1.0)[:, None]

    def keep_top_k(scores):
        ones = jnp.ones_like(scores)
        mask = _heaviest(scores, ones, parameters.top_k.astype(jnp.float32))
        return jnp.where(mask | (parameters.top_k == 0)[:, None], scores, -jnp.inf)

    def keep_top_p(scores):
        mask = _heaviest(scores, jax.nn.softmax(scores), parameters.top_p)
        return jnp.where(mask | (parameters.top_p >= 1)[:, None], scores, -jnp.inf)

    if not branch:
        return keep_top_p(keep_top_k(scores))
    scores = jax.lax.cond((samples & (parameters.top_k > 0)).any(), keep_top_k, _same, scores)
    return jax.lax.cond((samples & (parameters.top_p < 1)).any(), keep_top_p, _same, scores)


def _heaviest(scores: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """bool [S, V]: the fewest highest scores of a row whose weights sum to at least `target`.

    Scores equal to the lowest kept one are kept with it. The threshold is found digit by digit,
    which is exact and cheaper than sorting a vocabulary. A digit costs one pass over the scores and
    2^bits - 1 sums: on a CPU these take longer, elsewhere the passes (and a mesh's collectives).
    """
    digit_bits = 1 if platform() == "cpu" else 2
    bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    ranks = jnp.where(bits & sign, ~bits, bits | sign)  # ordered as the scores are

    def refined(n, threshold):
        shift = jnp.uint32(32 - digit_bits) - jnp.uint32(digit_bits) * n.astype(jnp.uint32)
        highest = threshold
        for digit in range(1, 2**digit_bits):  # the weight falls as the digit rises
            higher = threshold | (jnp.uint32(digit) << shift)
            weight = jnp.where(ranks >= higher[:, None], weights, 0).sum(-1)
            highest = jnp.where(weight >= target, higher, highest)
        return highest

    threshold = jax.lax.fori_loop(
        0, 32 // digit_bits, refined, jnp.zeros(scores.shape[0], jnp.uint32)
    )
    return ranks >= threshold[:, None]


def _gumbel(key_data: jax.Array, count: jax.Array, size: int) -> jax.Array:
    """Gumbel noise [size]: the argmax of scores plus it is a draw from their softmax."""
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, count), (size,))


def _same(x: jax.Array) -> jax.Array:
    return x
