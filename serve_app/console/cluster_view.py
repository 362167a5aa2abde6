"""Collects the nodes of the cluster and their cards while somebody views the console."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.node_live import ANSWER_TIMEOUT_S, Readings, Seen
from cluster.status import ReplicaState, serve_details, serve_replicas
from serve_app.settings import GATEWAY

log = logging.getLogger(__name__)

# The least pause between two queries. Queries use at most a 400th of a core, so they are less frequent on a large cluster.
_PAUSE_S = 5.0
_PAUSES_A_LOOK = 400
# After the first query, a query waits for a node at most this long. Without an answer the node's last description stays.
_LATER_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class View:
    """The result of the last query. `at` is in seconds since the epoch, 0 before the first query."""

    at: float = 0.0
    nodes: Sequence[Seen] = ()
    replicas: Sequence[ReplicaState] = ()
    problem: str | None = None

    @property
    def num_gateways(self) -> int:
        return sum(each.pool == GATEWAY and each.state == "running" for each in self.replicas)


class ClusterView:
    """Queries the cluster on a thread, but only after somebody has read the last result."""

    def __init__(self, look: Callable[[], View] | None = None) -> None:
        """`look` is for tests."""
        self._look = look or _Look()
        self._view, self._due, self._is_looking = View(), 0.0, False

    def read(self) -> View:
        """The last result. Starts the next query if it is due. Called on the event loop."""
        if not self._is_looking and time.monotonic() >= self._due:
            self._is_looking = True
            threading.Thread(target=self._renew, name="console", daemon=True).start()
        return self._view

    def _renew(self) -> None:
        start = time.thread_time()
        try:
            self._view = self._look()
        except Exception as error:  # the page shows the error, and the server keeps running
            log.warning("the console could not query the cluster: %r", error)
            old = self._view
            self._view = View(old.at, old.nodes, old.replicas, f"{type(error).__name__}: the server's log has the details")
        self._due = time.monotonic() + max(_PAUSE_S, _PAUSES_A_LOOK * (time.thread_time() - start))
        self._is_looking = False


class _Look:
    """Asks Ray, the nodes, and Serve's controller."""

    def __init__(self) -> None:
        self._readings: Readings | None = None

    def __call__(self) -> View:
        import ray

        if not ray.is_initialized():  # a query would start a new Ray
            return View(time.time(), problem="this server runs without Ray, so it knows no nodes")
        timeout_s = _LATER_TIMEOUT_S
        if self._readings is None:
            self._readings, timeout_s = Readings(), ANSWER_TIMEOUT_S
        nodes, details = self._readings.read(timeout_s), serve_details()
        return View(time.time(), nodes, serve_replicas(details) if details else ())


# The view of this process.
CLUSTER = ClusterView()
