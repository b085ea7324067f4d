"""The prompt files that `mmqa prompt` reads.

JSON lines, one prompt each:

    {"id": "q1", "prompt": "Question: ...\\nAnswer:", "max_new_tokens": 5, "stop": ["\\n"]}
    {"id": "q2", "prompt": "The capital of France is", "choices": [" Paris", " Rome"]}
    {"id": "q3", "messages": [{"role": "user", "content": "What is this?"}], "images": ["cat.jpg"]}
    {"custom_id": "q4", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}

The last is a line of OpenAI's batch files; pictures stand in it as `data:` URLs. Any other file is
plain text: every line is a prompt, and its line number the id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl, read_text
from mmqa_jax.core.typed import nearest
from mmqa_jax.data.picture_bounds import check_bytes
from mmqa_jax.prompting.backends import (
    Chat,
    Choices,
    Completion,
    Decoding,
    Message,
    Picture,
    Query,
)
from mmqa_jax.prompting.openai_fields import Fields
from mmqa_jax.prompting.openai_requests import read_chat
from mmqa_jax.prompting.source_prompts import IMAGE, MARK, as_prompt

_CHATS = "/v1/chat/completions"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# What a value must be, and the check.
_INTEGER = ("an integer", _is_integer)
_NUMBER = ("a number", lambda x: _is_integer(x) or isinstance(x, float))
_STRINGS = (
    "a list of strings",
    lambda x: isinstance(x, list) and bool(x) and all(isinstance(y, str) for y in x),
)
_DECODING = {
    "max_new_tokens": _INTEGER,
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "stop": _STRINGS,
    "n": _INTEGER,
    "seed": _INTEGER,
    "logprobs": ("true or false", lambda x: isinstance(x, bool)),
    "beams": _INTEGER,
    "length_penalty": _NUMBER,
}
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "id": ("a string or an integer", lambda x: isinstance(x, str) or _is_integer(x)),
    "prompt": ("a string", lambda x: isinstance(x, str)),
    "messages": ("a list of messages", lambda x: isinstance(x, list) and bool(x)),
    "images": _STRINGS,
    "choices": _STRINGS,
    "meta": ("anything", lambda x: True),
    **_DECODING,
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One prompt of a file.

    Attributes:
      where: file and line, for messages.
      request: the query.
      meta: the line's own notes, copied to the answer; None if there are none.
    """

    where: str
    request: Query
    meta: Any = None


def read_prompts(path: str | os.PathLike, decoding: Decoding | None = None) -> list[Line]:
    """Reads a file of prompts; images are read too, from paths relative to the file.

    Args:
      path: `.jsonl`, or plain text.
      decoding: the default for prompts that do not override it.
    """
    path, decoding = Path(path), decoding or Decoding()
    with _errors_at("config section decoding"):
        decoding.request("the default")  # rejects values out of range, before a model is loaded
    if path.suffix == ".jsonl":
        lines = []
        for number, row in read_jsonl(path):
            where = f"{path}, line {number}"
            with _errors_at(where):
                lines.append(_read_row(where, number, row, decoding, path.parent))
    else:
        texts = enumerate(read_text(path).split("\n"), start=1)
        lines = [
            Line(f"{path}, line {number}", Completion(number, text.rstrip("\r"), decoding))
            for number, text in texts
            if text.strip()
        ]
    if not lines:
        raise UserError(f"{path}: has no prompts; write one per line.")
    seen: dict[str, str] = {}
    for line in lines:
        name = str(line.request.id)
        if name in seen:
            raise UserError(
                f"{line.where}: the id {name!r} repeats that of {seen[name]}; make ids unique."
            )
        seen[name] = line.where.rpartition(", ")[2]
    return lines


def as_message(line: Line) -> Line:
    """A line whose text is to be continued, as the message of a user with its pictures."""
    query = line.request
    if not isinstance(query, Completion):
        return line
    plain = query.prompt.replace(MARK, " ")
    is_placed = plain.count(IMAGE) == len(query.images)
    marked = plain.replace(IMAGE, MARK) if is_placed else MARK * len(query.images) + plain
    messages, _ = as_prompt(marked, query.images, chat=True)
    return dataclasses.replace(line, request=Chat(query.id, messages, query.decoding))


def check_line(line: Line, check: Callable[[Query], None]) -> None:
    """Runs a backend's `check` on a line; errors name file and line."""
    with _errors_at(line.where):
        check(line.request)


@contextlib.contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """Puts file and line in front of errors."""
    try:
        yield
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith(where) else f"{where}: {said}") from error


def _read_row(where: str, number: int, row: Any, decoding: Decoding, folder: Path) -> Line:
    if not isinstance(row, dict):
        raise UserError("not a JSON object; write {...} with `prompt` or `messages`.")
    if "custom_id" in row:
        return Line(where, _batch_row(row, decoding))
    for key, value in row.items():
        if key not in _KEYS:
            raise UserError(
                f"key {key!r} is unknown; {nearest(key, _KEYS)} Notes of your own go under `meta`."
            )
        expected, fits = _KEYS[key]
        if not fits(value):
            raise UserError(f"{key} is {json.dumps(value)[:80]}, expected {expected}.")
    if ("prompt" in row) == ("messages" in row):
        found = "both" if "prompt" in row else "neither"
        raise UserError(f"has {found} of `prompt` and `messages`; give one of them.")
    request_id = row.get("id", number)
    changes = {key: value for key, value in row.items() if key in _DECODING}
    if changes and "choices" in row:
        raise UserError(
            f"{next(iter(changes))} has no effect with `choices`, which are scored; leave it out."
        )
    decoding = dataclasses.replace(decoding, **changes)
    decoding.request(request_id)  # rejects values out of range
    images = tuple(_read_picture(folder / name) for name in row.get("images", ()))
    query: Query
    if "choices" in row:
        choices = tuple(row["choices"])
        if "messages" in row:
            query = Choices(request_id, _messages(row["messages"], images, folder), choices)
        else:
            query = Choices(request_id, row["prompt"], choices, images)
    elif "messages" in row:
        query = Chat(request_id, _messages(row["messages"], images, folder), decoding)
    else:
        query = Completion(request_id, row["prompt"], decoding, images)
    return Line(where, query, row.get("meta"))


def _batch_row(row: Mapping[str, Any], default: Decoding) -> Query:
    """A line of an OpenAI batch file. Its model is that of --model, whatever it names."""
    fields = Fields(row)
    name = fields.take("custom_id", str)
    fields.only("method", "POST")
    fields.only("url", _CHATS, why=f"is not {_CHATS}, which alone is answered here")
    body = Fields({"model": "", **fields.take("body", dict)})
    fields.end()
    asked = read_chat(body, default)
    if asked.form.stream:
        raise UserError("stream has no meaning in a file; leave it out.")
    most = default.max_new_tokens if asked.most is None else asked.most
    return Chat(name, asked.messages, dataclasses.replace(asked.decoding, max_new_tokens=most))


def _messages(rows: list[Any], images: tuple[Picture, ...], folder: Path) -> tuple[Message, ...]:
    """Messages of a row; its `images` go to the front of the last one."""
    messages = []
    for row in rows:
        if not isinstance(row, dict) or row.keys() != {"role", "content"}:
            raise UserError("a message has exactly the keys `role` and `content`.")
        content = row["content"]
        parts = [content] if isinstance(content, str) else content
        if not isinstance(parts, list) or not isinstance(row["role"], str):
            raise UserError(
                "a message's role must be a string, its content a string or a list of parts."
            )
        messages.append(Message(row["role"], tuple(_part(part, folder) for part in parts)))
    if images:
        last = messages[-1]
        messages[-1] = Message(last.role, (*images, *last.content))
    return tuple(messages)


def _part(part: Any, folder: Path) -> str | Picture:
    """A text, {"type": "text", "text": ...} or {"type": "image", "image": path}."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    value = part.get(kind) if kind in ("text", "image") else None
    if not isinstance(value, str):
        raise UserError(
            'a part of a message is {"type": "text", "text": ...} or {"type": '
            '"image", "image": PATH}; write one of them.'
        )
    return value if kind == "text" else _read_picture(folder / value)


def _read_picture(path: Path) -> Picture:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # /dev/zero has no end, a pipe perhaps no beginning
            raise UserError(f"image {path}: is no file; name a picture's file.")
        check_bytes(status.st_size, str(path))
        return Picture(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(
            f"image {path}: cannot be read ({error.strerror}); paths are relative to the prompts "
            "file."
        ) from error
