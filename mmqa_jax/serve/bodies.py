"""Reads the JSON body of a request."""

from __future__ import annotations

from starlette.requests import Request

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.json_text import parse_json
from mmqa_jax.prompting.openai_fields import Fields
from mmqa_jax.serve.errors import ApiError


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
