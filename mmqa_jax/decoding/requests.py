"""Requests to the generation engine and their results."""

import dataclasses
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mmqa_jax.core.errors import UserError

MOST_TOP = 20  # likeliest tokens in a place, as many as OpenAI's API names
MOST_DRAWS = 10_000  # continuations of one request, each of which has its own row of the cache
_INT32 = 2**31 - 1  # the engine's arrays hold int32
_LEAST = 1e-6  # a temperature; logits divided by less exceed float32


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; transformers' and ours have it."""

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that a prompt begins with."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to be continued.

    `temperature` 0 is greedy decoding; otherwise tokens are drawn from softmax(logits /
    temperature), of which `top_k` (0: all) and then `top_p` keep the most probable, including ties
    (in transformers' order), and `min_p` those of at least this share of the likeliest one's
    probability. `n` draws are independent; `beams` above 0 is beam search instead, of
    which the `n` best are returned. The answer depends only on this request and its `seed`: not
    on other requests, its slot or its order.
    """

    id: Hashable  # of the result; unique in a run
    prompt: str | Sequence[int]  # text, or token ids with all special tokens
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: Sequence[str] = ()  # the first of these strings ends the text and is cut off
    n: int = 1
    seed: int = 0
    logprobs: bool = False  # whether the result has every token's log-probability
    beams: int = 0
    length_penalty: float = 0.0  # added to a beam's score per token; of a T5, the power of its
    # length by which the score is divided, as in transformers
    images: Sequence[np.ndarray] = ()  # uint8 as the model takes them, one each; see
    # `PictureConfig.expected_pixels`
    adapter: str = ""  # one of the engine's adapters; "": the model alone
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens of prompt and answer, see `sampling.shaped`
    presence_penalty: float = 0.0  # of tokens of the answer
    frequency_penalty: float = 0.0  # of these, each time
    logit_bias: Sequence[tuple[int, float]] = ()  # of tokens
    top_logprobs: int = 0  # how many of the likeliest tokens the result has in each place
    grammar: str = ""  # of the answer, in llguidance's Lark; "": any text

    def __post_init__(self):
        if isinstance(self.stop, str):
            _refuse(self.id, "stop", self.stop, "a list of strings, not one string")
        if "" in self.stop:
            _refuse(self.id, "stop", "", "strings of at least one character")
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", tuple(int(token) for token in self.prompt))
        if not 1 <= self.max_new_tokens <= _INT32:
            _refuse(self.id, "max_new_tokens", self.max_new_tokens, f"1 to {_INT32:,}")
        if self.temperature and not _LEAST <= self.temperature <= 1 / _LEAST:
            expected = f"0 (greedy) or a number from {_LEAST} to {1 / _LEAST:.0f}"
            _refuse(self.id, "temperature", self.temperature, expected)
        if not 0 <= self.top_k <= _INT32:
            _refuse(self.id, "top_k", self.top_k, f"0 (all tokens) to {_INT32:,}")
        if not 0.0 < self.top_p <= 1.0:
            _refuse(self.id, "top_p", self.top_p, "a share above 0, up to 1")
        if not 1 <= self.n <= MOST_DRAWS:
            _refuse(self.id, "n", self.n, f"1 to {MOST_DRAWS:,}")
        if not 0 <= self.seed < 2**63:
            _refuse(self.id, "seed", self.seed, "0 to 2^63 - 1")
        if self.beams and not self.n <= self.beams <= MOST_DRAWS:
            expected = f"0 (no beam search), or n = {self.n} to {MOST_DRAWS:,}"
            _refuse(self.id, "beams", self.beams, expected)
        if not abs(self.length_penalty) <= 1 / _LEAST:
            _refuse(self.id, "length_penalty", self.length_penalty, f"up to {1 / _LEAST:.0f}")
        if self.beams and self.temperature:
            _refuse(self.id, "beams", self.beams, "0 where temperature is above 0")
        if self.beams and len(self.images):
            _refuse(self.id, "beams", self.beams, "0 with pictures")
        if self.beams and self.logprobs:
            _refuse(self.id, "logprobs", True, "False with beams; `score` gives them")
        self._check_shape()
        if self.n > 1 and not self.beams and not self.temperature:
            _refuse(self.id, "n", self.n, "1 for greedy decoding; set a temperature or beams")

    def _check_shape(self) -> None:
        if not 0.0 <= self.min_p <= 1.0:
            _refuse(self.id, "min_p", self.min_p, "a share from 0 to 1")
        if not 0.0 < self.repetition_penalty <= 100.0:
            _refuse(self.id, "repetition_penalty", self.repetition_penalty, "above 0, up to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -100.0 <= getattr(self, name) <= 100.0:
                _refuse(self.id, name, getattr(self, name), "-100 to 100")
        if not 0 <= self.top_logprobs <= MOST_TOP:
            _refuse(self.id, "top_logprobs", self.top_logprobs, f"0 to {MOST_TOP}")
        for token, bias in self.logit_bias:
            if not (0 <= token <= _INT32 and -100.0 <= bias <= 100.0):
                _refuse(self.id, "logit_bias", {token: bias}, "tokens' ids with -100 to 100 each")
        if self.beams and self.is_shaped:
            _refuse(self.id, "beams", self.beams, "0 with penalties, a bias, or a grammar")

    @property
    def is_shaped(self) -> bool:
        """Whether its logits are changed, or looked at beside the chosen ones."""
        return bool(
            self.min_p
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.top_logprobs
            or self.grammar
        )


class Likeliest(NamedTuple):
    """A token that is likely in some place, and its log-probability."""

    token: int
    logprob: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One continuation of a prompt."""

    text: str | None  # without stop string and end token; None without a tokenizer
    tokens: tuple[int, ...]  # as generated: an end token or a stop string's tokens included
    total: float  # summed log-probability of the text's tokens, those before end token and stop
    # string, under the model itself (temperature 1); of a beam, its score, length penalty and end
    # token included
    logprobs: tuple[float, ...] | None  # of each of `tokens`, if requested
    finish: str  # "end" (end token), "stop" (stop string) or "length" (max_new_tokens)
    thinking: str = ""  # what a server gives apart from the text
    thinking_tokens: int | None = None  # before the answer; None: there are none, or not counted
    # The likeliest tokens in the place of each of `tokens`, as many as the request names.
    likeliest: tuple[tuple[Likeliest, ...], ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a Request."""

    id: Hashable
    candidates: tuple[Candidate, ...]  # n of them, highest total first
    prompt_tokens: int
    reused_tokens: int  # of these, how many were reused from the cache (the least of all n)

    @property
    def text(self) -> str | None:
        """The best candidate's text."""
        return self.candidates[0].text


@dataclasses.dataclass(frozen=True)
class Scoring:
    """A prompt and continuations to be scored."""

    id: Hashable
    prompt: str | Sequence[int]
    continuations: Sequence[str] | Sequence[Sequence[int]]  # texts or ids, as the prompt
    images: Sequence[np.ndarray] = ()  # of the prompt, as Request's
    adapter: str = ""  # as Request's
    # Of each continuation the prompt's tokens that it does not see, from the first one to before
    # the last; (0, 0): it sees all. The rest of the prompt has been encoded with them. (): all
    # continuations see all.
    hidden: Sequence[tuple[int, int]] = ()
    # Tokens with which every continuation begins, and which are given, not scored.
    unscored: int = 0

    def __post_init__(self):
        texts = [isinstance(text, str) for text in (self.prompt, *self.continuations)]
        if any(texts) and not all(texts):
            _refuse(self.id, "continuations", "mixed", "all texts or all token ids, as the prompt")
        if not self.continuations:
            _refuse(self.id, "continuations", "empty", "at least one")


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probability of one continuation."""

    total: float  # summed log-probability of its tokens
    logprobs: tuple[float, ...]  # of each
    greedy: bool  # whether greedy decoding would have given it
    # In the place of each token; () where nothing tells: a server, or a response cache.
    likeliest: tuple[Likeliest, ...] = dataclasses.field(default=(), compare=False)

    @property
    def mean(self) -> float:
        """Log-probability per token, which does not favor short continuations."""
        return self.total / len(self.logprobs)


@dataclasses.dataclass(frozen=True)
class Scores:
    """The result of a Scoring, in the order of its continuations."""

    id: Hashable
    scores: tuple[Score, ...]
    prompt_tokens: int = 0


class Unanswerable(UserError):
    """A query whose own text or picture cannot be served, though others can."""


class TooLong(Unanswerable):
    """A prompt that exceeds the context, with its new tokens, by `excess` tokens."""

    def __init__(self, request_id: Hashable, tokens: int, new: int, length: int):
        self.excess = tokens + new - length
        super().__init__(
            f"request {request_id!r}: its prompt of {tokens} tokens plus {new} new ones is "
            f"{self.excess} more than engine.length = {length}; shorten it (fewer examples), lower "
            "max_new_tokens or raise engine.length."
        )


def check_end_ids(end_ids: Collection[int], vocab_size: int) -> None:
    """Rejects end tokens that a model lacks."""
    for end in end_ids:
        if not 0 <= end < vocab_size:
            raise UserError(
                f"end token {end}: expected 0 to {vocab_size - 1}; use the model's own."
            )


def check_one_end(request: Request | Scoring, end_ids: Collection[int]) -> None:
    """Rejects beam search with a model whose answers end in several tokens, or in none."""
    if isinstance(request, Request) and request.beams and len(set(end_ids)) != 1:
        raise UserError(
            f"request {request.id!r}: beam search needs exactly one end token, the model has "
            f"{len(set(end_ids))}; leave beams out, or name one as eos_token_id in its "
            "generation_config.json (as end_ids of an engine)."
        )


def _refuse(request_id: Hashable, field: str, value: object, expected: str) -> None:
    text = f"{value!r:.60}" if not isinstance(value, int) or abs(value) < 2**99 else "a huge number"
    raise UserError(f"request {request_id!r}: {field} is {text}, expected {expected}.")


# Counts and rates of an engine's work.


@dataclasses.dataclass
class Throughput:
    """Counts since the start; seconds are wall-clock, without the caller's time in between."""

    requests: int = 0
    prefill_tokens: int = 0  # encoded, without padding
    reused_tokens: int = 0  # of prompts, taken from the prefix cache instead
    decode_tokens: int = 0
    steps: int = 0  # decode steps
    turns: int = 0  # of sequences in these steps; with speculation one gives several tokens
    pictures: int = 0  # that the tower encoded
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens encoded per second."""
        return self.prefill_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """New tokens per second, all slots together."""
        return self.decode_tokens / max(self.decode_seconds, 1e-9)


# Stop strings: finding them while tokens are generated, and cutting the text there.

INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of a character to


class StopDetector:
    """Decodes one sequence token by token and looks for stop strings, also across tokens.

    Only the last few tokens are decoded again: a token's text may depend on the one before
    (SentencePiece's leading space), and a character may be spread over several tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._context = self._read = 0  # tokens[:read] are decoded; decoding begins at context
        self._tail = ""  # the end of the text, shorter than the longest stop string
        self._keep = max(map(len, self._stops), default=1) - 1

    def push(self, token: int) -> bool:
        """Adds the next token; true once the text contains a stop string."""
        self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._context : self._read])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith(INCOMPLETE) or len(text) <= len(known):
            return False
        fresh = self._tail + text[len(known) :]
        self._context, self._read = self._read, len(self._tokens)
        self._tail = fresh[-self._keep :] if self._keep else ""
        return any(stop in fresh for stop in self._stops)


def truncate(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string, or all of it."""
    ends = [text.find(stop) for stop in stops]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def text_of(
    tokens: Sequence[int], finish: str, stops: Sequence[str], tokenizer: Tokenizer
) -> tuple[str, int]:
    """The text of a candidate's tokens without end token and stop string, and how many make it."""
    visible = list(tokens[:-1] if finish == "end" else tokens)
    whole = tokenizer.decode(visible)
    text = truncate(whole, stops)
    if text == whole:
        return text, len(visible)
    return text, tokens_of_text(visible, text, tokenizer)


def tokens_of_text(tokens: Sequence[int], text: str, tokenizer: Tokenizer) -> int:
    r"""How many tokens, from the first, make a text that was cut at a stop string.

    A token counts if some of the text is in it: `.\n` counts where `\n` is the stop string.

    Args:
      tokens: the text and what follows it begin with the same tokens.
      text: as `truncate` gave it.
    """
    count = len(tokens)
    while count and tokenizer.decode(list(tokens[: count - 1])).startswith(text):
        count -= 1
    return count
