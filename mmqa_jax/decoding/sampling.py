"""Samples the next token, each row with its own parameters and seed.

What a request asks of its logits is on the host while its answer grows. Grammars are llguidance's:
it says after each token which ones may come next.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import platform
from mmqa_jax.decoding.requests import MOST_TOP, Request

if TYPE_CHECKING:
    import llguidance


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


_ALL = np.uint32(2**32 - 1)


class ByteTokenizer(Protocol):
    """What grammars need of a tokenizer."""

    vocab_size: int

    @property
    def control_ids(self) -> Collection[int]:
        """Tokens that are no text."""

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, which may be a part of a character."""


class Grammars:
    """Makes matchers of grammars over one tokenizer's tokens.

    Args:
      tokenizer: None of an engine of ids alone, which has no grammars.
      end_ids: tokens that end an answer; they may come where the grammar is fulfilled.
    """

    def __init__(self, tokenizer: ByteTokenizer | None, end_ids: Collection[int]):
        self._tokenizer, self._end_ids = tokenizer, sorted(end_ids)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the beginning of an answer; UserError for what is no grammar, or one that no
        text fulfils."""
        try:
            import llguidance
        except ImportError as error:
            raise UserError(
                "a form of answers needs llguidance; `pip install 'mmqa-jax[serve]'`."
            ) from error
        if not hasattr(self._tokenizer, "token_bytes") or not self._end_ids:
            raise UserError(
                "a form of answers needs a model with a tokenizer and an end token; use another."
            )
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._lexed, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise UserError(f"no answer can be written in this form ({reason:.300}); change it.")
        return matcher

    @functools.cached_property
    def _lexed(self) -> llguidance.LLTokenizer:
        import llguidance

        return llguidance.LLTokenizer(
            _Wrapped(self._tokenizer, self._end_ids), eos_token=self._end_ids
        )


class _Wrapped:
    """A tokenizer as llguidance takes it (its TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, end_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted({*tokenizer.control_ids, *end_ids})

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "ignore")
        return self._tokenizer.encode_texts([text])[0]


class ShapedAnswer:
    """An answer's shape as far as it is written.

    Args:
      request: that asks for one.
      prompt: its tokens.
      vocab_size: of the model's logits, V.
      matcher: at the answer's beginning; None: any text.
    """

    def __init__(
        self, request: Request, prompt: Sequence[int], vocab_size: int, matcher: Any = None
    ):
        self._request, self._matcher = request, matcher
        self._bias = np.zeros(vocab_size, np.float32)
        for token, bias in request.logit_bias:
            self._bias[token] = bias
        self._seen = np.zeros(vocab_size, np.int32)
        self._seen[[token for token in prompt if 0 <= token < vocab_size]] = 1

    def push(self, token: int) -> None:
        """Takes the answer's next token."""
        self._seen[token] = max(self._seen[token], 1) + 1
        if self._matcher is not None:
            self._matcher.consume_token(token)

    def fill(self, shaping: Shaping, row: int) -> None:
        """Writes what shapes the next token into a row of numpy arrays."""
        shaping.bias[row], shaping.seen[row] = self._bias, self._seen
        request = self._request
        shaping.repetition[row] = request.repetition_penalty
        shaping.presence[row] = request.presence_penalty
        shaping.frequency[row] = request.frequency_penalty
        shaping.min_p[row], shaping.is_shaped[row] = request.min_p, True
        if self._matcher is not None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            shaping.allowed[row] = 0
            width = min(len(bits), shaping.allowed.shape[1])
            shaping.allowed[row, :width] = bits[:width]


def shaping_of(
    rows: int, answers: Mapping[int, ShapedAnswer | None], vocab_size: int
) -> Shaping | None:
    """The shaping of so many rows, of which some answers have one; None: none has."""
    if not any(answers.values()):
        return None
    shaping = Shaping(
        bias=np.zeros((rows, vocab_size), np.float32),
        seen=np.zeros((rows, vocab_size), np.int32),
        allowed=np.full((rows, -(-vocab_size // 32)), _ALL),
        repetition=np.ones(rows, np.float32),
        presence=np.zeros(rows, np.float32),
        frequency=np.zeros(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        is_shaped=np.zeros(rows, bool),
    )
    for row, answer in answers.items():
        if answer is not None:
            answer.fill(shaping, row)
    return shaping
