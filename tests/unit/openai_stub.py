"""A server of OpenAI's API on loopback that fails as it is told; asserts nothing itself."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO

import pytest

Answer = tuple[int, dict[str, str], bytes]
# An answer that is no whole one: gets the stream to the client, which ends when it returns.
Raw = Callable[[BinaryIO], None]


def answer(value: Any, status: int = 200, **headers: str) -> Answer:
    """A JSON answer."""
    return status, {"Content-Type": "application/json", **headers}, json.dumps(value).encode()


def said(text: str, prompt_tokens: int = 3) -> Answer:
    """One candidate of /completions and /chat/completions."""
    choice = {"text": text, "message": {"content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 2}
    return answer({"choices": [choice], "usage": usage, "system_fingerprint": "fp"})


def error(status: int, message: str, **headers: str) -> Answer:
    """An error as OpenAI words it."""
    return answer({"error": {"message": message, "code": None}}, status, **headers)


def drip(head: bytes, piece: bytes, every: float = 0.05, most: float = 5.0) -> Raw:
    """Sends `head`, then `piece` every few moments until the client is gone, `most` s at most."""

    def send(stream: BinaryIO) -> None:
        stream.write(head)
        ends = time.monotonic() + most
        while time.monotonic() < ends:
            stream.write(piece)
            stream.flush()
            time.sleep(every)

    return send


class Stub:
    """Answers each POST with `reply(body)`; counts what was asked.

    Args:
      max_model_len: of the model's context, as vLLM gives it in its list of models.
      count: answers /tokenize, which does not count as asked; None: there is no such service.
      models: answers /models; None: a list of one, `tiny`.

    Attributes:
      asked: (path, body) in order of arrival; at: their times.
      most: how many were under way at once.
      authorization, cookies: headers that came.
    """

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], Answer | Raw],
        *,
        max_model_len: int | None = None,
        count: Callable[[dict[str, Any]], Answer | Raw] | None = None,
        models: Answer | Raw | None = None,
    ):
        self.reply = reply
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.at: list[float] = []
        self.authorization: set[str | None] = set()
        self.cookies: set[str | None] = set()
        self.most = self._running = 0
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                model = {"id": "tiny", "owned_by": "test", "created": 5}
                if max_model_len is not None:
                    model["max_model_len"] = max_model_len
                self._send(answer({"data": [model]}) if models is None else models)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    self._send(error(404, "Not Found") if count is None else count(body))
                    return
                with stub._lock:
                    stub.asked.append((self.path, body))
                    stub.at.append(time.monotonic())
                    stub.authorization.add(self.headers["Authorization"])
                    stub.cookies.add(self.headers["Cookie"])
                    stub._running += 1
                    stub.most = max(stub.most, stub._running)
                try:
                    reply = stub.reply(body)
                finally:
                    with stub._lock:
                        stub._running -= 1
                self._send(reply)

            def _send(self, reply: Answer | Raw):
                if callable(reply):
                    with contextlib.suppress(OSError):
                        reply(self.wfile)
                    self.close_connection = True
                    return
                status, headers, data = reply
                with contextlib.suppress(OSError):  # the client may be gone
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(data)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @contextlib.contextmanager
    def serving(self, key: str = "sk-very-secret-0123456789") -> Iterator[Stub]:
        """Serves, and is what the environment names."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OPENAI_BASE_URL", self.url)
                patch.setenv("OPENAI_API_KEY", key)
                yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
