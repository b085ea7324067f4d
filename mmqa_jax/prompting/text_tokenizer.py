"""A language model's tokenizer, end tokens and chat template, from the files of its weights.

The `tokenizers` library opens what it can, in a fraction of the time of transformers; the rest
goes through published_tokenizer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jinja2
from tokenizers import Tokenizer, decoders

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, write_json
from mmqa_jax.core.paths import as_path
from mmqa_jax.data import tokenizer_files
from mmqa_jax.data.chat_template import TemplateOverBudget, rendered_marked, template_source
from mmqa_jax.data.tokenizers import MarkedTokenizer
from mmqa_jax.prompting import llava_prompt
from mmqa_jax.prompting.backends import Message, Picture
from mmqa_jax.prompting.backends.thinking import Thinking, split_thoughts
from mmqa_jax.prompting.gguf_tokenizer import read_gguf_tokenizer

if TYPE_CHECKING:
    from mmqa_jax.data.formats.chats import Conversation

Fields = dict[str, Any]  # of a message, as templates take it
_MOST_ENDS = 1000
_THOUGHTS = "reasoning_content"  # a template's field: an assistant's, apart from its answer
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token of one byte
_BYTE_OF = tokenizer_files.byte_symbols()
_CUTS_THOUGHTS = re.compile(r"split\(\s*['\"]</think>")  # off an assistant's answer


class TextTokenizer(MarkedTokenizer):
    """Text to a language model's token ids and back.

    Special tokens that are spelled out in a prompt are recognized, for templates spell them. What
    users and sources wrote is therefore put through `shield` before it becomes part of a prompt.

    Args:
      published: its post-processor adds the special tokens that a prompt begins (T5's: ends) with.
      template: for conversations; None for a model that was not trained on them.
      end_ids: tokens that end an answer.

    Attributes:
      bos: id of the token that every prompt begins with, None if there is none.
      fingerprint: 16 hex digits that change with ids, text handling, template or end tokens.
    """

    kind = "language model"

    def __init__(
        self,
        published: Tokenizer,
        template: ChatTemplate | None = None,
        end_ids: Sequence[int] = (),
    ):
        super().__init__(published)
        self.template = None if template is None else template.shielding(self.shield)
        self.end_ids = tuple(end_ids)
        first = self.encode("")
        # T5's closes a prompt instead.
        self.bos = first[0] if first and self.encode("a")[0] == first[0] else None
        parts = [published.to_str(), template.source if template else "", repr(self.end_ids)]
        parts += [repr(template.switches)] if template and template.switches else []
        self.fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def encode(self, prompt: str) -> list[int]:
        """Token ids, with the special tokens that a prompt begins or ends with."""
        return self.encode_prompts([prompt], around=True)[0]

    def encode_plain(self, piece: str) -> list[int]:
        """Token ids of a piece of a prompt, nothing added."""
        return self.encode_prompts([piece])[0]

    @tokenizer_files.panics_refused()
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out."""
        return self.published.decode(list(ids), skip_special_tokens=False)

    @property
    def control_ids(self) -> list[int]:
        """Special tokens, which are no text."""
        return [n for n, token in self._added.items() if token.special]

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, which may be a part of a character."""
        spelled = self.published.id_to_token(token) or ""
        if token in self._added:
            return spelled.encode()
        if self._spells_bytes:
            return bytes(map(_BYTE_OF.__getitem__, spelled))
        byte = _BYTE_TOKEN.fullmatch(spelled)
        return (
            bytes([int(byte[1], 16)])
            if byte
            else spelled.replace(tokenizer_files.SPACE, " ").encode()
        )

    @functools.cached_property
    def _spells_bytes(self) -> bool:
        """Whether each character of a token stands for a byte (GPT-2's byte-level BPE)."""
        return '"ByteLevel"' in json.dumps(json.loads(self.published.to_str())["decoder"])

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n times as many has n tokens or more."""
        return max(map(len, self.published.get_vocab()))

    def save(self, folder: Path) -> None:
        """Writes the files from which `open_text_tokenizer` makes an equal one."""
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.template is not None:
            settings |= {"chat_template": self.template.source, **self.template.tokens}
        write_json(folder / tokenizer_files.SETTINGS, settings)
        write_json(folder / "generation_config.json", {"eos_token_id": list(self.end_ids)})
        with atomic_write(folder / tokenizer_files.FILE) as file:
            file.write(self.published.to_str())


def open_text_tokenizer(path: str | os.PathLike, thinking: Thinking | None = None) -> TextTokenizer:
    """Opens the tokenizer that comes with a model's weights.

    Args:
      path: a GGUF file (its metadata); a folder with tokenizer.json, tokenizer.model, T5's
        spiece.model or what tokenizer_config.json names, and optionally chat_template.jinja or
        .json, generation_config.json, config.json; or a tokenizer.json in such a folder.
      thinking: what the chat template is told; None: nothing.
    """
    switches = thinking or Thinking()
    path = as_path(path)
    if path.suffix == ".gguf":
        opened = read_gguf_tokenizer(path)
        template = None
        if opened.template:
            name = f"{path}, tokenizer.chat_template"
            template = ChatTemplate(opened.template, opened.special, name=name, thinking=switches)
        return TextTokenizer(opened.tokenizer, template, opened.end_ids)
    folder = path if path.is_dir() else path.parent
    file = path if path.suffix == ".json" else folder / tokenizer_files.FILE
    settings = tokenizer_files.read_object(folder / tokenizer_files.SETTINGS)
    if file.is_file():
        tokenizer = tokenizer_files.read_tokenizer(file)
        special = {
            key: tokenizer_files.spelling(value) or ""
            for key, value in settings.items()
            if key.endswith("_token")
        }
    else:
        tokenizer, special = _open_published(folder)
    source, template = template_source(folder, settings), None
    if source:
        name = f"{folder}, chat_template"
        template = ChatTemplate(source, special, name=name, thinking=switches)
    return TextTokenizer(
        tokenizer, template, _end_ids(folder, tokenizer, special.get("eos_token", ""))
    )


def _end_ids(folder: Path, tokenizer: Tokenizer, eos: str) -> tuple[int, ...]:
    """The end tokens of generation_config.json, else config.json, else the tokenizer."""
    for name in ("generation_config.json", "config.json", "model.json"):
        content = tokenizer_files.read_object(folder / name)
        content = content | content.get("token_ids", {})  # a folder of `mmqa convert`
        named = content.get("eos_token_id")
        if named is not None:
            ids = named if isinstance(named, list) else [named]
            if len(ids) > _MOST_ENDS or not all(type(t) is int and t >= 0 for t in ids):
                raise UserError(
                    f"{folder / name}: eos_token_id is {json.dumps(named)[:80]}, a token's number "
                    f"or a list of at most {_MOST_ENDS} was expected; fetch the file again."
                )
            return tuple(ids)
    known = tokenizer.token_to_id(eos) if eos else None
    return () if known is None else (known,)


# Conversations in the text format that a chat model was trained on.


class ChatFormat(Protocol):
    """Turns messages into a prompt that ends where the assistant's answer begins."""

    before_answer: str  # text between the prompt's end and the answer's first word

    def render(
        self, request_id: Hashable, messages: Sequence[Message], thinking: Thinking | None = None
    ) -> str:
        """The prompt; raises UserError for messages that the format cannot express. `thinking` is
        what a template is told of it, None: what it was opened with."""


class ChatTemplate:
    """A model's own Jinja template, rendered by transformers in its sandbox and our box.

    Args:
      source: the template.
      special: spelling of special tokens by name (`bos_token`, ...), for templates that write them.
      name: for error messages.
      thinking: what the template is told where an answer begins.
    """

    before_answer = ""

    def __init__(
        self,
        source: str,
        special: Mapping[str, str] | None = None,
        *,
        name: str = "chat template",
        shield: Callable[[str], str] = str,
        thinking: Thinking = Thinking(),  # noqa: B008 - frozen
    ):
        self.source, self.tokens, self._name = source, dict(special or {}), name
        self.shield, self._thinking = shield, thinking
        self.switches = thinking.switches(source)
        self._marks: dict[Thinking | None, dict[str, bool]] = {}

    def shielding(self, shield: Callable[[str], str]) -> ChatTemplate:
        """The template of a tokenizer, by which the texts of messages are shielded."""
        return ChatTemplate(
            self.source, self.tokens, name=self._name, shield=shield, thinking=self._thinking
        )

    def thought_marks(self, thinking: Thinking | None = None) -> dict[str, bool]:
        """How `ThoughtStream` reads what a model says behind its prompts."""
        if thinking not in self._marks:
            asked = self.render("", [Message("user", "?")], thinking)
            opened = asked.rstrip().endswith(("<think>", "<thinking>"))
            self._marks[thinking] = {"opened": opened, "channels": "<|channel|>" in self.source}
        return self._marks[thinking]

    def render(
        self, request_id: Hashable, messages: Sequence[Message], thinking: Thinking | None = None
    ) -> str:
        """The prompt; see ChatFormat. The template says what stands for a picture."""
        return self.written(request_id, map(self.fields, messages), thinking)

    def written(
        self, request_id: Hashable, messages: Iterable[Fields], thinking: Thinking | None = None
    ) -> str:
        """The prompt of messages as the template takes them, which `fields` gives."""
        told = thinking or self._thinking
        switches = told.switches(self.source)
        text, _ = self._written(request_id, list(messages), answer=True, switches=switches)
        return text + told.begun(self.source)

    def _written(
        self,
        request_id: Hashable,
        messages: Sequence[Fields],
        *,
        answer: bool,
        tools: Sequence[Fields] = (),
        switches: Mapping[str, bool | str] = MappingProxyType({}),
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """A conversation's text, and the characters that the template marks as the assistant's."""
        try:
            return rendered_marked(self.source, messages, self.tokens, answer, tools, switches)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{self._name}: not a Jinja template ({error}); correct it.") from error
        except TemplateOverBudget as error:
            raise UserError(
                f"{self._name}: a prompt cannot be made ({error}); use the template of the "
                "checkpoint as it was published."
            ) from error
        except jinja2.TemplateError as error:
            raise UserError(
                f"request {request_id!r}: the model's chat template rejects its messages "
                f"({error}); change their roles."
            ) from error

    def turns(self, name: str, chat: Conversation) -> tuple[str, list[tuple[int, int | None]]]:
        """A whole conversation with shielded texts.

        Returns:
          Its text, and of each assistant's message the first character and the one behind its last.
          A template without `{% generation %}` does not mark the latter (None): the message then
          begins where the prompt of all messages before it ends.
        """
        messages, tools = list(map(self._chat_fields, chat.messages)), self._shielded(chat.tools)
        text, marked = self._written(name, messages, answer=False, tools=tools)
        for function in (*(tool["function"] for tool in chat.tools), *chat.calls):
            if self.shield(function["name"]) not in text:
                raise UserError(
                    f"{name}: {self._name} does not write the tool {function['name']!r:.60}; use "
                    "a model whose template takes tools, or leave them out."
                )
        places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if marked is None:
            spans: list[tuple[int, int | None]] = []
            for place in places:
                prompt, _ = self._written(name, messages[:place], answer=True, tools=tools)
                if not text.startswith(prompt):
                    raise UserError(
                        f"{name}: {self._name} writes the messages before message {place + 1} "
                        "otherwise than its prompt for that, so that what is learned would not be "
                        "asked for; use a template that marks answers by {% generation %}."
                    )
                spans.append((len(prompt), None))
            return text, spans
        if len(marked) != len(places):
            raise UserError(
                f"{name}: {self._name} marks {len(marked)} answers by {{% generation %}} where "
                f"{len(places)} were expected; mark each assistant's message once."
            )
        return text, list(marked)

    def _chat_fields(self, message: Fields) -> Fields:
        """A message of a chat file as the template takes it, with shielded texts."""
        made = {
            key: value if key in ("role", "weight") else self._shielded(value)
            for key, value in message.items()
        }
        if isinstance(message["content"], list):
            made["content"] = [
                {"type": "image"} if part["type"] == "image" else part for part in made["content"]
            ]
        elif message["role"] == "assistant" and _THOUGHTS not in message:
            made |= self.fields(Message("assistant", (message["content"],)))
        return made

    def _shielded(self, value: Any) -> Any:
        """A JSON value with shielded texts; names that templates look up stay as they are."""
        if isinstance(value, str):
            return self.shield(value)
        if isinstance(value, Mapping):
            return {
                key if key.isidentifier() else self.shield(key): self._shielded(entry)
                for key, entry in value.items()
            }
        return list(map(self._shielded, value)) if isinstance(value, list | tuple) else value

    def fields(self, message: Message) -> Fields:
        """A message with shielded texts, as a list of parts only where there is a picture.

        Of an assistant's message, a template that tells thoughts from answers gets both apart: it
        cannot find `</think>` in a shielded text.
        """
        if message.pictures:
            return self.in_parts(message)
        text, more = message.text, {}
        if message.role == "assistant" and "<|channel|>" in text and "<|channel|>" in self.source:
            text = split_thoughts(text)[1]  # gpt-oss's templates drop the thoughts of earlier turns
        elif message.role == "assistant" and "</think>" in text:
            thoughts, _, answer = text.rpartition("</think>")
            if _THOUGHTS in self.source:
                text, thoughts = answer.lstrip("\n"), thoughts.rpartition("<think>")[2]
                more = {_THOUGHTS: self.shield(thoughts.strip("\n"))}
            elif _CUTS_THOUGHTS.search(self.source):
                text = answer
        return {"role": message.role, "content": self.shield(text), **more}

    def in_parts(self, message: Message) -> Fields:
        """A message with shielded texts as a list of parts."""
        content = [
            {"type": "text", "text": self.shield(part)}
            if isinstance(part, str)
            else {"type": "image"}
            for part in message.content
        ]
        return {"role": message.role, "content": content}


class VicunaV1:
    """LLaVA-1.5's conversation (llava_prompt), with the `shield` of the prompts' tokenizer."""

    before_answer = " "

    def __init__(self, shield: Callable[[str], str] = str):
        self._shield = shield

    def render(
        self, request_id: Hashable, messages: Sequence[Message], thinking: Thinking | None = None
    ) -> str:
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
            text, count = message.text, len(message.pictures)
            is_user = message.role == "user"
            asked = llava_prompt.question(text, count, self._shield)
            texts.append(asked if is_user else self._shield(text))
        answers: list[str | None] = [*texts[1::2], None]
        return llava_prompt.conversation(list(zip(texts[::2], answers, strict=True)))


def pictures_of(messages: Sequence[Message]) -> tuple[Picture, ...]:
    """All pictures of a conversation in order."""
    return tuple(picture for message in messages for picture in message.pictures)


# Tokenizers that `tokenizers` cannot open by itself, built by transformers from published files.
#
# transformers reads the vocabulary; where it splits a text otherwise than the original library, the
# original's rule is put in its place. Importing it takes seconds, so that text_tokenizer opens a
# tokenizer.json without it.

_OF_T5 = ("T5Tokenizer", "T5TokenizerFast", "MT5Tokenizer", "MT5TokenizerFast")
_BYTE = "<0x00>"  # a piece of models that spell unknown characters in bytes


class PublishedTokenizer(NamedTuple):
    """A tokenizer that transformers opened, which adds the tokens that a prompt begins with.

    `special` is the spelling of special tokens by name (`bos_token`, `eos_token`, ...).
    """

    tokenizer: Tokenizer
    special: dict[str, str]


def _open_published(folder: Path) -> PublishedTokenizer:
    """Opens the tokenizer of a folder without tokenizer.json.

    A tokenizer.model is SentencePiece's, of LLaMA-2, Vicuna and LLaVA-1.5, a spiece.model that of
    T5, Flan-T5 and mT5 unless tokenizer_config.json names another class. Other files
    (vocab.json and merges.txt, ...) are opened as tokenizer_config.json names their class.
    """
    settings = tokenizer_files.read_object(folder / tokenizer_files.SETTINGS)
    if not (folder / "tokenizer.model").is_file():
        if (folder / tokenizer_files.SPIECE).is_file() and settings.get(
            "tokenizer_class", _OF_T5[0]
        ) in _OF_T5:
            # transformers' own class has mT5's pieces of bytes and does not use them.
            return _with_bytes(_published(_from_pretrained(_OF_T5[0], folder)))
        if not settings.get("tokenizer_class"):
            raise UserError(
                f"{folder}: has neither tokenizer.json nor tokenizer.model, nor a "
                "tokenizer_config.json that names its tokenizer_class; name the folder or GGUF "
                "file with the tokenizer by --tokenizer."
            )
        return _published(_from_pretrained("AutoTokenizer", folder))
    # As LLaMA's own code, where tokenizer_config.json does not say otherwise.
    defaults = {} if "add_bos_token" in settings else {"add_bos_token": True}
    opened = _published(_from_pretrained("LlamaTokenizer", folder, **defaults))
    prefix = "first" if settings.get("legacy") is False else "always"
    if settings.get("add_prefix_space") is False:
        prefix = "never"
    tokenizer_files.split_as_sentencepiece(opened.tokenizer, prefix)
    return opened


def _with_bytes(opened: PublishedTokenizer) -> PublishedTokenizer:
    """Spells unknown characters in bytes where the model has those pieces."""
    content = json.loads(opened.tokenizer.to_str())
    has_bytes = opened.tokenizer.token_to_id(_BYTE) is not None
    content["model"]["byte_fallback"] = has_bytes
    tokenizer = Tokenizer.from_str(json.dumps(content))  # as it is when it was saved
    if has_bytes:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), tokenizer.decoder])
    return PublishedTokenizer(tokenizer, opened.special)


def _from_pretrained(name: str, folder: Path, **settings: Any) -> Any:
    """transformers' class of this name, opened from local files; code beside them is not run."""
    import transformers

    try:
        return getattr(transformers, name).from_pretrained(
            os.fspath(folder), local_files_only=True, trust_remote_code=False, **settings
        )
    except Exception as error:  # the library raises all kinds for broken files
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"{folder}: transformers cannot open its tokenizer ({reason}); copy the files again, "
            "or name a folder with a tokenizer.json by --tokenizer."
        ) from error


def _published(opened: Any) -> PublishedTokenizer:
    if getattr(opened, "backend_tokenizer", None) is None:
        raise UserError(
            f"{opened.name_or_path}: its {type(opened).__name__} has no form of the tokenizers "
            "library; name a folder with a tokenizer.json by --tokenizer."
        )
    special = {key: str(token) for key, token in opened.special_tokens_map.items()}
    return PublishedTokenizer(opened.backend_tokenizer, special)
