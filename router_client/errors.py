"""What a failed call raises."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class KvferryError(Exception):
    """A call failed. Carries the gRPC status."""

    def __init__(
        self, code: grpc.StatusCode, message: str, field_name: str = "", retry_seconds: float | None = None
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        """The gRPC status code."""
        self.message = message
        """The reason as text."""
        self.field = field_name
        """The invalid field of the request, for INVALID_ARGUMENT."""
        self.retry_seconds = retry_seconds
        """When to try again, for RESOURCE_EXHAUSTED."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by what it was made of, so that a process of a pool can raise it."""
        return KvferryError, (self.code, self.message, self.field, self.retry_seconds)


def to_error(error: grpc.RpcError) -> KvferryError:
    """The exception for a failed call."""
    field_name, retry_seconds = "", None
    status = rpc_status.from_call(error) if not isinstance(error, grpc.aio.AioRpcError) else _aio_status(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field_name = bad.field_violations[0].field if bad.field_violations else ""
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            retry_seconds = info.retry_delay.ToMilliseconds() / 1e3
    call: Any = error
    return KvferryError(call.code(), call.details() or "", field_name, retry_seconds)


def _aio_status(error: grpc.aio.AioRpcError) -> Any:
    from google.rpc import status_pb2

    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return None
