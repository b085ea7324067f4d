"""OpenAI's Responses API in front of chat completions: one answer, whole or as typed events.

A request becomes the body of a chat, and the chat's reply becomes a response. Nothing is stored: a
request that continues an earlier response is refused, since the client can send its messages.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from mmqa_jax.prompting.backends.json_fields import Fields, wrong

_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "input_image": "image_url"}


def chat_body(fields: Fields) -> dict[str, Any]:
    """The body of the chat that a request asks for; WrongField for what is not answered here."""
    body: dict[str, Any] = {"model": fields.take("model", str)}
    given = fields.take("input", (str, list))
    rows = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [_message(row, f"input[{number}]") for number, row in enumerate(rows)]
    if instructions := fields.take("instructions", str, ""):
        messages.insert(0, {"role": "system", "content": instructions})
    body["messages"] = messages
    body["max_completion_tokens"] = fields.take("max_output_tokens", int, None)
    for key in ("temperature", "top_p"):
        body[key] = fields.take(key, (int, float), None)
    body["stream"] = fields.take("stream", bool, False)
    body["stream_options"] = {"include_usage": True} if body["stream"] else None
    form = Fields(fields.take("text", dict, {}))
    body["response_format"] = form.take("format", dict, None)
    form.ignore("verbosity")
    form.end()
    body["tools"] = fields.take("tools", list, None)
    body["tool_choice"] = fields.take("tool_choice", (str, dict), None)
    body["parallel_tool_calls"] = fields.take("parallel_tool_calls", bool, None)
    fields.only("previous_response_id", why="is not kept here: send the messages as input")
    fields.only("conversation", why="is not kept here: send the messages as input")
    fields.only("background", False)
    fields.ignore("store", "metadata", "user", "truncation", "include")
    reasoning = Fields(fields.take("reasoning", dict, {}))
    body["reasoning_effort"] = reasoning.take("effort", str, None)
    reasoning.ignore("summary", "generate_summary")
    reasoning.end()
    body["chat_template_kwargs"] = fields.take("chat_template_kwargs", dict, None)
    fields.ignore("service_tier", "safety_identifier", "prompt_cache_key")
    fields.end()
    return {key: value for key, value in body.items() if value is not None}


def _message(row: Any, key: str) -> dict[str, Any]:
    """A message of a chat from an item of the input."""
    kind = row.get("type") if isinstance(row, dict) else None
    if kind == "function_call":
        function = {"name": row.get("name"), "arguments": row.get("arguments")}
        return {"role": "assistant", "tool_calls": [{"function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": row.get("output")}
    if not isinstance(row, dict) or row.get("type", "message") != "message":
        raise wrong(key, row, "expected a message with role and content")
    fields = Fields(row)
    role, content = fields.take("role", str), fields.take("content", (str, list))
    fields.ignore("type", "id", "status")
    fields.end()
    if isinstance(content, str):
        return {"role": role, "content": content}
    parts = []
    for number, part in enumerate(content):
        kind = _PARTS.get(part.get("type", "")) if isinstance(part, dict) else None
        if kind is None or not isinstance(part.get(kind), str):
            raise wrong(f"{key}.content[{number}]", part, "expected an input_text or input_image")
        parts.append({"type": kind, kind: part[kind]})
    return {"role": role, "content": parts}


def response_of(chat: Mapping[str, Any]) -> dict[str, Any]:
    """The response that a whole reply to a chat is."""
    (choice,) = chat["choices"]
    return _Response(chat).whole(
        choice["message"]["content"] or "",
        choice["finish_reason"],
        chat,
        chat["usage"],
        choice["message"].get("tool_calls", ()),
    )


async def response_events(chat_events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events of a response from those of a chat's reply, which end with its usage."""
    numbers, response, text, finish, last, usage = itertools.count(), None, "", "stop", {}, None
    calls: list[Mapping[str, Any]] = []

    def event(kind: str, **fields: Any) -> str:
        value = {"type": kind, "sequence_number": next(numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(value)}\n\n"

    async for line in _pieces(chat_events):
        if "error" in line:
            yield event("error", **{"code": None, "param": None, **line["error"]})
            return
        if response is None:
            response = _Response(line)
            yield event("response.created", response=response.begun())
            yield event("response.in_progress", response=response.begun())
            item = {"output_index": 0, "item": response.message("", "in_progress", ())}
            yield event("response.output_item.added", **item)
            yield event("response.content_part.added", **response.place, part=_text_part("", ()))
        usage = line.get("usage") or usage
        for choice in line["choices"]:
            calls += choice["delta"].get("tool_calls", ())
            if piece := choice["delta"].get("content"):
                text += piece
                yield event(
                    "response.output_text.delta", **response.place, delta=piece, logprobs=[]
                )
            if choice["finish_reason"]:
                finish, last = choice["finish_reason"], line
    if response is not None:
        whole = response.whole(text, finish, last, usage, calls)
        message = whole["output"][0]
        yield event("response.output_text.done", **response.place, text=text, logprobs=[])
        yield event("response.content_part.done", **response.place, part=message["content"][0])
        yield event("response.output_item.done", output_index=0, item=message)
        for number, item in enumerate(whole["output"][1:], start=1):
            place = {"item_id": item["id"], "output_index": number}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield event("response.output_item.added", output_index=number, item=begun)
            more = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.function_call_arguments.done", **place, **more)
            yield event("response.output_item.done", output_index=number, item=item)
        yield event(f"response.{whole['status']}", response=whole)


async def _pieces(events: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        for line in event.splitlines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _text_part(text: str, sources: Any) -> dict[str, Any]:
    """An answer's text; what it cites are its annotations."""
    annotations = [
        {
            "type": "file_citation",
            "file_id": row["id"],
            "filename": row["file"] or row["title"] or row["id"],
            "index": len(text),
        }
        for row in sources
        if row["cited"] is not None
    ]
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}


class _Response:
    """The fields that all of a response's states share, with the ids of response and message.

    Args:
      chat: a reply to a chat, or its first piece.
    """

    def __init__(self, chat: Mapping[str, Any]):
        self._id, self._message = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._chat = chat
        self.place = {"item_id": self._message, "output_index": 0, "content_index": 0}

    def begun(self) -> dict[str, Any]:
        """The response before there is an answer."""
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._chat["created"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self._chat["model"],
            "output": [],
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "usage": None,
        }

    def message(self, text: str, status: str, sources: Any) -> dict[str, Any]:
        """The answer as an item of the output."""
        content = [_text_part(text, sources)] if status != "in_progress" else []
        head = {"type": "message", "id": self._message, "status": status}
        return {**head, "role": "assistant", "content": content}

    def whole(
        self,
        text: str,
        finish: str,
        last: Mapping[str, Any],
        usage: Mapping[str, Any] | None,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """The finished response.

        Args:
          finish: the chat's finish_reason.
          last: the reply, or its last piece, which has the sources of an answer from sources.
          usage: the chat's.
          calls: of functions, as a chat's message has them.
        """
        status = "incomplete" if finish == "length" else "completed"
        reason = {"reason": "max_output_tokens"} if finish == "length" else None
        message = self.message(text, status, last.get("sources", ()))
        more = {key: last[key] for key in ("sources", "quote", "notes") if key in last}
        made = {**self.begun(), **more, "status": status, "incomplete_details": reason}
        items = [
            {
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex}",
                "call_id": call["id"],
                "status": "completed",
                **call["function"],
            }
            for call in calls
        ]
        return {**made, "output": [message, *items], "usage": usage and _usage(usage)}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    thinking = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": usage["total_tokens"],
    }
