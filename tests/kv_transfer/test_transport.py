"""One class of tests for every transport: the fake and the real one keep the same promises."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from kv_transfer import nixl_transport
from kv_transfer.base import PageRegion, WriteState
from kv_transfer.errors import PeerLost, TransferError, TransportUnavailable
from kv_transfer.local_transport import LocalHub, LocalTransport
from kv_transfer.nixl_transport import NixlTransport

NUM_PAGES, PAGE_BYTES = 16, 4096
_counter = iter(range(1_000_000))


class Side:
    """A transport over a pool of bytes."""

    def __init__(self, make, name, page_bytes=PAGE_BYTES, num_layer_groups=1):
        self.memory = np.zeros((NUM_PAGES, page_bytes), dtype=np.uint8)
        self.name = f"{name}/{next(_counter)}"
        region = PageRegion(self.memory.ctypes.data, NUM_PAGES, page_bytes, num_layer_groups=num_layer_groups)
        self.transport = make(self.name, region)


def make_local_factory():
    hub = LocalHub()
    return lambda name, region: LocalTransport(hub, name, region)


@pytest.fixture(params=["local", "nixl"])
def make(request):
    return make_local_factory() if request.param == "local" else NixlTransport


@pytest.fixture
def pair(make):
    writer, owner = Side(make, "writer"), Side(make, "owner")
    writer.transport.connect(owner.transport.endpoint())
    yield writer, owner
    writer.transport.close()
    owner.transport.close()


def drive(writer, owner, handles, seconds=10.0):
    """Polls both sides until all writes are terminal. Returns the owner's notifications."""
    heard = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        states = [handle.poll() for handle in handles]
        writer.transport.take_notifications()
        heard += owner.transport.take_notifications()
        if all(state is not WriteState.IN_PROGRESS for state in states):
            for _ in range(200):
                heard += owner.transport.take_notifications()
                writer.transport.take_notifications()
                if len(heard) >= len(handles):
                    break
                time.sleep(0.001)
            return heard
    raise AssertionError("writes did not end")


class TestTransport:
    def test_pages_arrive_where_they_should_and_nowhere_else(self, pair):
        writer, owner = pair
        writer.memory[:] = np.arange(NUM_PAGES, dtype=np.uint8)[:, None] + 100
        handle = writer.transport.write(owner.name, [3, 4, 9], [0, 1, 15], b"done")
        [heard] = drive(writer, owner, [handle])
        assert (heard.sender, heard.payload) == (writer.name, b"done")
        assert handle.poll() is WriteState.DONE
        assert [owner.memory[page, 0] for page in (0, 1, 15)] == [103, 104, 109]
        assert (owner.memory[[0, 1, 15]] == owner.memory[[0, 1, 15], :1]).all()
        assert owner.memory[2:15].sum() == 0

    @pytest.mark.parametrize("owner_groups", [1, 3], ids=["owner uncut", "owner cut otherwise"])
    def test_a_layer_group_is_written_by_itself(self, make, owner_groups):
        writer, owner = Side(make, "writer", num_layer_groups=4), Side(make, "owner", num_layer_groups=owner_groups)
        writer.transport.connect(owner.transport.endpoint())
        expected = np.zeros_like(owner.memory)
        size = PAGE_BYTES // 4
        for number, group in enumerate((2, 0, 3), start=1):
            writer.memory[:] = number * 10 + np.arange(NUM_PAGES, dtype=np.uint8)[:, None]
            handle = writer.transport.write(owner.name, [3, 4, 9], [0, 1, 15], b"", group)
            assert drive(writer, owner, [handle]) == []
            for local, remote in zip((3, 4, 9), (0, 1, 15), strict=True):
                expected[remote, group * size : (group + 1) * size] = number * 10 + local
            assert (owner.memory == expected).all()
        # Whole pages go as before.
        handle = writer.transport.write(owner.name, [5], [7], b"whole")
        assert [n.payload for n in drive(writer, owner, [handle])] == [b"whole"]
        assert (owner.memory[7] == writer.memory[5]).all()
        writer.transport.close()
        owner.transport.close()

    def test_a_notification_never_comes_before_its_data(self, pair):
        writer, owner = pair
        for round_number in range(1, 40):
            writer.memory[:] = round_number
            handle = writer.transport.write(owner.name, range(NUM_PAGES), range(NUM_PAGES), b"x")
            while True:
                handle.poll()
                if owner.transport.take_notifications():
                    break
            assert (owner.memory == round_number).all()
            drive(writer, owner, [])

    def test_many_open_writes_all_end_and_all_are_heard(self, pair):
        writer, owner = pair
        writer.memory[:] = 7
        handles = [writer.transport.write(owner.name, [i], [i], str(i).encode()) for i in range(NUM_PAGES)]
        heard = drive(writer, owner, handles)
        assert sorted(int(n.payload) for n in heard) == list(range(NUM_PAGES))
        assert (owner.memory == 7).all()

    def test_messages_without_data_arrive(self, pair):
        writer, owner = pair
        writer.transport.notify(owner.name, b"hello")
        end = time.monotonic() + 5
        heard = []
        while not heard and time.monotonic() < end:
            writer.transport.take_notifications()
            heard = owner.transport.take_notifications()
        assert [n.payload for n in heard] == [b"hello"]

    def test_connecting_twice_is_harmless(self, pair):
        writer, owner = pair
        writer.transport.connect(owner.transport.endpoint())
        handle = writer.transport.write(owner.name, [0], [0], b"")
        drive(writer, owner, [handle])
        assert handle.poll() is WriteState.DONE

    def test_an_unknown_peer_is_lost(self, pair):
        writer, _ = pair
        with pytest.raises(PeerLost, match="stranger"):
            writer.transport.write("stranger", [0], [0], b"")
        with pytest.raises(PeerLost, match="stranger"):
            writer.transport.notify("stranger", b"")
        writer.transport.disconnect("stranger")

    def test_a_forgotten_peer_can_be_connected_again(self, pair):
        writer, owner = pair
        writer.transport.disconnect(owner.name)
        with pytest.raises(PeerLost):
            writer.transport.write(owner.name, [0], [0], b"")
        writer.transport.connect(owner.transport.endpoint())
        writer.memory[0] = 9
        handle = writer.transport.write(owner.name, [0], [0], b"")
        drive(writer, owner, [handle])
        assert owner.memory[0, 0] == 9

    def test_pages_of_another_size_are_refused(self, make):
        writer, owner = Side(make, "writer"), Side(make, "owner", page_bytes=2 * PAGE_BYTES)
        with pytest.raises(TransferError, match="pages of 8192 bytes, this worker of 4096"):
            writer.transport.connect(owner.transport.endpoint())


def test_nixl_says_why_it_can_not_start(monkeypatch, tmp_path):
    """Casebook C109; in a process of its own, since UCX reads its settings once."""
    import subprocess
    import sys

    code = (
        "import numpy as np\n"
        "from kv_transfer.base import PageRegion\n"
        "from kv_transfer.errors import TransportUnavailable\n"
        "from kv_transfer.nixl_transport import NixlTransport\n"
        "m = np.zeros(4096, dtype=np.uint8)\n"
        "try:\n    NixlTransport('a', PageRegion(m.ctypes.data, 1, 4096))\n"
        "except TransportUnavailable as error:\n    print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"UCX_TLS": "nonsense", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "refused: NIXL with UCX can't start" in done.stdout, done.stdout + done.stderr
    assert "UCX_TLS=nonsense" in done.stdout


def test_rdma_only_needs_a_device_and_never_allows_tcp(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl_transport, "RDMA_DEVICES", tmp_path)
    with pytest.raises(TransportUnavailable, match="--require-rdma, but this machine has no RDMA device"):
        nixl_transport._forbid_tcp()
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setenv("UCX_TLS", "rc,tcp")
    with pytest.raises(TransportUnavailable, match="UCX_TLS=rc,tcp allows tcp"):
        nixl_transport._forbid_tcp()
    monkeypatch.setenv("UCX_TLS", "all")
    with pytest.raises(TransportUnavailable, match="UCX_TLS=all allows tcp"):
        nixl_transport._forbid_tcp()
    for before, after in (("", "^tcp"), ("^sm", "^sm,tcp"), ("rc,sm", "rc,sm")):
        monkeypatch.setenv("UCX_TLS", before)
        nixl_transport._forbid_tcp()
        assert os.environ["UCX_TLS"] == after
