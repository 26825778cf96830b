"""Errors for clients, in the form that OpenAI's client reads."""

from collections.abc import Mapping
from typing import Any

# The type of an error by its status; of others it is "invalid_request_error".
_TYPES = {
    401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error",
    500: "server_error", 503: "service_unavailable_error", 504: "timeout_error",
}


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
      status: of HTTP.
      message: What was found, what was expected, what to change.
      param: the field of the request that is wrong.
      code: a word for programs.
      headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self._param, self._code = param, code

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": str(self), "type": kind, "param": self._param, "code": self._code,
            }
        }
