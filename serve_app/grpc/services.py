"""Registers the services of Ray Serve's gRPC ingress. Serve calls `add_services` in each process (`Settings.grpc_options`).

Serve's proxy imports this file, so it must not import the engine.
"""

from typing import Any

from grpc_health.v1 import health_pb2_grpc

from serve_app.grpc import tei_pb2_grpc
from serve_app.grpc.unread import UnreadMessages


def add_services(servicer: Any, server: Any) -> None:
    """Registers TEI's services and the standard health service. Serve adds reflection.

    All methods get their messages as unparsed bytes. We parse a message only for a caller with a key. gRPC itself would answer
    UNKNOWN to bytes that do not parse.
    """
    for add in (
        health_pb2_grpc.add_HealthServicer_to_server,
        tei_pb2_grpc.add_InfoServicer_to_server,
        tei_pb2_grpc.add_EmbedServicer_to_server,
        tei_pb2_grpc.add_PredictServicer_to_server,
        tei_pb2_grpc.add_RerankServicer_to_server,
        tei_pb2_grpc.add_TokenizeServicer_to_server,
    ):
        add(servicer, UnreadMessages(server))
