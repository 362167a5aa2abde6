"""Finds the nodes of an older cluster that wait for a head at this address.

A head without Redis forgets its cluster when it ends. The other nodes keep serving, and each of them tries every second to reach
the head again. As soon as a new head answers at the old address, these nodes end with all of their replicas. So before a head
starts, this module listens at its address for connections of such nodes.
"""

import os
import select
import socket
import struct
from time import monotonic

from cluster.files import ClusterError
from cluster.node_address import host_port

# The nodes try once a second. After a machine was unreachable, the kernel's own retries may be some seconds apart.
_LISTEN_S = 4.0
_HELLO_S = 0.5
_GRPC_HELLO = b"PRI * HTTP/2.0"
# Closes the connection with a reset. Otherwise the kernel would keep the port busy for a minute.
_RESET = struct.pack("ii", 1, 0)


def waiting_nodes(ip: str, port: int) -> tuple[str, ...]:
    """The addresses of machines whose processes try to reach a head at ip:port. Listens on this port for some seconds.

    Raises: ClusterError if the port is in use.
    """
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    found: set[str] = set()
    try:
        with socket.create_server((ip, port), family=family) as server:
            deadline = monotonic() + _LISTEN_S
            while (left := deadline - monotonic()) > 0:
                if not select.select([server], [], [], left)[0]:
                    break
                client, address = server.accept()
                with client:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    if _speaks_grpc(client):
                        found.add(address[0])
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ClusterError(f"cannot listen on {host_port(ip, port)} ({reason}): choose another port with --port") from error
    return tuple(sorted(found))


def refuse(nodes: tuple[str, ...], ip: str, port: int) -> None:
    """Raises: ClusterError that names the nodes that a new head would end; nothing without such nodes."""
    if nodes:
        raise ClusterError(
            f"nodes at {', '.join(nodes)} wait for a head at {host_port(ip, port)}. They may still serve as parts of an older "
            "cluster. A new head ends them within seconds, with all of their replicas: requests then fail until the nodes have "
            "joined again and the models are deployed again. If the nodes serve nothing, or at a time with little traffic, "
            "give --replace"
        )


def how_to_rejoin(nodes: tuple[str, ...], ip: str, port: int) -> list[str]:
    """Lines for the operator: how the nodes of the older cluster join the new one. The token stays the same."""
    if not nodes:
        return []
    command = f"emberforge node stop; emberforge node start --address {host_port(ip, port)}"
    return [f"on each node of the older cluster ({', '.join(nodes)}), with the same options as before:", f"  {command}"]


def _speaks_grpc(client: socket.socket) -> bool:
    """Whether the first bytes are those of gRPC. A port scan or a client of Redis sends other bytes, or none."""
    client.settimeout(_HELLO_S)
    try:
        return client.recv(len(_GRPC_HELLO), socket.MSG_WAITALL) == _GRPC_HELLO
    except OSError:
        return False
