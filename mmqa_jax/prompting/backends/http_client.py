"""Requests to the one server that the environment names, bounded in time and in bytes.

What a server sends is not trusted: a reply has a deadline as a whole and a limit of bytes, counted
after decompression, and redirects are not followed, since they would carry the prompt to, and take
the answer from, another server than the user named.

The server's address and key come only from the environment variables that OpenAI's own client
reads: OPENAI_BASE_URL (such as http://localhost:8000/v1) and OPENAI_API_KEY (optional if the server
requires none), with OPENAI_ORG_ID and OPENAI_PROJECT_ID. None is ever printed, stored or put into a
message.

A proxy is used for https:// addresses alone (HTTPS_PROXY, unless NO_PROXY names the host): it then
sees the server's name, neither key nor prompts. For http:// addresses HTTP_PROXY and ALL_PROXY are
ignored, because that proxy would read both.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import ipaddress
import json
import logging
import os
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Coroutine, Iterator, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json

URL, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
_PROXY = "HTTPS_PROXY"
_DEFAULT_URL = "https://api.openai.com/v1"
_MORE_HEADERS = {"OPENAI_ORG_ID": "OpenAI-Organization", "OPENAI_PROJECT_ID": "OpenAI-Project"}
_SHOWN = 300  # characters of a server's message
_LEAST_SECRET = 8  # characters; shorter keys (EMPTY, none) are no secrets
_ERROR_BYTES = 2**20  # of a reply that is not a success
_REDACTED = "***"


class NoReply(Exception):
    """There is no usable reply; the message says why, and a retry may bring one."""


class Reply(NamedTuple):
    """A server's whole reply: `value` is its JSON; of an error, None where it has none."""

    status: int
    headers: Mapping[str, str]
    value: Any
    text: str = ""  # of an error


def check_environment() -> None:
    """Raises UserError if the environment names no server, or one that cannot be asked."""
    url, key = os.environ.get(URL), os.environ.get(KEY)
    if not url and not key:
        raise UserError(
            f"environment: {URL} is not set; set it to the server's address (such as "
            f"http://localhost:8000/v1), and {KEY} to its key if it asks for one."
        )
    if url and _scheme(url) is None:
        raise UserError(
            f"environment: {URL} is no address of a server; write it as http://HOST:PORT/v1 or "
            "https://HOST/v1, with nothing behind that (no ? and no #)."
        )
    for name in (KEY, *_MORE_HEADERS):
        value = os.environ.get(name, "")
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise UserError(
                f"environment: {name} holds a character that no header of HTTP may have (such as "
                "a line's end or a curly quote); set it again without."
            )
    proxy = _proxy(url or _DEFAULT_URL)
    if proxy is not None and _scheme(proxy) is None:
        raise UserError(
            f"environment: {_PROXY} is no address of an HTTP proxy; write it as http://HOST:PORT, "
            "or unset it."
        )


def address() -> str:
    """The server's address as the environment gives it; "": OpenAI's own."""
    return os.environ.get(URL, "")


@functools.cache
def _certificates(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Loads the certificates of the environment's file or folder, or httpx's, once a process."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=True)


class HttpClient:
    """Asks the server of the environment. Use it in one event loop, and close it there. A reply
    must be there as a whole within `timeout` seconds, from connecting to its last byte."""

    def __init__(self, timeout: float):
        import httpx2

        self._httpx, self._timeout = httpx2, timeout
        for name in ("httpx2", "httpcore2"):  # they log addresses and whole headers
            logging.getLogger(name).setLevel(logging.WARNING)
        self._base = (os.environ.get(URL) or _DEFAULT_URL).rstrip("/")
        # A server that needs no key ignores it.
        headers = {"Authorization": f"Bearer {os.environ.get(KEY) or 'none'}"}
        for name, header in _MORE_HEADERS.items():
            if value := os.environ.get(name):
                headers[header] = value
        self._client = httpx2.AsyncClient(
            headers={"User-Agent": "mmqa-jax", "Accept": "application/json", **headers},
            # Of the environment only certificates: its proxies and the passwords in ~/.netrc are
            # not the user's word on where keys go.
            verify=_certificates(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
            trust_env=False,
            # None is kept: a hostile server's would make each request longer.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            proxy=_proxy(self._base),
            follow_redirects=False,
            timeout=timeout,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def send(
        self, path: str, body: Mapping[str, Any] | None, most: int, *, beside: bool = False
    ) -> Reply:
        """Posts `body`, or gets where it is None.

        Args:
          path: behind the server's address.
          body: JSON values.
          most: bytes of a reply, after decompression.
          beside: whether `path` stands beside the address's /v1, not in it.

        Raises:
          NoReply: no connection, no whole reply in time, one that is too large, or no JSON.
        """
        base = self._base.removesuffix("/v1") if beside else self._base
        content = None if body is None else json.dumps(body).encode()
        httpx = self._httpx
        try:
            request = self._client.build_request(
                "GET" if body is None else "POST",
                base + path,
                content=content,
                headers={} if body is None else {"Content-Type": "application/json"},
            )
            async with asyncio.timeout(self._timeout):
                response = await self._client.send(request, stream=True)
                try:
                    return await self._read(response, most)
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException) as error:
            raise NoReply(f"it gave no answer within {self._timeout:g} s") from error
        except (httpx.ConnectError, httpx.ProxyError, httpx.InvalidURL) as error:
            raise NoReply("no connection to it") from error
        except httpx.RemoteProtocolError as error:
            raise NoReply("it broke off, or does not speak HTTP") from error
        except httpx.TransportError as error:
            raise NoReply("the connection to it broke") from error
        except httpx.DecodingError as error:
            raise NoReply("its answer is malformed (damaged compression)") from error

    async def _read(self, response: Any, most: int) -> Reply:
        status = response.status_code
        if not 200 <= status < 300:
            body = await self._body(response, _ERROR_BYTES)
            text = body.decode("utf-8", "replace")
            return Reply(status, response.headers, _json_or_none(body), text)
        # Before the body: a stream of events (text/event-stream) may have no end.
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not kind.endswith("json"):
            described = f"of the type {clean(kind)}" if kind else "without a content type"
            raise NoReply(f"its answer is malformed ({described}, expected application/json)")
        body = await self._body(response, most)
        try:
            value = parse_json(body, "it", remedy="")
        except UserError as error:
            reason = str(error).removeprefix("it: ").rpartition(";")[0]
            raise NoReply(f"its answer is malformed ({clean(reason)})") from error
        if _holds_key(value):
            raise NoReply(f"its answer repeats {KEY}, which is written to no file")
        return Reply(status, response.headers, value)

    async def _body(self, response: Any, most: int) -> bytes:
        """The body, decompressed piece by piece and no further than `most` bytes."""
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > most:
                raise NoReply(
                    f"its answer is larger than the {most:,} bytes that this request allows"
                )
        return bytes(body)


def clean(text: str) -> str:
    """A server's words in one short line for messages, without key and address."""
    text = _without_secrets(text)
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split()).rstrip(".")
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _without_secrets(text: str) -> str:
    for secret in _secrets():
        if len(secret) >= _LEAST_SECRET:
            text = text.replace(secret, _REDACTED)
    return text


def _secrets() -> Iterator[str]:
    """Key and address, and a password in it as it is written there and as it is sent."""
    url = os.environ.get(URL, "")
    yield from (os.environ.get(KEY, ""), url)
    password = urllib.parse.urlsplit(url).password or ""
    yield from (password, urllib.parse.unquote(password))


def _holds_key(value: Any) -> bool:
    """Whether a server repeats the key in an answer, if the key looks like a secret."""
    key = os.environ.get(KEY, "")
    secret = len(key) >= 2 * _LEAST_SECRET and any(map(str.isdigit, key))
    return secret and key in json.dumps(value)


def _json_or_none(text: bytes) -> Any:
    try:
        return parse_json(text, "it")
    except UserError:
        return None


def _scheme(url: str) -> str | None:
    """`http` or `https`; None for what is no such address."""
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if "[" in parts.netloc:
            ipaddress.IPv6Address((parts.hostname or "").partition("%")[0])
        known = known and not (parts.query or parts.fragment)
    except ValueError:  # such as a port that is no number
        return None
    return parts.scheme if known and url.isprintable() and " " not in url else None


def _proxy(url: str) -> str | None:
    """The proxy for an address, if there is one."""
    proxy = urllib.request.getproxies_environment().get("https")
    if not proxy or _scheme(url) != "https":
        return None
    host = urllib.parse.urlsplit(url).netloc.rpartition("@")[2]
    return None if urllib.request.proxy_bypass_environment(host) else proxy


# An event loop beside the caller's own.


class EventLoop:
    """An event loop in its own thread, so that callers may run one too (notebooks)."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that Ctrl-C does not wait for answers.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancels what is under way, and ends the loop."""
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """Starts a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine and waits for its result."""
        return self.submit(coroutine).result()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
