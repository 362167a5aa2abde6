"""Calls to replicas through Serve's handles."""

import asyncio
import gc
import weakref
from typing import Any

import grpc
import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import RequestCancelledError

from serve_app.gateway.remote import drop, has_died, in_background


class Response:
    """A response that never comes. Once it is cancelled, it raises its own exception in the waiting task, as Serve's does."""

    def __init__(self) -> None:
        self.cancelled = False

    async def __call__(self) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise (RequestCancelledError("a") if self.cancelled else asyncio.CancelledError) from None

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.slow
def test_a_dropped_call_leaves_no_exception_for_the_log() -> None:
    logged: list[Any] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        response = Response()
        waiting = asyncio.ensure_future(response())
        await asyncio.sleep(0)
        drop(response, waiting)
        await asyncio.wait({waiting})
        assert response.cancelled
        del waiting
        gc.collect()

    asyncio.run(scenario())
    assert logged == []


@pytest.mark.parametrize(
    ("details", "expected"),
    [("Socket closed", True), ("recvmsg:Connection reset by peer", True), ("Deadline Exceeded", False), (None, False)],
)
def test_a_closed_connection_is_the_death_of_a_process(details: str | None, expected: bool) -> None:
    error = ActorUnavailableError("the connection was lost", None)
    error.__context__ = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert has_died(error) is expected


def test_a_task_in_the_background_runs_to_its_end_and_leaves_nothing() -> None:
    async def scenario() -> None:
        over = asyncio.Event()

        async def work() -> None:
            await asyncio.sleep(0)
            over.set()

        task = weakref.ref(in_background(work()))
        await over.wait()
        await asyncio.sleep(0)
        gc.collect()
        assert task() is None

    asyncio.run(scenario())
