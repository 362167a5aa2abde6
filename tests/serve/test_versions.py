"""A new version of a model beside the old one, on real Serve: both get requests, and the counts go to Ray's store."""

from collections import Counter

from ray import serve
from servers import BrokenPool, Clustered
from test_behaviour import wait_for

from cluster.applied import RayStore
from cluster.canary import is_worse, tallies
from cluster.serve_progress import replicas_seen
from cluster.status import serve_details
from serve_app.replica.pool import PoolServer


def test_a_new_version_that_fails_gets_its_share_and_is_found_out(clustered: Clustered) -> None:
    """Requests to the broken version fail, because the old version does not answer for it."""
    pools = {"mini": {"mini.cpu": PoolServer, "mini.cpu@00c0ffee": BrokenPool}}
    with clustered("/canary", pools, trials={"mini": "mini.cpu@00c0ffee"}) as client:

        def states() -> list[str]:
            (model,) = client.get("console/state").json()["models"]
            return [pool["state"] for pool in model["pools"]]

        wait_for(lambda: states() == ["ready", "ready"])
        ids = [{"x-request-id": f"request-{number}"} for number in range(40)]
        statuses = [client.post("embed", json={"inputs": "text"}, headers=each).status_code for each in ids]
        assert set(statuses) == {200, 503}
        assert [client.post("embed", json={"inputs": "text"}, headers=each).status_code for each in ids] == statuses
        gateways = [each.id for each in replicas_seen(serve_details() or {}, {}).values() if each.application == "gatewaycanary"]
        sent = Counter(statuses + statuses)
        wait_for(
            lambda: [
                (each.requests, each.failed) for each in tallies(RayStore(), "mini", "mini.cpu@00c0ffee", gateways)
            ] == [(sent[200], 0), (sent[503], sent[503])]
        )  # fmt: skip
        assert is_worse(*tallies(RayStore(), "mini", "mini.cpu@00c0ffee", gateways))
        assert "mini.cpu@00c0ffee" in serve.status().applications
