"""SmolLM2 and MiniLM behind one address over real HTTP, deployed as by a plan, with requests of the openai SDK."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from monitoring import PROMETHEUS, alert_expressions, dashboard_expressions, prometheus, without_comparisons
from ray import serve

from cluster.autoscale import options as scaling_options
from cluster.models_file import ModelsFile
from cluster.nodes import GIB, Node
from cluster.plan import Plan
from cluster.serve_config import serve_config
from engine.model_id import EMBEDDED_GENERATOR, EMBEDDED_MODEL
from serve_app.gateway import app as gateway
from serve_app.gateway.config import GatewayArgs
from serve_app.replica import pool
from serve_app.replica.pool import PoolArgs

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = "1, 2, 3, 4, 5, 6,"
PREFIX = "/both"
NODE = Node("here", "amd64", 14 * GIB, 8)
MODELS = [
    {"name": EMBEDDED_MODEL, "model": EMBEDDED_MODEL, "dtype": "float32"},
    {"name": EMBEDDED_GENERATOR, "model": EMBEDDED_GENERATOR, "dtype": "float32", "context": 4096},
]
PLAN = Plan(ModelsFile.model_validate({"models": MODELS, "settings": {"max_client_batch_size": 16}}), [NODE])
POOLS = {each.model: each.name for each in PLAN.pools}


def bound(name: str, **options: Any) -> serve.RunTarget:
    """The pool's application as in a plan, with these deployment options."""
    (planned,) = (each for each in serve_config(PLAN)["applications"] if each["name"] == name)
    args = PoolArgs.model_validate(planned["args"] | {"num_threads": 2})
    return serve.RunTarget(pool.bind(args, ray_actor_options={"num_cpus": 0.1}, **options), name, None)


@pytest.fixture(scope="module")
def http(address: str) -> Iterator[httpx.Client]:
    *pools, front = serve_config(PLAN)["applications"]
    applications = [bound(each["name"]) for each in pools]
    applications.append(serve.RunTarget(gateway.build(GatewayArgs.model_validate(front["args"])), "planned", PREFIX))
    serve.run_many(applications)
    with httpx.Client(base_url=address + PREFIX, timeout=60) as client:
        wait_for(lambda: client.get("health").status_code == 200)  # HAProxy learns of the application a moment later
        wait_for(lambda: {each["state"] for each in client.get("v1/models").json()["data"]} == {"ready"})
        yield client
    for each in applications:
        serve.delete(each.name, _blocking=False)


@pytest.fixture(scope="module")
def sdk(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}v1", api_key="unused", max_retries=0) as client:
        yield client


def metric(http: httpx.Client, name: str) -> float:
    lines = [line for line in http.get("metrics").text.splitlines() if line.startswith(f"emberforge_{name}{{")]
    assert lines, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def chat(sdk: openai.OpenAI, **fields: Any) -> Any:
    return sdk.chat.completions.create(**({"model": EMBEDDED_GENERATOR, "messages": FRANCE, "temperature": 0} | fields))


def complete(sdk: openai.OpenAI, **fields: Any) -> Any:
    return sdk.completions.create(**({"model": EMBEDDED_GENERATOR, "prompt": COUNT, "temperature": 0} | fields))


def test_a_chat_is_answered_whole_and_in_chunks(sdk: openai.OpenAI) -> None:
    whole = chat(sdk)
    choice = whole.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("The capital of France is Paris.", "stop")
    chunks = list(chat(sdk, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 7
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_a_text_is_continued(sdk: openai.OpenAI) -> None:
    answer = complete(sdk, max_tokens=9, prompt=[COUNT, "The capital of Italy is"])
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" 7, 8, 9")
    assert "Rome" in answer.choices[1].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 18


def test_a_stop_string_ends_the_answer(sdk: openai.OpenAI) -> None:
    stopped = complete(sdk, max_tokens=30, stop=[" 9", "x"]).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (" 7, 8,", "stop", " 9")


def test_a_seed_gives_the_same_answers_again(sdk: openai.OpenAI) -> None:
    asked = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 8, "prompt": "Once"}
    first, again, other = complete(sdk, **asked), complete(sdk, **asked), complete(sdk, **asked | {"seed": 6})
    texts = [[choice.text for choice in answer.choices] for answer in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_logprobs(sdk: openai.OpenAI) -> None:
    content = chat(sdk, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert b"".join(bytes(each.bytes) for each in content).decode() == "The capital of France is Paris."
    for each in content:
        assert each.logprob == max(top.logprob for top in each.top_logprobs)
        assert len(each.top_logprobs) == 2
    told = complete(sdk, max_tokens=3, logprobs=1).choices[0].logprobs
    assert told.token_logprobs == [max(top.values()) for top in told.top_logprobs]
    assert "".join(told.tokens) == complete(sdk, max_tokens=3).choices[0].text
    assert told.text_offset == [0, len(told.tokens[0]), len(told.tokens[0] + told.tokens[1])]


def test_a_prompt_is_scored(sdk: openai.OpenAI) -> None:
    told = complete(sdk, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (told.text, "".join(told.logprobs.tokens), told.finish_reason) == (COUNT, COUNT, "length")
    assert told.logprobs.token_logprobs[0] is None
    assert told.logprobs.token_logprobs[-1] == max(told.logprobs.top_logprobs[-1].values())  # the last comma is likeliest


def test_decisions(sdk: openai.OpenAI) -> None:
    choices = [{"value": "billing", "description": "payments and refunds"}, {"value": "sports"}]
    done = sdk.decisions.create(
        model=EMBEDDED_GENERATOR,
        input="I was charged twice for my subscription, please give me my money back!",
        questions=[
            {"type": "choice", "name": "topic", "instructions": "What is the message about?", "choices": choices},  # type: ignore[typeddict-item]
            {"type": "predicate", "instructions": "The customer asks for a refund."},
        ],
    )
    topic, refund = done.answers
    assert (topic.type, topic.name, refund.type, refund.name) == ("choice", "topic", "predicate", None)
    assert topic.type == "choice"
    assert topic.choice == "billing"
    assert sum(each.probability for each in topic.probabilities) == pytest.approx(1)
    assert (done.usage.output_tokens, done.usage.total_tokens) == (2, done.usage.input_tokens + 2)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.decisions.create(model=EMBEDDED_GENERATOR, input="x", questions=[])
    assert caught.value.param == "questions"


def test_a_bias_forces_a_token(sdk: openai.OpenAI) -> None:
    answer = complete(sdk, max_tokens=3, logit_bias={"28": 100}, extra_body={"ignore_eos": True}).choices[0]
    assert len(set(answer.text)) == 1


def test_a_prompt_seen_before_is_found_in_the_cache(sdk: openai.OpenAI) -> None:
    prompt = "A long story about a cat. " * 40
    first, again = complete(sdk, prompt=prompt, max_tokens=1).usage, complete(sdk, prompt=prompt, max_tokens=1).usage
    assert first.prompt_tokens == again.prompt_tokens > 256
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again.prompt_tokens_details.cached_tokens == 256


def test_a_client_that_leaves_gives_its_pages_back(http: httpx.Client) -> None:
    asked = {"model": EMBEDDED_GENERATOR, "prompt": COUNT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    cancelled = metric(http, "cancelled_requests_total")
    with http.stream("POST", "v1/completions", json=asked) as answer:
        lines = answer.iter_lines()  # kept, because httpx closes the connection when the iterator is freed
        next(lines)
        wait_for(lambda: metric(http, "pool_kv_pages_held") > 0)  # a replica reports once a second
    wait_for(lambda: metric(http, "pool_kv_pages_held") == 0)
    wait_for(lambda: metric(http, "requests_in_flight") == 0)
    assert metric(http, "cancelled_requests_total") == cancelled + 1


def test_errors_have_their_status_with_and_without_stream(http: httpx.Client, sdk: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(sdk, messages=[{"role": "user", "content": "long " * 9000}], stream=stream)
        assert "maximum context length is 4096 tokens" in caught.value.message
        assert caught.value.param == "input_tokens"
    with pytest.raises(openai.BadRequestError, match="tools") as caught:
        chat(sdk, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (caught.value.param, caught.value.type) == ("tools", "BadRequestError")
    with pytest.raises(openai.BadRequestError, match="generates text and gives no vectors"):
        sdk.embeddings.create(model=EMBEDDED_GENERATOR, input="x")
    assert http.post("embed", json={"inputs": "x", "model": EMBEDDED_GENERATOR}).status_code == 400


def test_one_address_serves_both_models(http: httpx.Client, sdk: openai.OpenAI) -> None:
    embedder, generator = sdk.models.list()
    assert (embedder.id, generator.id, generator.max_model_len) == (EMBEDDED_MODEL, EMBEDDED_GENERATOR, 4096)
    assert http.get("info").json()["model_type"] == {"embedding": {"pooling": "mean"}}
    assert http.get("info", params={"model": EMBEDDED_GENERATOR}).json()["model_type"] == {"generation": {}}
    assert http.get("info", params={"model": "nope"}).status_code == 404
    assert len(sdk.embeddings.create(model=EMBEDDED_MODEL, input="x").data[0].embedding) == 384
    assert len(http.post("embed", json={"inputs": "x"}).json()[0]) == 384  # without a name, the first model that embeds answers
    assert http.post("v1/completions", json={"prompt": COUNT, "max_tokens": 1}).json()["model"] == EMBEDDED_GENERATOR
    replicas = {f'emberforge_pool_replicas{{model="{name}",pool="{pool}"}} 1.0' for name, pool in POOLS.items()}
    assert replicas <= set(http.get("metrics").text.splitlines())
    with pytest.raises(openai.NotFoundError, match=f"the models are {EMBEDDED_MODEL}, {EMBEDDED_GENERATOR}"):
        chat(sdk, model="nope")


def test_a_model_of_vectors_does_not_chat(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"`{EMBEDDED_MODEL}` does not generate text"):
        chat(sdk, model=EMBEDDED_MODEL)


def test_a_stream_goes_on_when_its_replica_dies(sdk: openai.OpenAI) -> None:
    """The replica is killed during the stream. The model has no other replica, so Serve starts one. Greedy text is the same."""
    asked: dict[str, Any] = {"max_tokens": 60, "frequency_penalty": 0.3, "extra_body": {"ignore_eos": True}}
    whole = complete(sdk, **asked)
    chunks: list[Any] = []
    for chunk in complete(sdk, stream=True, stream_options={"include_usage": True}, **asked):
        chunks.append(chunk)
        if len(chunks) == 10:
            replica_of(POOLS[EMBEDDED_GENERATOR]).kill()
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-2:] == [None, "length"]
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (whole.usage.prompt_tokens, 60)


def test_a_stream_moves_when_its_replica_stops_in_order(http: httpx.Client, sdk: openai.OpenAI) -> None:
    """Two replicas have a stream each, then one of them stops. Both streams have the same text, and only one of them moves."""
    name = POOLS[EMBEDDED_GENERATOR]
    texts: list[list[str]] = [[], []]
    enough = threading.Event()

    def read(into: list[str]) -> None:
        for chunk in complete(sdk, stream=True, max_tokens=3000, frequency_penalty=0.3, extra_body={"ignore_eos": True}):
            into.append(chunk.choices[0].text)
            if enough.is_set():
                return

    serve.run_many([bound(name, **scaling_options(2, 2))])
    two = f'emberforge_pool_replicas{{model="{EMBEDDED_GENERATOR}",pool="{name}"}} 2.0'
    wait_for(lambda: two in http.get("metrics").text.splitlines())
    with ThreadPoolExecutor() as pool:
        try:
            readers = []
            for text in texts:
                readers.append(pool.submit(read, text))
                wait_for(lambda text=text: len(text) > 3)  # so that the next stream goes to the other replica
            serve.run_many([bound(name, **scaling_options(1, 1))], wait_for_applications_running=False)
            wait_for(lambda: len(replicas_of(name)) == 1)
            lengths = [len(text) for text in texts]
            assert not any(each.done() for each in readers)
            wait_for(lambda: all(len(text) > length + 20 for text, length in zip(texts, lengths, strict=True)))
        finally:
            enough.set()
        for each in readers:
            each.result(30)
    length = min(map(len, texts))
    assert texts[0][:length] == texts[1][:length]


def replicas_of(pool: str) -> list[psutil.Process]:
    """The processes of the pool's replicas."""
    title = f"ray::ServeReplica:{pool}:Engine"
    return [each for each in psutil.process_iter(["cmdline"]) if " ".join(each.info["cmdline"] or ()).startswith(title)]


def replica_of(pool: str) -> psutil.Process:
    """The process of the pool's only replica."""
    (replica,) = replicas_of(pool)
    return replica


# These expressions may be empty on a healthy server on a CPU without API keys. tests/deploy tests the alerts among them.
EMPTY = {
    "server: Tokens/s of API keys: {{key}}",
    "server: Refusals of API keys: {{key}}",
    "cluster: Tokens/s of API keys, the most: {{key}}",
    "cluster: Share of the requests that fail: failed",
    "EmberforgeNoReplica",
    "EmberforgeErrors",
    "EmberforgeMemoryAbovePlan",
    "EmberforgeKeyRefused",
}


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
def test_each_expression_of_dashboards_and_alerts_has_a_result(http: httpx.Client, address: str, tmp_path: Path) -> None:
    """The node's address has the series of the gateway, of both replicas and of HAProxy."""
    assert http.post("embed", json={"inputs": "x"}).status_code == 200
    assert http.post("v1/completions", json={"prompt": COUNT, "max_tokens": 1}).status_code == 200
    expressions = dashboard_expressions() | {name: without_comparisons(each) for name, each in alert_expressions().items()}
    with prometheus(tmp_path, address.removeprefix("http://")) as query:
        empty = {name for name, expression in expressions.items() if not query(expression)}
        for _ in range(5):
            if empty <= EMPTY:
                break
            time.sleep(1)  # on a busy machine a scrape fails, and Prometheus has no series until the next one
            empty = {name for name in empty if not query(expressions[name])}
        models = {each["metric"]["model"] for each in query("emberforge_memory_used_bytes")}
        gateways = query('count by (replica) (te_request_count{pool=""})')
    assert empty <= EMPTY
    assert {EMBEDDED_MODEL, EMBEDDED_GENERATOR} <= models
    assert len(gateways) >= 1
