"""Conversations in the text format that a chat model was trained on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmqa_jax.core.errors import UserError
from mmqa_jax.prompting import llava_prompt
from mmqa_jax.prompting.backends import Message, Picture


class ChatFormat(Protocol):
    """Turns messages into a prompt that ends where the assistant's answer begins."""

    before_answer: str  # text between the prompt's end and the answer's first word

    def render(self, request_id: Hashable, messages: Sequence[Message]) -> str:
        """The prompt; raises UserError for messages that the format cannot express."""


class ChatTemplate:
    """A model's own Jinja template, as transformers and llama.cpp render it.

    Source: transformers utils/chat_template_utils.py (`_compile_jinja_template`): sandboxed,
    blocks trimmed, with `raise_exception`, `tojson`, `strftime_now`, `bos_token`, `eos_token`.

    Args:
      source: the template.
      bos, eos: spellings of these tokens, for templates that write them.
      name: for error messages.
    """

    before_answer = ""

    def __init__(self, source: str, *, bos: str = "", eos: str = "", name: str = "chat template"):
        def refuse(message: str):
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.source, self.tokens = source, {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{name}: not a Jinja template ({error}); correct it.") from error

    def render(self, request_id: Hashable, messages: Sequence[Message]) -> str:
        """The prompt from the messages' texts; see ChatFormat."""
        plain = [{"role": message.role, "content": message.text} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=True, **self.tokens)
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(
                f"request {request_id!r}: the model's chat template rejects its messages "
                f"({error}); change their roles."
            ) from error


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


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
