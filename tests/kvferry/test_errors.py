"""What a failed call of the client raises."""

from __future__ import annotations

import pickle

import grpc

from router_client.errors import KvferryError


def test_an_error_can_be_told_to_another_process():
    error = KvferryError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "prompt", 2.5)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))
