"""Priority, deadline and cache headers, from HTTP to the engine's queue and, through a gateway, to a pool's."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster import router
from cluster.model_folder import find_folder
from cluster.model_spec import ModelSpec
from cluster.router import Report, Ticket
from engine.errors import BackendError, DeadlineOutOfReach, DeadlinePassed, EngineStopped
from engine.hub import EMBEDDED_MODEL
from engine.loop import EngineLoop
from engine.model.config import MOST_BATCH_TOKENS, OutputName
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.run.flight import Finished, Output
from engine.schedule.rates import Rates
from engine.schedule.request import Request
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import DEFAULT_QOS, Qos, read_qos
from serve_app.errors import Asleep, Unhealthy
from serve_app.gateway.config import GatewayModel, PoolRef
from serve_app.gateway.facts import facts_of
from serve_app.gateway.models import PooledModel, _joined
from serve_app.gateway.parcel import Answered, Parcel
from serve_app.gateway.remote import ReplicaDied
from serve_app.http import openapi
from serve_app.http.app import Api
from serve_app.models import ModelInfo, ServedModel
from serve_app.observe.metrics import Metrics
from serve_app.replica.cache import ENTRY_BYTES, CachedModel
from serve_app.replica.health import Health
from serve_app.replica.local import LocalModel, LocalModels
from serve_app.settings import Settings

INFO = ModelInfo("stub", "stub", "float32", "stub", "mean", 4, 256, 64, 0)


class Gate:
    """A stand-in for the engine that waits until the test opens it. No two vectors are equal, not even those of one text."""

    passes_in_flight, num_stages, num_groups, speculation_rows, max_graph_tokens, pages = 1, 1, 1, 0, 0, None
    cohort_size = 0

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        self.lengths: list[int] = []  # the lengths of the computed sequences, in order
        self._rows = 0

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, outputs: tuple[OutputName, ...] = ()
    ) -> Finished:
        self.entered.set()
        start = perf_counter()
        assert self.open.wait(10)
        self.lengths += map(len, sequences)
        vectors = np.arange(self._rows + 1, self._rows + 1 + len(sequences), dtype=np.float32)[:, None] / [3, 7, 9, 11]
        self._rows += len(sequences)
        tokens = [np.ones((len(ids), 4), dtype=np.float32) for ids in sequences]
        return Finished(Output(vectors.astype(np.float32), dict.fromkeys(outputs, tokens), perf_counter() - start))


@dataclass
class Replica:
    """The API over one model whose engine the test controls."""

    gate: Gate
    loop: EngineLoop
    metrics: Metrics
    app: Any

    def run(self, scenario: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test") as client:
                return await scenario(client)

        return asyncio.run(run())

    def metric(self, name: str) -> float:
        lines = self.metrics.exposition().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"emberforge_{name}{{"))


Made = Callable[..., Replica]

CANARY = np.ones(1, dtype=np.int32)


@pytest.fixture(scope="module")
def tokenizer(minilm: Path) -> Tokenizer:
    return Tokenizer.load(minilm, load_model_config(minilm))


@pytest.fixture
def made(tokenizer: Tokenizer) -> Iterator[Made]:
    loops: list[Replica] = []

    def make(**settings: Any) -> Replica:
        gate, metrics, chosen = Gate(), Metrics("stub"), Settings(**settings)
        loop = EngineLoop(gate, max_batch_tokens=64)

        async def collect(job: Request) -> None:
            loop.submit([job])

        model: ServedModel = LocalModel(INFO, tokenizer, loop, collect, chosen.request_timeout_s)
        if chosen.cache_bytes:
            model = CachedModel(model, chosen.cache_bytes, metrics)
        health = Health(loop, lambda: Request([CANARY], EmbedOptions()))
        loops.append(Replica(gate, loop, metrics, Api(LocalModels(model, loop, health), chosen, metrics).app))
        return loops[-1]

    yield make
    for each in loops:
        each.gate.open.set()
        each.loop.stop()


def embed(client: httpx.AsyncClient, text: str | list[str], path: str = "/embed", **more: Any) -> Awaitable[httpx.Response]:
    headers = {name.replace("_", "-"): value for name, value in more.pop("headers", {}).items()}
    return client.post(path, json={"inputs": text, "input": text} | more, headers=headers)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


# Headers.


@pytest.mark.parametrize(
    ("header", "value", "way_out"),
    [("x-priority", value, "send interactive or batch") for value in ("urgent", "Batch", "", "interactive,batch")]
    + [
        ("x-request-deadline-ms", value, "send milliseconds, a number over 0")
        for value in ("0", "0.0", "-5", "soon", "nan", "inf", "1_000", "", "5 ms")
    ],
)
@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/embed_all", "/"])
def test_a_header_that_cannot_be_used_is_named_with_its_value(
    made: Made, path: str, header: str, value: str, way_out: str
) -> None:
    replica = made()
    answer = replica.run(lambda client: embed(client, "x", path, headers={header: value}))
    assert answer.status_code == 422
    message = answer.json()["error"]["message"] if "v1" in path else answer.json()["error"]
    assert message == f"`{header}` is `{value}`; {way_out}"
    assert answer.json()["type" if "v1" in path else "error_type"] == "Validation"
    assert not replica.gate.lengths


def test_what_headers_say() -> None:
    def read(**headers: str) -> Qos:
        return read_qos([(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()], 60.0)

    assert read(host="x", accept="*/*") is DEFAULT_QOS
    assert read(x_priority="batch") == Qos("batch")
    assert read(x_priority=" interactive ") == DEFAULT_QOS
    assert read(x_request_deadline_ms="250") == Qos(deadline_s=0.25)
    assert read(x_request_deadline_ms="0.5") == Qos(deadline_s=0.0005)
    assert read(x_request_deadline_ms="9" * 400) == Qos(deadline_s=60.0)  # the server's own deadline is shorter
    assert read(cache_control="max-age=0, No-Store") == Qos(store=False)
    assert read(cache_control="no-cache") == DEFAULT_QOS
    assert Qos(deadline_s=2.0).after(0.5) == Qos(deadline_s=1.5)
    assert DEFAULT_QOS.after(0.5) is DEFAULT_QOS


# One replica.


def test_an_interactive_request_overtakes_batch_requests(made: Made) -> None:
    replica = made()

    async def scenario(client: httpx.AsyncClient) -> list[str]:
        replica.gate.open.clear()
        order: list[str] = []

        async def ask(name: str, text: str, **headers: str) -> None:
            assert (await embed(client, text, headers=headers)).status_code == 200
            order.append(name)

        tasks = [asyncio.ensure_future(ask("first", "word " * 60))]
        await until(replica.gate.entered.is_set)
        for name in ("bulk", "more"):
            tasks.append(asyncio.ensure_future(ask(name, "word " * 61, x_priority="batch")))
        await until(lambda: replica.loop.queued_requests == 2)
        tasks.append(asyncio.ensure_future(ask("query", "word " * 50)))
        await until(lambda: replica.loop.queued_requests == 3)
        replica.gate.open.set()
        await asyncio.gather(*tasks)
        return order

    assert replica.run(scenario) == ["first", "query", "bulk", "more"]
    assert replica.gate.lengths == [62, 52, 63, 63]


def test_a_request_out_of_time_is_answered_and_never_computed(made: Made) -> None:
    replica = made()

    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        replica.gate.open.clear()
        first = asyncio.ensure_future(embed(client, "one two"))
        await until(replica.gate.entered.is_set)
        late = await embed(client, "too late for this", headers={"x_request_deadline_ms": "30"})
        replica.gate.open.set()
        assert (await first).status_code == (await embed(client, "next one please now")).status_code == 200
        return late

    late = replica.run(scenario)
    assert (late.status_code, late.json()["error_type"]) == (504, "Timeout")
    assert "0.03 s" in late.json()["error"]
    assert "retry-after" not in late.headers
    assert replica.gate.lengths == [4, 6]


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({}, {"x_request_deadline_ms": "9500"}),
        ({"request_timeout_s": 9.5}, {}),
        ({"request_timeout_s": 9.5}, {"x_priority": "batch"}),
    ],
    ids=["deadline", "timeout", "batch"],
)
def test_a_request_that_cannot_be_in_time_is_refused_at_once(
    made: Made, settings: dict[str, float], headers: dict[str, str]
) -> None:
    replica = made(**settings)

    async def scenario(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        await embed(client, "learn the rate")
        replica.gate.open.clear()
        replica.gate.entered.clear()
        first = asyncio.ensure_future(embed(client, "one two"))
        await until(replica.gate.entered.is_set)
        waiting = asyncio.ensure_future(embed(client, "three four five six"))
        await until(lambda: replica.loop.queued_requests)
        replica.loop._scheduler.rates = Rates(8)
        replica.loop._scheduler.rates.add(8, 16.0)
        refused = await embed(client, "no", "/v1/embeddings", headers=headers)  # 6 + 3 tokens: 18 s
        replica.gate.open.set()
        await asyncio.gather(first, waiting)
        return refused, await embed(client, "yes", headers=headers)

    refused, accepted = replica.run(scenario)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "Overloaded"
    assert "about 18 s" in refused.json()["message"]
    assert refused.headers["retry-after"] == "9"
    assert replica.metric("rejected_requests_total") == 1
    assert accepted.status_code == 200
    assert replica.gate.lengths == [5, 4, 6, 3]


# The cache.


def test_what_was_seen_before_is_not_computed_again(made: Made) -> None:
    replica = made(cache_bytes=100_000)

    async def scenario(client: httpx.AsyncClient) -> None:
        first = await embed(client, ["one", "two three", "one"])
        replica.gate.open.clear()  # the engine is busy
        again = await embed(client, ["two three", "one", "one"])
        assert again.json() == [first.json()[1], first.json()[0], first.json()[0]]
        assert again.headers["x-compute-tokens"] == "10"
        replica.gate.open.set()
        mixed = await embed(client, ["one", "new and long"])
        assert mixed.json()[0] == first.json()[0]
        assert (await embed(client, "new and long")).json()[0] == mixed.json()[1]
        similarity = {"source_sentence": "one", "sentences": ["two three"]}
        assert (await client.post("/similarity", json={"inputs": similarity})).status_code == 200

    replica.run(scenario)
    assert replica.gate.lengths == [3, 4, 5]  # "one" twice in a request is a duplicate in its pass
    assert replica.metric("cache_misses_total") == 4
    assert replica.metric("cache_hits_total") == 3 + 1 + 1 + 2
    assert replica.metric("cache_bytes") == 3 * (16 + ENTRY_BYTES)


def test_what_changes_the_vector_tells_entries_apart(made: Made) -> None:
    replica = made(cache_bytes=100_000)

    async def scenario(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await embed(client, "one")
            await embed(client, "one", normalize=False)
            assert len((await embed(client, "one", dimensions=2)).json()[0]) == 2

    replica.run(scenario)
    assert replica.gate.lengths == [3, 3, 3]


def test_what_is_not_to_be_stored_is_neither_kept_nor_found(made: Made) -> None:
    replica = made(cache_bytes=100_000)

    async def scenario(client: httpx.AsyncClient) -> None:
        await embed(client, "secret text", headers={"cache_control": "no-store"})
        assert replica.metric("cache_bytes") == 0
        await embed(client, "secret text")
        await embed(client, "secret text", headers={"cache_control": "no-store"})
        await embed(client, "secret text", "/embed_all")
        await embed(client, "secret text", "/embed_all")

    replica.run(scenario)
    assert len(replica.gate.lengths) == 5
    assert (replica.metric("cache_hits_total"), replica.metric("cache_misses_total")) == (0, 1)


def test_the_cache_keeps_to_its_bytes_and_gives_up_the_oldest(made: Made) -> None:
    replica = made(cache_bytes=2 * (16 + ENTRY_BYTES) + 1)

    async def scenario(client: httpx.AsyncClient) -> None:
        for text in ("one", "two two", "one", "three three three", "one", "two two"):
            await embed(client, text)
            assert replica.metric("cache_bytes") <= 2 * (16 + ENTRY_BYTES) + 1

    replica.run(scenario)
    assert replica.gate.lengths == [3, 4, 5, 4]
    tiny = made(cache_bytes=1)
    assert tiny.run(lambda client: embed(client, "one")).status_code == 200
    assert tiny.metric("cache_bytes") == 0


def test_without_the_setting_everything_is_computed(made: Made) -> None:
    replica = made()

    async def scenario(client: httpx.AsyncClient) -> None:
        await embed(client, "one")
        await embed(client, "one")

    replica.run(scenario)
    assert replica.gate.lengths == [3, 3]


def test_kept_vectors_are_nobodys_to_change() -> None:
    class Model:
        info, tokenizer = INFO, None

        async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
            return Embeddings(np.ones((len(sequences), 4), dtype=np.float32), {}, 0.0, 0.0)

    async def scenario() -> None:
        model: Any = CachedModel(Model(), 10_000, Metrics("m"))  # type: ignore[arg-type]
        ids = [np.array([1, 2], dtype=np.int32)]
        for _ in range(3):
            vectors = (await model.embed(ids, EmbedOptions(), DEFAULT_QOS)).vectors
            assert vectors.tolist() == [[1.0] * 4]
            vectors[:] = 5

    asyncio.run(scenario())


# The gateway.


class Handle:
    """Stands in for a pool's handle. The test decides the replica's answer."""

    def __init__(self, answer: Callable[[Qos], Embeddings | Exception]) -> None:
        self.calls: list[tuple[Qos, Ticket]] = []
        self.responses: list[asyncio.Future[list[Answered]]] = []
        self.woken = 0
        self.may_answer: asyncio.Event | None = None
        self._answer = answer
        self.embed_parcels, self.wake = self, self._Wake(self)

    class _Wake:
        def __init__(self, handle: "Handle") -> None:
            self._handle = handle

        def remote(self, *, ticket: Ticket) -> Awaitable[None]:
            self._handle.woken += 1
            return asyncio.sleep(0)

    def remote(self, parcels: Sequence[Parcel], *, ticket: Ticket) -> Awaitable[list[Answered]]:
        self.calls += [(each.qos, ticket) for each in parcels]

        async def answer() -> list[Answered]:
            if self.may_answer is not None:
                await self.may_answer.wait()
            return [self._answer(each.qos) for each in parcels]

        self.responses.append(asyncio.ensure_future(answer()))
        return self.responses[-1]


def vectors(qos: Qos) -> Embeddings:
    return Embeddings(np.ones((1, 4), dtype=np.float32), {}, 0.0, 0.0)


def remote_error(cause: Exception) -> Callable[[Qos], Embeddings]:
    """An error of a replica, as Ray raises it for the whole call."""

    def fail(qos: Qos) -> Embeddings:
        error = RayTaskError("embed", "Traceback: much of it", cause, "proc", 1, "1.2.3.4")
        raise error.as_instanceof_cause()

    return fail


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[PooledModel, list[Handle]]]:
    monkeypatch.setattr(router, "LOADS", {})

    def make(
        *answers: Callable[[Qos], Embeddings], queued: Sequence[int] = (0, 0), awake: bool = True, timeout_s: float = 60.0
    ) -> tuple[PooledModel, list[Handle]]:
        refs = tuple(PoolRef(name=f"p{i}", node_class="cpu", tokens_per_s=100) for i, _ in enumerate(answers))
        spec = ModelSpec(name="m", model=EMBEDDED_MODEL)
        model = PooledModel(GatewayModel(spec=spec, pools=refs), "wait", find_folder(spec), facts_of(spec), timeout_s)
        handles = [Handle(answer) for answer in answers]
        for pool, handle, tokens in zip(model.pools, handles, queued, strict=False):
            pool.connection._handle = handle  # type: ignore[assignment]
            if awake:
                pool.load.update({pool.ref.name: Report(1.0, tokens, 100.0)}, monotonic())
        return model, handles

    return make


IDS = [np.arange(10, dtype=np.int32)]


@pytest.mark.parametrize(("given", "shown"), [(512, 512), (None, MOST_BATCH_TOKENS)])
def test_a_gateway_shows_the_largest_batch(given: int | None, shown: int) -> None:
    spec = ModelSpec(name="m", model=EMBEDDED_MODEL, max_batch_tokens=given)
    pools = (PoolRef(name="p", node_class="cpu", tokens_per_s=100),)
    model = PooledModel(GatewayModel(spec=spec, pools=pools), "wait", find_folder(spec), facts_of(spec))
    assert model.info.max_batch_tokens == shown


def test_a_pool_is_told_the_priority_and_the_time_left(pooled: Any) -> None:
    model, (handle,) = pooled(vectors)
    asyncio.run(model.embed(IDS, EmbedOptions(), Qos("batch", 30.0, store=False)))
    ((qos, ticket),) = handle.calls
    assert (qos.priority, qos.store, ticket.batch) == ("batch", False, True)
    assert 29 < qos.deadline_s <= 30
    asyncio.run(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
    assert handle.calls[1][0] is DEFAULT_QOS
    assert not handle.calls[1][1].batch


@pytest.mark.parametrize(("replicas", "tokens_of_calls"), [(1, [1, 2]), (2, [1, 1, 1]), (2, [1, 1, 2])])
def test_requests_wait_for_each_other_while_there_are_calls_on_the_way_for_every_replica(
    replicas: int, tokens_of_calls: list[int], pooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.gateway.outbox._MOST_WAIT_S", 1e6)
    model, (handle,) = pooled(vectors)
    model.pools[0].load.update({str(number): Report(1.0, 0, 100.0) for number in range(replicas)}, monotonic())

    async def scenario() -> None:
        short = [np.arange(1, dtype=np.int32)]
        handle.may_answer = asyncio.Event()
        answers = []
        for _ in range(sum(tokens_of_calls)):
            answers.append(asyncio.ensure_future(model.embed(short, EmbedOptions(), DEFAULT_QOS)))
            for _ in range(10):  # gives other tasks ten turns of the event loop
                await asyncio.sleep(0)
        handle.may_answer.set()
        async with asyncio.timeout(10):
            await asyncio.gather(*answers)

    asyncio.run(scenario())
    assert [ticket.num_tokens for _, ticket in handle.calls] == tokens_of_calls


def test_a_request_does_not_wait_for_the_first_replica_of_a_pool_if_another_pool_has_one(
    pooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new gateway knows no replica for a moment. Meanwhile it may choose a pool whose node is lost."""
    monkeypatch.setattr("serve_app.gateway.connection._LOOK_EVERY_S", 0.01)
    model, (lost, other) = pooled(vectors, vectors, awake=False)

    async def scenario() -> None:
        lost.may_answer = asyncio.Event()
        waiting = asyncio.ensure_future(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
        await until(lambda: lost.calls)
        model.pools[1].load.update({"p1": Report(1.0, 0, 100.0)}, monotonic())
        async with asyncio.timeout(10):
            await waiting

    asyncio.run(scenario())
    assert (len(lost.calls), len(other.calls)) == (1, 1)


def test_a_request_waits_for_the_first_replica_of_a_pool_if_the_others_are_busy(
    pooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.gateway.connection._LOOK_EVERY_S", 0.01)
    model, (busy, asleep) = pooled(vectors, vectors, awake=False)
    model.pools[0].load.update({"p0": Report(1.0, 10_000, 100.0)}, monotonic())

    async def scenario() -> None:
        asleep.may_answer = asyncio.Event()
        waiting = asyncio.ensure_future(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
        await until(lambda: asleep.calls)
        await asyncio.sleep(0.1)
        asleep.may_answer.set()
        await waiting

    asyncio.run(scenario())
    assert (len(busy.calls), len(asleep.calls)) == (0, 1)


def test_a_key_is_not_refused_for_the_work_of_another_one(pooled: Any) -> None:
    """The work of one key takes longer than a request may. A request of the same key is refused, one of another key is not."""
    model, (handle,) = pooled(vectors, timeout_s=40.0)

    async def scenario() -> None:
        handle.may_answer = asyncio.Event()
        flood = asyncio.ensure_future(model.embed([np.arange(5000, dtype=np.int32)], EmbedOptions(), Qos(owner="flood")))
        await until(lambda: handle.calls)
        with pytest.raises(DeadlineOutOfReach):
            await model.embed(IDS, EmbedOptions(), Qos(owner="flood"))
        other = asyncio.ensure_future(model.embed(IDS, EmbedOptions(), Qos(owner="other")))
        await until(lambda: len(handle.calls) == 2)
        handle.may_answer.set()
        await asyncio.gather(flood, other)

    asyncio.run(scenario())
    assert [qos.owner for qos, _ in handle.calls] == ["flood", "other"]
    assert not model._open_tokens


def test_a_call_that_serve_cancels_is_computed_again(pooled: Any) -> None:
    def cancelled_once(qos: Qos) -> Embeddings:
        if len(handle.calls) == 1:
            raise asyncio.CancelledError
        return vectors(qos)

    model, (handle,) = pooled(cancelled_once)
    result = asyncio.run(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
    assert result.vectors.tolist() == [[1.0] * 4]
    assert len(handle.calls) == 2


def test_a_caller_that_leaves_says_nothing_about_the_replica(pooled: Any) -> None:
    model, (handle,) = pooled(vectors)
    load = model.pools[0].load
    replica = load.replicas["p0"]
    replica.failures = 3

    async def scenario() -> None:
        handle.may_answer = asyncio.Event()
        leaving = asyncio.ensure_future(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
        while not handle.calls:
            await asyncio.sleep(0)
        load.routed("p0", handle.calls[0][1])
        leaving.cancel()
        await asyncio.wait({leaving})
        await asyncio.wait(handle.responses, timeout=5)
        assert handle.responses[0].cancelled()
        assert replica.failures == 3
        handle.may_answer.set()
        work = asyncio.ensure_future(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
        while len(handle.calls) < 2:
            await asyncio.sleep(0)
        load.routed("p0", handle.calls[1][1])
        await work
        assert replica.failures == 0, "an answer resets the count"

    asyncio.run(scenario())


def test_a_second_attempt_has_less_time(pooled: Any) -> None:
    def lost_once(qos: Qos) -> Embeddings:
        if len(handle.calls) == 1:
            time.sleep(0.05)
            raise EngineStopped("gone")
        return vectors(qos)

    model, (handle,) = pooled(lost_once)
    asyncio.run(model.embed(IDS, EmbedOptions(), Qos(deadline_s=30.0)))
    assert handle.calls[1][0].deadline_s <= handle.calls[0][0].deadline_s - 0.05


def test_what_could_not_be_sent_counts_no_more(pooled: Any) -> None:
    model, (handle,) = pooled(vectors)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RayServeException("the application is gone")

    async def two() -> list[Any]:
        short = [np.arange(1, dtype=np.int32)]  # short enough to leave as one call
        return await asyncio.gather(*(model.embed(short, EmbedOptions(), DEFAULT_QOS) for _ in range(2)), return_exceptions=True)

    handle.embed_parcels = SimpleNamespace(remote=refuse)
    assert [type(each) for each in asyncio.run(two())] == [Unhealthy, Unhealthy]
    assert model.pools[0].queued_tokens == 0


def test_the_gateway_refuses_what_no_pool_can_do_in_time(pooled: Any) -> None:
    model, handles = pooled(vectors, vectors, queued=(1_000, 2_000))  # the replica with less work is free after 10 s
    with pytest.raises(DeadlineOutOfReach) as refused:
        asyncio.run(model.embed(IDS, EmbedOptions(), Qos(deadline_s=2.0)))
    assert refused.value.predicted_s == pytest.approx(10.1, abs=0.5)
    assert not [call for handle in handles for call in handle.calls]
    asyncio.run(model.embed(IDS, EmbedOptions(), Qos(deadline_s=20.0)))
    assert len(handles[0].calls) == 1


def test_without_a_deadline_the_servers_timeout_decides(pooled: Any) -> None:
    model, handles = pooled(vectors, vectors, queued=(1_000, 2_000), timeout_s=2.0)
    with pytest.raises(DeadlineOutOfReach) as refused:
        asyncio.run(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
    assert refused.value.deadline_s == 2.0
    assert not [call for handle in handles for call in handle.calls]


def test_a_rate_that_no_replica_has_measured_refuses_nothing(pooled: Any) -> None:
    model, (handle,) = pooled(vectors)
    model.pools[0].load.update({"p0": Report(2.0, 100_000, 0.0)}, monotonic())  # 1,000 s at the plan's 100 tokens/s
    asyncio.run(model.embed(IDS, EmbedOptions(), Qos(deadline_s=2.0)))
    assert len(handle.calls) == 1


def test_without_a_deadline_a_sleeping_pool_is_waited_for(pooled: Any) -> None:
    model, (handle,) = pooled(vectors, awake=False, timeout_s=2.0)  # the predicted start takes longer, but is a guess
    asyncio.run(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
    assert len(handle.calls) == 1


@pytest.mark.parametrize(("asleep", "sleeps"), [("refuse", True), ("refuse", False), ("wait", True)])
def test_a_model_may_refuse_requests_while_its_pool_sleeps(pooled: Any, asleep: str, sleeps: bool) -> None:
    """A pool that has lost its replicas does not sleep."""
    model, (handle,) = pooled(vectors, awake=False)
    (pool,), is_refused = model.pools, asleep == "refuse" and sleeps
    model._asleep, pool.ref = asleep, pool.ref.model_copy(update={"sleeps": sleeps})

    async def scenario() -> None:
        with pytest.raises(Asleep) if is_refused else nullcontext():
            await model.embed(IDS, EmbedOptions(), DEFAULT_QOS)
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert (handle.woken, len(handle.calls)) == (1, 0 if is_refused else 1)


def test_an_idle_pool_tries_whatever_the_plan_believes_of_it(pooled: Any) -> None:
    model, (handle,) = pooled(vectors)
    asyncio.run(model.embed([np.arange(200, dtype=np.int32)], EmbedOptions(), Qos(deadline_s=0.5)))  # 2 s at 100 tokens/s
    assert len(handle.calls) == 1


def test_a_pool_that_sleeps_is_woken_by_what_cannot_wait_for_it(pooled: Any) -> None:
    model, (handle,) = pooled(vectors, awake=False)

    async def scenario() -> None:
        with pytest.raises(DeadlineOutOfReach):
            await model.embed(IDS, EmbedOptions(), Qos(deadline_s=1.0))
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert (handle.woken, handle.calls) == (1, [])


@pytest.mark.parametrize(
    "error",
    [DeadlineOutOfReach(3.0, 1.0), DeadlinePassed("too late"), BackendError("the model gave a vector that is not finite")],
)
@pytest.mark.parametrize("of", [remote_error, lambda error: lambda qos: error], ids=["the call", "the request"])
def test_a_replicas_error_arrives_as_it_was_raised(pooled: Any, of: Callable[[Exception], Any], error: Exception) -> None:
    model, _ = pooled(of(error))
    with pytest.raises(type(error)) as caught:
        asyncio.run(model.embed(IDS, EmbedOptions(), DEFAULT_QOS))
    assert str(caught.value) == str(error)
    assert not isinstance(caught.value, RayTaskError)


NODE_DEATH = ActorDiedErrorContext(error_message="The actor died because its node has died.", actor_id=bytes(16))


@pytest.mark.parametrize(("error", "expected"), [(ActorDiedError(), ReplicaDied), (ActorDiedError(NODE_DEATH), ActorDiedError)])
def test_the_death_of_a_replica_is_told_from_that_of_its_node(pooled: Any, error: Exception, expected: type[Exception]) -> None:
    def fail(qos: Qos) -> Embeddings:
        raise error

    model, _ = pooled(fail)
    with pytest.raises(expected):
        asyncio.run(model.pools[0].connection.send([(IDS, EmbedOptions(), DEFAULT_QOS)], [Ticket(0, 10, 10)]))


def test_the_openapi_document_has_the_headers() -> None:
    paths = openapi.document("")["paths"]
    names = [each["name"] for each in paths["/v1/embeddings"]["post"]["parameters"]]
    assert names == ["x-priority", "x-request-deadline-ms", "cache-control"]
    assert "parameters" not in paths["/tokenize"]["post"]


def test_what_replicas_computed_apart_comes_in_the_inputs_order() -> None:
    def computed(part: list[int], pooled: bool) -> Embeddings:
        vectors = np.array([[index, 0.5] for index in part], dtype=np.float32)
        tokens = [np.full((index + 1, 2), index, dtype=np.float32) for index in part]
        return Embeddings(vectors if pooled else None, {"tokens": tokens}, float(part[0]), 1.0)

    parts = [[3, 0], [4, 1, 2]]
    for pooled in (True, False):
        options = EmbedOptions(pooled=pooled, outputs=("tokens",))
        whole = _joined(parts, [computed(part, pooled) for part in parts], options)
        assert [tokens.tolist() for tokens in whole.ragged["tokens"]] == [[[i, i]] * (i + 1) for i in range(5)]
        assert (whole.vectors is not None) == pooled
        assert whole.vectors is None or whole.vectors[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert (whole.queue_s, whole.inference_s) == (4.0, 1.0)
