"""Where and how much one server answers; light, so that `mmqa serve --help` loads nothing."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Where and how much is served.

    Attributes:
      host, port: to listen at; port 0 takes a free one.
      key: that requests must carry; "" needs none.
      queue: requests that may wait or be answered at once, beyond which others are refused (429).
      timeout: seconds that an answer may take.
      body: MiB of a request.
    """

    host: str = "127.0.0.1"
    port: int = 8321
    key: str = ""
    queue: int = 64
    timeout: float = 120.0
    body: float = 16.0
