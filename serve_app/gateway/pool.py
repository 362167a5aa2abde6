"""One pool for the gateway's models: an outbox that joins requests into calls, and the connection that sends the calls."""

from collections.abc import Sequence
from math import nan
from time import monotonic
from typing import Any

from cluster.router import PoolLoad, Ticket
from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.schedule.stream import Stream
from serve_app.admission.qos import Qos
from serve_app.gateway.config import PoolRef
from serve_app.gateway.connection import PoolConnection
from serve_app.gateway.outbox import Outbox
from serve_app.gateway.remote import LOST
from serve_app.models import PoolInfo, replica_overview
from serve_app.observe.metrics import Metrics


class PoolClient:
    """Sends requests to the replicas of one pool."""

    def __init__(self, ref: PoolRef, kind: type[PoolLoad]) -> None:
        self.ref = ref
        self.connection = PoolConnection(ref, kind)
        self.load = self.connection.load
        self._outbox = Outbox(self.connection.send, self.connection.max_tokens, self.connection.has_room)

    @property
    def state(self) -> str:
        if self.load.heard:
            return "ready"
        return "asleep" if self.connection.connected and self.ref.sleeps else "starting"

    async def embed(
        self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos, ticket: Ticket, alone: bool = False
    ) -> Embeddings:
        """Computes on the replica that should finish first. With `alone` no other request is in the same call.

        Raises: the engine's error, or one of `connection.LOST`.
        """
        self.load.opened(ticket)  # before the first await: the next request's routing counts this one
        try:
            if alone:
                (answer,) = await self.connection.send([(sequences, options, qos)], [ticket])
                if isinstance(answer, Exception):
                    raise answer
                return answer
            return await self._outbox.put((sequences, options, qos), ticket)
        finally:
            self.load.finished(ticket, monotonic(), failed=None)  # does nothing if the connection has closed or replaced it

    async def generate(self, stream: Stream, ticket: Ticket) -> None:
        """Like `PoolConnection.generate`."""
        self.load.opened(ticket)
        failed: bool | None = None
        try:
            await self.connection.generate(stream, ticket)
            failed = None if stream.future.cancelled() else False
        except LOST:
            failed = True
            raise
        finally:
            self.load.finished(ticket, monotonic(), failed=failed)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens/s of the replicas together: measured rates, or else the plan's. None if a replica has neither."""
        rates = [each.report.tokens_per_s or self.ref.tokens_per_s for each in self.load.heard]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if len(known) == len(rates) else None

    @property
    def queued_tokens(self) -> float:
        """As `PoolLoad.waiting_tokens`."""
        return self.load.waiting_tokens(monotonic())

    @property
    def pages_held(self) -> int:
        """Pages of the KV caches that streams hold."""
        return sum(each.report.pages_held for each in self.load.heard)

    @property
    def info(self) -> PoolInfo:
        dtypes, revisions = (tuple(sorted(each)) for each in (self.load.dtypes, self.load.revisions))
        return PoolInfo(self.ref.name, self.ref.node_class, dtypes, revisions)

    def describe(self) -> dict[str, Any]:
        """The pool's entry in `GET /v1/models`."""
        heard, rate = self.load.heard, self.tokens_per_s
        return {
            "name": self.ref.name,
            "node_class": self.ref.node_class,
            "state": self.state,
            "replicas": len(heard),
            "queued_tokens": round(self.queued_tokens),
            "tokens_per_s": None if rate is None else round(rate),
            "busy": round(sum(each.report.busy for each in heard) / max(1, len(heard)), 2),
        }

    def overview(self) -> dict[str, Any]:
        """The pool, as data for the console. Its replicas are those that report."""
        heard = [(name, each.report) for name, each in self.load.replicas.items() if self.load.is_heard(name)]
        return self.describe() | {"replicas": [replica_overview(name, report) for name, report in heard]}

    def show_in(self, metrics: Metrics, model: str) -> None:
        metrics.watch_pool(
            model,
            self.ref.name,
            self.ref.sleeps,
            lambda: len(self.load.heard),
            lambda: self.queued_tokens,
            lambda: nan if (rate := self.tokens_per_s) is None else rate,
        )

    def show_pages_in(self, metrics: Metrics, model: str) -> None:
        metrics.watch_pool_pages(model, self.ref.name, lambda: self.pages_held)
