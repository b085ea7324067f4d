"""What a request is refused with, in OpenAI's form."""

from __future__ import annotations

import dataclasses

from starlette.responses import JSONResponse

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.online import Closed, QueueFull
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.backends.openai_fields import WrongField

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclasses.dataclass(eq=False)
class ApiError(Exception):
    """A request that is refused.

    Attributes:
      status: of HTTP.
      message: one sentence that says what was expected.
      param: the key of the body that it is about.
      code: OpenAI's short name, for clients that look for it.
      headers: of the reply.
    """

    status: int
    message: str
    _: dataclasses.KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None

    def to_json(self) -> dict[str, object]:
        """`{"error": {message, type, param, code}}`."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The reply."""
        return JSONResponse(self.to_json(), self.status, self.headers)


def busy(message: str) -> ApiError:
    """The refusal of what exceeds the queue; clients try again."""
    sentence = f"{message}; try again in a moment."
    return ApiError(429, sentence, code="queue_full", headers={"Retry-After": "1"})


def refusal(error: Exception) -> ApiError:
    """What an exception means to a client; raises one that is no refusal."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return busy(str(error))
    if isinstance(error, TooLong):
        return too_long(_without_id(error))
    if isinstance(error, UserError):
        param = error.param if isinstance(error, WrongField) else None
        return ApiError(400, _without_id(error), param=param)
    if isinstance(error, Closed):
        return ApiError(503, str(error))
    raise error


def too_long(message: str) -> ApiError:
    """The refusal of a prompt that exceeds the model's context."""
    return ApiError(400, message, code="context_length_exceeded")


def _without_id(error: UserError) -> str:
    """The sentence without the id that requests have here, which no client gave."""
    return str(error).removeprefix("request 0: ")
