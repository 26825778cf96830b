"""Errors that are sent to clients, in the format of OpenAI's API."""

from collections.abc import Mapping
from typing import Any

# Type of an error by its HTTP status; "invalid_request_error" for all others.
_TYPES = {
    401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error",
    500: "server_error", 503: "service_unavailable_error", 504: "timeout_error",
}


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
      status: HTTP status.
      message: What was found, what was expected and what to change.
      param: Field of the request that is invalid.
      code: Machine-readable code of the error.
      headers: HTTP headers of the answer.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self._param, self._code = param, code

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": str(self), "type": kind, "param": self._param, "code": self._code,
            }
        }
