"""Errors in the format of OpenAI's API, which are sent to clients."""

from collections.abc import Mapping
from typing import Any

# Maps HTTP statuses to error types; for other statuses, the type is "invalid_request_error".
_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
      status: HTTP status.
      message: Error message with the actual value, the expected value and a suggested fix.
      param: Name of the invalid field in the request.
      code: Machine-readable error code.
      headers: HTTP headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self._param, self._code = param, code

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self._param,
                "code": self._code,
            }
        }
