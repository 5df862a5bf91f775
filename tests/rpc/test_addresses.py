"""host:port with IPv6, in all the forms that people and Kubernetes write."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.config import EngineConfig
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from rpc.addresses import bare_host, join_address, normal_address, split_address
from rpc.channel import MAX_METADATA_BYTES, open_channel
from rpc.config import ProcessConfig
from rpc.server import RpcServer


@pytest.mark.parametrize(
    ("address", "host", "port", "normal"),
    [
        ("hostA:7001", "hostA", 7001, "hostA:7001"),
        ("10.0.0.1:1", "10.0.0.1", 1, "10.0.0.1:1"),
        ("[::1]:7001", "::1", 7001, "[::1]:7001"),
        ("::1:7001", "::1", 7001, "[::1]:7001"),
        ("fd00:10:244::5:7001", "fd00:10:244::5", 7001, "[fd00:10:244::5]:7001"),
        ("[fe80::1%eth0]:7001", "fe80::1%eth0", 7001, "[fe80::1%eth0]:7001"),
    ],
)
def test_addresses_of_both_kinds(address, host, port, normal):
    assert split_address(address) == (host, port)
    assert normal_address(address) == normal
    assert join_address(host, port) == join_address(f"[{host}]", port) == normal
    assert bare_host(f"[{host}]") == bare_host(host) == host


@pytest.mark.parametrize("address", ["", "host", "host:", ":7001", "host:0", "host:70000", "http://host:1", "a:b:7001"])
def test_what_is_no_address_gets_a_sentence(address):
    with pytest.raises(ValueError, match=r"must look like host:port or \[IPv6\]:port"):
        split_address(address)


def test_a_flag_with_a_wrong_address_is_named():
    with pytest.raises(ValueError, match=r"--prefill: 'a:b:7001' must look like .* or dns:///name:port"):
        RouterConfig(model="m", prefill=("hostA:7001,a:b:7001",))
    RouterConfig(model="m", prefill=("::1:7001", "dns:///[::1]:7001", "dns:///workers:7001"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_a_worker_that_listens_everywhere_needs_an_address_of_its_own(host):
    process = ProcessConfig(host=host)
    with pytest.raises(ValueError, match="give --advertise-address"):
        PrefillConfig(engine=EngineConfig(model="m"), process=process)
    with pytest.raises(ValueError, match=r"--advertise-address: 'here' must look like"):
        PrefillConfig(engine=EngineConfig(model="m"), process=process, advertise_address="here")
    PrefillConfig(engine=EngineConfig(model="m"), process=process, advertise_address="fd00::5:7001")


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
async def test_a_server_on_ipv6_is_reached_at_its_address(host):
    server = RpcServer(host, 0, [])
    await server.start()
    try:
        async with open_channel(join_address("::1", server.port)) as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
        assert server.address == join_address(host, server.port)
    finally:
        await server.stop(0)


async def test_headers_of_a_call_have_a_stated_size_not_a_random_one():
    server = RpcServer("127.0.0.1", 0, [])
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(8):  # gRPC's own limit is between 8 and 16 KiB, by chance
                ask = health_pb2.HealthCheckRequest()
                await stub.Check(ask, metadata=(("x", "a" * (MAX_METADATA_BYTES - 2000)),), timeout=10)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Check(ask, metadata=(("x", "a" * (MAX_METADATA_BYTES + 2000)),), timeout=10)
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        await server.stop(0)
