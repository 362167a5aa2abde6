"""A model that generates and embeds, behind HTTP and behind the gateway."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from test_terms import Handle, vectors
from tiny_generators import folder_without_pooling

from cluster import router
from cluster.model_folder import find_folder
from cluster.model_spec import ModelSpec
from engine import Engine
from engine.loop import EngineLoop
from engine.options import EmbedOptions, EncodeOptions
from engine.schedule.request import Request
from serve_app.admission.qos import Qos
from serve_app.gateway.config import GatewayModel, PoolRef
from serve_app.gateway.facts import facts_of
from serve_app.gateway.models import PooledGenerator
from serve_app.http.app import Api
from serve_app.models import ModelInfo
from serve_app.observe.metrics import Metrics
from serve_app.replica.health import Health
from serve_app.replica.local import LocalGenerator, LocalModel, LocalModels
from serve_app.replica.model_server import canary_of
from serve_app.settings import Settings

TEXTS = ["w1 w2 w3", "w4", "w1 w2 w3"]


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = folder_without_pooling(tiny, "qwen3_lm", tmp_path_factory.getbasetemp() / "both")
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return copy


@pytest.fixture(scope="module", params=["last_token", None])
def asked(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Engine, Callable[..., httpx.Response]]]:
    """An engine with or without a pooling, and a function that sends requests to its server."""
    engine = Engine.load(folder, dtype="float32", device="cpu", pooling=request.param)
    loop = EngineLoop(engine, engine.max_batch_tokens)
    info = ModelInfo.of(
        engine.config, folder, model_id="both", served_model_name="both", dtype="float32", device="cpu", max_input_length=512,
        max_batch_tokens=engine.max_batch_tokens,
    )  # fmt: skip

    async def collect(each: Request) -> None:
        loop.submit([each], polled=True)

    embedder = LocalModel(info, engine.tokenizer, loop, collect) if info.embeds else None
    model = LocalGenerator(info, engine, loop, embedder)

    async def scenario(method: str, path: str, body: Any) -> httpx.Response:
        app = Api(LocalModels(model, loop, Health(loop, canary_of(engine))), Settings(), Metrics("both")).app
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://both") as client:
            return await client.request(method, path, json=body)

    yield engine, lambda method, path, body=None: asyncio.run(scenario(method, path, body))
    loop.stop()
    assert engine.pages is not None
    engine.pages.check_integrity()
    assert engine.pages.num_free == engine.pages.num_pages


def test_one_name_answers_embeddings_and_generation(asked: tuple[Engine, Callable[..., httpx.Response]]) -> None:
    engine, ask = asked
    chat = ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 3})
    assert chat.json()["usage"]["completion_tokens"] == 3
    assert ask("POST", "/v1/completions", {"prompt": "w1", "max_tokens": 2}).status_code == 200
    assert ask("GET", "/health").status_code == 200
    (entry,) = ask("GET", "/v1/models").json()["data"]
    assert entry["max_model_len"] == 512
    kinds = ask("GET", "/info").json()["model_type"]
    bodies: dict[str, Any] = {
        "/v1/embeddings": {"input": TEXTS},
        "/embed": {"inputs": TEXTS},
        "/": {"inputs": TEXTS},
        "/similarity": {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}},
    }
    answers = {path: ask("POST", path, body) for path, body in bodies.items()}
    if not engine.config.embeds:
        assert kinds == {"generation": {}}
        for answer in answers.values():
            assert answer.status_code == 400
            assert "generates text and gives no vectors" in answer.text
            assert "--pooling last_token" in answer.text
        return
    assert kinds == {"embedding": {"pooling": "last_token"}, "generation": {}}
    expected = engine.embed(TEXTS)
    found = [each["embedding"] for each in answers["/v1/embeddings"].json()["data"]]
    for given in (found, answers["/embed"].json(), answers["/"].json()):
        np.testing.assert_allclose(given, expected, atol=1e-5)
    np.testing.assert_allclose(answers["/similarity"].json(), expected @ expected[0], atol=1e-5)
    refused = ask("POST", "/embed_all", {"inputs": "w1"})
    assert (refused.status_code, "besides vectors it gives none" in refused.text) == (422, True), refused.text
    assert ask("POST", "/rerank", {"query": "w1", "texts": ["w2"]}).status_code == 424


def test_the_gateway_embeds_with_such_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "LOADS", {})
    spec = ModelSpec(name="both", model=str(folder), pooling="last_token")
    pools = (PoolRef(name="p", node_class="cpu", tokens_per_s=100),)
    model = PooledGenerator(GatewayModel(spec=spec, pools=pools), "wait", find_folder(spec), facts_of(spec))
    handle = Handle(vectors)
    model.pools[0].connection._handle = handle  # type: ignore[assignment]
    ids = model.tokenizer.encode(["w1"], EncodeOptions())
    answer = asyncio.run(model.embed(ids, EmbedOptions(), Qos()))
    assert answer.vectors is not None
    assert answer.vectors.shape == (1, 4)
    assert len(handle.calls) == 1
    entry = model.entry()
    assert (entry["task"], entry["dimensions"], entry["max_model_len"]) == ("generation", 64, 512)
