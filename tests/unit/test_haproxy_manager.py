"""The HAProxy manager of each node is ours. It calls Serve's controller regularly: only a call shows a lost connection."""

import asyncio

import pytest
from ray.serve._private import controller
from ray.serve._private.haproxy import HAProxyManager as RaysManager
from ray.serve._private.long_poll import LongPollClient

from cluster import haproxy_manager
from cluster.local_ray import SERVE_ENV


def test_the_controller_starts_our_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "HAProxyManager", RaysManager)  # pytest restores the class at the end
    module, function = SERVE_ENV["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"].split(":")
    assert module == haproxy_manager.__name__
    getattr(haproxy_manager, function)()
    ours = controller.HAProxyManager.__ray_metadata__
    assert issubclass(ours.modified_class, haproxy_manager.HAProxyManager)
    assert ours.class_name == RaysManager.__ray_metadata__.class_name  # the processes keep their title
    assert ours.num_cpus == RaysManager.__ray_metadata__.num_cpus == 0


def test_a_manager_listens_on_and_asks_the_controller_whatever_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def ask() -> None:
        calls.append("ask")
        raise RuntimeError("the head is down")

    def rays(manager: haproxy_manager.HAProxyManager) -> None:
        calls.append("Ray's")
        manager.event_loop = asyncio.get_running_loop()

    async def run() -> None:
        manager = haproxy_manager.HAProxyManager()
        for _ in range(1000):
            await asyncio.sleep(0.001)
            if calls.count("ask") >= 3:
                break
        manager._asking.cancel()

    monkeypatch.setattr(RaysManager.__ray_metadata__.modified_class, "__init__", rays)
    monkeypatch.setattr(LongPollClient, "_process_update", LongPollClient._process_update)  # pytest restores it
    monkeypatch.setattr(haproxy_manager, "ask_controller", ask)
    monkeypatch.setattr(haproxy_manager, "keep_listening", lambda: calls.append("listen"))
    monkeypatch.setattr(haproxy_manager, "_ASK_EVERY_S", 0.001)
    asyncio.run(run())
    assert calls[:2] == ["listen", "Ray's"]  # Ray's `__init__` begins the long-poll call
    assert calls[2:].count("ask") >= 3
