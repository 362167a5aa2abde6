"""The gateway's application: the API of a replica, in front of all pools of the cluster. It needs no GPU."""

import asyncio
import logging
import os
from time import monotonic
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from cluster.applied import RayStore
from cluster.listening import keep_private, limit_messages
from cluster.router import is_deaf
from cluster.updates import ask_controller, keep_listening
from engine.interpreter import switch_often
from serve_app.deployment import deployment_options
from serve_app.garbage import FEW_REQUESTS, collect_seldom, keep_little, spare_what_stays, tidy
from serve_app.gateway.config import GatewayArgs
from serve_app.gateway.facts import Facts, read_facts
from serve_app.gateway.models import PooledModels
from serve_app.grpc.servicer import TeiServicer
from serve_app.http.app import Api
from serve_app.http.server import answer_directly
from serve_app.observe.metrics import Metrics
from serve_app.observe.process import observe_process, publish

log = logging.getLogger(__name__)

_TELL_TIMEOUT_S = 5.0
# The most threads of the tokenizers library in a gateway. By default each gateway of a machine has one for each core. Then health
# checks waited up to 142 ms beside 500 large requests, and 14 ms with four threads (docs/decisions/065).
_LIBRARY_THREADS = 4


class Gateway(TeiServicer):
    """The gateway's deployment. It takes HTTP and gRPC requests, and calls the pools over wires and Serve's handles."""

    def __init__(self, args: GatewayArgs, facts: Facts) -> None:
        observe_process("gateway")
        switch_often()
        os.environ.setdefault("RAYON_NUM_THREADS", str(min(_LIBRARY_THREADS, os.cpu_count() or 1)))
        collect_seldom()
        keep_little()
        keep_private()
        keep_listening()
        limit_messages(args.settings.payload_limit)
        self._models = PooledModels(args, facts)
        self._metrics = metrics = Metrics("gateway")
        self._models.show_in(metrics)
        self._api = Api(self._models, args.settings, metrics, in_serve=True, sharing=args.gateways)
        self._models.share(self._api.service.turns)
        answer_directly(self._api.app)
        super().__init__(self._api.service)
        publish(metrics)
        spare_what_stays()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._api.app

    async def check_health(self) -> None:
        """Connects to new pools, restores Serve's updates, reports the counts of trials, and returns unused memory.

        Serve calls this every few seconds. It never raises, because a new gateway would find the same pools as this one.
        `/health` tells whether there are any.
        """
        if self._metrics.num_in_flight <= FEW_REQUESTS:
            tidy()
        await self._models.connect()
        if is_deaf(monotonic()):
            log.warning("no replica reports; testing the connection to Ray Serve's controller")
            try:
                await asyncio.to_thread(ask_controller)
            except Exception as error:  # the head may be down: Ray then finds no actor
                log.warning("Ray Serve's controller cannot be reached: %r", error)
        if self._models.has_trials:
            try:
                gateway = str(serve.get_replica_context().replica_id.unique_id)
                await asyncio.wait_for(asyncio.to_thread(self._models.tell_trials, RayStore(), gateway), _TELL_TIMEOUT_S)
            except Exception as error:  # the head may be down
                log.warning("the counts of a trial could not be reported: %r", error)

    async def __del__(self) -> None:
        await asyncio.to_thread(self._api.service.usage.write)


def build(args: GatewayArgs) -> serve.Application:
    """The gateway's application. Ray Serve calls this with the `args` of the YAML."""
    return bind(args)


def bind(args: GatewayArgs, **options: Any) -> serve.Application:
    """Like `build`, with deployment options. Benchmarks use it."""
    chosen = deployment_options(args.settings) | options
    deployment = serve.deployment(name="Gateway")(serve.ingress()(Gateway)).options(**chosen)
    application: serve.Application = deployment.bind(args, read_facts(args))
    return application
