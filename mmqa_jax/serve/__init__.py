"""`mmqa serve`: a page and OpenAI's API over models that stay loaded.

Where and how much is served stands here, so that `mmqa serve --help` loads nothing.
"""

from __future__ import annotations

import dataclasses

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The address and the limits of a server.

    Attributes:
      host, port: to listen at; port 0 takes a free one.
      key: that requests must carry as `Authorization: Bearer KEY`; "" needs none.
      queue: requests that may wait or be answered at once, beyond which others are refused (429).
        A completion of several prompts takes a place for each.
      timeout: seconds that an answer may take, from the request's header on.
      body: MiB of a request.
      header: seconds in which the header of a request has to arrive.
      upload: seconds in which a body has to arrive; each 64 KiB that arrive add one.
      mcp: whether an assistant finds tools over the sources at /mcp.
      follow_up: how a folder is searched for a question behind others: joined with the last of
        them, alone, both in turn, or rewritten by the reader.
      uploads: documents that users may add to the folder; 0: none.
      origins: of pages that may ask, such as https://chat.example.org; "*": of all.
    """

    host: str = "127.0.0.1"
    port: int = 8321
    key: str = ""
    queue: int = 128
    timeout: float = 600.0
    body: float = 16.0
    header: float = 10.0
    upload: float = 10.0
    mcp: bool = False
    follow_up: str = "both"
    uploads: int = 0
    origins: tuple[str, ...] = ()
