"""The child of `core.box` that renders chat templates; it imports nothing of mmqa_jax."""

from typing import Any

# What `apply_chat_template` of a tokenizer calls; its import needs no PyTorch.
from transformers.utils.chat_template_utils import render_jinja_template

_ALWAYS = 1 << 20  # characters that a prompt may have whatever its messages are
_OF_INPUT = 4  # and so many for each of template and messages


class TooLong(Exception):
    """A template writes far more than it and its messages are."""


def render(
    source: str,
    messages: list[dict[str, Any]],
    answer: bool,
    tools: list[dict[str, Any]],
    is_marked: bool,
    special: dict[str, Any],
    size: int,
) -> tuple[str, list[tuple[int, int]]]:
    """The prompt, and the assistant's characters of a template that marks them.

    `size` characters are those of template, messages and tools together.
    """
    (text,), spans = render_jinja_template(
        [messages],
        tools=tools or None,
        chat_template=source,
        return_assistant_tokens_mask=is_marked,
        add_generation_prompt=answer,
        **special,
    )
    most = _ALWAYS + _OF_INPUT * size
    if len(text) > most:
        raise TooLong(f"it makes {len(text):,} characters of {size:,}, at most {most:,} are taken")
    return text, spans[0] if is_marked else []
