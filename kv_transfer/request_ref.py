"""Identifies one attempt of a request."""

from __future__ import annotations

from typing import NamedTuple

from protos import kv_pb2


class RequestRef(NamedTuple):
    """See `kv.proto: RequestRef`. Hashable."""

    request_id: str
    attempt: int

    @classmethod
    def from_proto(cls, message: kv_pb2.RequestRef) -> RequestRef:
        """From the wire form."""
        return cls(message.request_id, message.attempt)

    def to_proto(self) -> kv_pb2.RequestRef:
        """The wire form."""
        return kv_pb2.RequestRef(request_id=self.request_id, attempt=self.attempt)

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"
