"""A client for Ray Serve's updates asks again after a lost connection. Serve's own client would end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.long_poll import LongPollClient, LongPollState

from cluster import router, updates
from cluster.router import DEAF_S, Heard, PoolLoad, Report


class Controller:
    """Gives these answers to long-poll calls, one after another. The next call waits for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.num_calls = list(answers), 0
        self.listen_for_change = SimpleNamespace(remote=self._listen)

    def _listen(self, _: Any) -> Any:
        self.num_calls += 1
        return SimpleNamespace(_on_completed=lambda give: give(self.answers.pop(0)) if self.answers else None)


async def calls_after(*answers: Any) -> int:
    controller = Controller(*answers)
    LongPollClient(controller, {}, asyncio.get_running_loop(), "test")
    for _ in range(20):
        await asyncio.sleep(0.002)
    return controller.num_calls


LOST = ActorUnavailableError("the connection was lost", None)


def test_a_lost_connection_ends_serves_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(calls_after(LongPollState.TIME_OUT, LOST)) == 2
    monkeypatch.setattr(LongPollClient, "_process_update", LongPollClient._process_update)  # pytest restores it
    monkeypatch.setattr(updates, "_AGAIN_S", 0.001)
    updates.keep_listening()
    assert asyncio.run(calls_after(LongPollState.TIME_OUT, LOST, LOST)) == 4
    assert asyncio.run(calls_after(LongPollState.TIME_OUT, ActorDiedError())) == 2


def test_a_process_is_deaf_if_it_knows_replicas_and_hears_none(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    load = PoolLoad("a", 1_000, heard)
    monkeypatch.setattr(router, "_HEARD", heard)
    monkeypatch.setattr(router, "LOADS", {"a": load})
    assert not router.is_deaf(DEAF_S + 1)
    load.update({"a0": Report(1.0)}, now=1.0)
    assert not router.is_deaf(DEAF_S + 1)
    assert router.is_deaf(DEAF_S + 1.1)
    load.update({"a0": Report(2.0)}, now=DEAF_S)
    assert not router.is_deaf(DEAF_S + 1.1)
    load.update({}, now=DEAF_S)
    assert not router.is_deaf(100.0)
