"""Conversations in the text format that a chat model was trained on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import jinja2

from mmqa_jax.core.errors import UserError
from mmqa_jax.prompting import llava_prompt
from mmqa_jax.prompting.backends import Message, Picture


class ChatFormat(Protocol):
    """Turns messages into a prompt that ends where the assistant's answer begins."""

    before_answer: str  # text between the prompt's end and the answer's first word

    def render(self, request_id: Hashable, messages: Sequence[Message]) -> str:
        """The prompt; raises UserError for messages that the format cannot express."""


class ChatTemplate:
    """A model's own Jinja template, rendered by transformers in its sandbox.

    Args:
      source: the template.
      special: spelling of special tokens by name (`bos_token`, ...), for templates that write them.
      name: for error messages.
    """

    before_answer = ""

    def __init__(
        self, source: str, special: Mapping[str, str] | None = None, *, name: str = "chat template"
    ):
        self.source, self.tokens, self._name = source, dict(special or {}), name

    def render(self, request_id: Hashable, messages: Sequence[Message]) -> str:
        """The prompt from the messages' texts; see ChatFormat."""
        # What `apply_chat_template` of a tokenizer calls; its import needs no PyTorch.
        from transformers.utils.chat_template_utils import render_jinja_template

        plain = [{"role": message.role, "content": message.text} for message in messages]
        try:
            (text,), _ = render_jinja_template(
                [plain], chat_template=self.source, add_generation_prompt=True, **self.tokens
            )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{self._name}: not a Jinja template ({error}); correct it.") from error
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(
                f"request {request_id!r}: the model's chat template rejects its messages "
                f"({error}); change their roles."
            ) from error
        return text


class VicunaV1:
    """LLaVA-1.5's conversation, see llava_prompt."""

    before_answer = " "

    def render(self, request_id: Hashable, messages: Sequence[Message]) -> str:
        """The prompt, one placeholder per picture; see ChatFormat."""
        expected = ["user", "assistant"] * len(messages)
        roles = [message.role for message in messages]
        if roles != expected[: len(roles)] or len(roles) % 2 == 0:
            raise UserError(
                f"request {request_id!r}: LLaVA's messages are {', '.join(roles) or 'none'}, "
                "expected user and assistant in turn, a user's first and last; its system sentence "
                "is fixed, so put instructions into the user's message."
            )
        texts = []
        for message in messages:
            count = len(message.pictures)
            is_user = message.role == "user"
            texts.append(llava_prompt.question(message.text, count) if is_user else message.text)
        answers: list[str | None] = [*texts[1::2], None]
        return llava_prompt.conversation(list(zip(texts[::2], answers, strict=True)))


def pictures_of(messages: Sequence[Message]) -> tuple[Picture, ...]:
    """All pictures of a conversation in order."""
    return tuple(picture for message in messages for picture in message.pictures)
