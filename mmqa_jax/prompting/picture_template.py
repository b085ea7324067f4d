"""Chat templates of models that see: how they take pictures is found by trying.

A processor's template takes a message as parts, and writes a placeholder for each picture. A
tokenizer's own (that of the language model that a LLaVA was made of) takes words alone; the
placeholders are then written into the words, in front, as LLaVA was trained.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mmqa_jax.core.errors import UserError
from mmqa_jax.prompting.backends import Message
from mmqa_jax.prompting.llava_prompt import PLACEHOLDER, question
from mmqa_jax.prompting.text_tokenizer import ChatTemplate, Content

_WORD = "flag"  # any that a template does not write itself


class PictureTemplate:
    """A ChatFormat (see text_tokenizer) of a model's own template, with `<image>` for a picture."""

    before_answer = ""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._takes_parts = _takes_parts(template)

    def render(self, request_id: Hashable, messages: Sequence[Message]) -> str:
        """The prompt; see ChatFormat."""
        contents = map(_parts if self._takes_parts else _words, messages)
        pairs = zip(messages, contents, strict=True)
        return self._template.written(request_id, [(one.role, content) for one, content in pairs])


def _takes_parts(template: ChatTemplate) -> bool:
    """Whether a template shows both parts of a message, the picture and the words."""
    parts: Content = [{"type": "image"}, {"type": "text", "text": _WORD}]
    try:
        text = template.written("a trial", [("user", parts)])
    except UserError:
        return False
    return text.count(PLACEHOLDER) == 1 and _WORD in text


def _parts(message: Message) -> Content:
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in message.content
    ]


def _words(message: Message) -> Content:
    count = len(message.pictures)
    return question(message.text, count) if count else message.text
