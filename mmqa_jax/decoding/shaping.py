"""What a request asks of its logits, kept on the host while its answer grows.

Grammars are llguidance's: it says after each token which ones may come next.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.sampling import Shaping

if TYPE_CHECKING:
    import llguidance

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
