"""Files of prompts: what `mmqa prompt` reads.

JSON lines, one prompt each:

    {"id": "q1", "prompt": "Question: ...\\nAnswer:", "max_new_tokens": 5, "stop": ["\\n"]}
    {"id": "q2", "prompt": "The capital of France is", "choices": [" Paris", " Rome"]}
    {"id": "q3", "messages": [{"role": "user", "content": "What is this?"}], "images": ["cat.jpg"]}

Any other file is plain text, a prompt on each line, whose number is its id.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.config import nearest
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_text, read_jsonl, read_text
from mmqa_jax.prompting.backends import (
    Asked,
    Chat,
    Choices,
    Completion,
    Decoding,
    Message,
    Picture,
)

_NUMBER, _WHOLE, _TEXTS = "a number", "a whole number", "a list of texts"
_DECODING = {
    "max_new_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_k": _WHOLE,
    "top_p": _NUMBER,
    "stop": _TEXTS,
    "n": _WHOLE,
    "seed": _WHOLE,
    "logprobs": "true or false",
    "beams": _WHOLE,
    "length_penalty": _NUMBER,
}
_KINDS = {
    "id": "a text or a whole number",
    "prompt": "a text",
    "messages": "a list of messages",
    "images": _TEXTS,
    "choices": _TEXTS,
    "meta": "anything",
    **_DECODING,
}
_FITS: dict[str, Callable[[Any], bool]] = {
    "a text or a whole number": lambda x: isinstance(x, str) or _is_whole(x),
    "a text": lambda x: isinstance(x, str),
    "a list of messages": lambda x: isinstance(x, list) and bool(x),
    "anything": lambda x: True,
    "true or false": lambda x: isinstance(x, bool),
    _WHOLE: lambda x: _is_whole(x),
    _NUMBER: lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    _TEXTS: lambda x: isinstance(x, list) and bool(x) and all(isinstance(y, str) for y in x),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One prompt of a file.

    Attributes:
      place: file and line, for messages.
      request: what is asked.
      meta: the line's own notes, which go with the answer; None if there are none.
    """

    place: str
    request: Asked
    meta: Any = None


def read_prompts(path: str | os.PathLike, decoding: Decoding | None = None) -> list[Line]:
    """Reads a file of prompts; images are read too, from paths relative to the file.

    Args:
      path: `.jsonl`, or plain text.
      decoding: of prompts that do not say otherwise.

    Raises:
      UserError: no such file or no prompt in it, or, with file and line: not JSON, an unknown key,
        a value of another type or that no backend could serve, an id twice, no such image.
    """
    path, decoding = Path(path), decoding or Decoding()
    if path.suffix == ".jsonl":
        lines = []
        for number, row in read_jsonl(path):
            place = f"{path}, line {number}"
            with_place = _with_place(place)
            lines.append(with_place(_read_row, place, number, row, decoding, path.parent))
    else:
        texts = enumerate(read_text(path).split("\n"), start=1)
        lines = [
            Line(f"{path}, line {number}", Completion(number, text.rstrip("\r"), decoding))
            for number, text in texts
            if text.strip()
        ]
    if not lines:
        raise UserError(f"{path}: holds no prompt; write one on each line.")
    seen: dict[str, str] = {}
    for line in lines:
        name = str(line.request.id)
        if name in seen:
            raise UserError(
                f"{line.place}: the id {name!r} is that of {seen[name]} too; give each its own."
            )
        seen[name] = line.place.rpartition(", ")[2]
    return lines


def check_line(line: Line, check: Callable[[Asked], None]) -> None:
    """Runs a backend's `check` on a line; its complaint gets file and line."""
    _with_place(line.place)(check, line.request)


def _with_place(place: str) -> Callable[..., Any]:
    """Calls a function whose complaints get file and line in front."""

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except UserError as error:
            said = str(error)
            raise UserError(said if said.startswith(place) else f"{place}: {said}") from error

    return call


def _read_row(place: str, number: int, row: Any, decoding: Decoding, folder: Path) -> Line:
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object; write {{...}} with `prompt` or `messages`.")
    check_text(row, place)
    for key, value in row.items():
        if key not in _KINDS:
            raise UserError(
                f"{place}: key {key!r} is unknown; {nearest(key, _KINDS)} Notes of your own go "
                "under `meta`."
            )
        if not _FITS[_KINDS[key]](value):
            raise UserError(
                f"{place}: {key} is {json.dumps(value)[:80]}, {_KINDS[key]} was expected."
            )
    if ("prompt" in row) == ("messages" in row):
        found = "both" if "prompt" in row else "neither"
        raise UserError(f"{place}: has {found} of `prompt` and `messages`; give one of them.")
    request_id = row.get("id", number)
    changes = {key: value for key, value in row.items() if key in _DECODING}
    if changes and "choices" in row:
        raise UserError(
            f"{place}: {next(iter(changes))} has no meaning beside `choices`, which are scored; "
            "leave it out."
        )
    decoding = dataclasses.replace(decoding, **changes)
    decoding.request(request_id)  # refuses values out of range
    images = tuple(_read_picture(folder / name) for name in row.get("images", ()))
    if "messages" in row:
        messages = _messages(place, row["messages"], images, folder)
        if "choices" in row:
            return Line(
                place, Choices(request_id, messages, tuple(row["choices"])), row.get("meta")
            )
        return Line(place, Chat(request_id, messages, decoding), row.get("meta"))
    if "choices" in row:
        asked = Choices(request_id, row["prompt"], tuple(row["choices"]), images)
        return Line(place, asked, row.get("meta"))
    return Line(place, Completion(request_id, row["prompt"], decoding, images), row.get("meta"))


def _messages(
    place: str, rows: list[Any], images: tuple[Picture, ...], folder: Path
) -> tuple[Message, ...]:
    """Messages of a row; its `images` go to the front of the last one."""
    messages = []
    for row in rows:
        if not isinstance(row, dict) or row.keys() != {"role", "content"}:
            raise UserError(f"{place}: a message is {{role, content}}; give these two keys.")
        content = row["content"]
        parts = [content] if isinstance(content, str) else content
        if not isinstance(parts, list) or not isinstance(row["role"], str):
            raise UserError(f"{place}: a message's content is a text, or a list of parts.")
        messages.append(Message(row["role"], tuple(_part(place, part, folder) for part in parts)))
    if images:
        last = messages[-1]
        messages[-1] = Message(last.role, (*images, *last.content))
    return tuple(messages)


def _part(place: str, part: Any, folder: Path) -> str | Picture:
    """A text, {"type": "text", "text": ...} or {"type": "image", "image": path}."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    value = part.get(kind) if kind in ("text", "image") else None
    if not isinstance(value, str):
        raise UserError(
            f'{place}: a part of a message is {{"type": "text", "text": ...}} or {{"type": '
            '"image", "image": PATH}; write one of them.'
        )
    return value if kind == "text" else _read_picture(folder / value)


def _read_picture(path: Path) -> Picture:
    try:
        return Picture(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(
            f"image {path}: cannot be read ({error.strerror}); name a file relative to the file "
            "of prompts."
        ) from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
