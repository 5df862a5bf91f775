"""What an error carries over the wire: code, details, and texts cut to what trailers hold."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from rpc import errors
from rpc.errors import LONGEST_MESSAGE, LONGEST_QUOTE, InvalidArgument, RequestError, ResourceExhausted, quoted

CODES = {
    "RequestError": "INTERNAL",
    "NotFound": "NOT_FOUND",
    "AlreadyExists": "ALREADY_EXISTS",
    "Unavailable": "UNAVAILABLE",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "ResourceExhausted": "RESOURCE_EXHAUSTED",
    "Internal": "INTERNAL",
    "Cancelled": "CANCELLED",
    "Refused": "INVALID_ARGUMENT",
}


class Context:
    """Keeps the status that a call is aborted with, as gRPC does."""

    async def abort_with_status(self, status):
        self.status = status
        raise grpc.RpcError


def sent(error):
    """The `google.rpc.Status` of an aborted call."""
    context = Context()
    with pytest.raises(grpc.RpcError):
        asyncio.run(error.abort(context))
    assert (context.status.code, context.status.details) == (error.code, error.message)
    [(_, packed)] = context.status.trailing_metadata
    return status_pb2.Status.FromString(packed)


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_code_and_message(name, code):
    error = getattr(errors, name)("why")
    assert (error.code, error.message, str(error)) == (grpc.StatusCode[code], "why", "why")
    status = sent(error)
    assert (status.code, status.message) == (grpc.StatusCode[code].value[0], "why")


def test_every_class_is_in_the_table():
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RequestError)}
    assert {cls.__name__ for cls in classes} == CODES.keys() | {"InvalidArgument"}


def test_invalid_argument_names_the_field():
    error = InvalidArgument("sampling.top_p", "is 2", "too_large")
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "too_large")
    assert error.message == "sampling.top_p: is 2"
    [detail] = sent(error).details
    bad = error_details_pb2.BadRequest()
    assert detail.Unpack(bad)
    [violation] = bad.field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "is 2")
    assert InvalidArgument("a", "b").reason == "invalid_value"


def test_resource_exhausted_says_when_to_try_again():
    error = ResourceExhausted("full")
    error.retry_seconds = 2.5
    [detail] = sent(error).details
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert ResourceExhausted("full").retry_seconds == 1.0


@pytest.mark.parametrize(
    ("length", "expected"), [(LONGEST_MESSAGE, LONGEST_MESSAGE), (LONGEST_MESSAGE + 1, LONGEST_MESSAGE + len("..."))]
)
def test_long_messages_are_cut(length, expected):
    message = RequestError("x" * length).message
    assert len(message) == expected
    assert message.endswith("...") is (length > LONGEST_MESSAGE)


def test_long_fields_and_descriptions_are_cut():
    error = InvalidArgument("f" * 10_000, "d" * 10_000)
    assert error.field == "f" * LONGEST_QUOTE + "..."
    assert error.description == "d" * LONGEST_MESSAGE + "..."
    assert error.message.startswith(f"{error.field}: d")
    assert len(error.message) == LONGEST_MESSAGE + 3
    assert sent(error).ByteSize() < 3000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "'a'"),
        ("a\n", r"'a\n'"),
        ("a" * LONGEST_QUOTE, repr("a" * LONGEST_QUOTE)),
        ("a" * (LONGEST_QUOTE + 1), f"{'a' * LONGEST_QUOTE!r}... ({LONGEST_QUOTE + 1} characters)"),
    ],
)
def test_quoted(text, expected):
    assert quoted(text) == expected
