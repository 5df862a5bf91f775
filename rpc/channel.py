"""Options of gRPC channels and servers, in one place so that both ends agree."""

from __future__ import annotations

import json
from typing import Any

import grpc

from rpc.tls import NAME_OPTION, TlsFiles

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million token ids is about 4 MB; this leaves room, and is documented."""

MAX_METADATA_BYTES = 32 * 1024
"""Headers of a call. gRPC refuses more by chance between two limits, unless both are the same."""

_COMMON: list[tuple[str, Any]] = [
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Every channel has a connection of its own: two sessions to one address must not share fate by accident.
    ("grpc.use_local_subchannel_pool", 1),
]
RETRY_POLICY = {
    "methodConfig": [
        {
            "name": [{"service": "kvferry.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                # What a server that ends answers to calls that it had accepted and not begun. Nothing else answers so:
                # a client that cancels its call does not wait for a status.
                "retryableStatusCodes": ["CANCELLED"],
            },
        }
    ]
}
"""gRPC's own retries, before the first message only. For clients, so that a router can be restarted under them."""
CLIENT_OPTIONS: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(RETRY_POLICY))]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    # Two servers on one port would each get half of the calls; a port in use must be an error.
    ("grpc.so_reuseport", 0),
    # Clients keep quiet channels alive; that is not abuse.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


def open_channel(address: str, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """A channel to a process of ours at `host:port`. tls: mutual TLS; raises ConfigError if its files can't be read."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*CHANNEL_OPTIONS, NAME_OPTION])
