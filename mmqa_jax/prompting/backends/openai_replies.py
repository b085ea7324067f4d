"""Parsing answers of OpenAI's API defensively: servers differ, and proxies answer in HTML.

Log-probabilities come in two forms: `content` (chat; in llama.cpp also completions), a list of
tokens with theirs; and the older one of completions, parallel lists.
"""

from __future__ import annotations

import email.utils
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mmqa_jax.decoding.requests import Candidate, Score, truncate

_LARGEST = 1e30  # of what a server gives as a number
_ROUNDING = 1e-2  # by which the logarithm of a probability of 1 may exceed 0
_LONGEST_NAME = 200  # characters


class Malformed(Exception):
    """An answer that does not follow the API; a retry may return one that does."""


class NoLogprobs(Malformed):
    """An answer lacks the log-probabilities that were requested."""


class WrongCount(Malformed):
    """An answer has fewer or more choices than were requested."""


class NoEcho(Exception):
    """The server gives no log-probabilities of a prompt."""


class Tokens(NamedTuple):
    """An answer's token counts, system fingerprint, the model's name, and of the completion the
    tokens of thoughts; None: the server does not say."""

    prompt: int
    completion: int
    system: str | None
    model: str | None = None
    thinking: int | None = None


class Echo(NamedTuple):
    """Log-probabilities of a prompt's own tokens (the first has none) and of new ones."""

    logprobs: Sequence[float | None]
    best: Sequence[float]  # of the likeliest token at each position; -inf where there is none


class ServerError(NamedTuple):
    """What a server says of an error, whatever its status."""

    message: str
    code: str | int | None


def read_error(answer: Any, text: str = "") -> ServerError | None:
    """Returns the error in a server's JSON, or in the reply's text where that has no message; None
    if it holds none."""
    error = answer.get("error") if isinstance(answer, dict) else None
    answer = answer if isinstance(answer, dict) else {}
    if not error and isinstance(answer.get("choices", answer.get("data")), list):
        return None
    inner = error if isinstance(error, dict) else answer
    words = (error, inner.get("message"), inner.get("detail"))
    message = next(
        (text_given for text_given in words if isinstance(text_given, str) and text_given), text
    )
    code = inner.get("code")
    if not message and not error:
        return None
    return ServerError(message or "no message", code if isinstance(code, str | int) else None)


def read_usage(answer: Any) -> Tokens:
    """Token counts of an answer, 0 where it has none."""
    answer = answer if isinstance(answer, dict) else {}
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts = [
        value if is_count(value) else 0
        for value in (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    ]
    details = usage.get("completion_tokens_details")
    thinking = details.get("reasoning_tokens") if isinstance(details, dict) else None
    names = map(_name, (answer.get("system_fingerprint"), answer.get("model")))
    return Tokens(*counts, *names, thinking if is_count(thinking) else None)


def read_candidates(
    answer: Any, logprobs: bool, n: int = 1, stops: Sequence[str] = ()
) -> list[Candidate]:
    """The candidates of a completion or chat, in the order of their `index`.

    Their totals are of the text alone, also where a server reports an end token or a stop string's
    tokens. One that names no tokens with its log-probabilities is taken to report the text's.

    Args:
      answer: the JSON of a server.
      logprobs: whether they were requested.
      n: how many were.
      stops: the stop strings that were.

    Raises:
      Malformed: no candidates, one without text, or one twice.
      WrongCount: not n of them.
      NoLogprobs: one without requested log-probabilities.
    """
    choices = _choices(answer)
    if len(choices) != n:
        raise WrongCount(f"it has {len(choices)} of the {n} choices that were requested")
    if n > 1 and all("index" in choice for choice in choices):
        if {repr(choice["index"]) for choice in choices} != set(map(repr, range(n))):
            raise Malformed("its choices are not numbered from 0 on, each once")
        choices = sorted(choices, key=lambda choice: choice["index"])
    candidates = []
    for choice in choices:
        text, thinking = _text_and_thoughts(choice)
        text = truncate(text, stops)
        # "stop" is an end token or a stop string: the API does not say which.
        finish = _name(choice.get("finish_reason")) or "stop"
        reported, total = None, math.nan
        if logprobs:
            reported, tokens = _of_new_tokens(choice.get("logprobs"))
            if text and not reported:
                raise NoLogprobs("it lacks the requested log-probabilities")
            count = tokens_of_text(tokens, text, stops, finish) if tokens else len(reported)
            total = math.fsum(reported[:count])
        candidates.append(Candidate(text, (), total, reported, finish, thinking))
    return candidates


def read_echo(answer: Any) -> Echo:
    """Reads the log-probabilities of a prompt that was echoed; NoEcho where there are none of it,
    Malformed for no form of the API's."""
    reported = _choices(answer)[0].get("logprobs")
    if not isinstance(reported, dict) or not isinstance(reported.get("token_logprobs"), list):
        raise NoEcho("its answer has none")
    logprobs, top = reported["token_logprobs"], reported.get("top_logprobs")
    if not isinstance(top, list) or len(top) != len(logprobs):
        raise NoEcho("its answer has no top_logprobs")
    rows = [row.values() if isinstance(row, dict) else () for row in top]
    if not all(is_number(value) for row in rows for value in row):
        raise Malformed("its top_logprobs are no numbers")
    return Echo(logprobs, [max(row, default=-math.inf) for row in rows])


def cut_echo(echo: Echo, prompt: int, whole: int) -> Score | None:
    """Returns the score of a continuation, which is tokens `prompt` to `whole`; None if there are
    none. It raises NoEcho where the log-probabilities are not those of prompt and continuation."""
    if not prompt or not whole:
        raise NoEcho("its answers do not say how many tokens a prompt has (usage.prompt_tokens)")
    if len(echo.logprobs) < whole:
        raise NoEcho(f"{len(echo.logprobs)} tokens have some, the prompt has {whole}")
    logprobs, best = echo.logprobs[prompt:whole], echo.best[prompt:whole]
    if not all(map(_is_logprob, logprobs)):
        raise NoEcho("some of its tokens have none, or no logarithm of a probability")
    if not logprobs:
        return None
    greedy = all(logprob >= likeliest for logprob, likeliest in zip(logprobs, best, strict=True))
    return Score(math.fsum(logprobs), tuple(map(float, logprobs)), greedy)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait that a server asks for (RFC 9110, 10.2.3: seconds or a date)."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.replace(".", "", 1).isdecimal():
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError, TypeError):
        return None


def is_count(value: Any) -> bool:
    """Whether a server's value is a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    """Whether a server's value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_LARGEST < value < _LARGEST  # false for NaN


def _is_logprob(value: Any) -> bool:
    return is_number(value) and value <= _ROUNDING


def _name(value: Any) -> str | None:
    """A short printable text of a server's, None for anything else."""
    short = isinstance(value, str) and len(value) <= _LONGEST_NAME
    return value if short and value.isprintable() and value else None


def _choices(answer: Any) -> list[dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices:
        raise Malformed("it has no choices")
    if not all(isinstance(choice, dict) for choice in choices):
        raise Malformed("a choice is no object")
    return choices


def _text_and_thoughts(choice: Mapping[str, Any]) -> tuple[str, str]:
    """A choice's text, and its thoughts where the server gives them apart.

    vLLM, SGLang, DeepSeek and llama.cpp have a field for them, whose answer is null while there is
    none; Mistral's content is a list of parts of both.
    """
    message = choice.get("message")
    if not isinstance(message, dict):
        message = {"content": choice.get("text")}
    content, thinking = message.get("content"), ""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str):
            thinking = thinking or message[name]
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        thinking = thinking or _joined([part.get("thinking") for part in parts])
        content = _joined([part.get("text") for part in parts])
        content = content if parts else None
    if content is None:
        is_cut = choice.get("finish_reason") == "length"
        content = "" if thinking or is_cut else message.get("refusal")
    if not isinstance(content, str):
        raise Malformed("a choice has no text")
    return content, thinking


def _joined(values: Sequence[Any]) -> str:
    """Texts one after the other; of lists of parts, theirs."""
    texts = []
    for value in values:
        inner = (
            [part.get("text") for part in value if isinstance(part, dict)]
            if isinstance(value, list)
            else [value]
        )
        texts += [text for text in inner if isinstance(text, str)]
    return "".join(texts)


def _of_new_tokens(logprobs: Any) -> tuple[tuple[float, ...], list[bytes]]:
    """Log-probabilities of a candidate's tokens in either form, and their texts; [] if unknown."""
    values, texts = None, None
    if isinstance(logprobs, dict):
        values, texts = logprobs.get("token_logprobs"), logprobs.get("tokens")
        if isinstance(logprobs.get("content"), list):
            content = [entry for entry in logprobs["content"] if isinstance(entry, dict)]
            values = [entry.get("logprob") for entry in content]
            texts = [_text_of(entry) for entry in content]
    if not isinstance(values, list) or None in values:
        raise NoLogprobs("it lacks the requested log-probabilities")
    if not all(map(_is_logprob, values)):
        raise Malformed("one of its log-probabilities is no logarithm of a probability")
    tokens = [
        token_bytes(text) if isinstance(text, str) else text
        for text in (texts if isinstance(texts, list) else ())
    ]
    known = len(tokens) == len(values) and all(isinstance(token, bytes) for token in tokens)
    return tuple(map(float, values)), tokens if known else []


def _text_of(entry: Mapping[str, Any]) -> Any:
    """The text of an entry of `content`: its bytes, where a token is part of a character."""
    octets = entry.get("bytes")
    if isinstance(octets, list) and all(type(b) is int and 0 <= b < 256 for b in octets):
        return bytes(octets)
    return entry.get("token")


# Which of a server's reported tokens make the text of its answer.
#
# Servers differ in what they report: some list the end token or a stop string's tokens, which the
# text lacks, and some do not. What an answer's log-probability sums must not depend on that.


_BYTES = re.compile(r"bytes:((?:\\x[0-9a-fA-F]{2})+)\Z")  # OpenAI's form of part of a character


def token_bytes(token: str) -> bytes:
    """The bytes of a reported token's text."""
    if spelled := _BYTES.match(token):
        return bytes.fromhex(spelled[1].replace("\\x", ""))
    return token.encode("utf-8", "surrogatepass")


def tokens_of_text(tokens: Sequence[bytes], text: str, stops: Sequence[str], finish: str) -> int:
    r"""How many of the reported tokens, from the first, make the text.

    A token counts if some of the text is in it: `.\n` counts where `\n` is a stop string, `\n\n`
    does not. decoding.requests.tokens_of_text is the same for the engine's tokens.

    Args:
      tokens: the text of each.
      text: of the answer, without stop string and end token.
      stops: the stop strings that were asked for.
      finish: the server's reason; "length": no end token follows the text.
    """
    joined, encoded = b"".join(tokens), text.encode("utf-8", "surrogatepass")
    if finish == "length" and not any(stop.encode() in joined for stop in stops):
        return len(tokens)
    if joined.startswith(encoded):
        return _starting_before(len(encoded), tokens)
    # Some servers strip the text, or the first token's leading space.
    bare = joined.lstrip()
    if bare.startswith(encoded.strip()):
        return _starting_before(len(joined) - len(bare) + len(encoded.strip()), tokens)
    # Tokens in another spelling than the text: only an end token can be told, as the last.
    alien = finish == "stop" and not (tokens[-1] and encoded.endswith(tokens[-1]))
    return len(tokens) - alien


def _starting_before(end: int, tokens: Sequence[bytes]) -> int:
    count = start = 0
    for token in tokens:
        if start >= end:
            break
        start += len(token)
        count += 1
    return count
