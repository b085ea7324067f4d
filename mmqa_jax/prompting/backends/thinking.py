"""Whether a model thinks before it answers, and its thoughts apart from the answer.

Models mark thoughts by tags in their text, or by channels (gpt-oss: OpenAI's harmony format);
servers with a parser for that give them in a field of their own (`openai_replies`). A template or a
server that knows no switch is left as it is.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from mmqa_jax.core.errors import UserError, decimal_number
from mmqa_jax.decoding.requests import Candidate, Result

ROOM = 2048  # tokens of thoughts, where no number is named
EFFORTS = {"low": 1024, "medium": 2048, "high": 8192}  # of templates that know them, and their room
_TAGS = re.compile(r"\s*<(think|thinking)>")
_CLOSED = re.compile(r"</(think|thinking)>")
# Switches of chat templates: Qwen3's, SmolLM3's and others'; Granite's and DeepSeek-V3.1's.
_SWITCHES = (("enable_thinking", "enable_thinking"), ("thinking", "if thinking"))
_EFFORT = "reasoning_effort"
# gpt-oss's messages have a header with a channel: analysis, commentary or final. Without special
# tokens they run together.
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(\w++)[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>"
)
_MESSAGE_END = re.compile(r"<\|(?:end|return|call)\|>")
_RUN_TOGETHER = re.compile(r"\s*analysis(.*?)assistantfinal(.*)", re.DOTALL)
_FINAL = "<|channel|>final<|message|>"


@dataclasses.dataclass(frozen=True)
class Thinking:
    """How a model is asked to think.

    Attributes:
      on: whether it is; None: as it does by itself.
      room: tokens of thoughts beside those of the answer (`max_new_tokens`).
      effort: of `EFFORTS`, which some templates and servers know; "": none is named.
    """

    on: bool | None = None
    room: int = 0
    effort: str = ""

    def switches(self, template: str) -> dict[str, bool | str]:
        """What a chat template is told, of the switches that its source names."""
        if self.on is None:
            return {}
        switches: dict[str, bool | str] = {
            name: self.on for name, text in _SWITCHES if text in template
        }
        effort = self.effort if self.on else "low"
        return switches | ({_EFFORT: effort} if effort and _EFFORT in template else {})

    def begun(self, template: str) -> str:
        """What an answer without thoughts begins with, where a template has no switch for that:
        gpt-oss's then begins in the channel of answers."""
        harmony = _EFFORT in template and "<|channel|>" in template
        return _FINAL if self.on is False and harmony else ""


def read_thinking(text: str, where: str) -> Thinking:
    """Reads `auto`, `off`, `on` or a number of tokens; `where`: the flag or key, for a message."""
    if text in ("auto", "off"):
        return Thinking(None if text == "auto" else False)
    if text in EFFORTS:
        return Thinking(True, EFFORTS[text], text)
    room = (
        ROOM
        if text == "on"
        else (decimal_number(text) or 0)
        if text.isascii() and text.isdecimal()
        else 0
    )
    if not 0 < room < 2**20:
        raise UserError(
            f"{where}={text[:40]}: expected auto, off, on, {', '.join(EFFORTS)} or the number of "
            "tokens that thoughts may have."
        )
    return Thinking(True, room)


def split_thoughts(text: str) -> tuple[str, str]:
    """The thoughts that a text begins with, and the answer behind them, both stripped.

    Some chat templates open the tag in the prompt (Qwen3's, DeepSeek-R1's): a text then begins
    within it. Of thoughts that do not end, as where tokens ran out, there is no answer. Tags behind
    the beginning are the answer's own. Of gpt-oss's channels `final` is the answer.
    """
    if _HEADER.match(text.lstrip()):
        return _by_channel(text)
    if together := _RUN_TOGETHER.fullmatch(text):
        return together[1].strip(), together[2].strip()
    opened, closed = _TAGS.match(text), _CLOSED.search(text)
    start = opened.end() if opened else 0
    if closed and (opened or not re.search("<(think|thinking)>", text[: closed.start()])):
        return text[start : closed.start()].strip(), text[closed.end() :].strip()
    return (text[start:].strip(), "") if opened else ("", text.strip())


class ThoughtStream:
    """Splits a text that comes in pieces into thoughts and an answer, as `split_thoughts` splits a
    whole one; a text without thoughts stays as it is.

    Args:
      opened: whether the chat template opens a tag in front of the text.
      channels: whether the text is a gpt-oss's.
    """

    def __init__(self, *, opened: bool = False, channels: bool = False):
        self._opened, self._channels = opened, channels
        self._text, self._given = "", ("", "")

    def push(self, piece: str, *, is_last: bool) -> tuple[str, str]:
        """Returns what a piece adds to the thoughts, and what it adds to the answer."""
        self._text += piece
        now = self._split(is_last)
        added = [new[len(old) :] for new, old in zip(now, self._given, strict=True)]
        self._given = now
        return added[0], added[1]

    def _split(self, is_last: bool) -> tuple[str, str]:
        start = self._text.lstrip()
        openers = (*_OPENERS, *([_TOGETHER[0]] if self._channels else []))
        tags = self._opened or _TAGS.match(start)
        runs_together = self._channels and start.startswith(_TOGETHER[0])
        header = _HEADER.match(start)
        if not (is_last or tags or runs_together or header):
            may_begin = any(opener.startswith(start) for opener in openers)
            if may_begin or start.startswith(("<|channel|>", "<|start|>assistant")):
                return self._given
        if not (tags or runs_together or header):
            return "", self._text
        if not is_last:
            start = start[: len(start) - _held_back(start)]
        if runs_together and _TOGETHER[1] not in start:
            return start.removeprefix(_TOGETHER[0]).strip(), ""
        if self._opened and not _TAGS.match(start):
            start = f"<think>{start}"
        return split_thoughts(start)


_OPENERS = ("<think>", "<thinking>", "<|channel|>", "<|start|>assistant")
_TOGETHER = ("analysis", "assistantfinal")
_CLOSERS = ("</think>", "</thinking>", "<|end|>", "<|return|>", "<|call|>", _TOGETHER[1])


def _held_back(text: str) -> int:
    """How many of a text's last characters may begin a mark."""
    most = max(map(len, _CLOSERS))
    ends = (n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in _CLOSERS))
    return next((n for n in ends if n <= len(text)), 0)


def _by_channel(text: str) -> tuple[str, str]:
    headers = [*_HEADER.finditer(text)]
    ends = [*(header.start() for header in headers[1:]), len(text)]
    thoughts, answer = [], []
    for header, end in zip(headers, ends, strict=True):
        message = _MESSAGE_END.split(text[header.end() : end])[0].strip()
        (answer if header[1] == "final" else thoughts).append(message)
    return "\n".join(thoughts), "\n".join(answer)


def thoughts_apart(result: Result) -> Result:
    """The result whose candidates' texts are answers alone: thoughts in them are `thinking`."""

    def apart(candidate: Candidate) -> Candidate:
        text = candidate.text or ""
        thoughts, answer = split_thoughts(text)
        if answer == text.strip():  # which stays as it is
            return candidate
        return dataclasses.replace(candidate, text=answer, thinking=thoughts)

    return dataclasses.replace(result, candidates=tuple(map(apart, result.candidates)))


def with_thinking_tokens(result: Result, decode: Callable[[Sequence[int]], str]) -> Result:
    """The result whose candidates say how many of their tokens stand before the answer.

    decode: gives the text of tokens, of which a beginning has the beginning of the text.
    """

    def counted(candidate: Candidate) -> Candidate:
        text, tokens = candidate.text or "", candidate.tokens
        thoughts, answer = split_thoughts(text)
        if not thoughts:
            return candidate
        count = len(tokens)
        if answer:
            begins = text.rfind(answer)
            counts = range(len(tokens) + 1)
            count = bisect.bisect_right(counts, begins, key=lambda n: len(decode(tokens[:n]))) - 1
        return dataclasses.replace(candidate, thinking_tokens=count)

    return dataclasses.replace(result, candidates=tuple(map(counted, result.candidates)))


def read_answer(candidate: Candidate, trace: dict[str, Any]) -> str:
    """The answer's text; the trace gets its thoughts, their tokens where they are known, and `cut`
    where its tokens ran out."""
    thoughts, answer = _parts(candidate)
    if thoughts:
        trace["thinking"] = [thoughts]
    if candidate.thinking_tokens:
        trace["thinking_tokens"] = candidate.thinking_tokens
    if candidate.finish == "length":
        trace["cut"] = True
    return answer


def _parts(candidate: Candidate) -> tuple[str, str]:
    """Thoughts and answer, which a server or `thoughts_apart` may have taken apart."""
    text = candidate.text or ""
    return (candidate.thinking, text.strip()) if candidate.thinking else split_thoughts(text)


def thoughts_of(candidate: Candidate) -> str:
    """A candidate's thoughts, whether a server or its text says them; "": none."""
    return _parts(candidate)[0]


def why_empty(candidate: Candidate) -> str:
    """The sentence to a user about a candidate without an answer, or with half of one; "": it has a
    whole one."""
    answer = _parts(candidate)[1]
    if candidate.finish == "length":
        if answer:
            return "the answer was cut where its tokens ran out; raise max_new_tokens"
        if thoughts_of(candidate):
            return (
                "all of its tokens went into thoughts; give them more room by --thinking=TOKENS, "
                "or turn them off by --thinking=off (of a row: parts.llm.thinking)"
            )
        return (
            "its tokens ran out before the answer began, as those of a model do whose thoughts are "
            "hidden; give them room by --thinking=TOKENS (of a row: parts.llm.thinking)"
        )
    return "" if answer else "the model wrote nothing; ask it otherwise, or use another model"
