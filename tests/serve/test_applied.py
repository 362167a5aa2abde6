"""The applied configs in Ray's own store."""

import pytest

from cluster.applied import History, RayStore


@pytest.mark.usefixtures("address")
def test_ray_keeps_the_last_ten_configs() -> None:
    history, store = History(RayStore()), RayStore()
    for port in range(12):
        number = history.begin({"applications": [], "port": port})
    history.finish(number, {"mini.pc": 4.5})
    assert [(entry.number, entry.config["port"], entry.ready) for entry in History(RayStore()).entries()] == [
        *((port + 1, port, False) for port in range(2, 11)),
        (12, 11, True),
    ]
    assert history.start_s() == {"mini.pc": 4.5}
    assert not store.put("applied/00000012", "another", overwrite=False)
    assert history.begin({"applications": [], "port": 11}) == 12
