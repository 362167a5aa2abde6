"""A short run of the fuzzer and of the soak (`loadtests/`): no answer is wrong, and no memory or process is left behind."""

import asyncio
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from ray import serve
from test_behaviour import wait_for

from engine.model_id import EMBEDDED_GENERATOR, EMBEDDED_MODEL
from loadtests import fuzz
from loadtests.fuzz_cases import Site, cases
from loadtests.fuzz_schema import generated
from loadtests.soak import Clients, held, left_over
from loadtests.usage import Key, Usage, tracebacks, usage
from serve_app.app import GATEWAY, Share, targets
from serve_app.http.openapi import document
from serve_app.settings import Settings

MODELS = [EMBEDDED_MODEL, EMBEDDED_GENERATOR]
PREFIX = "/rough"


@pytest.fixture(scope="module")
def site(address: str, grpc_port: int) -> Iterator[Site]:
    settings = Settings(models=tuple(MODELS), num_threads=2, dtype="float32", cache_tokens=2048)
    applications = targets(settings, Share(num_threads=2, num_cpus=0.1, num_gpus=0, max_surge_percent=0), PREFIX)
    serve.run_many(applications)
    site = Site(int(address.rpartition(":")[2]), grpc_port, PREFIX, GATEWAY)
    with httpx.Client(base_url=address + PREFIX, timeout=60) as client:
        wait_for(lambda: client.get("health").status_code == 200)  # HAProxy learns of the application a moment later
        wait_for(lambda: {each["state"] for each in client.get("v1/models").json()["data"]} == {"ready"})
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        info = channel.unary_unary("/tei.v1.Info/Info")
        wait_for(lambda: _answers(info))
    yield site
    for each in applications:
        serve.delete(each.name, _blocking=False)


def _answers(info: grpc.UnaryUnaryMultiCallable) -> bool:
    try:
        info(b"", metadata=[("application", GATEWAY)])
    except grpc.RpcError:
        return False
    return True


def count() -> dict[Key, Usage]:
    """The usage of the processes of this file's applications."""
    titles = tuple(f"ray::ServeReplica:{name}:" for name in (GATEWAY, *MODELS))
    return usage(each for each in psutil.process_iter(["cmdline"]) if "".join(each.info["cmdline"] or ()).startswith(titles))


def test_no_answer_to_rubbish_is_wrong(site: Site) -> None:
    before, outcome = count(), fuzz.Outcome()
    bodies = generated(document(PREFIX), 44, start=1)
    asyncio.run(fuzz.run(islice(cases(1, site, document(PREFIX), MODELS, bodies), 300), site, outcome))
    assert outcome.faults == []
    assert {kind for kind, _ in outcome.counts} == {"body", "raw", "grpc", "grpc bytes"}
    assert before.keys() == count().keys()


def test_clients_that_leave_leave_nothing_behind(site: Site, server_log: Path) -> None:
    """The log has no traceback either."""
    logged = len(tracebacks(server_log))

    async def soak() -> tuple[fuzz.Outcome, list[str]]:
        clients = Clients(1, site, document(PREFIX), MODELS)
        await clients.run(rate=60, number=30, most=8)  # creates the connections and threads that stay
        assert await left_over(site, count, {}, tasks=1000, seconds=10) == []
        before, tasks = count(), held(site)["tasks"]
        await clients.run(rate=60, number=150, most=8)
        await clients.close()
        return clients.outcome, await left_over(site, count, before, tasks, seconds=10, spare=8)

    outcome, left = asyncio.run(soak())
    assert outcome.faults == []
    assert left == []
    assert sum(number for (_, status), number in outcome.counts.items() if status.startswith("left")) > 25
    assert tracebacks(server_log)[logged:] == []
