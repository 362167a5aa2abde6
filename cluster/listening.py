"""Limits the addresses and the message sizes of Ray Serve's own servers, for which Ray has no settings.

Ray opens gRPC on all interfaces, independent of Serve's host. On a server of one machine no other machine needs these ports,
because only HAProxy listens for clients. Ray calls `keep_private` in every process that will listen
(`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`).
"""

import os
from importlib import import_module
from typing import Any

from cluster.haproxy import ALONE_VARIABLE

_RECEIVE = "grpc.max_receive_message_length"


def keep_private() -> list[Any]:
    """Makes the gRPC servers of this process listen on 127.0.0.1, on a server of one machine. Returns no middlewares."""
    if ALONE_VARIABLE not in os.environ:
        return []
    default_impl: Any = import_module("ray.serve._private.default_impl")
    replica: Any = import_module("ray.serve._private.replica")

    def add_grpc_address(server: Any, address: str) -> None:
        server.add_insecure_port(_on_this_machine(address))

    default_impl.add_grpc_address = add_grpc_address
    if getattr(replica.add_port_to_grpc_server, "__module__", "") != __name__:
        add_port = replica.add_port_to_grpc_server

        def add_port_to_grpc_server(server: Any, address: str) -> int:
            port: int = add_port(server, _on_this_machine(address))
            return port

        replica.add_port_to_grpc_server = add_port_to_grpc_server
    return []


def limit_messages(most_bytes: int) -> None:
    """Makes gRPC servers that start later in this process refuse longer messages before they are received."""
    from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS as OPTIONS

    OPTIONS[:] = [(name, most_bytes if name == _RECEIVE else value) for name, value in OPTIONS]


def _on_this_machine(address: str) -> str:
    """The address `[::]:PORT`, changed to an address that only this machine can reach."""
    return f"127.0.0.1:{address.rpartition(':')[2]}"
