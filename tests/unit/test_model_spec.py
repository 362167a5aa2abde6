"""One model's spec, which the command line, the plan, the gateway and the replica use."""

import inspect
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from cluster import router
from cluster.model_folder import pinned
from cluster.model_spec import ModelOptions, ModelSpec
from cluster.router import Report
from cluster.settings import ServerSettings
from engine.engine import Engine
from engine.errors import ModelError
from engine.model_id import EMBEDDED_MODEL
from serve_app.app import _gateway
from serve_app.gateway.config import GatewayArgs
from serve_app.gateway.facts import read_facts
from serve_app.gateway.models import PooledModels
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.replica.model_server import EngineServer
from serve_app.settings import Settings


def test_every_option_is_one_of_the_engine() -> None:
    """A replica passes the options to `Engine.load` by name."""
    taken = inspect.signature(Engine.load).parameters
    assert set(ModelOptions.model_fields) <= set(taken)
    assert {name: taken[name].default for name in ModelOptions.model_fields} == ModelOptions().options


def test_the_command_line_gives_each_model_its_spec() -> None:
    settings = Settings(models=("org/a", "b"), dtype="bf16", max_input_tokens=9)  # type: ignore[arg-type]
    shared = {"dtype": "bfloat16", "max_input_tokens": 9}
    assert settings.specs == tuple(ModelSpec.model_validate(shared | {"name": each, "model": each}) for each in ("org/a", "b"))


def pooled(args: GatewayArgs) -> PooledModels:
    return PooledModels(args, read_facts(args))


@pytest.fixture
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PooledModels:
    monkeypatch.setattr(router, "LOADS", {})
    spec = {"name": "m", "model": EMBEDDED_MODEL, "dtype": request.param}
    pools = [{"name": name, "node_class": "c", "tokens_per_s": 1} for name in ("a", "b")]
    return pooled(GatewayArgs.model_validate({"models": [{"spec": spec, "pools": pools}], "default": "m"}))


def report(models: PooledModels, *dtypes: str, revision: str = "r") -> None:
    for pool, dtype in zip(models.get("m").pools, dtypes, strict=True):
        pool.load.update({pool.ref.name: Report(monotonic(), dtype=dtype, revision=revision)}, monotonic())


@pytest.mark.parametrize("models", ["float8"], indirect=True)
def test_info_of_a_cluster_tells_the_models_dtype_and_how_close_it_is(models: PooledModels) -> None:
    with TestClient(Api(models, Settings(), Metrics("gateway")).app) as client:
        info = client.get("/info").json()
    assert info["model_dtype"] == "float8"
    assert info["dtype_closeness"]["mean_cosine"] < 1


@pytest.mark.parametrize("models", ["auto"], indirect=True)
def test_info_of_a_cluster_tells_what_each_pool_has_loaded(models: PooledModels) -> None:
    with TestClient(Api(models, Settings(), Metrics("gateway")).app) as client:
        info = client.get("/info").json()
        assert info["model_sha"] == pinned(ModelSpec(name="m", model=EMBEDDED_MODEL)).revision, "no replica has reported"
        assert [(each["name"], each["revisions"]) for each in info["pools"]] == [("a", []), ("b", [])]
        report(models, "bfloat16", "float32", revision="new")
        info = client.get("/info").json()
        assert info["pools"] == [
            {"name": "a", "node_class": "c", "dtypes": ["bfloat16"], "revisions": ["new"]},
            {"name": "b", "node_class": "c", "dtypes": ["float32"], "revisions": ["new"]},
        ]
        assert info["model_sha"] == "new"
        assert client.post("/tokenize", json={"inputs": "x"}).headers["x-model-revision"] == "new"


@pytest.mark.parametrize(("measured", "shown"), [(0.0, None), (4_000.0, 4_000)])
def test_a_server_without_a_plan_shows_only_a_measured_rate(
    monkeypatch: pytest.MonkeyPatch, measured: float, shown: int | None
) -> None:
    monkeypatch.setattr(router, "LOADS", {})
    models, metrics = pooled(_gateway(Settings(models=(EMBEDDED_MODEL,), gateways=1))), Metrics("gateway")
    models.show_in(metrics)
    (pool,) = models.get(None).pools
    with TestClient(Api(models, Settings(), metrics).app) as client:
        assert client.get("/v1/models").json()["data"][0]["pools"][0]["tokens_per_s"] == 0, "no replica yet"
        pool.load.update({"r": Report(monotonic(), tokens_per_s=measured)}, monotonic())
        (entry,) = client.get("/v1/models").json()["data"]
        assert (entry["pools"][0]["replicas"], entry["pools"][0]["tokens_per_s"]) == (1, shown)
        text = client.get("/metrics").text
    gauge = f'emberforge_pool_tokens_per_second{{model="{EMBEDDED_MODEL}",pool="{pool.ref.name}"}} '
    assert gauge + ("NaN" if shown is None else f"{measured}") in text


@pytest.mark.parametrize("models", ["auto"], indirect=True)
def test_a_planned_rate_is_shown_until_one_is_measured(models: PooledModels) -> None:
    report(models, "float32", "float32")
    assert [pool["tokens_per_s"] for pool in models.models()[0]["pools"]] == [1, 1]


@pytest.mark.parametrize("models", ["auto"], indirect=True)
def test_a_gateway_suggests_a_model_of_a_similar_name(models: PooledModels) -> None:
    with TestClient(Api(models, Settings(), Metrics("gateway")).app) as client:
        meant = "the models are m; did you mean 'm'?"
        for name, end in (("M", meant), ("sentence-transformers/M", meant), ("other", "the models are m")):
            text = f"model `{name}` is not served here; {end}"
            assert client.post("/embed", json={"inputs": "x", "model": name}).json()["error"] == text
            assert client.get(f"/v1/models/{name}").json()["error"]["message"] == text


def test_a_gateway_with_other_files_than_planned_does_not_start() -> None:
    spec = {"name": "m", "model": EMBEDDED_MODEL, "revision": "files-0"}
    pool = {"name": "a", "node_class": "c", "tokens_per_s": 1}
    with pytest.raises(ModelError, match="the plan says files-0"):
        pooled(GatewayArgs.model_validate({"models": [{"spec": spec, "pools": [pool]}], "default": "m"}))


def test_a_replica_with_other_files_than_planned_does_not_start() -> None:
    class NoServer(EngineServer):
        def __del__(self) -> None:
            """Does nothing: there is no engine to stop."""

        def load_engine(self, spec: ModelSpec, num_threads: int) -> Engine:
            raise AssertionError("the files are compared before they are loaded")

    with pytest.raises(ModelError, match="the plan says files-0"):
        NoServer(ModelSpec(name="m", model=EMBEDDED_MODEL, revision="files-0"), ServerSettings(), 1)


def test_a_replica_loads_the_tokenizer_of_grammars_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unstarted(EngineServer):
        def __init__(self) -> None: ...

        def __del__(self) -> None:
            """Does nothing: there is no engine to stop."""

        def load_options(self, spec: ModelSpec, num_threads: int) -> dict[str, Any]:
            return {}

    prepared: list[str] = []
    engine = SimpleNamespace(prepare_grammars=lambda: prepared.append("once"))
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    assert Unstarted().load_engine(ModelSpec(name="m", model=EMBEDDED_MODEL), 1) is engine
    assert prepared == ["once"]


def test_models_of_one_address_are_listed_and_chosen_by_name(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "LOADS", {})
    settings = Settings(models=(EMBEDDED_MODEL, str(tiny("bert"))), served_model_name=("org/first", "second"))
    models = pooled(_gateway(settings))
    with TestClient(Api(models, settings, Metrics("gateway")).app) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["org/first", "second"]
        for name in ("org/first", "second"):
            entry = client.get(f"/v1/models/{name}").json()
            assert (entry["id"], entry["object"]) == (name, "model")
            assert client.get("/info", params={"model": name}).json()["served_model_name"] == name
        assert client.get("/v1/models/third").status_code == 404
        assert client.post("/v1/embeddings", json={"model": "third", "input": "x"}).status_code == 404
        tokens = [client.post("/tokenize", json={"model": name, "inputs": "hello"}).json()[0] for name in settings.names]
        assert [each["id"] for each in tokens[0]] != [each["id"] for each in tokens[1]], "each model has its own tokenizer"


@pytest.mark.parametrize("models", ["auto"], indirect=True)
def test_info_of_a_cluster_tells_the_dtype_that_replicas_chose(models: PooledModels) -> None:
    with TestClient(Api(models, Settings(), Metrics("gateway")).app) as client:
        assert client.get("/info").json()["model_dtype"] == "auto", "no replica has reported"
        report(models, "bfloat16", "bfloat16")
        assert client.get("/info").json()["model_dtype"] == "bfloat16"
        report(models, "float32", "bfloat16")
        assert client.get("/info").json()["model_dtype"] == "bfloat16, float32"
