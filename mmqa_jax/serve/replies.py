"""Replies in the form of OpenAI's API."""

from __future__ import annotations

import base64
import codecs
import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.decoding.requests import Candidate
from mmqa_jax.prompting.backends.answer_forms import Call, CallReader
from mmqa_jax.prompting.backends.thinking import Thinking, ThoughtStream
from mmqa_jax.prompting.text_tokenizer import ChatTemplate, TextTokenizer

_FINISH = {"end": "stop", "stop": "stop", "length": "length"}


class Token(NamedTuple):
    """A token in an answer's log-probabilities, None for the first of an echoed prompt, and the
    likeliest (id, log-probability) in its place, if any are asked for."""

    id: int
    logprob: float | None
    likeliest: Sequence[tuple[int, float]]


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


def finish_of(finish: str, *, has_calls: bool = False) -> str:
    """OpenAI's word for how an answer ended."""
    return "tool_calls" if has_calls and finish != "length" else _FINISH[finish]


def tool_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """An answer's calls of functions."""
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def tokens_of(candidate: Candidate, *, top: int) -> list[Token]:
    """An answer's tokens; of a greedy one without likeliest tokens each is the likeliest itself."""
    pairs = list(zip(candidate.tokens, candidate.logprobs or (), strict=True))
    likeliest = candidate.likeliest or [[pair] for pair in pairs]
    return [Token(*pair, best[:top]) for pair, best in zip(pairs, likeliest, strict=True)]


def completion_logprobs(
    tokens: Sequence[Token], tokenizer: TextTokenizer, *, top: int, start: int = 0
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
        if token.logprob is None or not token.likeliest:
            best.append(None)
        else:
            likeliest = {tokenizer.decode([other]): logprob for other, logprob in token.likeliest}
            best.append({**likeliest, text: token.logprob})
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
            "top_logprobs": [entry(*likely) for likely in token.likeliest],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def embedding(vector: np.ndarray, index: int, *, as_base64: bool) -> dict[str, Any]:
    """One vector of a list."""
    plain = np.asarray(vector, "<f4")
    value = base64.b64encode(plain.tobytes()).decode() if as_base64 else plain.tolist()
    return {"object": "embedding", "index": index, "embedding": value}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of an assistant's message, or all of it.

    Attributes:
      calls: those that are whole, of which `earlier` were in the pieces before.
      finish: OpenAI's word for how the message ended; None: it goes on.
    """

    thoughts: str
    text: str
    calls: Sequence[Call] = ()
    earlier: int = 0
    finish: str | None = None

    def delta(self) -> dict[str, Any]:
        """What a stream says of it."""
        delta: dict[str, Any] = {}
        if self.thoughts:
            delta["reasoning_content"] = self.thoughts
        if self.text:
            delta["content"] = self.text
        if self.calls:
            numbered = enumerate(tool_calls(self.calls), start=self.earlier)
            delta["tool_calls"] = [{"index": number, **call} for number, call in numbered]
        return delta


class MessageReader:
    """Takes thoughts and calls out of an answer's text, piece by piece.

    Args:
      template: of the model that writes it, if it has one.
      calls: whether functions may be called.
      thinks: whether thoughts are in the text.
      thinking: what the template was told of them; None: what it was opened with.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        *,
        calls: bool,
        thinks: bool = True,
        thinking: Thinking | None = None,
    ):
        marks = {} if template is None else template.thought_marks(thinking)
        self._thoughts = ThoughtStream(**marks) if thinks else None
        self._calls, self._count = CallReader() if calls else None, 0

    def push(self, text: str, finish: str = "") -> Piece:
        """The piece that is final once text is added, the last if `finish` says how it ended."""
        thoughts, calls, earlier = "", list[Call](), self._count
        if self._thoughts is not None:
            thoughts, text = self._thoughts.push(text, is_last=bool(finish))
        if self._calls is not None:
            text, calls = self._calls.push(text, is_last=bool(finish))
            self._count += len(calls)
        ending = finish_of(finish, has_calls=self._count > 0) if finish else None
        return Piece(thoughts, text, calls, earlier, ending)


def chat_choice(
    index: int, whole: Piece, logprobs: dict[str, Any] | None, refusal: str | None = None
) -> dict[str, Any]:
    """A message as vLLM's reasoning parsers write it: thoughts apart, no content without answer."""
    message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": refusal}
    if not whole.text and (whole.thoughts or whole.calls or refusal):
        message["content"] = None
    if whole.thoughts:
        message["reasoning_content"] = whole.thoughts
    if whole.calls:
        message["tool_calls"] = tool_calls(whole.calls)
    ends = {"logprobs": logprobs, "finish_reason": whole.finish}
    return {"index": index, "message": message, **ends}


def choice_piece(
    index: int,
    delta: dict[str, Any],
    finish: str | None = None,
    *,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A piece of a choice of a chat."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def text_choice(
    index: int, text: str, finish: str | None = None, *, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A choice of a completion, or a piece of one."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
