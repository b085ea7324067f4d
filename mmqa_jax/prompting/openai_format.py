"""Parsing answers of OpenAI's API defensively: servers differ, and proxies answer in HTML.

Log-probabilities come in two forms: `content` (chat; in llama.cpp also completions), a list of
tokens with theirs; and the older one of completions, parallel lists.
"""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mmqa_jax.decoding.requests import Candidate, Score
from mmqa_jax.decoding.stop_strings import truncate
from mmqa_jax.prompting.answer_tokens import token_bytes, tokens_of_text


class Malformed(Exception):
    """An answer that does not follow the API; a retry may return one that does."""


class NoLogprobs(Malformed):
    """An answer lacks the log-probabilities that were requested."""


class NoEcho(Exception):
    """The server gives no log-probabilities of a prompt."""


class Tokens(NamedTuple):
    """An answer's token counts and system fingerprint."""

    prompt: int
    completion: int
    system: str | None


class Echo(NamedTuple):
    """Log-probabilities of a prompt's own tokens (the first has none) and of new ones."""

    logprobs: Sequence[float | None]
    best: Sequence[float]  # of the likeliest token at each position; -inf where there is none


def read_usage(answer: Any) -> Tokens:
    """Token counts of an answer, 0 where it has none."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    counts = [
        value if isinstance(value, int) else 0
        for value in ((usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens"))
    ]
    system = answer.get("system_fingerprint") if isinstance(answer, dict) else None
    return Tokens(*counts, system if isinstance(system, str) else None)


def read_candidates(answer: Any, logprobs: bool, stops: Sequence[str] = ()) -> list[Candidate]:
    """The candidates of a completion or chat.

    Their totals are of the text alone, also where a server reports an end token or a stop string's
    tokens. One that names no tokens with its log-probabilities is taken to report the text's.

    Args:
      answer: the JSON of a server.
      logprobs: whether they were requested.
      stops: the stop strings that were.

    Raises:
      Malformed: no candidates, or one without text.
      NoLogprobs: one without requested log-probabilities.
    """
    candidates = []
    for choice in _choices(answer):
        text = choice.get("text")
        if "message" in choice and isinstance(choice["message"], dict):
            text = choice["message"].get("content")
            if text is None:
                text = choice["message"].get("refusal")
        if not isinstance(text, str):
            raise Malformed("a choice has no text")
        text = truncate(text, stops)
        # "stop" is an end token or a stop string: the API does not say which.
        finish = str(choice.get("finish_reason") or "stop")
        found, total = None, math.nan
        if logprobs:
            found, tokens = _of_new_tokens(choice.get("logprobs"))
            count = tokens_of_text(tokens, text, stops, finish) if tokens else len(found)
            total = math.fsum(found[:count])
        candidates.append(Candidate(text, (), total, found, finish))
    return candidates


def read_echo(answer: Any) -> Echo:
    """Log-probabilities of a prompt that was echoed.

    Raises:
      NoEcho: there are none of the prompt.
      Malformed: no form of the API's.
    """
    found = _choices(answer)[0].get("logprobs")
    if not isinstance(found, dict) or not isinstance(found.get("token_logprobs"), list):
        raise NoEcho("its answer has none")
    logprobs, top = found["token_logprobs"], found.get("top_logprobs")
    if not isinstance(top, list) or len(top) != len(logprobs):
        raise NoEcho("its answer has no top_logprobs")
    best = [max((row or {}).values(), default=-math.inf) for row in top]
    return Echo(logprobs, best)


def cut_echo(echo: Echo, prompt: int, whole: int) -> Score | None:
    """The score of a continuation, which is tokens `prompt` to `whole`; None if there are none.

    Raises:
      NoEcho: the log-probabilities are not those of prompt and continuation.
    """
    if not prompt or not whole:
        raise NoEcho("its answers do not say how many tokens a prompt has (usage.prompt_tokens)")
    if len(echo.logprobs) < whole:
        raise NoEcho(f"{len(echo.logprobs)} tokens have some, the prompt has {whole}")
    logprobs, best = echo.logprobs[prompt:whole], echo.best[prompt:whole]
    if any(not isinstance(value, int | float) for value in logprobs):
        raise NoEcho("some of its tokens have none")
    if not logprobs:
        return None
    greedy = all(own >= other for own, other in zip(logprobs, best, strict=True))
    return Score(math.fsum(logprobs), tuple(map(float, logprobs)), greedy)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait that a server asks for (RFC 9110, 10.2.3: seconds or a date)."""
    value = headers.get("retry-after", "").strip()
    if value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _choices(answer: Any) -> list[dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Malformed("it has no choices")
    return choices


def _of_new_tokens(found: Any) -> tuple[tuple[float, ...], list[bytes]]:
    """Log-probabilities of a candidate's tokens in either form, and their texts; [] if unknown."""
    values, texts = None, None
    if isinstance(found, dict):
        values, texts = found.get("token_logprobs"), found.get("tokens")
        if isinstance(found.get("content"), list):
            content = [one for one in found["content"] if isinstance(one, dict)]
            values = [one.get("logprob") for one in content]
            texts = [_text_of(one) for one in content]
    if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
        raise NoLogprobs("it lacks the requested log-probabilities")
    tokens = [
        token_bytes(text) if isinstance(text, str) else text
        for text in (texts if isinstance(texts, list) else ())
    ]
    known = len(tokens) == len(values) and all(isinstance(token, bytes) for token in tokens)
    return tuple(map(float, values)), tokens if known else []


def _text_of(entry: Mapping[str, Any]) -> Any:
    """The text of an entry of `content`: its bytes, where a token is part of a character."""
    given = entry.get("bytes")
    if isinstance(given, list) and all(type(b) is int and 0 <= b < 256 for b in given):
        return bytes(given)
    return entry.get("token")
