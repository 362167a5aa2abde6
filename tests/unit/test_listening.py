"""Ray's gRPC servers on a server of one machine: they listen on 127.0.0.1 and take no long message."""

from importlib import import_module
from typing import Any

import pytest

from cluster.listening import keep_private, limit_messages

constants: Any = import_module("ray.serve._private.constants")
default_impl: Any = import_module("ray.serve._private.default_impl")
replica: Any = import_module("ray.serve._private.replica")


class Server:
    def __init__(self) -> None:
        self.addresses: list[str] = []

    def add_insecure_port(self, address: str) -> int:
        self.addresses.append(address)
        return 7


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test changes Ray's modules. These calls make pytest restore them."""
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    monkeypatch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)
    monkeypatch.setattr(constants, "DEFAULT_GRPC_SERVER_OPTIONS", list(constants.DEFAULT_GRPC_SERVER_OPTIONS))


def _listened() -> list[str]:
    server: Any = Server()
    default_impl.add_grpc_address(server, "[::]:31001")
    assert replica.add_port_to_grpc_server(server, "[::]:0") == 7
    addresses: list[str] = server.addresses
    return addresses


def test_a_server_on_one_machine_keeps_grpc_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERFORGE_ON_ONE_MACHINE", "0.0.0.0")
    assert keep_private() == keep_private() == []
    assert _listened() == ["127.0.0.1:31001", "127.0.0.1:0"]


def test_a_node_of_a_cluster_listens_as_ray_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERFORGE_ON_ONE_MACHINE", raising=False)
    keep_private()
    assert _listened() == ["[::]:31001", "[::]:0"]


def test_messages_have_a_limit_on_their_way_in() -> None:
    before = dict(constants.DEFAULT_GRPC_SERVER_OPTIONS)
    limit_messages(1000)
    after = dict(constants.DEFAULT_GRPC_SERVER_OPTIONS)
    assert after == before | {"grpc.max_receive_message_length": 1000}
