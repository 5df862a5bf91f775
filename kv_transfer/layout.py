"""Checks that a pair of workers can exchange pages: both must have equal fingerprints."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kv_transfer.errors import LayoutMismatch
from protos import kv_pb2

PROTOCOL_VERSION = 5


@dataclass(frozen=True)
class Fingerprint:
    """Properties that the bytes of a page depend on. The wire form is `kv.proto: Fingerprint`, with the same names."""

    model_config_hash: str
    weights_hash: str
    tokenizer_hash: str
    dtype: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_axes: str
    rope: str
    max_model_len: int
    quantization: str
    protocol_version: int = PROTOCOL_VERSION

    def to_proto(self) -> kv_pb2.Fingerprint:
        """The wire form."""
        return kv_pb2.Fingerprint(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: kv_pb2.Fingerprint) -> Fingerprint:
        """From the wire form."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


def check_equal(prefill: Fingerprint, decode: Fingerprint) -> None:
    """Raises LayoutMismatch naming every field that differs, with both values."""
    differing = [
        f"{f.name} (prefill {getattr(prefill, f.name)}, decode {getattr(decode, f.name)})"
        for f in fields(Fingerprint)
        if getattr(prefill, f.name) != getattr(decode, f.name)
    ]
    if differing:
        raise LayoutMismatch(f"prefill and decode differ in {', '.join(differing)}")
