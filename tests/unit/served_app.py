"""An application behind a real HTTP server in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.run import make_server

if TYPE_CHECKING:
    import openai

OPTIONS = ServeOptions(timeout=10.0)


@contextlib.contextmanager
def serving(app: Any, options: ServeOptions = OPTIONS) -> Iterator[str]:
    """The address of a server that answers inside the `with` block."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = make_server(app, options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


def openai_client(address: str, timeout: float) -> openai.OpenAI:
    """OpenAI's own client of the server at `address`, which waits `timeout` seconds, and tries once."""
    import openai  # half a second: in the workers that ask, and not in all

    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=timeout)
