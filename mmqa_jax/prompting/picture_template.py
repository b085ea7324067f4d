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
from mmqa_jax.prompting.text_tokenizer import ChatTemplate, Fields

_WORD = "flag"  # any that a template does not write itself


class PictureTemplate:
    """A ChatFormat (see text_tokenizer) of a model's own template, with `<image>` for a picture."""

    before_answer = ""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._takes_parts = _takes_parts(template)

    def render(self, request_id: Hashable, messages: Sequence[Message]) -> str:
        """The prompt; see ChatFormat."""
        fields = self._template.in_parts if self._takes_parts else self._in_words
        return self._template.written(request_id, map(fields, messages))

    def _in_words(self, message: Message) -> Fields:
        count = len(message.pictures)
        if not count:
            return self._template.fields(message)
        content = question(message.text, count, self._template.shield)
        return {"role": message.role, "content": content}


def _takes_parts(template: ChatTemplate) -> bool:
    """Whether a template shows both parts of a message, the picture and the words."""
    parts = [{"type": "image"}, {"type": "text", "text": _WORD}]
    try:
        text = template.written("a trial", [{"role": "user", "content": parts}])
    except UserError:
        return False
    return text.count(PLACEHOLDER) == 1 and _WORD in text
