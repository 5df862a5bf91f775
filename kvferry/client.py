"""The Python client: plain and async, streaming iterators, typed results, errors as exceptions. Does not import torch.

with Client("127.0.0.1:50051") as client:
    stream = client.generate("Once upon a time", max_tokens=50)
    for piece in stream:
        print(piece.text, end="")
    print(stream.result().usage.completion_tokens)
"""

from __future__ import annotations

from router_client.clients import AsyncClient, Client
from router_client.errors import KvferryError, to_error
from router_client.requests import Messages, Prompt, make_request
from router_client.results import KvTransfer, Piece, PositionLogprobs, Result, TokenLogprob, Usage
from router_client.streams import AsyncGenerationStream, GenerationStream
from router_client.tls import ClientTls

__all__ = [
    "AsyncClient",
    "AsyncGenerationStream",
    "Client",
    "ClientTls",
    "GenerationStream",
    "KvTransfer",
    "KvferryError",
    "Messages",
    "Piece",
    "PositionLogprobs",
    "Prompt",
    "Result",
    "TokenLogprob",
    "Usage",
    "make_request",
    "to_error",
]
