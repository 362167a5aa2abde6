"""One model's spec: told once, read by the command line, the plan, the gateway and the replica."""

import inspect
from time import monotonic

import pytest
from starlette.testclient import TestClient

from cluster import router
from cluster.model_spec import ModelOptions, ModelSpec
from cluster.router import Report
from engine.engine import Engine
from engine.model_id import EMBEDDED_MODEL
from serve_app.gateway.config import GatewayArgs
from serve_app.gateway.models import PooledModels
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
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


@pytest.fixture
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PooledModels:
    monkeypatch.setattr(router, "LOADS", {})
    spec = {"name": "m", "model": EMBEDDED_MODEL, "dtype": request.param}
    pools = [{"name": name, "node_class": "c", "tokens_per_s": 1} for name in ("a", "b")]
    return PooledModels(GatewayArgs.model_validate({"models": [{"spec": spec, "pools": pools}], "default": "m"}))


def report(models: PooledModels, *dtypes: str) -> None:
    for pool, dtype in zip(models.get("m").pools, dtypes, strict=True):
        pool.load.update({pool.ref.name: Report(monotonic(), dtype=dtype)}, monotonic())


@pytest.mark.parametrize("models", ["float8"], indirect=True)
def test_info_of_a_cluster_tells_the_models_dtype_and_how_close_it_is(models: PooledModels) -> None:
    with TestClient(Api(models, Settings(), Metrics("gateway")).app) as client:
        info = client.get("/info").json()
    assert info["model_dtype"] == "float8"
    assert info["dtype_closeness"]["mean_cosine"] < 1


@pytest.mark.parametrize("models", ["auto"], indirect=True)
def test_info_of_a_cluster_tells_the_dtype_that_replicas_chose(models: PooledModels) -> None:
    with TestClient(Api(models, Settings(), Metrics("gateway")).app) as client:
        assert client.get("/info").json()["model_dtype"] == "auto", "no replica has reported"
        report(models, "bfloat16", "bfloat16")
        assert client.get("/info").json()["model_dtype"] == "bfloat16"
        report(models, "float32", "bfloat16")
        assert client.get("/info").json()["model_dtype"] == "bfloat16, float32"
