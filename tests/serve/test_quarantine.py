"""A request that kills its replica can kill only two replicas. Other requests are answered."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from servers import MARKER, Clustered, Deploy, KilledPool, KilledServer
from test_behaviour import wait_for


def _embed(client: httpx.Client, text: str) -> httpx.Response:
    return client.post("embed", json={"inputs": text})


def test_a_request_ends_two_replicas_of_a_pool(clustered: Clustered, tmp_path: Path) -> None:
    env = {MARKER: str(tmp_path)}
    with clustered("/kills", {"mini": {"kills": KilledPool}}, replicas={"kills": (3, 3)}, env=env) as gate:

        def replicas() -> int:
            count: int = gate.get("v1/models").json()["data"][0]["pools"][0]["replicas"]
            return count

        wait_for(lambda: replicas() == 3)
        with ThreadPoolExecutor(8) as threads:
            others = [threads.submit(_embed, gate, f"text {i}") for i in range(40)]
            answer = _embed(gate, "please kill")
            assert (answer.status_code, answer.json()["error_type"]) == (422, "Quarantined"), answer.text
            assert "two replicas of the model died" in answer.json()["error"]
            assert {each.result().status_code for each in others} == {200}
        assert len(list(tmp_path.iterdir())) == 2
        form = gate.post("v1/embeddings", json={"input": "please kill"})
        assert (form.status_code, form.json()["error"]["type"]) == (422, "Quarantined")
        assert _embed(gate, "text 1").status_code == 200
        assert len(list(tmp_path.iterdir())) == 2


def test_a_request_ends_the_only_replica_twice(deployed: Deploy, tmp_path: Path) -> None:
    options = {"ray_actor_options": {"num_cpus": 0.1, "runtime_env": {"env_vars": {MARKER: str(tmp_path)}}}}
    options |= {"health_check_period_s": 1}
    with deployed("/killsone", KilledServer, options) as client:
        statuses, deadline = list[int](), time.monotonic() + 60
        while (not statuses or statuses[-1] != 422) and time.monotonic() < deadline:
            statuses.append(_embed(client, "please kill").status_code)
            time.sleep(0.1)
        assert set(statuses) == {503, 422}, statuses
        assert len(list(tmp_path.iterdir())) == 2
        assert _embed(client, "another text").status_code == 200
