"""gRPC's standard health service, `grpc.health.v1`. It needs no API key."""

from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2

from serve_app.compute.service import Service
from serve_app.compute.tasks import can_rerank
from serve_app.errors import Unhealthy, UnknownRoute
from serve_app.grpc.calls import Context, end_with_error

_HEALTH = health_pb2.HealthCheckResponse
_ALWAYS = ("tei.v1.Info", "tei.v1.Tokenize")  # these services need no engine


class HealthServicer:
    """The health service's methods over one backend."""

    _service: Service

    async def Check(self, request: health_pb2.HealthCheckRequest, grpc_context: Context) -> health_pb2.HealthCheckResponse:
        """The status of one service, or of the server if the request names none."""
        statuses = await self._statuses()
        if request.service not in statuses:
            end_with_error(grpc_context, UnknownRoute(f"there is no service {request.service}", 404))
            return _HEALTH()
        return _HEALTH(status=statuses[request.service])

    async def List(self, request: health_pb2.HealthListRequest, grpc_context: Context) -> health_pb2.HealthListResponse:
        statuses = await self._statuses()
        return health_pb2.HealthListResponse(statuses={name: _HEALTH(status=each) for name, each in statuses.items()})

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Not implemented, and clients take that for healthy. The load balancer watches the replicas; an endless stream would
        delay each redeploy (docs/decisions/018)."""
        grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        grpc_context.set_details("ask grpc.health.v1.Health/Check")
        return
        yield

    async def _statuses(self) -> dict[str, int]:
        """The status of each service; the server's has an empty name. A service that the model cannot do is NOT_SERVING."""
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
