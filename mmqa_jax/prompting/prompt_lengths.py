"""How long a request is on a server that counts tokens: vLLM's /tokenize."""

from __future__ import annotations

import base64
import json
import weakref
from collections.abc import Hashable
from typing import Any

from mmqa_jax.decoding.requests import TooLong, Unanswerable
from mmqa_jax.prompting.backends import Chat, Choices, Message, Picture, Query
from mmqa_jax.prompting.event_loop import EventLoop
from mmqa_jax.prompting.http_client import HttpClient, NoReply
from mmqa_jax.prompting.openai_format import is_count

# A chat template's own tokens, at most; a text's are at most its bytes.
_TEMPLATE_TOKENS = 512
# A count comes with the tokens themselves (ids, in some servers texts): at most as many as bytes.
_REPLY_BYTES, _REPLY_BYTES_PER_BYTE = 2**20, 64
_LONGEST_CONTEXT = 2**31  # tokens; what a server says beyond it is not believed


class TooLongForServer(TooLong):
    """A request that exceeds the server's context, with its new tokens, by `excess` tokens."""

    def __init__(self, request_id: Hashable, tokens: int, new: int, length: int):
        self.excess = tokens + new - length
        Unanswerable.__init__(
            self,
            f"request {shown_id(request_id)}: its prompt of {tokens} tokens plus {new} new ones is "
            f"{self.excess} more than the server's context of {length}; shorten it (fewer "
            "examples), lower max_new_tokens, or serve the model with a longer context.",
        )


class PromptLengths:
    """Refuses what a server would refuse as too long, before it is sent.

    A request is counted only where its bytes leave room for doubt. Pictures are not counted, so
    that the server may still refuse what has some.

    Args:
      model: the server's name for it.
      length: of its context (vLLM's max_model_len), as the server says; where that is no sensible
        number it is unknown, and nothing is refused.
      timeout: seconds to wait for a count.
    """

    def __init__(self, model: str, length: Any, timeout: float):
        self._model, self._timeout = model, timeout
        self._length = length if is_count(length) and 0 < length < _LONGEST_CONTEXT else None
        self._loop: EventLoop | None = None
        self._client: Any = None

    def check(self, request: Query) -> None:
        """Raises TooLong."""
        if self._length is None:
            return
        new = 1 if isinstance(request, Choices) else request.decoding.max_new_tokens
        if isinstance(request, Chat):
            texts = [Message(one.role, one.text) for one in request.messages]
            body: dict[str, Any] = {"messages": [openai_message(message) for message in texts]}
            size = sum(len(message.text.encode()) for message in texts) + _TEMPLATE_TOKENS
        else:
            longest = max(request.continuations, key=len) if isinstance(request, Choices) else ""
            body = {"prompt": f"{request.prompt}{longest}"}
            size = len(body["prompt"].encode()) + 2  # special tokens
        if size + new <= self._length:
            return
        tokens = self._count(body)
        if tokens is not None and tokens + new > self._length:
            raise TooLongForServer(request.id, tokens, new, self._length)

    def _count(self, body: dict[str, Any]) -> int | None:
        """A request's tokens; None where the server does not say, which is not asked again."""
        if self._loop is None:
            self._loop = EventLoop().start()
            self._client = self._loop.run(_open(self._timeout))
            weakref.finalize(self, _close, self._loop, self._client)
        asked = {"model": self._model, **body}
        most = _REPLY_BYTES + _REPLY_BYTES_PER_BYTE * len(json.dumps(asked))
        try:
            reply = self._loop.run(self._client.send("/tokenize", asked, most, beside=True))
        except NoReply:
            reply = None
        count = reply.value.get("count") if reply and isinstance(reply.value, dict) else None
        if reply is None or reply.status != 200 or not is_count(count):
            self._length = None
            return None
        return count


async def _open(timeout: float) -> HttpClient:
    return HttpClient(timeout)


def _close(loop: EventLoop, client: HttpClient) -> None:
    loop.run(client.close())
    loop.close()


def shown_id(request_id: Hashable) -> str:
    """A request's id as messages show it; one of several parts is `a/b`."""
    return "/".join(map(str, request_id)) if isinstance(request_id, tuple) else repr(request_id)


def openai_message(message: Message) -> dict[str, Any]:
    """A message as the API takes it, pictures as data URLs."""
    if not message.pictures:
        return {"role": message.role, "content": message.text}
    parts = []
    for part in message.content:
        if isinstance(part, Picture):
            data = base64.b64encode(part.data).decode()
            url = f"data:{part.media_type};base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": part})
    return {"role": message.role, "content": parts}
