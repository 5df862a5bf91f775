"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`, with OpenAI's codes."""

from __future__ import annotations

from typing import Any

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rpc.errors import InvalidArgument, NotFound, RequestError

STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", "invalid_value"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "conflict_error", "request_id_in_use"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (408, "timeout_error", "deadline_exceeded"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "overloaded_error", "rate_limit_exceeded"),
    grpc.StatusCode.CANCELLED: (499, "cancelled_error", "cancelled"),
    grpc.StatusCode.UNAVAILABLE: (503, "unavailable_error", "service_unavailable"),
}
"""gRPC status to HTTP status, type and code. All other errors are 500, server_error."""
RETRY_SECONDS = "1"


def error_object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: RequestError) -> tuple[int, dict[str, Any]]:
    """HTTP status and error object of an error."""
    status, kind, code = STATUS.get(error.code, (500, "server_error", "internal_error"))
    param = error.field if isinstance(error, InvalidArgument) else "model" if isinstance(error, NotFound) else None
    return status, error_object(error.message, kind, param, error.reason or code)


def error_response(error: RequestError) -> Response:
    """An error as an HTTP response."""
    status, body = error_of(error)
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = RETRY_SECONDS
    if status in (408, 409):
        # OpenAI's client retries these by default, but a retry would fail again.
        headers["x-should-retry"] = "false"
    return JSONResponse(body, status, headers)


async def http_error(request: Request, error: Exception) -> Response:
    """Errors of the web framework: an unknown path, or an unsupported method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    message, code = {
        404: (f"the path {path} does not exist", "unknown_url"),
        405: (f"the path {path} does not support {request.method}", "method_not_supported"),
    }.get(error.status_code, (str(error.detail), None))
    return JSONResponse(
        error_object(message, "invalid_request_error", None, code), error.status_code, dict(error.headers or {})
    )
