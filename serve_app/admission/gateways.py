"""Counts the processes that take the server's requests, because they share the limits of each API key."""

import logging
import threading
from time import sleep

from ray import serve
from ray.serve.exceptions import RayServeException

log = logging.getLogger(__name__)

_ASK_EVERY_S = 10.0


class Gateways:
    """The number of running replicas of this process's deployment. A thread asks Serve's controller for the number.

    While the controller does not answer, the number does not change.
    """

    def __init__(self) -> None:
        self.count = 1
        try:
            context = serve.get_replica_context()
        except RayServeException:  # a test or a benchmark runs without Serve
            return
        own = context.app_name, context.deployment
        threading.Thread(target=self._ask_for_ever, args=own, name="gateways", daemon=True).start()

    def _ask_for_ever(self, application: str, deployment: str) -> None:
        while True:
            try:
                states = serve.status().applications[application].deployments[deployment].replica_states
                self.count = max(1, sum(count for state, count in states.items() if state == "RUNNING"))
            except Exception as error:
                log.warning("the number of gateways is unknown (%r); it was %d", error, self.count)
            sleep(_ASK_EVERY_S)
