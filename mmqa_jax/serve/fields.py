"""Reads the JSON body of a request key by key, and refuses by name what is wrong or unknown."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.json_text import parse_json
from mmqa_jax.data import images
from mmqa_jax.data.picture_bounds import PictureError
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.serve.errors import ApiError

_REQUIRED: Any = object()
_SHOWN = 60  # characters of a wrong value in a message


async def read_body(request: Request) -> Fields:
    """The JSON object of a POST request.

    Raises:
      ApiError: it is another type, no JSON, or no object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a foreign page may send without asking first is refused
        raise ApiError(415, "the Content-Type is not application/json; send the body as JSON.")
    try:
        body = parse_json(await request.body(), "the body", remedy="send JSON")
    except UserError as error:
        raise ApiError(400, str(error)) from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object; send {...}.")
    return Fields(body)


class Fields:
    """The keys of a body, each of which is taken once."""

    def __init__(self, body: Mapping[str, Any]):
        self._left = dict(body)

    def take(self, key: str, kinds: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """A value of one of some types (a bool is no number); null, or none, is the default."""
        value = self._left.pop(key, None)
        if value is None:
            if default is _REQUIRED:
                raise ApiError(400, f"{key} is missing; give it.", param=key)
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise wrong(key, value, f"expected {names}")
        return value

    def number(self, key: str, default: float, least: float, most: float) -> float:
        """A number within bounds."""
        value = self.take(key, (int, float), default)
        if not least <= value <= most:
            raise wrong(key, value, f"expected {least:g} to {most:g}")
        return float(value)

    def whole(self, key: str, default: Any, least: int, most: int) -> Any:
        """An integer within bounds, or the default."""
        value = self.take(key, int, default)
        if value is not default and not least <= value <= most:
            raise wrong(key, value, f"expected {least:,} to {most:,}")
        return value

    def only(self, key: str, *values: Any, why: str = "is not supported here") -> None:
        """A key that may be given, but changes nothing: one of these values, or none."""
        value = self._left.pop(key, None)
        if value is not None and value not in values:
            raise ApiError(400, f"{key} {why}; leave it out.", param=key)

    def ignore(self, *keys: str) -> None:
        """Keys that say nothing about the answer."""
        for key in keys:
            self._left.pop(key, None)

    def end(self) -> None:
        """ApiError for a key that nobody took."""
        for key in self._left:
            raise ApiError(400, f"{key} is no key that this server knows; leave it out.", param=key)


def wrong(key: str, value: Any, expected: str) -> ApiError:
    """The refusal of a key's value."""
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return ApiError(400, f"{key} is {shown}, {expected}.", param=key)


def strings(value: Any) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def token_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return isinstance(value, list) and all(type(one) is int for one in value)


def read_picture(url: str, key: str) -> Picture:
    """The picture of a `data:` URL, checked before it is decoded.

    Raises:
      ApiError: another URL (this server fetches nothing), broken base64, or no picture that may be
        decoded.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ApiError(
            400,
            f"{key} is no data:image/...;base64, URL; this server fetches no pictures, so send "
            "the bytes.",
            param=key,
        )
    try:
        decoded = base64.b64decode(data, validate=True)
        images.verify(decoded, "the picture")
        picture = Picture(decoded, "the picture")
        _ = picture.media_type
    except binascii.Error as error:
        raise ApiError(400, f"{key} is broken base64 ({error}).", param=key) from error
    except (PictureError, UserError) as error:
        raise ApiError(400, str(error), param=key) from error
    return picture
