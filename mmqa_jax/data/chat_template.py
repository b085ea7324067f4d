"""The chat template that a model's folder has, and prompts that are cut from it.

A prompt's frame is what the template makes of it with marks in place of its texts. Texts are put
into the frame as plain characters: a special token that is spelled out in one is none.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from mmqa_jax.core.box import Box, Failed, OverBudget
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, read_text
from mmqa_jax.data.tokenizer_files import SETTINGS
from mmqa_jax.data.tokenizers import Tokenizer

TEMPLATE = "chat_template.jinja"
_OF_PROCESSOR = "chat_template.json"  # before transformers 5
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKS = ("\ue000", "\ue001")  # private characters, in place of a prompt's texts


def template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The Jinja source of a folder's chat template; None: it has none.

    `settings`: its tokenizer_config.json.
    """
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE)
    source = settings.get("chat_template")
    try:
        if isinstance(source, list):  # several by name
            source = {template["name"]: template["template"] for template in source}.get("default")
    except (KeyError, TypeError):
        source = ()
    if not isinstance(source, str | None):
        raise UserError(
            f"{folder / SETTINGS}, chat_template: a text was expected, or a list of "
            '{"name": ..., "template": ...}; fetch the file again.'
        )
    if source is None and (folder / _OF_PROCESSOR).is_file():
        content = read_json(folder / _OF_PROCESSOR)
        source = content.get("chat_template") if isinstance(content, dict) else None
    return source if isinstance(source, str) and source else None


class TemplateOverBudget(jinja2.TemplateError):
    """A template takes more time or memory than it may, or writes too much."""


def rendered(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    answer: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """A template's prompt of a conversation.

    Args:
      settings: tokenizer_config.json, whose special tokens a template may write.
      answer: whether the prompt ends where an answer begins.
      tools: that the assistant may call.

    Raises:
      TemplateOverBudget: the template takes more time or memory than it may, or writes too much.
      jinja2.TemplateError: the template does not take it.
    """
    return rendered_marked(source, messages, settings, answer, tools)[0]


def rendered_marked(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    answer: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    switches: Mapping[str, bool | str] | None = None,
) -> tuple[str, list[tuple[int, int]] | None]:
    """The same, and the assistant's characters by the template's `{% generation %}`; None: it has
    no such mark. `switches` are variables of the template, such as `enable_thinking`."""
    special = {name: text for name, text in settings.items() if name.endswith("_token")}
    is_marked = _GENERATION.search(source) is not None
    size = len(source) + sum(len(str(part)) for part in (*messages, *tools))
    try:
        text, spans = _renderer(os.getpid()).call(
            "render",
            source=source,
            messages=list(messages),
            answer=answer,
            tools=list(tools),
            is_marked=is_marked,
            special={**special, **(switches or {})},
            size=size,
        )
    except OverBudget as error:
        raise TemplateOverBudget(str(error)) from error
    except Failed as error:  # a template is a program: it can raise nearly any
        if error.kind == "TemplateSyntaxError":
            syntax = jinja2.TemplateSyntaxError(str(error), error.line)
            syntax.translated = True  # as Jinja raises it: its text is the message alone
            raise syntax from error
        kind = TemplateOverBudget if error.kind == "TooLong" else jinja2.TemplateError
        raise kind(str(error)) from error
    return text, [tuple(span) for span in spans] if is_marked else None


@functools.cache
def _renderer(process: int) -> Box:
    """The box of templates; a fork has one of its own, since two cannot share a child."""
    return Box(Path(__file__).with_name("boxed_template.py"))


class PictureChat:
    """Prompts of one message with texts and pictures behind an instruction, as token ids.

    Args:
      folder: with a chat template.
      tokenizer: the folder's.
      image_token: id of a picture's placeholder.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, image_token: int):
        file = folder / SETTINGS
        settings = read_json(file) if file.is_file() else {}
        self._settings = settings if isinstance(settings, dict) else {}
        source = template_source(folder, self._settings)
        if source is None:
            raise UserError(
                f"{folder}: has no chat template ({TEMPLATE}), of which its prompts are made; "
                "fetch the whole folder again."
            )
        self.source = source  # of the chat template
        self._folder, self._tokenizer, self._image_token = folder, tokenizer, image_token
        self._frames: dict[tuple[str, tuple[str | None, ...]], list[int | str]] = {}

    def encode(
        self,
        instruction: str,
        parts: Sequence[str | None],
        texts: Sequence[Sequence[str]],
        lengths: Sequence[int],
    ) -> list[list[int]]:
        """Token ids of prompts, with one placeholder for each picture.

        Args:
          instruction: the system's message.
          parts: of the user's message: texts, in which MARKS stand for those of `texts`, and None
            for a picture.
          texts: of each prompt, in the order of the marks.
          lengths: tokens of each prompt; of a longer one the last text loses its end.
        """
        frame = self._frame(instruction, tuple(parts))
        plain = [place for place, piece in enumerate(frame) if isinstance(piece, str)]
        filled = [_filled(frame[place], of_message) for of_message in texts for place in plain]
        encoded = iter(self._tokenizer.encode_batch(filled))
        before, after = self._tokenizer.before, self._tokenizer.after
        marked = [place for place in plain if any(mark in frame[place] for mark in MARKS)]
        made = []
        for length in lengths:
            pieces = [next(encoded) if isinstance(piece, str) else [piece] for piece in frame]
            excess = sum(map(len, pieces)) + len(before) + len(after) - length
            if excess > 0 and marked:
                last = pieces[marked[-1]]
                pieces[marked[-1]] = last[: max(len(last) - excess, 0)]
            made.append([*before, *(token for piece in pieces for token in piece), *after])
        return made

    def _frame(self, instruction: str, parts: tuple[str | None, ...]) -> list[int | str]:
        """The prompt cut at its special tokens: their ids, and the text between them."""
        key = instruction, parts
        if key in self._frames:
            return self._frames[key]
        content = [{"type": "image"} if part is None else _said(part) for part in parts]
        messages = [
            {"role": "system", "content": [_said(instruction)]},
            {"role": "user", "content": content},
        ]
        try:
            text = rendered(self.source, messages, self._settings, answer=True)
        except jinja2.TemplateError as error:
            raise UserError(
                f"{self._folder}: its chat template makes no prompt of an instruction, texts and "
                f"pictures ({error}); use a checkpoint as it was published."
            ) from error
        frame = self._tokenizer.pieces.cut(text)
        wanted = [mark for part in parts for mark in MARKS if part is not None and mark in part]
        marks = [c for piece in frame if isinstance(piece, str) for c in piece if c in MARKS]
        pictures = frame.count(self._image_token)
        if instruction not in text or marks != wanted or pictures != parts.count(None):
            raise UserError(
                f"{self._folder}: its chat template does not put the instruction, each text and a "
                f"placeholder for each picture (token {self._image_token}) into the prompt, each "
                "once and in order; use a checkpoint as it was published."
            )
        self._frames[key] = frame
        return frame


def _said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _filled(piece: str, texts: Sequence[str]) -> str:
    """A piece of a frame with the texts in place of their marks."""
    pattern = "|".join(MARKS)
    return re.sub(pattern, lambda match: texts[MARKS.index(match.group())], piece)
