"""Options of gRPC channels and servers, in one place so that both ends agree."""

from __future__ import annotations

import json
from typing import Any

import grpc

from rpc.tls import NAME_OPTION, TlsFiles

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Documented limit. A prompt of a million token ids is about 4 MB."""

MAX_METADATA_BYTES = 32 * 1024
"""Limit of a call's headers. Between gRPC's soft and hard limit rejection is random, so both get this value."""

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
    # Every channel has its own connection, so that two sessions to one address fail independently.
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
                # The status of accepted calls that had not started when a server shut down. Nothing else gives clients
                # this status: a client that cancels its call does not wait for one.
                "retryableStatusCodes": ["CANCELLED"],
            },
        }
    ]
}
"""gRPC's own retries, only before the first message. For clients, so that routers can be restarted."""
CLIENT_OPTIONS: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(RETRY_POLICY))]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    # A port in use must be an error. With so_reuseport, two servers would share the calls.
    ("grpc.so_reuseport", 0),
    # Clients may send keepalive pings on idle channels.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


def open_channel(address: str, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """A channel to a kvferry process at `host:port`. tls: mutual TLS; raises ConfigError if its files can't be read."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*CHANNEL_OPTIONS, NAME_OPTION])
