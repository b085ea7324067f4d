"""What a request is refused with, in OpenAI's form."""

from __future__ import annotations

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused.

    Args:
      status: of HTTP.
      message: one sentence that says what was expected.
      param: the key of the body that it is about.
      code: OpenAI's short name, for clients that look for it.
      headers: of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers

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
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
