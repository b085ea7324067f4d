"""What a reasoning model writes between thinking tags, apart from its answer."""

from __future__ import annotations

_OPEN, _CLOSE = "<think>", "</think>"


def answer_of(text: str) -> str:
    """The text without the thoughts that it begins with, stripped.

    Some chat templates open the tag in the prompt (Qwen3's, DeepSeek-R1's): a text then begins
    within it. Of thoughts that do not end, as where tokens ran out, there is no answer. Tags behind
    the beginning are the answer's own.
    """
    thoughts, closed, rest = text.partition(_CLOSE)
    if closed and (_OPEN not in thoughts or thoughts.lstrip().startswith(_OPEN)):
        return rest.strip()
    return "" if text.lstrip().startswith(_OPEN) else text.strip()
