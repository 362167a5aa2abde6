"""Limits of API keys (models, tokens per minute, requests in flight, priority), and their usage."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_generator import FakeGenerator
from fake_models import FakeModel
from starlette.testclient import TestClient

from cluster.settings import ServerSettings
from engine.errors import DeadlineOutOfReach
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.text.tokenizer import Tokenizer
from serve_app.admission import gateways
from serve_app.admission.accounts import Account, called_by
from serve_app.admission.admission import Admission
from serve_app.admission.bytes_in_flight import BytesInFlight, Hold
from serve_app.admission.gateways import Gateways
from serve_app.admission.key_file import Limits, add_key, limit_key
from serve_app.admission.places import Places
from serve_app.admission.qos import Qos
from serve_app.admission.slots import Slots
from serve_app.errors import Overloaded, UnknownModel
from serve_app.http.app import Api
from serve_app.models import Check, ServedModel, passes
from serve_app.observe import usage as usage_module
from serve_app.observe.metrics import Metrics
from serve_app.observe.usage import Counts, Usage, UsageError, total
from serve_app.replica.cache import CachedModel
from serve_app.settings import Settings, SettingsError, load_settings

NO_USAGE = Usage(lambda *_: None, None)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def account(limits: Limits, num_gateways: int = 1, usage: Usage = NO_USAGE) -> tuple[Account, Clock]:
    clock = Clock()
    made = Account("alice", usage, lambda: num_gateways, clock)
    made.limits = limits
    return made, clock


def retry_after_s(error: Overloaded) -> int:
    return int(error.headers["retry-after"])


# Tokens per minute.


def test_a_key_has_its_tokens_at_once_and_gets_them_back_over_a_minute() -> None:
    alice, clock = account(Limits(tokens_per_minute=600))
    alice.spend("m", 500)
    alice.spend("m", 100)
    with pytest.raises(Overloaded, match="`alice` has used up its tokens per minute; its limit is 600") as told:
        alice.spend("m", 50)
    assert retry_after_s(told.value) == 5
    clock.now += 5.1
    alice.spend("m", 50)
    with pytest.raises(Overloaded):
        alice.spend("m", 50)
    clock.now += 3600
    alice.spend("m", 600)  # an hour without requests gives no more than the limit
    with pytest.raises(Overloaded):
        alice.spend("m", 1)


def test_a_request_over_the_limit_waits_for_all_of_it_and_leaves_a_debt() -> None:
    alice, clock = account(Limits(tokens_per_minute=600))
    alice.spend("m", 1)
    with pytest.raises(Overloaded):
        alice.spend("m", 2000)
    clock.now += 1
    alice.spend("m", 2000)
    clock.now += 60
    with pytest.raises(Overloaded) as told:
        alice.enter("m")  # before any text is tokenised
    assert retry_after_s(told.value) == 80  # 1,400 of the 2,000 tokens still count, 800 more than the limit


def test_tokens_of_an_answer_count_when_they_are_there() -> None:
    alice, _ = account(Limits(tokens_per_minute=600))
    alice.spend("m", 600)
    alice.add("m", 300)
    with pytest.raises(Overloaded) as told:
        alice.spend("m", 10)
    assert retry_after_s(told.value) == 31
    alice.limits = Limits()
    alice.spend("m", 10**9)
    alice.limits = Limits(tokens_per_minute=600)
    alice.spend("m", 600)


def test_time_before_an_answer_gives_nothing_back_for_its_tokens() -> None:
    alice, clock = account(Limits(tokens_per_minute=600))
    alice.spend("m", 1)
    clock.now += 3600  # a long answer, or a long wait for one
    alice.add("m", 600)
    with pytest.raises(Overloaded) as told:
        alice.spend("m", 1)
    assert retry_after_s(told.value) == 1


def test_gateways_share_the_limits() -> None:
    alice, _ = account(Limits(tokens_per_minute=600, requests_in_flight=4), num_gateways=3)
    alice.spend("m", 200)
    with pytest.raises(Overloaded, match="its limit is 200 at each of 3 gateways"):
        alice.spend("m", 1)
    usage = Usage(lambda *_: None, None)
    bob, _ = account(Limits(requests_in_flight=4), num_gateways=3, usage=usage)
    assert bob.most_requests == 2
    bob.enter("m")
    bob.enter("m")
    with pytest.raises(Overloaded, match="has 2 requests in flight; its limit is 2 at each of 3 gateways"):
        bob.enter("m")
    assert usage.totals["alice", "m"].refusals == 1
    bob.leave()
    bob.enter("m")


def test_gateways_are_counted_by_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def status() -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise RuntimeError("no controller")
        deployment = SimpleNamespace(replica_states={"RUNNING": 3, "STARTING": 1})
        return SimpleNamespace(applications={"app": SimpleNamespace(deployments={"Gateway": deployment})})

    def sleep(_: float) -> None:
        if len(asked) == 2:
            raise SystemExit

    assert Gateways().count == 1  # without Serve
    monkeypatch.setattr(gateways, "sleep", sleep)
    monkeypatch.setattr(gateways.serve, "status", status)
    counted = Gateways()
    with pytest.raises(SystemExit):
        counted._ask_for_ever("app", "Gateway")
    assert counted.count == 3


# Places.


def test_a_key_leaves_places_to_the_others() -> None:
    places = Places(100)

    def fill(owner: str) -> int:
        count = 0
        while True:
            try:
                places.take("m", owner)
            except LookupError:
                return count
            count += 1

    assert [fill("a"), fill("b"), fill("c")] == [80, 16, 4]  # each new key finds a place
    assert Places(1).take("m", "a")


def test_keys_that_come_together_have_equal_places() -> None:
    places, taken = Places(90), {"a": 0, "b": 0}
    for owner in ["a", "b"] * 90:
        try:
            places.take("m", owner)
            taken[owner] += 1
        except LookupError:
            pass
    assert taken["a"] == taken["b"] == 40


def test_a_key_that_floods_one_model_has_its_share_of_the_other() -> None:
    places = Places(120, num_models=2)
    held = [places.take("flooded", "a") for _ in range(72)]  # 80 % of the model's 30 own places and the 60 common places
    with pytest.raises(LookupError):
        places.take("flooded", "a")
    assert places.take("other", "a")
    for place in held:
        places.give_back(place)
    assert not places._held["flooded", "a"]
    assert not places._taken["flooded"]


def test_a_key_leaves_bytes_to_the_others() -> None:
    budget = BytesInFlight(1000)
    flood = [Hold(budget, "a") for _ in range(9)]
    for hold in flood[:8]:
        hold.add(100)
    with pytest.raises(Overloaded):
        flood[8].add(100)
    assert budget.now == 800
    other = Hold(budget, "b")
    other.add(100)
    for hold in [*flood, other]:
        hold.release()
    assert budget.now == 0
    assert not +budget.held
    alone = Hold(budget, "a")
    alone.add(1500)  # the only request may hold any number of bytes
    alone.release()


def test_keys_that_wait_for_a_slot_get_it_in_turn() -> None:
    got: list[str] = []

    async def scenario() -> None:
        slots = Slots(2)

        async def wait(owner: str, most: int | None = None) -> None:
            await slots.acquire(owner, most)
            got.append(owner)

        tasks = [asyncio.create_task(wait("a")) for _ in range(6)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(wait("b", most=1)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0)
        assert got == ["a", "a"]
        for _ in range(3):
            slots.release("a")
            for _ in range(3):
                await asyncio.sleep(0)
        assert got == ["a", "a", "a", "b", "a"]  # `b` may hold one slot, and holds it already
        slots.release("b")
        for _ in range(3):
            await asyncio.sleep(0)
        assert got == ["a", "a", "a", "b", "a", "b"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert slots._free == 0

    asyncio.run(scenario())


def test_a_slot_that_was_given_to_a_task_that_is_cancelled_goes_on() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        await slots.acquire("")
        first, second = (asyncio.create_task(slots.acquire("")) for _ in range(2))
        await asyncio.sleep(0)
        slots.release("")
        first.cancel()
        async with asyncio.timeout(10):
            await second

    asyncio.run(scenario())


def test_a_higher_limit_gives_slots_to_all_messages_that_wait() -> None:
    async def scenario() -> None:
        slots = Slots(4)
        await slots.acquire("a", 1)
        waiting = [asyncio.create_task(slots.acquire("a", 1)) for _ in range(2)]
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await asyncio.gather(slots.acquire("a", 4), *waiting)

    asyncio.run(scenario())


def test_a_refusal_gives_back_what_it_had_taken() -> None:
    admission = Admission(ServerSettings(max_concurrent_requests=5), Metrics("m"), lambda _: 2.0)
    alice, _ = account(Limits(requests_in_flight=10))
    model: Any = SimpleNamespace(info=SimpleNamespace(served_model_name="m"))

    async def scenario() -> None:
        called_by(alice)
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(admission.admit(1, model))
            refused = admission.admit(1, model)
            with pytest.raises(Overloaded, match="Model is overloaded"):
                refused.__enter__()
            assert alice._in_flight == 4
        assert alice._in_flight == 0

    asyncio.run(scenario())


# Over HTTP.


class Models:
    """Two models, of which `large` has an alias. `held` requests wait."""

    def __init__(self, **models: ServedModel) -> None:
        self._models = models

    def get(self, name: str | None, check: Check | None = None) -> ServedModel:
        name = {"big": "large"}.get(name or "", name)
        if name is None:
            able = (each for each in self._models.values() if check is None or passes(check, each.info))
            return next(able, next(iter(self._models.values())))
        if name not in self._models:
            raise UnknownModel.among(name, [*self._models, "big"])
        return self._models[name]

    def models(self) -> list[dict[str, Any]]:
        aliases = {"large": ["big"]}
        return [each.info.openai_entry() | {"aliases": aliases.get(name, [])} for name, each in self._models.items()]

    async def check_health(self) -> None: ...

    def backlog_s(self, name: str | None = None) -> float:
        return 2.0


class Embedder(FakeModel):
    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        super().__init__(tokenizer, "embedding")
        self.info = replace(self.info, served_model_name=name)
        self.qos: list[Qos] = []
        self.go: asyncio.Event | None = None

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        self.qos.append(qos)
        if qos.deadline_s is not None:
            raise DeadlineOutOfReach(10.0, qos.deadline_s)
        if self.go is not None:
            await self.go.wait()
        return await super().embed(sequences, options, qos)


@pytest.fixture(scope="module")
def tokenizer(minilm: Path) -> Tokenizer:
    return Tokenizer.load(minilm, load_model_config(minilm))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


class Server:
    def __init__(self, tokenizer: Tokenizer, file: Path, **settings: Any) -> None:
        self.small, self.large = Embedder(tokenizer, "small"), Embedder(tokenizer, "large")
        self.metrics = Metrics("gateway")
        self.api = Api(Models(small=self.small, large=self.large), Settings(api_keys_file=str(file), **settings), self.metrics)
        self.client = TestClient(self.api.app)

    def embed(self, key: str, text: str = "one two", path: str = "/embed", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | more.pop("headers", {})
        bodies = {"/v1/embed": {"texts": [text]}, "/v1/embeddings": {"input": text}}
        return self.client.post(path, json=bodies.get(path, {"inputs": text}) | more, headers=headers)

    def get(self, key: str, path: str) -> httpx.Response:
        return self.client.get(path, headers={"authorization": f"Bearer {key}"})

    def usage(self, name: str, model: str = "small") -> dict[str, float]:
        """The values of a usage metric, by key."""
        text = self.metrics.exposition().decode().splitlines()
        lines = [each for each in text if each.startswith(f"emberforge_key_{name}_total") and f'served_model="{model}"' in each]
        return {each.split('key="')[1].split('"')[0]: float(each.rsplit(" ", 1)[1]) for each in lines}


def test_a_key_has_its_models_and_no_others(tokenizer: Tokenizer, file: Path) -> None:
    free, bound, nothing = add_key(file, "free"), add_key(file, "bound", {"models": "big"}), add_key(file, "x", {"models": "y"})
    server = Server(tokenizer, file)
    assert [each["id"] for each in server.get(free, "/v1/models").json()["data"]] == ["small", "large"]
    assert [each["id"] for each in server.get(bound, "/v1/models").json()["data"]] == ["large"]
    assert server.get(nothing, "/v1/models").json()["data"] == []
    for name in ("large", "big", None):
        assert server.embed(bound, model=name).status_code == 200
    assert (len(server.large.qos), len(server.small.qos)) == (3, 0)  # a request without a name gets the first model of its key
    assert server.embed(free, model="small").status_code == 200
    text = "the API key `bound`: it may not use model `{}`; it may use large"
    for name in ("small", "missing"):
        refused = server.embed(bound, model=name)
        assert (refused.status_code, refused.json()) == (404, {"error": text.format(name), "error_type": "NotFound"})
        refused = server.embed(bound, path="/v1/embeddings", model=name)
        assert (refused.status_code, refused.json()["error"]["message"]) == (404, text.format(name))
        refused = server.embed(bound, path="/v1/embed", model=name)
        assert (refused.status_code, refused.json()) == (404, {"message": text.format(name)})
        assert server.get(bound, f"/v1/models/{name}").status_code == 404
        assert server.get(bound, f"/info?model={name}").status_code == 404
        assert "small" not in server.get(bound, f"/v1/models/{name}").text.replace(f"`{name}`", "")
    assert server.embed(nothing).json()["error"] == "the API key `x`: it may use no model of this server"
    assert server.get(bound, "/info").json()["served_model_name"] == "large"


@pytest.mark.parametrize(("name", "meant"), [("SMALL", "small"), ("smal", "small"), ("lagre", "large"), ("Big", "big")])
def test_an_unknown_model_suggests_a_similar_one_that_the_key_may_use(
    tokenizer: Tokenizer, file: Path, name: str, meant: str
) -> None:
    free, bound = add_key(file, "free"), add_key(file, "bound", {"models": "big"})
    server = Server(tokenizer, file)
    end = f"; did you mean '{meant}'?"
    text = f"model `{name}` is not served here; the models are small, large, big" + end
    assert server.embed(free, model=name).json() == {"error": text, "error_type": "NotFound"}
    assert server.embed(free, path="/v1/embeddings", model=name).json()["error"]["message"] == text
    assert server.embed(free, path="/v1/embed", model=name).json() == {"message": text}
    assert server.get(free, f"/v1/models/{name}").json()["error"]["message"] == text
    assert server.get(free, f"/info?model={name}").json()["error"] == text
    refused = server.embed(bound, model=name).json()["error"]
    listed = server.get(bound, f"/v1/models/{name}").json()["error"]["message"]
    for said in (refused, listed):
        assert "small" not in said.replace(f"`{name}`", "")
        assert said.endswith(end) is (meant != "small"), said


def test_a_request_has_no_higher_priority_than_its_key(tokenizer: Tokenizer, file: Path) -> None:
    free, batch = add_key(file, "free"), add_key(file, "batch", {"priority": "batch"})
    server = Server(tokenizer, file)
    for key in (free, batch):
        for headers in ({}, {"x-priority": "interactive"}, {"x-priority": "batch"}):
            assert server.embed(key, headers=headers).status_code == 200
    assert [(qos.owner, qos.priority) for qos in server.small.qos] == [
        ("free", "interactive"),
        ("free", "interactive"),
        ("free", "batch"),
        *[("batch", "batch")] * 3,
    ]


def test_a_refusal_names_the_limit_in_the_form_of_the_route(tokenizer: Tokenizer, file: Path) -> None:
    key = add_key(file, "alice", {"tokens_per_minute": "8"})
    other = add_key(file, "other")
    server = Server(tokenizer, file)
    assert server.embed(key).status_code == 200  # four tokens
    assert server.embed(key).status_code == 200
    text = "the API key `alice` has used up its tokens per minute; its limit is 8"
    bodies = {
        "/embed": {"error": text, "error_type": "Overloaded"},
        "/v1/embed": {"message": text},
    }
    for path in ("/embed", "/v1/embed", "/v1/embeddings"):
        refused = server.embed(key, path=path)
        assert (refused.status_code, 1 <= int(refused.headers["retry-after"]) <= 30) == (429, True)
        assert refused.json() == bodies.get(path) or refused.json()["error"]["message"] == text
    assert server.embed(other).status_code == 200
    assert server.usage("requests") == {"alice": 2, "other": 1}
    assert server.usage("tokens") == {"alice": 8, "other": 4}
    assert server.usage("refusals") == {"alice": 3, "other": 0}
    assert server.embed(other, headers={"x-request-deadline-ms": "1"}).status_code == 429
    assert server.usage("refusals", "") == {"other": 1}
    assert server.metrics.rejected._value.get() == 4
    limit_key(file, "alice", {"tokens_per_minute": "none"})
    assert server.api.service.keys is not None
    server.api.service.keys.look()
    assert server.embed(key).status_code == 200


def test_a_refusal_for_lack_of_memory_is_counted(tokenizer: Tokenizer, file: Path) -> None:
    key = add_key(file, "alice")
    server = Server(tokenizer, file)
    budget = server.api.service.admission._bytes
    budget.now = 2 * budget.most
    assert server.embed(key).status_code == 429
    assert server.usage("refusals", "") == {"alice": 1}
    assert server.metrics.rejected._value.get() == 1


def test_a_key_over_its_requests_in_flight_is_refused_and_others_are_not(tokenizer: Tokenizer, file: Path) -> None:
    key, other = add_key(file, "alice", {"requests_in_flight": "2"}), add_key(file, "other")
    server = Server(tokenizer, file)

    async def scenario() -> None:
        server.small.go = asyncio.Event()
        transport = httpx.ASGITransport(server.api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client, asyncio.timeout(20):

            def embed(key: str) -> "asyncio.Task[httpx.Response]":
                return asyncio.create_task(
                    client.post("/embed", json={"inputs": "one"}, headers={"authorization": f"Bearer {key}"})
                )

            held = [embed(key), embed(key), embed(other)]
            while len(server.small.qos) < 3:
                await asyncio.sleep(0)
            refused = await embed(key)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"] == "the API key `alice` has 2 requests in flight; its limit is 2"
            server.small.go.set()
            assert [(await each).status_code for each in held] == [200] * 3
            assert (await embed(key)).status_code == 200

    asyncio.run(scenario())


def test_tokens_of_prompts_and_answers_are_counted(tmp_path: Path, file: Path) -> None:
    key = add_key(file, "alice", {"tokens_per_minute": "14"})
    generator: Any = FakeGenerator(tmp_path, "five!")
    metrics = Metrics("gateway")
    api = Api(Models(fake=generator), Settings(api_keys_file=str(file)), metrics)
    headers = {"authorization": f"Bearer {key}"}
    with TestClient(api.app) as client:
        for stream in (False, True):
            body = {"prompt": "ab", "max_tokens": 50, "stream": stream}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert all(each.owner == "alice" for each in generator.streams)
        assert len(generator.streams) == 2
        refused = client.post("/v1/completions", json={"prompt": "abc"}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "Overloaded")
    assert "`alice` has used up its tokens per minute" in refused.json()["error"]["message"]
    text = metrics.exposition().decode()
    assert 'emberforge_key_tokens_total{key="alice",model="gateway",served_model="fake"} 14.0' in text
    assert 'emberforge_key_requests_total{key="alice",model="gateway",served_model="fake"} 2.0' in text


def test_an_expired_key_hears_why(tokenizer: Tokenizer, file: Path) -> None:
    key = add_key(file, "old")
    limit_key(file, "old", {"expires": "2020-01-01"})
    refused = Server(tokenizer, file).embed(key, path="/v1/embeddings")
    assert (refused.status_code, refused.json()["type"]) == (401, "Unauthorized")
    assert refused.json()["message"] == "the API key `old` has expired; ask the server's operator for another one"


# The cache.


@pytest.mark.parametrize("shared", [False, True])
def test_the_cache_answers_a_key_with_its_own_inputs(tokenizer: Tokenizer, shared: bool) -> None:
    model = Embedder(tokenizer, "m")
    cached = CachedModel(model, 1 << 20, Metrics("m"), shared)
    ids = [np.array([101, 102], dtype=np.int32)]

    async def scenario() -> None:
        for owner in ("a", "b", "a", "b", ""):
            await cached.embed(ids, EmbedOptions(), Qos(owner=owner))

    asyncio.run(scenario())
    assert [each.owner for each in model.qos] == (["a"] if shared else ["a", "b", ""])


# Usage.


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(usage_module, "_WRITE_EVERY_S", 3600.0)  # tests call `write`
    return tmp_path / "usage.jsonl"


def test_the_usage_log_has_a_line_for_each_key_and_model(log: Path) -> None:
    usage = Usage(lambda *_: None, log)
    for _ in range(3):
        usage.count("alice", "m", requests=1, tokens=10)
    usage.count("alice", "m", refusals=1)
    usage.count("bob", "m", tokens=1)
    usage.write()
    usage.write()
    usage.count("alice", "m", requests=1, tokens=5)
    usage.write()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["key"], each["requests"], each["tokens"], each["refusals"]) for each in entries] == [
        ("alice", 3, 30, 1),
        ("bob", 0, 1, 0),
        ("alice", 1, 5, 0),
    ]
    assert total([log, log], None) == {("alice", "m"): Counts(8, 70, 2), ("bob", "m"): Counts(0, 2, 0)}
    assert total([log], datetime(2200, 1, 1, tzinfo=UTC)) == {}
    with log.open("a") as file:
        file.write('{"half a li')
    assert total([log], None)["bob", "m"] == Counts(0, 1, 0)
    with log.open("a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match="line 4"):
        total([log], None)


def test_usage_that_cannot_be_written_is_written_later(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = Usage(lambda *_: None, log)
    log.mkdir()
    usage.count("alice", "m", tokens=1)
    usage.write()
    assert "cannot be written" in caplog.text
    usage.count("alice", "m", tokens=2)
    log.rmdir()
    usage.write()
    assert total([log], None) == {("alice", "m"): Counts(0, 3, 0)}


LINE = {"at": "2027-01-31T18:00:00Z", "key": "alice", "model": "m", "requests": 1, "tokens": 2, "refusals": 0}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not JSON", "it is not JSON (Expecting value at column 1)"),
        ("[]", "it is not a JSON object"),
        (json.dumps({"at": LINE["at"]}), "it has no 'key'"),
        (json.dumps(LINE | {"tokens": "2"}), "'tokens' is not a whole number"),
        (json.dumps(LINE | {"key": None}), "'key' is not a text"),
        (json.dumps(LINE | {"at": "soon"}), "'at' is not a time: 'soon'"),
    ],
)
def test_a_wrong_line_of_a_usage_log_is_told_plainly(log: Path, line: str, reason: str) -> None:
    log.write_text(json.dumps(LINE) + f"\n{line}\n")
    with pytest.raises(UsageError) as raised:
        total([log], None)
    assert str(raised.value) == f"{log}, line 2 is not a line of a usage log: {reason}"


class Full(FileIO):
    """A file on storage that has room for a third of the content."""

    def write(self, content: Any) -> int:
        return super().write(content[: len(content) // 3])


def test_full_storage_leaves_no_half_line_in_the_usage_log(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(lambda *_: None, log)
    usage.count("alice", "m", tokens=1)
    usage.write()
    usage.count("alice", "m", tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *_, **__: Full(path, "ab"))
        usage.write()
    assert total([log], None) == {("alice", "m"): Counts(0, 1, 0)}
    usage.count("alice", "m", tokens=4)
    usage.write()
    assert total([log], None) == {("alice", "m"): Counts(0, 7, 0)}


def test_a_thread_writes_the_usage(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, slept = Usage(lambda *_: None, log), list[float]()

    def sleep(seconds: float) -> None:
        usage.count("alice", "m", tokens=1)
        slept.append(seconds)

    monkeypatch.setattr(usage_module, "sleep", sleep)
    usage_module._write_for_ever(lambda: usage if len(slept) < 3 else None)  # type: ignore[arg-type]
    assert total([log], None) == {("alice", "m"): Counts(0, 2, 0)}
    assert set(slept) == {3600.0}


def test_a_server_writes_its_usage(tokenizer: Tokenizer, file: Path, log: Path) -> None:
    key = add_key(file, "alice")
    server = Server(tokenizer, file, usage_log=str(log))
    server.embed(key)
    server.api.service.usage.write()
    assert total([log], None) == {("alice", "small"): Counts(1, 4, 0)}


def test_a_usage_log_without_keys_is_refused() -> None:
    with pytest.raises(SettingsError, match="usage_log counts by API key"):
        load_settings({"usage_log": "x"}, {})
    assert "It needs api_keys_file or api_key; otherwise the server does not start" in (
        Settings.model_fields["usage_log"].description or ""
    )


def test_the_number_of_series_is_bounded() -> None:
    metrics = Metrics("gateway")
    for number in range(1100):
        metrics.observe_usage(f"key{number}", "m", Counts(1, 1, 0))
    lines = [line for line in metrics.exposition().decode().splitlines() if line.startswith("emberforge_key_requests_total")]
    assert len(lines) == 1001
    assert next(line for line in lines if 'key="others"' in line).endswith(" 100.0")
