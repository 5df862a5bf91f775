"""Errors of requests: gRPC status codes with `google.rpc` details, never text in a response with status OK."""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

LONGEST_QUOTE = 200
"""Most characters that an error quotes of a client's input."""
LONGEST_MESSAGE = 1000
"""Most characters of an error message. HTTP/2 trailers carry it twice, and receivers limit trailers to a few KB."""


def quoted(text: str) -> str:
    """A client's input, truncated for an error message."""
    return repr(text) if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]!r}... ({len(text)} characters)"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."


class RequestError(Exception):
    """A request can't be served. Has the status and message for the client."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason = ""
    """OpenAI's `error.code` for this error. Empty: derived from the status."""

    def __init__(self, message: str) -> None:
        self.message = _cut(message, LONGEST_MESSAGE)
        super().__init__(self.message)

    def details(self) -> list[error_details_pb2.BadRequest | error_details_pb2.RetryInfo]:
        """Machine-readable details, from google/rpc/error_details.proto."""
        return []

    async def abort(self, context: grpc.aio.ServicerContext) -> NoReturn:  # type: ignore[type-arg]
        """Ends a call with this error."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details():
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        await context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("abort_with_status always raises")


class InvalidArgument(RequestError):
    """A field has an invalid or unsupported value."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, description: str, reason: str = "invalid_value") -> None:
        """field: path of the field in the request, for example "sampling.top_p"."""
        self.field, self.description = _cut(field, LONGEST_QUOTE), _cut(description, LONGEST_MESSAGE)
        super().__init__(f"{self.field}: {self.description}")
        self.reason = reason

    def details(self) -> list[error_details_pb2.BadRequest | error_details_pb2.RetryInfo]:
        """Names the field."""
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.description)
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class NotFound(RequestError):
    """The named thing does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RequestError):
    """The id is in use."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unavailable(RequestError):
    """No worker could serve the request."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(RequestError):
    """The client's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ResourceExhausted(RequestError):
    """The system is overloaded, or the request is too large for it."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_seconds = 1.0
    """Seconds after which a retry makes sense."""

    def details(self) -> list[error_details_pb2.BadRequest | error_details_pb2.RetryInfo]:
        """Names the time for a retry."""
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(int(self.retry_seconds * 1e3))
        return [info]


class Internal(RequestError):
    """A bug or failure of the system."""

    code = grpc.StatusCode.INTERNAL


class Cancelled(RequestError):
    """The client cancelled the request."""

    code = grpc.StatusCode.CANCELLED


class Refused(RequestError):
    """A worker rejected the request as invalid, although the router accepted it."""

    code = grpc.StatusCode.INVALID_ARGUMENT
