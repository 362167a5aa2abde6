"""Keeps Ray Serve's updates coming to the HAProxy of a node that was cut off from the network for some seconds.

Ray runs a manager on each node. The manager learns of gateways from a long call to Serve's controller, as a gateway learns of
replicas (`cluster/updates.py`). If the network loses the answer to this call, HAProxy keeps the gateways of that moment for ever.
"""

import asyncio
import logging
from importlib import import_module
from typing import Any

import ray
from ray.serve._private.haproxy import HAProxyManager as RaysManager

from cluster.updates import ask_controller, keep_listening

log = logging.getLogger(__name__)

_ASK_EVERY_S = 5.0


class HAProxyManager(RaysManager.__ray_metadata__.modified_class):  # type: ignore[misc, name-defined]
    """Ray's manager, which also calls the controller regularly. Only a call shows that the connection is lost.

    A gateway calls only if it hears no replica. A manager hears nothing for hours if no gateway starts or ends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        keep_listening()
        super().__init__(*args, **kwargs)
        self._asking = self.event_loop.create_task(_ask_for_ever())


async def _ask_for_ever() -> None:
    while True:
        await asyncio.sleep(_ASK_EVERY_S)
        try:
            await asyncio.to_thread(ask_controller)
        except Exception as error:  # the head may be down: Ray then finds no actor
            log.warning("Ray Serve's controller cannot be reached: %r", error)


def use_ours() -> None:
    """Makes this process start our manager where it would start Ray's.

    Ray calls this in Serve's controller (`RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH`).
    """
    controller: Any = import_module("ray.serve._private.controller")
    controller.HAProxyManager = ray.remote(num_cpus=0)(HAProxyManager)
