"""Keeps Ray Serve's updates coming to a gateway whose node was cut off from the network for some seconds.

A gateway learns of the replicas and their load from one long call to Serve's controller. If the network loses the answer to this
call, Ray notices after five minutes. Then Serve's client ends for ever.
"""

import logging
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_ASK_S = 5.0


def keep_listening() -> None:
    """Lets the clients for updates of this process ask again after a lost connection. Call it once."""
    clients: Any = LongPollClient
    process = clients._process_update

    def process_update(client: Any, updates: Any) -> None:
        if not isinstance(updates, ActorUnavailableError):
            process(client, updates)  # also `ActorDiedError`: the controller will not come back
            return
        log.warning("the connection to Ray Serve's controller was lost, next attempt in %g s: %s", _AGAIN_S, updates)
        client._schedule_to_event_loop(lambda: client.event_loop.call_later(_AGAIN_S, client._poll_next))

    clients._process_update = process_update


def ask_controller() -> None:
    """Calls the controller. On a lost connection this call and the long call fail within seconds. Blocks.

    Raises: an error of Ray if the controller cannot be reached.
    """
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    ray.get(controller.check_alive.remote(), timeout=_ASK_S)
