"""Replies in the form of OpenAI's API."""

from __future__ import annotations

import base64
import codecs
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.decoding.requests import Candidate
from mmqa_jax.prompting.text_tokenizer import TextTokenizer

_FINISH = {"end": "stop", "stop": "stop", "length": "length"}


class Token(NamedTuple):
    """A token in an answer's log-probabilities, None for the first of an echoed prompt, and the
    likeliest (id, log-probability) in its place."""

    id: int
    logprob: float | None
    likeliest: tuple[int, float] | None


class Envelope:
    """The fields of all replies to a request: their kind, and the model as the client named it."""

    def __init__(self, kind: str, model: str):
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._kind, self._model, self._created = kind, model, int(time.time())

    def whole(
        self, choices: Sequence[Any], usage: dict[str, int] | None, **more: Any
    ) -> dict[str, Any]:
        """The reply with all choices; `usage` None: tokens are not counted."""
        return {**self._head(self._kind), "choices": list(choices), "usage": usage, **more}

    def piece(
        self, choices: Sequence[Any], usage: dict[str, int] | None = None, **more: Any
    ) -> dict[str, Any]:
        """A piece of a stream."""
        kind = self._kind if self._kind == "text_completion" else f"{self._kind}.chunk"
        piece = {**self._head(kind), "choices": list(choices), **more}
        return piece if usage is None else {**piece, "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}


def usage_of(prompt: int, completion: int, thinking: int = 0) -> dict[str, Any]:
    """Numbers of tokens; of the completion's those of thoughts, where there are some."""
    total = prompt + completion
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    of_thoughts = {"completion_tokens_details": {"reasoning_tokens": thinking}}
    return counts | (of_thoughts if thinking else {})


def finish_of(finish: str) -> str:
    """OpenAI's word for how an answer ended."""
    return _FINISH[finish]


def tokens_of(candidate: Candidate, *, top: bool) -> list[Token]:
    """An answer's tokens; at temperature 0 each is the likeliest in its place."""
    pairs = zip(candidate.tokens, candidate.logprobs or (), strict=True)
    return [Token(token, p, (token, p) if top else None) for token, p in pairs]


def completion_logprobs(
    tokens: Sequence[Token], tokenizer: TextTokenizer, *, top: bool, start: int = 0
) -> dict[str, Any]:
    """Returns the `logprobs` of a completion's choice, with `start` characters in front of the
    first token."""
    texts = [tokenizer.decode([token.id]) for token in tokens]
    # A character of several tokens ends with the last of them.
    decoder, offsets = codecs.getincrementaldecoder("utf-8")("replace"), [start]
    for token in tokens:
        offsets.append(offsets[-1] + len(decoder.decode(tokenizer.token_bytes(token.id))))
    best: list[dict[str, float] | None] = []
    for token, text in zip(tokens, texts, strict=True):
        if token.logprob is None or token.likeliest is None:
            best.append(None)
        else:
            likeliest, logprob = token.likeliest
            best.append({text: token.logprob} | {tokenizer.decode([likeliest]): logprob})
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": best if top else None,
        "text_offset": offsets[:-1],
    }


def chat_logprobs(tokens: Sequence[Token], tokenizer: TextTokenizer) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        octets = list(tokenizer.token_bytes(token))
        return {"token": tokenizer.decode([token]), "logprob": logprob, "bytes": octets}

    content = [
        {
            **entry(token.id, token.logprob),
            "top_logprobs": [] if token.likeliest is None else [entry(*token.likeliest)],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def embedding(vector: np.ndarray, index: int, *, as_base64: bool) -> dict[str, Any]:
    """One vector of a list."""
    plain = np.asarray(vector, "<f4")
    value = base64.b64encode(plain.tobytes()).decode() if as_base64 else plain.tolist()
    return {"object": "embedding", "index": index, "embedding": value}
