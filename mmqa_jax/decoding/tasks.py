"""Requests being served: a job is a request, a task one sequence of it that takes a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.pictures import PictureReader
from mmqa_jax.decoding.prefix import Buckets, Piece, split
from mmqa_jax.decoding.requests import (
    Candidate,
    Request,
    Result,
    Score,
    Scores,
    Scoring,
    Tokenizer,
    TooLong,
)
from mmqa_jax.decoding.stops import StopWatch, cut


class Task:
    """One sequence in a slot, from its prompt's first piece on."""

    def __init__(self, pieces: list[Piece]):
        self.pieces = pieces
        self.done = 0  # pieces in the cache
        self.slot = self.source = -1  # see prefix.Place
        self.pictures: Mapping[int, np.ndarray] = {}  # see PictureReader
        self.reused = 0

    @property
    def reusable(self) -> int:
        """How many pieces may come from another slot."""
        raise NotImplementedError


class GenerationTask(Task):
    """A prompt and the tokens drawn after it."""

    def __init__(self, job: GenerationJob, draw: int, pieces: list[Piece]):
        super().__init__(pieces)
        self.job, self.draw = job, draw
        self.lacks = job.request.max_new_tokens - 1  # tokens to be decoded after the first
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish = ""  # "end", "stop" or "length"
        stops = job.request.stop
        self._watch = StopWatch(job.tokenizer, stops) if stops else None

    @property
    def reusable(self) -> int:
        """All pieces but the last, whose hidden state gives the first new token."""
        return len(self.pieces) - 1

    def take(self, token: int, logprob: float) -> bool:
        """The next token; true if it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.job.end_ids:
            self.finish = "end"
        elif self._watch is not None and self._watch.push(token):
            self.finish = "stop"
        elif len(self.tokens) == self.job.request.max_new_tokens:
            self.finish = "length"
        return bool(self.finish)

    def candidate(self) -> Candidate:
        """What was generated."""
        request = self.job.request
        return make_candidate(
            self.job,
            self.tokens,
            float(np.sum(self.logprobs)),
            tuple(self.logprobs) if request.logprobs else None,
            self.finish,
        )


class GenerationJob:
    """A Request with its prompt in tokens."""

    def __init__(
        self,
        request: Request,
        prompt: Sequence[int],
        tokenizer: Tokenizer | None,
        end_ids: frozenset[int],
        buckets: Buckets,
    ):
        self.request, self.prompt = request, tuple(prompt)
        self.tokenizer, self.end_ids = tokenizer, end_ids
        pieces = split(prompt, buckets)
        draws = 0 if request.beams else request.n  # beams take no slots, see BeamBatches
        self.tasks = [GenerationTask(self, draw, pieces) for draw in range(draws)]

    def result(self) -> Result | None:
        """The result once all tasks are finished."""
        if not all(task.finish for task in self.tasks):
            return None
        candidates = sorted((task.candidate() for task in self.tasks), key=lambda c: -c.total)
        reused = min(task.pieces[task.reused - 1].end if task.reused else 0 for task in self.tasks)
        return Result(self.request.id, tuple(candidates), len(self.prompt), reused)


class ScoringTask(Task):
    """A prompt with one continuation, whose tokens' log-probabilities are read."""

    def __init__(self, job: ScoringJob, number: int, tokens: tuple[int, ...], buckets: Buckets):
        # The prompt's own pieces end where the last ones, which every choice has anew, begin: at
        # or before its last token, whose hidden state gives the continuation's first.
        shared = (job.prompt - 1) // buckets[0] * buckets[0]
        head = split(tokens[:shared], buckets)
        # The last token is only read off, never encoded.
        super().__init__(head + split(tokens[:-1], buckets, shared))
        self.job, self.number, self.sequence = job, number, tokens
        self._head = len(head)
        self.logprobs: list[float] = []
        self.greedy = True

    @property
    def reusable(self) -> int:
        """The prompt's pieces."""
        return self._head

    def targets(self, piece: Piece, bucket: int) -> np.ndarray:
        """The token after each of the piece, int32 [bucket]; 0 behind its end."""
        row = np.zeros(bucket, np.int32)
        row[: len(piece.tokens)] = self.sequence[piece.start + 1 : piece.end + 1]
        return np.maximum(row, 0)  # patches are in the prompt, whose scores are not read

    def wants(self, piece: Piece) -> bool:
        """Whether a token of the continuation follows one of the piece."""
        return piece.end >= self.job.prompt

    def take(self, piece: Piece, logprobs: np.ndarray, likeliest: np.ndarray) -> None:
        """Reads a piece's row of `SlotRunner.score`."""
        asked = slice(max(self.job.prompt - 1 - piece.start, 0), len(piece.tokens))
        self.logprobs += logprobs[asked].tolist()
        self.greedy &= bool(likeliest[asked].all())

    @property
    def finished(self) -> bool:
        """Whether all of the continuation is scored."""
        return len(self.logprobs) == len(self.sequence) - self.job.prompt


class ScoringJob:
    """A Scoring in tokens: (prompt, continuation) pairs that share the prompt."""

    def __init__(
        self,
        request: Scoring,
        prompt: Sequence[int],
        continuations: Sequence[Sequence[int]],
        buckets: Buckets,
    ):
        self.request, self.prompt = request, len(prompt)
        self.tasks = [
            ScoringTask(self, number, (*prompt, *continuation), buckets)
            for number, continuation in enumerate(continuations)
        ]

    def result(self) -> Scores | None:
        """The scores once all tasks are finished."""
        if not all(task.finished for task in self.tasks):
            return None
        return Scores(
            self.request.id,
            tuple(
                Score(float(np.sum(task.logprobs)), tuple(task.logprobs), task.greedy)
                for task in self.tasks
            ),
        )


def make_candidate(
    job: GenerationJob,
    tokens: Sequence[int],
    total: float,
    logprobs: tuple[float, ...] | None,
    finish: str,
) -> Candidate:
    """A Candidate with its text, which has neither end token nor stop string."""
    text = None
    if job.tokenizer is not None:
        shown = tokens[:-1] if finish == "end" else tokens
        text = cut(job.tokenizer.decode(list(shown)), job.request.stop)
    return Candidate(text, tuple(tokens), total, logprobs, finish)


class Intake:
    """Turns requests into jobs, and refuses what cannot be served.

    Args:
      tokenizer: for texts and stop strings.
      end_ids: tokens that end an answer.
      vocab_size, length, buckets: of model and engine.
      pictures: of a LLaVA, None of a LLaMA.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        end_ids: frozenset[int],
        vocab_size: int,
        length: int,
        buckets: Buckets,
        pictures: PictureReader | None,
    ):
        self._tokenizer, self._end_ids, self._pictures = tokenizer, end_ids, pictures
        self._vocab_size, self._length, self._buckets = vocab_size, length, buckets

    def job(self, request: Request | Scoring) -> GenerationJob | ScoringJob:
        """The request in tokens.

        Raises:
          TooLong: prompt and new tokens exceed the engine's length.
          UserError: an empty prompt, an unknown token, text without a tokenizer, or pictures that
            do not fit.
        """
        if isinstance(request, Scoring):
            return self._scoring(request)
        prompt = self._tokens(request.id, "prompt", request.prompt)
        prompt, pictures = self._expand(request, prompt)
        if len(prompt) + request.max_new_tokens > self._length:
            raise TooLong(request.id, len(prompt), request.max_new_tokens, self._length)
        if request.stop and self._tokenizer is None:
            raise UserError(
                f"request {request.id!r}: stop strings need a tokenizer; give the engine one."
            )
        job = GenerationJob(request, prompt, self._tokenizer, self._end_ids, self._buckets)
        for task in job.tasks:
            task.pictures = pictures
        return job

    def _scoring(self, request: Scoring) -> ScoringJob:
        if isinstance(request.prompt, str):
            prompt, continuations = self._encode_pairs(request)
        else:
            prompt = self._tokens(request.id, "prompt", request.prompt)
            continuations = [
                self._tokens(request.id, "continuation", tokens) for tokens in request.continuations
            ]
        prompt, pictures = self._expand(request, prompt)
        longest = max(map(len, continuations))
        if len(prompt) + longest > self._length:
            raise TooLong(request.id, len(prompt), longest, self._length)
        job = ScoringJob(request, prompt, continuations, self._buckets)
        for task in job.tasks:
            task.pictures = pictures
        return job

    def _expand(
        self, request: Request | Scoring, prompt: list[int]
    ) -> tuple[list[int], Mapping[int, np.ndarray]]:
        if self._pictures is not None:
            return self._pictures.expand(request.id, prompt, request.images)
        if len(request.images):
            raise UserError(
                f"request {request.id!r}: it has pictures, the engine's model is a LLaMA without "
                "eyes; use a LLaVA."
            )
        return prompt, {}

    def _encode_pairs(self, request: Scoring) -> tuple[list[int], list[list[int]]]:
        """Tokens of prompt and continuations as lm-evaluation-harness cuts them.

        (TemplateLM._encode_pair.) Blanks at the prompt's end belong to the continuations; prompt
        and continuation are encoded together and cut at the prompt's own number of tokens.
        """
        text = request.prompt.rstrip()
        blanks = request.prompt[len(text) :]
        prompt = self._tokens(request.id, "prompt", text)
        continuations = []
        for continuation in request.continuations:
            whole = self._tokens(request.id, "continuation", text + blanks + continuation)
            continuations.append(whole[len(prompt) :])
            if not continuations[-1]:
                raise UserError(
                    f"request {request.id!r}: continuation {continuation!r} adds no token to its "
                    "prompt; expected some text."
                )
        return prompt, continuations

    def _tokens(self, request_id: object, what: str, given: str | Sequence[int]) -> list[int]:
        if isinstance(given, str):
            if self._tokenizer is None:
                raise UserError(
                    f"request {request_id!r}: its {what} is text, for which the engine has no "
                    "tokenizer; give it one, or token ids."
                )
            given = self._tokenizer.encode(given)
        tokens = [int(token) for token in given]
        if not tokens:
            raise UserError(
                f"request {request_id!r}: its {what} is empty; give at least one token."
            )
        placeholder = None if self._pictures is None else self._pictures.token
        for odd in tokens:
            if 0 <= odd < self._vocab_size or odd == placeholder:
                continue
            raise UserError(
                f"request {request_id!r}: its {what} has token {odd}, expected 0 to "
                f"{self._vocab_size - 1}; use the model's own tokenizer."
            )
        return tokens
