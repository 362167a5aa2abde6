"""Calls replicas through Serve's handles, and defines the errors of a lost replica."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

import grpc
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.serve.exceptions import RayServeException, RequestCancelledError

from engine.errors import DeviceLost, EngineStopped

# Errors of a lost replica or node. The request was not answered, and another replica can answer it.
LOST = (RayActorError, RayServeException, RequestCancelledError, EngineStopped, DeviceLost)


# gRPC's texts for a connection that the other side has closed.
_CLOSED = ("closed", "reset", "broken pipe")


class Lost(EngineStopped):
    """The replica that has the request is gone, or has stopped reporting while other replicas report."""


class Elsewhere(Lost):
    """Another replica continues the request. No replica has died with it."""


class Stopping(Elsewhere):
    """The replica stops gracefully."""


class NoReplica(Elsewhere):
    """The request waits for a pool's first replica, and another pool of the model has one now."""


class Unreachable(Lost):
    """The replica is gone, and the request was not sent to it. So the request is not the reason."""


class ReplicaDied(Lost):
    """The replica's process or device died while the request was in flight there."""

    def __init__(self, replica: str, reason: BaseException) -> None:
        super().__init__(f"replica {replica} died: {reason!r}")
        self.replica = replica


def has_died(error: BaseException | None) -> bool:
    """Whether the error means that a replica died with the request. The loss of a whole node is no request's fault.

    When a process ends, its connections are closed. When a node is lost, they stay open or time out.
    """
    match error:
        case ActorDiedError():
            return "its node has died" not in str(error)
        case ActorUnavailableError(__context__=grpc.aio.AioRpcError() as reason):
            return any(word in (reason.details() or "").lower() for word in _CLOSED)
        case _:
            return isinstance(error, DeviceLost)


def remote(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `method.remote(...)` in a new context.

    Otherwise all calls of one HTTP request would share the request id. Serve's router distinguishes waiting calls by this id, and
    would never send the second one.
    """
    return Context().run(method.remote, *args, **kwargs)


_background: set["asyncio.Task[None]"] = set()


def in_background(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Runs `work` as a task that nobody awaits, outside of the current request's context."""
    task = asyncio.get_running_loop().create_task(work, context=Context())
    _background.add(task)  # the event loop keeps only a weak reference
    task.add_done_callback(_background.discard)
    return task


def drop(response: Any, waiting: "asyncio.Future[Any]") -> None:
    """Cancels a call, and the task that waits for its response.

    Serve gives the task of a cancelled call an exception. If nobody reads the exception, asyncio logs a traceback.
    """
    waiting.cancel()
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    response.cancel()
