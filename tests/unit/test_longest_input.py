"""The longest input that a replica of a pool reports to gateways, which refuse longer ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.replica import pool
from serve_app.replica.pool import PoolServer

GIB, PER_TOKEN, LONGEST = 1 << 30, 1 << 20, 8192


def longest_input(monkeypatch: pytest.MonkeyPatch, free_gib: float, device: str = "cpu", **changes: Any) -> int:
    """That of a replica on a host with so much free memory. There is no engine behind it."""

    def free(for_gpu: bool) -> int:
        assert for_gpu is (device != "cpu")
        return int(free_gib * GIB)

    monkeypatch.setattr(pool, "free_host_bytes", free)
    engine = SimpleNamespace(longest_input=LONGEST, device=SimpleNamespace(type=device))
    its = {"_channels": None, "_engine": engine, "_takes_host_memory": True, "_per_token": PER_TOKEN} | changes
    replica: Any = SimpleNamespace(**its)
    return PoolServer._longest_input(replica)


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # a GPU that shares the host's memory
@pytest.mark.parametrize(("free_gib", "longest"), [(64, LONGEST), (9, LONGEST), (8.5, 7680), (2, 1024), (1, 0), (0.5, 0)])
def test_an_input_leaves_a_gib_of_the_hosts_memory_free(
    monkeypatch: pytest.MonkeyPatch, device: str, free_gib: float, longest: int
) -> None:
    assert longest_input(monkeypatch, free_gib, device) == longest


def test_a_card_of_its_own_needs_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest_input(monkeypatch, 0, _takes_host_memory=False) == LONGEST


def test_a_generator_takes_what_its_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(info=SimpleNamespace(max_input_length=40_960))
    assert longest_input(monkeypatch, 0, _channels=object(), _model=model) == 40_960
