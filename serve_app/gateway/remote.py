"""Calls to replicas through Serve's handles, and the errors of a replica that is gone."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException, RequestCancelledError

from engine.errors import DeviceLost, EngineStopped

# Errors of a lost replica or node. The request was not answered, and another replica can answer it.
LOST = (RayActorError, RayServeException, RequestCancelledError, EngineStopped, DeviceLost)


class Lost(EngineStopped):
    """The replica that has the request is gone, or has stopped reporting while other replicas report."""


def remote(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `method.remote(...)` in a context of its own.

    Calls out of one HTTP request would share the request id. Serve's router tells waiting calls apart by this id, and would
    never send the second one.
    """
    return Context().run(method.remote, *args, **kwargs)


_background: set["asyncio.Task[None]"] = set()


def in_background(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Runs `work` as a task that nobody awaits, outside of the request that begins it."""
    task = asyncio.get_running_loop().create_task(work, context=Context())
    _background.add(task)  # the event loop keeps only a weak reference
    task.add_done_callback(_background.discard)
    return task
