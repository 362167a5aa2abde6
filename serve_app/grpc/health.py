"""gRPC's standard health service, `grpc.health.v1`. It needs no API key."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from engine.errors import EmberError
from serve_app.compute.service import Service
from serve_app.compute.tasks import can_rerank
from serve_app.errors import Unhealthy, UnknownRoute
from serve_app.grpc.calls import Context, end_with_error, with_id
from serve_app.grpc.guard import parsed
from serve_app.grpc.metadata import headers
from serve_app.grpc.unread import Unread
from serve_app.observe import requests

_HEALTH = health_pb2.HealthCheckResponse
_ALWAYS = ("tei.v1.Info", "tei.v1.Tokenize")  # these services need no engine


class HealthServicer:
    """The health service's methods over one backend."""

    _service: Service

    async def Check(self, request: Unread, grpc_context: Context) -> health_pb2.HealthCheckResponse:
        """The status of one service, or of the server if the request names none."""
        try:
            name = self._parsed(request, grpc_context).service
            if (status := (await self._statuses()).get(name)) is None:
                raise UnknownRoute(f"there is no service {name}", 404)
            return _HEALTH(status=status)
        except EmberError as error:
            end_with_error(grpc_context, error)
            return _HEALTH()

    async def List(self, request: Unread, grpc_context: Context) -> health_pb2.HealthListResponse:
        try:
            self._parsed(request, grpc_context)  # only for its errors, because the message has no fields
            statuses = await self._statuses()
        except EmberError as error:
            end_with_error(grpc_context, error)
            statuses = {}
        return health_pb2.HealthListResponse(statuses={name: _HEALTH(status=each) for name, each in statuses.items()})

    async def Watch(self, request: Unread, grpc_context: Context) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Answers `unimplemented`, which clients treat as healthy. The load balancer watches the replicas. An endless stream
        would delay each redeploy (docs/decisions/018)."""
        grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        grpc_context.set_details("ask grpc.health.v1.Health/Check")
        return
        yield

    def _parsed(self, request: Unread, grpc_context: Context) -> Any:
        requests.identify(headers(grpc_context.invocation_metadata()))
        grpc_context.set_trailing_metadata(with_id({}))
        return parsed(request, self._service.settings.payload_limit)

    async def _statuses(self) -> dict[str, int]:
        """The status of each service; the server's own has an empty name. A service that the model does not support is
        NOT_SERVING."""
        try:
            await self._service.backend.check_health()
            healthy = _HEALTH.SERVING
        except Unhealthy:
            healthy = _HEALTH.NOT_SERVING
        info = self._service.backend.get(None).info
        able = {
            "tei.v1.Embed": info.embeds,
            "tei.v1.Predict": info.task in ("reranker", "classifier"),
            "tei.v1.Rerank": can_rerank(info),
        }
        always = dict.fromkeys(_ALWAYS, _HEALTH.SERVING)
        return {"": healthy, **always} | {name: healthy if each else _HEALTH.NOT_SERVING for name, each in able.items()}
