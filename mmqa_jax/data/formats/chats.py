"""Chat files: conversations as JSON lines in OpenAI's format for fine-tuning.

    {"messages": [{"role": "user", "content": "Who was it?"},
                  {"role": "assistant", "content": "Ada.", "weight": 1}],
     "tools": [...], "id": "c1", "split": "train"}

A content is a text, or a list of parts: {"type": "text", "text": ...}, {"type": "image_url",
"image_url": {"url": ...}} or {"type": "image", "image": ...}. A picture is a `data:` URL, or the
path of a file below the chat file's folder. An assistant's message may have `tool_calls`, which
messages of the role `tool` answer. An assistant's message of `weight` 0 is not learned.

A prepared conversation is a question of the corpus whose `extra` has MESSAGES and `tools`.
"""

import base64
import binascii
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import ONE_A_LINE, decode_text, parse_json
from mmqa_jax.data.formats.interchange import InterchangePictures
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes
from mmqa_jax.data.schema import SPLITS, Question

MESSAGES, TOOLS = "messages", "tools"  # keys of Question.extra of a conversation
_ROLES = ("system", "user", "assistant", "tool")
# What may follow a message; `calls` is an assistant's with tool_calls.
_NEXT = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calls": ("tool",),
    "tool": ("tool", "assistant"),
}
_KEPT = ("name", "tool_call_id", "reasoning_content", "weight")
_KNOWN = ("role", "content", "tool_calls", *_KEPT)
_ROW = (MESSAGES, TOOLS, "id", "split")
_PART = (
    'a part of a content is {"type": "text", "text": ...}, {"type": "image_url", "image_url": '
    '{"url": ...}} or {"type": "image", "image": ...}; write one of them.'
)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A checked conversation."""

    # Role, content and what else chat templates read. A content with pictures is a list of parts
    # {"type": "text", "text": ...} and {"type": "image", "image": name}, any other a text; the
    # arguments of a tool's call are an object.
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # the functions that the assistant may call

    @property
    def pictures(self) -> tuple[str, ...]:
        """The pictures' names, in order."""
        contents = (m["content"] for m in self.messages if isinstance(m["content"], list))
        parts = itertools.chain.from_iterable(contents)
        return tuple(part["image"] for part in parts if part["type"] == "image")

    @property
    def calls(self) -> Iterator[Mapping[str, Any]]:
        """The functions that the assistant calls, in order."""
        for message in self.messages:
            yield from (call["function"] for call in message.get("tool_calls", ()))

    def as_question(self, name: str, split: str) -> Question:
        """Returns the question that a corpus stores; its text is the first user's words."""
        asked = next(message["content"] for message in self.messages if message["role"] == "user")
        if isinstance(asked, list):
            asked = "".join(part.get("text", "") for part in asked)
        names = tuple(dict.fromkeys(self.pictures))
        tools = {TOOLS: list(self.tools)} if self.tools else {}
        return Question(
            id=name,
            split=split,
            question=asked,
            image=names[0] if names else None,
            more_images=names[1:],
            extra={MESSAGES: list(self.messages), **tools},
        )


def is_chat(question: Question) -> bool:
    """Whether a question of a corpus is a conversation."""
    return MESSAGES in question.extra


def shown_pictures(question: Question) -> tuple[str, ...]:
    """The pictures that a model is shown of a question or conversation."""
    if is_chat(question):
        return conversation(question.extra, f"question {question.id}").pictures
    return () if question.image is None else (question.image,)


def conversation(row: Mapping[str, Any], where: str) -> Conversation:
    """Checks the conversation in MESSAGES and `tools` of a row; `where` is its place, for
    messages.
    """
    unchecked, tools = row.get(MESSAGES), row.get(TOOLS) or []
    if not isinstance(unchecked, list) or not unchecked:
        raise UserError(
            f"{where}: `{MESSAGES}` is {_shown(unchecked)}; a list of messages was expected."
        )
    if not isinstance(tools, list) or not all(isinstance(_function(tool), dict) for tool in tools):
        raise UserError(
            f'{where}: `{TOOLS}` is {_shown(tools)}; a list of {{"type": "function", "function": '
            "{...}} was expected."
        )
    before, calls, messages = "", set(), []
    for number, message in enumerate(unchecked, start=1):
        place = f"{where}, message {number}"
        made = _message(message, place)
        role = made["role"]
        if role not in _NEXT[before]:
            behind = f"behind {_article(before)}" if before else "at the beginning"
            raise UserError(
                f"{place}: is {_article(role)} {behind}, where {_article(_NEXT[before][-1])} was "
                "expected; correct the order of the roles."
            )
        before = role
        if role == "assistant":
            calls = {call.get("id") for call in made.get("tool_calls", ())}
            before = "calls" if calls else role
        elif role == "tool" and made.get("tool_call_id") not in {None, *calls}:
            raise UserError(
                f"{place}: `tool_call_id` is {_shown(made['tool_call_id'])}, which no call before "
                "it has as its id; correct it."
            )
        messages.append(made)
    if messages[-1]["role"] != "assistant":
        raise UserError(
            f"{where}: the last message is {_article(before)}; end with an assistant's, which is "
            "what is learned."
        )
    if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
        raise UserError(f"{where}: all weights are 0, so that nothing is learned; give one of 1.")
    return Conversation(tuple(messages), tuple(tools))


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in (*_ROLES, "developer"):
        role = message.get("role") if isinstance(message, Mapping) else message
        raise UserError(f"{place}: its role is {_shown(role)}, expected {' or '.join(_ROLES)}.")
    role = "system" if message["role"] == "developer" else message["role"]
    calls, content = message.get("tool_calls") or [], message.get("content")
    if calls and (role != "assistant" or not isinstance(calls, list)):
        raise UserError(f"{place}: only an assistant has a list of `tool_calls`; leave them out.")
    made: dict[str, Any] = {"role": role, "content": _content(content, role, calls, place)}
    for key in _KEPT:
        kind = int if key == "weight" else str
        value = message.get(key)
        if value is not None and (type(value) is not kind or (kind is int and value not in (0, 1))):
            expected = "0 or 1" if kind is int else "a text"
            raise UserError(f"{place}: `{key}` is {_shown(value)}; {expected} was expected.")
        if value is not None:
            made[key] = value
    if calls:
        made["tool_calls"] = [_call(call, place) for call in calls]
    return made


def _content(content: Any, role: str, calls: list[Any], place: str) -> str | list[dict[str, str]]:
    if isinstance(content, str) or (content is None and calls):
        return content or ""
    if not isinstance(content, list) or not content:
        raise UserError(
            f"{place}: `content` is {_shown(content)}; a text or a list of parts was expected."
        )
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get(kind) if kind in ("text", "image", "image_url") else None
        if kind == "image_url" and isinstance(value, Mapping):
            value = value.get("url")
        if not isinstance(value, str):
            raise UserError(f"{place}: {_PART}")
        parts.append({"type": "text", "text": value} if kind == "text" else _image(value))
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    if role != "user":
        raise UserError(f"{place}: only a user shows pictures; move them to a user's message.")
    return parts


def _image(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def _call(call: Any, place: str) -> dict[str, Any]:
    function = _function(call)
    arguments = function.get("arguments") if function else None
    if isinstance(arguments, str):  # OpenAI's form; chat templates take an object
        arguments = parse_json(arguments or "{}", f"{place}, the arguments of a call")
    if not isinstance(arguments, dict) or not isinstance(call.get("id"), str | None):
        raise UserError(
            f'{place}: a call of a tool is {{"id": ..., "type": "function", "function": {{"name": '
            '..., "arguments": "{...}"}}; write it so.'
        )
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if call.get("id") else made


def _function(value: Any) -> dict[str, Any] | None:
    """The function with a name that a tool or a call has."""
    function = value.get("function") if isinstance(value, Mapping) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return function if is_named else None


def _article(role: str) -> str:
    names = {"system": "a system message", "user": "a user's", "assistant": "an assistant's",
             "calls": "an assistant's call of a tool", "tool": "a tool's"}  # fmt: skip
    return names[role]


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]


class ChatFiles:
    """The conversations of chat files, and a reader of their pictures.

    `path`: a file, whose conversations are for training unless `split` says otherwise, or a folder
    with train.jsonl, val.jsonl, test.jsonl.
    """

    def __init__(self, path: Path):
        split_of = {path: "train"} if path.is_file() else {
            path / f"{split}.jsonl": split for split in SPLITS
        }  # fmt: skip
        self.files = [file for file in split_of if file.is_file()]  # what was read
        if not self.files:
            raise UserError(f"{path}: holds none of train.jsonl, val.jsonl, test.jsonl; add one.")
        self._folder = InterchangePictures(self.files[0].parent)
        self._inline: dict[str, tuple[Path, int, int]] = {}  # name -> its line's file and place
        self.ignored: Counter[str] = Counter()  # how often each key occurs that is not read
        # One for each conversation, with its first user's words as its text.
        self.questions: list[Question] = []
        for file in self.files:
            for number, start, row in _rows(file):
                where = f"{file}, line {number}"
                self.questions.append(self._question(row, where, split_of[file], (file, start)))
        if not self.questions:
            raise UserError(f"{path}: has no conversation; write one per line.")

    def _question(self, row: Any, where: str, split: str, place: tuple[Path, int]) -> Question:
        if not isinstance(row, dict):
            raise UserError(f"{where}: not a JSON object; write one object per line.")
        checked = conversation(row, where)
        self.ignored.update(key for key in row if key not in _ROW)
        for message in row[MESSAGES]:
            self.ignored.update(f"{MESSAGES}.{key}" for key in message if key not in _KNOWN)
        number = where.rpartition(" ")[2]
        name, split = row.get("id", f"{place[0].stem}-{number}"), row.get("split", split)
        if not isinstance(name, str | int) or split not in SPLITS:
            wrong, expected = (
                ("split", " or ".join(SPLITS)) if split not in SPLITS else ("id", "a text")
            )
            raise UserError(f"{where}: `{wrong}` is {_shown(row[wrong])}; {expected} was expected.")
        messages = []
        counted = itertools.count()
        for message in checked.messages:
            content = message["content"]
            if isinstance(content, list):
                content = [
                    part if part["type"] == "text"
                    else _image(self._named(part["image"], where, place, next(counted)))
                    for part in content
                ]  # fmt: skip
            messages.append({**message, "content": content})
        checked = dataclasses.replace(checked, messages=tuple(messages))
        return checked.as_question(str(name), split)

    def _named(self, picture: str, where: str, place: tuple[Path, int], number: int) -> str:
        """The name of a picture in the corpus."""
        if picture.startswith("data:"):
            name = f"{where.removeprefix(str(place[0].parent)).lstrip('/')}, picture {number + 1}"
            self._inline[name] = (*place, number)
            return name
        if problem := self._folder.problem(picture):
            raise UserError(f"{where}: the picture {picture[:80]!r} {problem}.")
        return picture

    def read_picture(self, name: str) -> bytes:
        """The encoded bytes of a picture; PictureError for too many, or broken base64."""
        if name not in self._inline:
            return self._folder(name)
        path, start, number = self._inline[name]
        with path.open("rb") as file:
            file.seek(start)
            row = json.loads(file.readline())
        url = conversation(row, name).pictures[number]
        head, _, data = url.partition(",")
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            raise PictureError(f"{name}: is no data:image/...;base64, URL; write it as one.")
        check_bytes(len(data) * 3 // 4, name)
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise PictureError(f"{name}: is broken base64 ({error}); encode it again.") from error


def _rows(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yields number, first byte and value of every line of a file, and holds one line at a time."""
    with path.open("rb") as file:
        start = 0
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if line.strip():
                yield number, start, parse_json(decode_text(line, where), where, remedy=ONE_A_LINE)
            start += len(line)
