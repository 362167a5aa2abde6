"""Two versions of a model: the names of their pools, the memory that they need, and the version that a request gets."""

import asyncio
from collections import Counter
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
from stub_hub import stub_hub

from cluster import canary, router
from cluster.models_file import ModelEntry, ModelsFile
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.room import has_room
from cluster.router import Report
from cluster.serve_config import canaries, serve_config
from engine.errors import BackendError, InvalidInput
from engine.hub import EMBEDDED_MODEL
from engine.options import EmbedOptions
from engine.request_tag import RequestTag, request_tags
from serve_app.admission.accounts import Account, called_by
from serve_app.admission.qos import Qos
from serve_app.gateway.config import GatewayArgs
from serve_app.gateway.facts import read_facts
from serve_app.gateway.models import PooledModels
from serve_app.observe.usage import Usage
from serve_app.replica.pool import PoolArgs

CARD = Node("pc", "amd64", 64 * GIB, 16, (Card("NVIDIA GeForce RTX 5080", 16 * GIB),))
hub = pytest.fixture(stub_hub)


def plan(*nodes: Node, **changes: Any) -> Plan:
    model = {"name": "m", "model": "Qwen/Qwen3-Embedding-0.6B", "canary": 10} | changes
    return Plan(ModelsFile(models=(ModelEntry.model_validate(model),)), nodes or (CARD,))


def pool_and_gateway(made: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    pool, gateway = serve_config(made)["applications"]
    return pool, gateway


@pytest.mark.usefixtures("hub")
def test_the_name_of_a_pool_tells_its_version() -> None:
    pool, gateway = pool_and_gateway(plan())
    assert PoolArgs.model_validate(pool["args"]).pool == pool["name"]
    (ref,) = GatewayArgs.model_validate(gateway["args"]).models[0].pools
    assert ref.name == pool["name"]
    assert pool["name"].startswith("m.rtx-5080-16g-amd64@")
    assert pool_and_gateway(plan(dtype="float32"))[0]["name"] != pool["name"]
    assert pool_and_gateway(plan(canary=None))[0]["name"] == "m.rtx-5080-16g-amd64"
    assert pool_and_gateway(plan(CARD, replace(CARD, name="pc2"), max_replicas=2))[0]["name"] == pool["name"]  # more replicas
    assert canaries(plan(canary_s=60)) == {"m": canary.Canary(10, 60.0, embeds=True, has_keys=False)}


@pytest.mark.usefixtures("hub")
def test_a_gateway_takes_the_config_of_both_versions() -> None:
    old, new = (serve_config(plan(dtype=dtype)) for dtype in ("bfloat16", "float32"))
    found = canary.trial(old, new, old, {"m": canary.Canary(10, 60.0)})
    assert found is not None
    *pools, gateway = found.beside["applications"]
    assert {each["name"] for each in pools} == {old["applications"][0]["name"], new["applications"][0]["name"]}
    (model,) = GatewayArgs.model_validate(gateway["args"]).models
    assert model.spec.dtype == "bfloat16"
    assert model.trial is not None
    assert (model.trial.spec.dtype, model.trial.percent) == ("float32", 10)
    assert canary.trial(found.beside, new, old, found.canaries) == found  # typed again while both versions run
    assert canary.trial(new, new, old, found.canaries) is None
    assert canary.trial(old, new, None, found.canaries) is None
    assert canary.trial(old, new, new, found.canaries) is None  # the running version was never ready


@pytest.mark.usefixtures("hub")
def test_room_is_needed_where_the_old_replicas_are() -> None:
    def room(made: Plan) -> bool:
        name = serve_config(made)["applications"][0]["name"]
        replica = {"replica_id": "r", "state": "RUNNING", "node_id": "1", "start_time_s": 0.0}
        shown = {"deployed_app_config": serve_config(made)["applications"][0], "deployments": {"Engine": {"replicas": [replica]}}}
        return has_room(made, {"1": "pc"}, {}, {"applications": {name: shown}}, {name})

    assert room(plan())
    assert not room(plan(model="Qwen/Qwen3-Embedding-4B"))  # two replicas of 8 GiB do not fit
    assert room(plan(CARD, replace(CARD, name="pc2"), model="Qwen/Qwen3-Embedding-4B"))


@pytest.mark.parametrize(
    "entry",
    [
        {"model": f"Qwen/Qwen3-0.6B@{'0' * 40}", "context": 2048, "streams": 1},
        {"model": f"Qwen/Qwen3-0.6B@{'0' * 40}", "cache_tokens": 4096},
        {"model": f"Qwen/Qwen3-Embedding-0.6B@{'0' * 40}", "pipeline": 2},
        {"model": f"Qwen/Qwen3-0.6B@{'0' * 40}", "pipeline": 2},
    ],
)
def test_replicas_of_every_kind_of_model_may_run_beside_a_plan(entry: dict[str, Any]) -> None:
    """The arguments of a deployment are not the keys of a model in the file."""
    node = Node("pc", "amd64", 256 * GIB, 32, (Card("NVIDIA H200", 140 * GIB),) * 4)
    made = Plan(ModelsFile.model_validate({"models": [{"name": "m"} | entry]}), [node])
    application = serve_config(made)["applications"][0]
    replica = {"replica_id": "r", "state": "RUNNING", "node_id": "1", "start_time_s": 0.0}
    shown = {"deployed_app_config": application, "deployments": {"Engine": {"replicas": [replica]}}}
    assert has_room(made, {"1": "pc"}, {}, {"applications": {application["name"]: shown}}, {application["name"]})


@pytest.mark.parametrize(("count", "expected"), [(4, True), (3, False)])
def test_a_version_in_stages_on_several_nodes_may_run_beside_another(count: int, expected: bool) -> None:
    """The old version runs on two nodes. The new version needs two others."""
    nodes = [replace(CARD, name=f"pc{index}") for index in range(count)]
    entry = {"name": "m", "model": f"Qwen/Qwen3-8B@{'0' * 40}", "canary": 10}
    made = Plan(ModelsFile.model_validate({"models": [entry]}), nodes)
    application = serve_config(made)["applications"][0]
    assert application["args"]["stages"] == 2
    replica = {"actor_name": "actor", "replica_id": "r", "state": "RUNNING", "node_id": "0", "start_time_s": 0.0}
    shown = {"deployed_app_config": application, "deployments": {"Engine": {"replicas": [replica]}}}
    groups = {
        "present": {"name": "actor", "state": "CREATED", "bundles_to_node_id": {0: "0", 1: "1"}},
        "old": {"name": "actor", "state": "REMOVED", "bundles_to_node_id": {0: "a node that has left", 1: "2"}},
    }
    names = {str(index): node.name for index, node in enumerate(nodes)}
    details = {"applications": {application["name"]: shown}}
    assert has_room(made, names, groups, details, {application["name"]}) is expected


def test_a_free_node_is_no_room_for_a_version_that_must_run_on_another_node() -> None:
    """Two of the nodes hold one model each, and the plan names the node of each model, so Ray does not use the free one."""
    nodes = [Node(f"pc{index}", "amd64", 19 * GIB // 10, 4, reserve_bytes=0) for index in range(3)]
    entry = {"model": EMBEDDED_MODEL, "dtype": "float32"}
    made = Plan(ModelsFile.model_validate({"models": [entry | {"name": "m", "canary": 10}, entry | {"name": "other"}]}), nodes)
    pools, names = {pool.model: pool for pool in made.pools}, {node.name: node.name for node in nodes}
    application = next(each for each in serve_config(made)["applications"] if each["args"]["spec"]["name"] == "m")

    def room(node: str) -> bool:
        replica = {"replica_id": "r", "state": "RUNNING", "node_id": node, "start_time_s": 0.0}
        shown = {"deployed_app_config": application, "deployments": {"Engine": {"replicas": [replica]}}}
        return has_room(made, names, {}, {"applications": {application["name"]: shown}}, {application["name"]})

    (planned,), (taken,) = pools["m"].nodes, pools["other"].nodes
    (free,) = {*names} - {planned, taken}
    assert not room(planned)
    assert room(free)


def models(monkeypatch: pytest.MonkeyPatch, **new: Any) -> PooledModels:
    """A model with a trial that gets 10 % of the requests. `new` changes the new version's spec."""
    monkeypatch.setattr(router, "LOADS", {})
    spec = {"name": "m", "model": EMBEDDED_MODEL, "dtype": "float32"}
    pool = {"node_class": "c", "tokens_per_s": 1}
    trial = {"spec": spec | new, "pools": [pool | {"name": "new"}], "percent": 10}
    given = {"spec": spec, "pools": [pool | {"name": "old"}], "trial": trial}
    args = GatewayArgs.model_validate({"models": [given], "default": "m"})
    return PooledModels(args, read_facts(args))


def ready(made: PooledModels) -> None:
    for model in made._all:
        for pool in model.pools:
            pool.load.update({"r": Report(monotonic(), dtype="float32", revision="r")}, monotonic())


def chosen(made: PooledModels, units: int = 500) -> Counter[str]:
    """The number of requests that each pool gets. Each request has its own id."""

    def pool_of(number: int) -> str:
        request_tags.set((RequestTag(f"request-{number}"),))
        first = made.get("m")
        assert made.get(None) is first  # a request asks several times, and gets the same model
        return first.pools[0].ref.name

    return Counter(copy_context().run(pool_of, number) for number in range(units))


def test_a_tenth_of_the_requests_get_the_new_version_when_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    made = models(monkeypatch, max_batch_tokens=512)
    assert chosen(made) == {"old": 500}
    ready(made)
    assert 25 < chosen(made)["new"] < 75
    assert [pool["name"] for pool in made.overview()[0]["pools"]] == ["old", "new"]


@pytest.mark.parametrize("new", [{"default_prompt": "query: "}, {"dtype": "bfloat16"}])
def test_vectors_of_two_versions_never_mix_for_a_key(new: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = models(monkeypatch, **new)
    ready(made)
    assert chosen(made) == {"old": 500}  # without a key
    found = Counter[str]()
    for number in range(100):

        async def ask(name: str = f"key-{number}") -> Counter[str]:
            called_by(Account(name, Usage(lambda *_: None, None), lambda: 1))
            return chosen(made, 10)

        (pair,) = asyncio.run(ask()).items()  # one version for all requests of the key
        assert pair[1] == 10
        found[pair[0]] += 1
    assert 2 < found["new"] < 25


def test_a_gateway_counts_and_tells_how_requests_to_both_versions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = models(monkeypatch, max_batch_tokens=512)
    old, new = made._all
    errors: list[Exception | None] = [None, BackendError("broken"), InvalidInput("too long"), OSError("unforeseen")]

    async def embed(*_: Any) -> Any:
        if (error := errors.pop(0)) is not None:
            raise error

    monkeypatch.setattr(new, "_embed", embed)

    async def requests() -> None:
        while errors:
            with suppress(Exception):
                await new.embed([], EmbedOptions(), Qos())

    asyncio.run(requests())
    values: dict[str, str] = {}

    class Store:
        def put(self, key: str, value: str, overwrite: bool = True) -> bool:
            values[key] = value
            return overwrite

        def get(self, key: str) -> str | None:
            return values.get(key)

    store: Any = Store()
    for gateway in ("g1", "g2", "gone"):
        made.tell_trials(store, gateway)
    found = canary.tallies(store, "m", "new", ["g1", "g2", "g3"])
    assert [(each.requests, each.failed) for each in found] == [(0, 0), (6, 4)]
    assert canary.tallies(store, "m", "another", ["g1"])[1].requests == 0
    assert old.on_end is not None


@pytest.mark.parametrize(("timeout_s", "failures"), [(0.01, 1), (3600.0, 0)])
def test_a_request_that_the_server_ends_late_is_a_failure_of_its_version(
    timeout_s: float, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that never answers must not count as good. A client that leaves shows nothing."""
    made = models(monkeypatch, max_batch_tokens=512)
    new = made._all[1]
    new._timeout_s = timeout_s

    async def embed(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(new, "_embed", embed)

    async def request() -> None:
        waits = asyncio.create_task(new.embed([], EmbedOptions(), Qos()))
        await asyncio.sleep(0)  # the request's time begins
        await asyncio.sleep(0.02)
        waits.cancel()
        with suppress(asyncio.CancelledError):
            await waits

    asyncio.run(request())
    (versions,) = made._versions.values()
    tally = versions._tallies[1]
    assert (tally.requests, tally.failed) == (failures, failures)
