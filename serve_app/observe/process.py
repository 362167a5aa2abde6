"""Sets up logs, traces and metrics at the start of each process of a server."""

import asyncio
from concurrent.futures import Future
from time import perf_counter

from ray import serve
from ray.serve.exceptions import RayServeException

from cluster import logs, node_metrics
from cluster.node_sockets import node_folder
from serve_app.observe import traces
from serve_app.observe.metrics import Metrics


def observe_process(name: str) -> None:
    """Raises: TracesError."""
    logs.set_up(name)
    traces.set_up(name)


def publish(metrics: Metrics, *, of_pool: bool = False) -> None:
    """Shows the metrics of this replica or gateway at the node's address. Called on the event loop that counts.

    Args:
        of_pool: whether the label `pool` is the application's name. A gateway has series of all pools.
    """
    try:
        context = serve.get_replica_context()
    except RayServeException:  # a test or a benchmark without Serve
        return
    labels = f'replica="{context.replica_id.unique_id}"' + (f',pool="{context.app_name}"' if of_pool else "")
    loop = asyncio.get_running_loop()
    node_metrics.publish(node_folder(), lambda: node_metrics.labelled(_exposition(metrics, loop), labels).encode())


def _exposition(metrics: Metrics, loop: asyncio.AbstractEventLoop) -> str:
    """Reads the metrics on the event loop that counts them. Raises: TimeoutError if the loop is busy for too long."""
    read, asked_at = Future[bytes](), perf_counter()

    def exposition() -> None:
        metrics.tasks.set(len(asyncio.all_tasks()))
        metrics.loop_delay.set(perf_counter() - asked_at)
        read.set_result(metrics.exposition())

    loop.call_soon_threadsafe(exposition)
    return read.result(node_metrics.TIMEOUT_S).decode()
