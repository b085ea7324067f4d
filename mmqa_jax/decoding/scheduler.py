"""What the engine schedules: tokenized requests and their sequences, one per slot.

The boundaries of a prompt's chunks depend only on its length. Prompts with a common prefix
therefore begin with the same chunks, computed by the same program on the same input: whoever has
computed them, no bit differs.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import marshal
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding import requests
from mmqa_jax.decoding.image_tower import PatchIds
from mmqa_jax.decoding.page_pool import Prefix
from mmqa_jax.decoding.sampling import Grammars, ShapedAnswer
from mmqa_jax.weights.registry import nouns

Buckets = tuple[int, ...]  # chunk sizes, ascending, each a multiple of the one before


class Chunk(NamedTuple):
    """Tokens in consecutive columns of the cache that are encoded together."""

    start: int  # column of the first token
    tokens: tuple[int, ...]  # ids; negative ones are patches of pictures
    trunk: int = 0  # where the prompt ends whose continuations follow as branches; 0: one sequence
    # Of every token the column where its branch begins (0 in the trunk); () without.
    branches: tuple[int, ...] = ()
    adapter: int = 0  # its number, on which keys and values depend as they do on the tokens
    # Of every token the first column of the trunk that it does not see, and the one behind the
    # last; () without.
    hidden: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The column after the last token."""
        return self.start + len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How prompts are cut into chunks."""

    buckets: Buckets  # sizes of chunks
    # `LlamaConfig.picture_sight`; but for "causal" no picture is cut, nor the prompt where all of
    # it is seen: a chunk may then be several of the largest bucket.
    sight: str = "causal"
    # In place of the last chunk there are several of a smaller bucket where these have less
    # padding.
    tight: bool = False

    def split(self, tokens: Sequence[int], *, adapter: int = 0, prompt: int = 0) -> list[Chunk]:
        """Splits into chunks of the largest bucket, and a last one of the smallest that fits.

        A chunk of bucket b begins at a multiple of b, so that with its padding it fits into columns
        that are a multiple of the largest bucket.

        Args:
          tokens: of a prompt and what follows it.
          adapter: its number.
          prompt: tokens of it.
        """
        starts = [
            start
            for start in range(0, len(tokens), self.buckets[-1])
            if not start or not _joins(self.sight, tokens, start, prompt)
        ]
        if self.tight and self.sight == "causal" and starts:
            rest = len(tokens) - starts[-1]
            padded = {bucket: -(-rest // bucket) * bucket for bucket in reversed(self.buckets)}
            starts += range(starts[-1], len(tokens), min(padded, key=padded.__getitem__))[1:]
        ends = [*starts[1:], len(tokens)]
        return [
            Chunk(start, tuple(tokens[start:end]), adapter=adapter)
            for start, end in zip(starts, ends, strict=True)
        ]


def _joins(sight: str, tokens: Sequence[int], start: int, prompt: int) -> bool:
    """Whether the token at `start` must be encoded with the one before it."""
    if sight == "prompt":
        return start < prompt
    return sight != "causal" and max(tokens[start - 1 : start + 1]) < 0


def bucket_of(count: int, buckets: Buckets) -> int:
    """The smallest bucket that holds `count` tokens, or else as many of the largest as do."""
    largest = buckets[-1]
    return next((bucket for bucket in buckets if bucket >= count), -(-count // largest) * largest)


def chunks_within(chunks: Sequence[Chunk], columns: int) -> int:
    """How many of a prompt's first chunks end within so many columns."""
    return sum(chunk.end <= columns for chunk in chunks)


def prefix_keys(chunks: Sequence[Chunk], size: int) -> list[bytes]:
    """A key for each of the prompt's beginnings of n * `size` tokens that other prompts may share.

    Equal keys are equal tokens (by BLAKE2) and the same adapter.

    Args:
      chunks: of a prompt; its first ones are of the largest bucket.
      size: tokens, a multiple of the largest bucket.
    """
    keys: list[bytes] = []
    tokens: list[int] = []
    key = b""
    for chunk in chunks:
        # A continuation may begin in it, or a picture lies in it that is not cut.
        if chunk.trunk or len(chunk.tokens) > size:
            break
        tokens.extend(chunk.tokens)
        if len(tokens) == size:
            # Version 2 writes equal numbers alike; those of pictures have more than 64 bits.
            text = marshal.dumps([chunk.adapter, *tokens], 2)
            key = hashlib.blake2b(key + text, digest_size=16).digest()
            keys.append(key)
            tokens = []
    return keys


Pictures = Mapping[int, np.ndarray]  # by number, see PatchIds
CANCELLED = "cancelled"  # how a sequence ended that nobody waits for any more


class SlotSequence:
    """One sequence in a slot, from its prompt's first chunk on.

    Args:
      chunks: of the prompt.
      reusable: how many of these may be those of another sequence.
      pictures: of the prompt.
      shifts: of its tokens' positions, see PatchIds; None: positions are columns.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        reusable: int,
        pictures: Pictures,
        shifts: np.ndarray | None = None,
    ):
        self.chunks, self.reusable, self.pictures = chunks, reusable, pictures
        self._shifts = shifts
        self.encoded = 0  # chunks in the cache
        self.slot, self.reused = -1, 0  # `reused` of its chunks are another sequence's
        self.keys: list[bytes] = []  # of its prefixes, see `chunks.prefix_keys`
        self.awaited: Prefix | None = None  # that another one encodes, see page_pool.Placement

    @property
    def whole(self) -> bool:
        """Whether all of the prompt is in the cache."""
        return self.encoded == len(self.chunks)

    @property
    def most_columns(self) -> int:
        """Columns that it may come to need."""
        return self.chunks[-1].end

    @property
    def reusable_columns(self) -> int:
        """How many of its first columns may be those of another sequence."""
        return self.chunks[self.reusable - 1].end if self.reusable else 0

    @property
    def ready(self) -> bool:
        """Whether its next chunk can be encoded."""
        return self.awaited is None or self.awaited.encoded

    def shifts(self, start: int, end: int) -> np.ndarray | int:
        """Returns the shifts of positions in columns `start` to `end`, [end - start, 3]."""
        if self._shifts is None:
            return 0
        return self._shifts[np.minimum(np.arange(start, end), len(self._shifts) - 1)]


class GeneratedSequence(SlotSequence):
    """A prompt and the tokens generated after it."""

    def __init__(
        self,
        request: TokenizedRequest,
        draw: int,
        chunks: list[Chunk],
        pictures: Pictures,
        shifts: np.ndarray | None = None,
    ):
        # The last chunk is always encoded: its hidden state gives the first new token.
        super().__init__(chunks, len(chunks) - 1, pictures, shifts)
        self.request, self.draw = request, draw
        self.undecoded = request.original.max_new_tokens - 1  # decode steps still to be started
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish = ""  # "end", "stop", "length" or CANCELLED
        self.shape = request.shaped()
        self.likeliest: list[tuple[requests.Likeliest, ...]] = []
        stops = request.original.stop
        self._stop_detector = requests.StopDetector(request.tokenizer, stops) if stops else None

    @property
    def most_columns(self) -> int:
        """See SlotSequence: the last token is not cached."""
        return self.chunks[-1].end + self.request.original.max_new_tokens - 1

    @property
    def columns(self) -> int:
        """Columns of its slot that are in use after the next decode step to be started."""
        return self.chunks[-1].end + self.request.original.max_new_tokens - self.undecoded

    def append(
        self, token: int, logprob: float, likeliest: Sequence[requests.Likeliest] = ()
    ) -> bool:
        """Adds the next token, and the likeliest in its place; true if it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.shape is not None:
            self.shape.push(token)
            self.likeliest.append(tuple(likeliest[: self.request.original.top_logprobs]))
        if self.finish == CANCELLED:
            return True
        if token in self.request.end_ids:
            self.finish = "end"
        elif self._stop_detector is not None and self._stop_detector.push(token):
            self.finish = "stop"
        elif len(self.tokens) == self.request.original.max_new_tokens:
            self.finish = "length"
        return bool(self.finish)


class TokenizedRequest:
    """A Request with its prompt in tokens."""

    def __init__(
        self,
        original: requests.Request,
        prompt: Sequence[int],
        pictures: Pictures,
        tokenizer: requests.Tokenizer | None,
        end_ids: frozenset[int],
        chunking: Chunking,
        shifts: np.ndarray | None = None,
        adapter: int = 0,
        shaped: Callable[[], ShapedAnswer | None] = lambda: None,
    ):
        self.adapter, self.shaped = adapter, shaped
        self.original, self.prompt = original, tuple(prompt)
        self.tokenizer, self.end_ids = tokenizer, end_ids
        chunks = chunking.split(prompt, adapter=adapter, prompt=len(prompt))
        draws = 0 if original.beams else original.n  # beams take no slots, see BeamBatches
        self.sequences = [
            GeneratedSequence(self, draw, chunks, pictures, shifts) for draw in range(draws)
        ]

    def beam(self, tokens: Sequence[int], score: float, finish: str) -> requests.Candidate:
        """A beam as a Candidate, with its text."""
        text, _ = self._text(tokens, finish)
        return requests.Candidate(text, tuple(tokens), score, None, finish)

    def _drawn(self, sequence: GeneratedSequence) -> requests.Candidate:
        text, count = self._text(sequence.tokens, sequence.finish)
        logprobs = tuple(sequence.logprobs) if self.original.logprobs else None
        total = math.fsum(sequence.logprobs[:count])
        return requests.Candidate(
            text, tuple(sequence.tokens), total, logprobs, sequence.finish,
            likeliest=tuple(sequence.likeliest),
        )  # fmt: skip

    def _text(self, tokens: Sequence[int], finish: str) -> tuple[str | None, int]:
        """The text without end token and stop string, and how many tokens make it."""
        if self.tokenizer is None:
            return None, len(tokens) - (finish == "end")
        return requests.text_of(tokens, finish, self.original.stop, self.tokenizer)

    def result(self) -> requests.Result | None:
        """The result once all sequences are finished; None as well of a cancelled request."""
        if not all(sequence.finish and sequence.finish != CANCELLED for sequence in self.sequences):
            return None
        candidates = sorted(map(self._drawn, self.sequences), key=lambda drawn: -drawn.total)
        reused = min(
            sequence.chunks[sequence.reused - 1].end if sequence.reused else 0
            for sequence in self.sequences
        )
        return requests.Result(self.original.id, tuple(candidates), len(self.prompt), reused)


class Continuation(NamedTuple):
    """Tokens behind a prompt, and what of it they do not see, as in `Scoring`."""

    tokens: tuple[int, ...]
    hidden: tuple[int, int] = (0, 0)

    def begins_with(self, other: Continuation) -> bool:
        """Whether another continuation is the beginning of this one."""
        return self.hidden == other.hidden and self.tokens[: len(other.tokens)] == other.tokens


class Target(NamedTuple):
    """A token whose log-probability is read from the hidden state of another."""

    continuation: int  # number of its continuation in the sequence
    token: int


class ScoredSequence(SlotSequence):
    """A prompt and continuations of it, as branches side by side in one slot.

    A continuation with which an earlier one begins has no branch of its own.

    Args:
      request: whose sequence it is.
      prompt: token ids.
      continuations: token ids of each, and where their scores go.
      chunking: of its tokens.
      pictures, shifts, adapter: of the prompt.
    """

    def __init__(
        self,
        request: TokenizedScoring,
        prompt: Sequence[int],
        continuations: Sequence[Continuation],
        chunking: Chunking,
        pictures: Pictures,
        shifts: np.ndarray | None = None,
        adapter: int = 0,
    ):
        trunk = len(prompt)
        tokens, begins, hidden = list(prompt), [0] * trunk, [(0, 0)] * trunk
        branches: list[tuple[int, Continuation]] = []  # with the columns where they begin
        unscored = request.original.unscored
        self._targets: dict[int, list[Target]] = collections.defaultdict(list)  # by column
        for number, continuation in enumerate(continuations):
            begun = (column for column, longer in branches if longer.begins_with(continuation))
            begin = next(begun, None)
            if begin is None:
                begin = len(tokens)
                branches.append((begin, continuation))
                # The last token is only predicted, never encoded.
                tokens += continuation.tokens[:-1]
                begins += [begin] * (len(continuation.tokens) - 1)
                hidden += [continuation.hidden] * (len(continuation.tokens) - 1)
            columns = (trunk - 1, *range(begin, begin + len(continuation.tokens) - 1))
            scored = list(zip(columns, continuation.tokens, strict=True))[unscored:]
            for column, token in scored:
                self._targets[column].append(Target(number, token))
        if not any(map(any, hidden)):
            hidden = []
        chunks = [
            chunk
            if chunk.end <= trunk
            else chunk._replace(
                trunk=trunk,
                branches=tuple(begins[chunk.start : chunk.end]),
                hidden=tuple(hidden[chunk.start : chunk.end]),
            )
            for chunk in chunking.split(tokens, adapter=adapter, prompt=trunk)
        ]
        # The chunk of the prompt's last token is always encoded: its hidden state is needed.
        super().__init__(chunks, sum(chunk.end < trunk for chunk in chunks), pictures, shifts)
        self.request = request
        self._scored = [continuation.tokens[unscored:] for continuation in continuations]
        self.logprobs: list[list[float]] = [[] for _ in continuations]
        self.likeliest: list[list[requests.Likeliest]] = [[] for _ in continuations]
        self._unread = sum(map(len, self._scored))

    def targets(self, chunk: Chunk) -> list[tuple[int, Target]]:
        """What the hidden states of a chunk predict: (offset in the chunk, target)."""
        return [
            (offset, target)
            for offset in range(len(chunk.tokens))
            for target in self._targets.get(chunk.start + offset, ())
        ]

    def append(self, target: Target, logprob: float, likeliest: requests.Likeliest) -> None:
        """Adds the log-probability of the next token of a continuation."""
        self.logprobs[target.continuation].append(logprob)
        self.likeliest[target.continuation].append(likeliest)
        self._unread -= 1

    @property
    def finished(self) -> bool:
        """Whether all continuations are scored."""
        return not self._unread

    def scores(self) -> list[requests.Score]:
        """Returns the scores of its continuations, once it is finished."""
        return [
            requests.Score(
                float(np.sum(logprobs)),
                tuple(logprobs),
                all(token == best.token for token, best in zip(tokens, likeliest, strict=True)),
                tuple(likeliest),
            )
            for tokens, logprobs, likeliest in zip(
                self._scored, self.logprobs, self.likeliest, strict=True
            )
        ]


class TokenizedScoring:
    """A Scoring in tokens.

    Several continuations share a sequence: as many as fit the engine's length and whose tokens
    after the prompt fit one chunk of the largest bucket; `apart` none do.
    """

    def __init__(
        self,
        original: requests.Scoring,
        prompt: Sequence[int],
        continuations: Sequence[Sequence[int]],
        pictures: Pictures,
        chunking: Chunking,
        length: int,
        shifts: np.ndarray | None = None,
        adapter: int = 0,
        apart: bool = False,
    ):
        self.original, self._prompt_tokens = original, len(prompt)
        most = min(chunking.buckets[-1], length - len(prompt))  # tokens after the prompt
        groups: list[list[Continuation]] = []
        room = 0
        hidden = original.hidden or [(0, 0)] * len(continuations)
        for continuation in map(Continuation, map(tuple, continuations), hidden):
            encoded = len(continuation.tokens) - 1
            if groups and any(longer.begins_with(continuation) for longer in groups[-1]):
                encoded = 0
            if apart or not groups or encoded > room:
                groups.append([])
                room = most
            groups[-1].append(continuation)
            room -= encoded
        self.sequences = [
            ScoredSequence(self, prompt, group, chunking, pictures, shifts, adapter)
            for group in groups
        ]

    def result(self) -> requests.Scores | None:
        """The scores once all sequences are finished."""
        if not all(sequence.finished for sequence in self.sequences):
            return None
        scores = tuple(score for sequence in self.sequences for score in sequence.scores())
        return requests.Scores(self.original.id, scores, self._prompt_tokens)


class RequestTokenizer:
    """Tokenizes requests, and rejects what cannot be served.

    Args:
      tokenizer: for texts and stop strings.
      end_ids: tokens that end an answer.
      vocab_size, length, chunking: of model and engine.
      patches: of a model with pictures, None of a text-only one.
      adapters: names of adapters, from number 1 on.
      recurrent: whether the model has layers whose state has no branches.
      has_beams: whether all that its layers hold is held for beams, too.
    """

    def __init__(
        self,
        tokenizer: requests.Tokenizer | None,
        end_ids: frozenset[int],
        vocab_size: int,
        length: int,
        chunking: Chunking,
        patches: PatchIds | None,
        adapters: Sequence[str] = (),
        *,
        recurrent: bool = False,
        has_beams: bool = True,
    ):
        self._recurrent, self._has_beams = recurrent, has_beams
        self._adapters = {"": 0} | {name: n for n, name in enumerate(adapters, start=1)}
        self._tokenizer, self._end_ids, self._patches = tokenizer, end_ids, patches
        self._vocab_size, self._length, self._chunking = vocab_size, length, chunking
        self._grammars = Grammars(tokenizer, end_ids)

    def tokenize(
        self, request: requests.Request | requests.Scoring
    ) -> TokenizedRequest | TokenizedScoring:
        """The request in tokens.

        Raises:
          TooLong: prompt and new tokens exceed the engine's length.
        """
        adapter = self._adapters.get(request.adapter)
        if adapter is None:
            names = ", ".join(filter(None, self._adapters)) or "none"
            raise UserError(
                f"request {request.id!r}: adapter is {request.adapter!r}, and the engine has "
                f"{names}; name one of its own, or leave it out."
            )
        if isinstance(request, requests.Scoring):
            return self._scoring(request, adapter)
        if request.beams and not self._has_beams:
            raise UserError(
                f"request {request.id!r}: beams is {request.beams}: states of the gated delta "
                "rule, and keys that layers share, are not held for beams; set it to 0."
            )
        prompt = self._tokens(request.id, "prompt", request.prompt)
        prompt, pictures, shifts = self._expand(request, prompt)
        if len(prompt) + request.max_new_tokens > self._length:
            raise requests.TooLong(request.id, len(prompt), request.max_new_tokens, self._length)
        if request.stop and self._tokenizer is None:
            raise UserError(
                f"request {request.id!r}: stop strings need a tokenizer; give the engine one."
            )
        sizes = self._tokenizer, self._end_ids, self._chunking
        rest = shifts, adapter, self._shaped(request, prompt)
        return TokenizedRequest(request, prompt, pictures, *sizes, *rest)

    def _shaped(
        self, request: requests.Request, prompt: Sequence[int]
    ) -> Callable[[], ShapedAnswer | None]:
        """Makes the shapes of the draws of a request, which is checked here."""
        if not request.is_shaped:
            return lambda: None
        for token, _ in request.logit_bias:
            if token >= self._vocab_size:
                raise UserError(
                    f"request {request.id!r}: logit_bias has the token {token}, expected 0 to "
                    f"{self._vocab_size - 1}; use the model's own ids."
                )
        matcher = self._grammars.matcher(request.grammar) if request.grammar else None
        return lambda: ShapedAnswer(
            request, prompt, self._vocab_size, matcher and matcher.deep_copy()
        )

    def _scoring(self, request: requests.Scoring, adapter: int) -> TokenizedScoring:
        if isinstance(request.prompt, str):
            prompt, continuations = self._encode_pairs(request)
        else:
            prompt = self._tokens(request.id, "prompt", request.prompt)
            continuations = [
                self._tokens(request.id, "continuation", tokens) for tokens in request.continuations
            ]
        prompt, pictures, shifts = self._expand(request, prompt)
        longest = max(map(len, continuations))
        if len(prompt) + longest > self._length:
            raise requests.TooLong(request.id, len(prompt), longest, self._length)
        sizes = self._chunking, self._length
        rest = shifts, adapter, self._recurrent
        return TokenizedScoring(request, prompt, continuations, pictures, *sizes, *rest)

    def _expand(
        self, request: requests.Request | requests.Scoring, prompt: list[int]
    ) -> tuple[list[int], Pictures, np.ndarray | None]:
        """The prompt with its pictures' tokens, the pictures, and the shifts of positions."""
        if self._patches is not None:
            expanded, pictures = self._patches.expand(request.id, prompt, request.images)
            return expanded, pictures, self._patches.shifts(prompt, request.images)
        if len(request.images):
            raise UserError(
                f"request {request.id!r}: it has pictures, but the engine's model is a text-only "
                f"LLaMA; use a model that sees ({nouns('sees')})."
            )
        return prompt, {}, None

    def _encode_pairs(self, request: requests.Scoring) -> tuple[list[int], list[list[int]]]:
        """Tokens of prompt and continuations, split as lm-evaluation-harness does.

        (TemplateLM._encode_pair.) Trailing spaces of the prompt belong to the continuations;
        prompt and continuation are encoded together and split at the prompt's number of tokens.
        """
        text = request.prompt.rstrip()
        spaces = request.prompt[len(text) :]
        prompt = self._tokens(request.id, "prompt", text)
        continuations = []
        for continuation in request.continuations:
            whole = self._tokens(request.id, "continuation", text + spaces + continuation)
            continuations.append(whole[len(prompt) :])
            if not continuations[-1]:
                raise UserError(
                    f"request {request.id!r}: continuation {continuation!r} adds no token to its "
                    "prompt; expected some text."
                )
        return prompt, continuations

    def _tokens(self, request_id: object, what: str, text: str | Sequence[int]) -> list[int]:
        if isinstance(text, str):
            if self._tokenizer is None:
                raise UserError(
                    f"request {request_id!r}: its {what} is text, but the engine has no "
                    "tokenizer; give it one, or pass token ids."
                )
            text = self._tokenizer.encode(text)
        tokens = [int(token) for token in text]
        if not tokens:
            raise UserError(
                f"request {request_id!r}: its {what} is empty; give at least one token."
            )
        placeholder = None if self._patches is None else self._patches.token
        for token in tokens:
            if 0 <= token < self._vocab_size or token == placeholder:
                continue
            raise UserError(
                f"request {request_id!r}: its {what} has token {token}, expected 0 to "
                f"{self._vocab_size - 1}; use the model's own tokenizer."
            )
        return tokens
