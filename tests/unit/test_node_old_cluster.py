"""A new head finds the nodes of an older cluster first, because its start would end them."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from cluster import node_old_cluster
from cluster.files import ClusterError
from cluster.local_ray import free_port
from cluster.node_old_cluster import how_to_rejoin, refuse, waiting_nodes

GRPC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00$\x04"


@contextmanager
def knocking(port: int, hello: bytes) -> Iterator[None]:
    """A thread that connects to 127.0.0.1:port again and again, and sends `hello` on each connection."""
    ended = threading.Event()

    def knock() -> None:
        while not ended.wait(0.02):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as client:
                client.sendall(hello)
                client.recv(1)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_old_cluster, "_LISTEN_S", 0.4)
    monkeypatch.setattr(node_old_cluster, "_HELLO_S", 0.1)


@pytest.mark.parametrize(
    ("hello", "found"), [(GRPC, ("127.0.0.1",)), (b"PING\r\n", ()), (b"", ())], ids=["node", "redis", "scan"]
)
def test_a_node_that_waits_for_a_head_is_found(hello: bytes, found: tuple[str, ...]) -> None:
    port = free_port()
    with knocking(port, hello):
        assert waiting_nodes("127.0.0.1", port) == found


def test_the_port_is_free_again_at_once() -> None:
    port = free_port()
    with knocking(port, GRPC):
        assert waiting_nodes("127.0.0.1", port)
    with socket.socket() as strict:
        strict.bind(("127.0.0.1", port))  # without SO_REUSEADDR, because another program may bind so


def test_nobody_is_waited_for_without_end() -> None:
    begin = time.monotonic()
    assert waiting_nodes("127.0.0.1", free_port()) == ()
    assert time.monotonic() - begin < 5


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(Address already in use\).*--port"):
            waiting_nodes("127.0.0.1", port)


def test_a_head_that_would_end_nodes_is_refused_and_the_way_back_is_one_command() -> None:
    refuse((), "10.0.0.1", 6379)
    with pytest.raises(ClusterError, match=r"nodes at 10\.0\.0\.3, 10\.0\.0\.4 wait for a head at 10\.0\.0\.1:6379.*--replace$"):
        refuse(("10.0.0.3", "10.0.0.4"), "10.0.0.1", 6379)
    assert how_to_rejoin((), "10.0.0.1", 6379) == []
    assert how_to_rejoin(("10.0.0.3",), "10.0.0.1", 6379)[1] == (
        "  emberforge node stop; emberforge node start --address 10.0.0.1:6379"
    )
