"""Measures the routing of streams by real gateways to real replicas whose engines sleep: ours beside three other policies.

python -m loadtests.stream_lab

The traffic, the cards and the other policies are those of `loadtests/stream_routing.py`, for six cards on one Ray. The engine's
own scheduler and cache run in the replicas. All times are `SLOW` times as long as the cards' times, so that two cores suffice for
everything else.
"""

import asyncio
import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any
from urllib.request import urlopen

import numpy as np
import orjson
import psutil

from cluster.local_ray import free_port, local_ray
from cluster.prefixes import PAGE_TOKENS
from engine.model_id import EMBEDDED_GENERATOR
from loadtests import stream_routing
from loadtests.report import write
from loadtests.stream_routing import CARDS, Chat, Job, Kind, Rag, capacity, uncached_share
from loadtests.traces import percentile

NUMBERS = {"NVIDIA GeForce RTX 4090": 2, "NVIDIA GeForce RTX 5090": 2, "NVIDIA L40S": 1, "NVIDIA GB10": 1}
SLOW = 2.0
LOAD = 0.8
WARM_S, MEASURED_S = 25.0, 35.0  # of the cards' time
OBJECTIVE_S = 1.0  # of the cards' time
POLICIES = ("round robin", "power of two", "prefix only", "ours")  # names in `loadtests/stub_cards.py`, which imports Ray
# A prompt's last token decides the length of the answer: each token of the answer is one less than the token before, to `LAST`.
LAST = 2000
# The traffic of this many cards. A traffic for six cards has so few system prompts that each card would soon have all of them.
TRAFFIC_OF = {Chat: 60, Rag: 6}
TURN_S = 17.0  # seconds of the cards' time between two requests of a chat: the answer, and the user's pause
CACHED = re.compile(rb'"cached_tokens":(\d+)')


@dataclass(slots=True)
class Asked:
    """A request and its answer. Times by `perf_counter`."""

    at: float
    prompt_tokens: int
    first_at: float = inf
    cached: int | None = None  # known at the end of the answer
    error: str = ""


class Reader(asyncio.Protocol):
    """Sends one request, and keeps the time of the first token. Uses as little CPU time as possible in Python."""

    def __init__(self, asked: Asked, request: bytes) -> None:
        self._asked, self._request, self._tail = asked, request, b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._asked.error = data[:300].decode(errors="replace")
            self._transport.close()
        elif self._asked.first_at == inf and b"data: {" in data:
            self._asked.first_at = perf_counter()
        self._tail = (self._tail + data)[-2000:]
        if b"[DONE]" in self._tail:
            if found := CACHED.search(self._tail):
                self._asked.cached = int(found[1])
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Clients:
    """Sends the requests of one traffic to a server, for `WARM_S` and `MEASURED_S`."""

    def __init__(self, traffic: Chat | Rag, per_s: float, open_chats: int, port: int, seed: int) -> None:
        """
        Args:
            per_s: first requests of chats, or questions, in a second of the cards' time.
            open_chats: chats that have begun before the start.
            seed: decides the tokens. Runs with different seeds share no cached pages.
        """
        self._traffic, self._per_s, self._port, self._seed = traffic, per_s, port, seed
        self._open_chats = open_chats
        self.asked: list[Asked] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> list[Asked]:
        """The requests that came after the warm-up."""
        rng, start = random.Random(1), perf_counter()
        for _ in range(self._open_chats):
            self._begin(self._later_turn(rng), rng.uniform(0.0, TURN_S * SLOW))
        while (now := perf_counter() - start) < (WARM_S + MEASURED_S) * SLOW:
            self._begin(self._traffic.first(now))
            await asyncio.sleep(rng.expovariate(self._per_s / SLOW))
        self.end_at = perf_counter()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return [each for each in self.asked if each.at - start >= WARM_S * SLOW]

    def _later_turn(self, rng: random.Random) -> Job | None:
        """A chat that has begun before. The number of its remaining turns does not depend on the number of turns before."""
        job = self._traffic.first(0.0)
        while job is not None and job.session is not None and rng.random() < 0.8:
            job = job.session.turn(0.0) or self._traffic.first(0.0)
        return job

    def _begin(self, job: Job | None, after_s: float = 0.0) -> None:
        task = asyncio.create_task(self._talk(job, after_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(self, job: Job | None, after_s: float) -> None:
        """Sends a question, or all turns of a chat. A turn's prompt contains the tokens of the server's earlier answers."""
        said = list[int]()
        await asyncio.sleep(after_s)
        while job is not None:
            said = self._prompt(job, said)
            await self._ask(said, job.answer)
            said = [*said, *range(said[-1] - 1, LAST - 1, -1)]
            session, job = job.session, None
            if session is not None and (job := session.turn(0.0)) is not None:
                await asyncio.sleep(self._traffic.think_s() * SLOW)

    def _prompt(self, job: Job, said: list[int]) -> list[int]:
        """The earlier tokens, and new ones: from the job's pages, which other prompts may share, or from the job itself."""
        ids = list(said)
        while len(ids) < job.prompt:
            page, offset = divmod(len(ids), PAGE_TOKENS)
            seed = job.pages[page] if page < len(job.pages) else random.getrandbits(64)
            ids += np.random.default_rng([seed, self._seed]).integers(4000, 40_000, PAGE_TOKENS)[offset:].tolist()
        return [*ids[: job.prompt - 1], LAST + job.answer - 1]

    async def _ask(self, prompt: list[int], answer: int) -> None:
        body = {"prompt": prompt, "max_tokens": 1024, "stream": True, "stream_options": {"include_usage": True}}
        content = orjson.dumps(body)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        self.asked.append(asked := Asked(perf_counter(), len(prompt)))
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(lambda: Reader(asked, request), "127.0.0.1", self._port)
        try:
            await reader.ended
        finally:
            transport.close()


def figures(asked: Sequence[Asked], end_at: float) -> dict[str, Any]:
    """The figures in the cards' time. A request without a token at the end counts with its waiting time until then."""
    waits = [(min(each.first_at, end_at) - each.at) / SLOW for each in asked]
    ended = [each for each in asked if each.cached is not None]
    good = sum((each.first_at - each.at) / SLOW <= OBJECTIVE_S for each in asked)
    return {
        "errors": sum(bool(each.error) for each in asked),
        "p50 ms": 1e3 * percentile(waits, 50),
        "p99 ms": 1e3 * percentile(waits, 99),
        "good requests/s": good / MEASURED_S,
        "good %": 100 * good / len(asked),
        "cached %": 100 * sum(each.cached or 0 for each in ended) / max(1, sum(each.prompt_tokens for each in ended)),
    }


class Cluster:
    """Replicas of six cards, and one gateway whose policy can be changed."""

    def __init__(self, kinds: dict[Kind, int]) -> None:
        from ray import serve

        from loadtests.stub_cards import bind_pool
        from serve_app.replica.pool import PoolArgs

        self.port = free_port()
        self._small = {"ray_actor_options": {"num_cpus": 0.1}}
        self._spec = {"name": "chat", "model": EMBEDDED_GENERATOR, "dtype": "float32"}
        self._pools = [
            {"name": kind.name.replace(" ", "-"), "node_class": kind.name.replace(" ", "-"), "tokens_per_s": kind.rate / SLOW}
            for kind in kinds
        ]
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})
        targets = []
        for ref, (kind, number) in zip(self._pools, kinds.items(), strict=True):
            args = {"pool": ref["name"], "spec": self._spec, "tokens_per_s": ref["tokens_per_s"]}
            card = kind.rate / SLOW, kind.step_s * SLOW, kind.stream_s * SLOW, kind.pages
            application = bind_pool(PoolArgs.model_validate(args), card, num_replicas=number, **self._small)
            targets.append(serve.RunTarget(application, ref["name"], None))
        serve.run_many(targets)
        self._num_replicas = sum(kinds.values())

    async def use(self, policy: str) -> None:
        """Replaces the gateway. Returns when it knows all replicas."""
        from ray import serve

        from loadtests.stub_cards import bind_gateway
        from serve_app.gateway.config import GatewayArgs

        settings = {"max_concurrent_requests": 4096, "request_timeout_s": 600.0}
        given = {"models": [{"spec": self._spec, "pools": self._pools}], "default": "chat", "settings": settings}
        application = bind_gateway(GatewayArgs.model_validate(given), policy, **self._small)
        await asyncio.to_thread(serve.run, application, name="gateway", route_prefix="/")
        for _ in range(300):
            if await asyncio.to_thread(self._num_ready) == self._num_replicas:
                return
            await asyncio.sleep(0.2)
        raise TimeoutError(f"the gateway does not find {self._num_replicas} replicas")

    def _num_ready(self) -> int:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=5) as answer:
                (model,) = orjson.loads(answer.read())["data"]
        except OSError:
            return 0
        return sum(pool["replicas"] for pool in model["pools"])


async def table(cluster: Cluster, traffic_of: type[Chat] | type[Rag], kinds: dict[Kind, int]) -> list[dict[str, Any]]:
    size = TRAFFIC_OF[traffic_of]
    each, prompt, new, answer = uncached_share(traffic_of(random.Random(0), size), 600)
    per_s = LOAD * capacity(kinds, prompt, new, answer) / each
    open_chats = round(per_s * each * TURN_S) if each > 1 else 0
    rows: list[dict[str, Any]] = []
    for seed, policy in enumerate(POLICIES):
        await cluster.use(policy)
        clients = Clients(traffic_of(random.Random(0), size), per_s, open_chats, cluster.port, seed)
        asked = await clients.run()
        row = {"load": f"{LOAD:.0%}", "policy": policy, "requests/s": len(asked) / MEASURED_S} | figures(asked, clients.end_at)
        if policy == "ours":
            row["p99 / best other"] = row["p99 ms"] / min(other["p99 ms"] for other in rows)
            row["good / best other"] = row["good requests/s"] / max(other["good requests/s"] for other in rows)
        rows.append(row)
        print(row, psutil.getloadavg(), {each.error for each in asked if each.error}, file=sys.stderr, flush=True)
    return rows


async def tables(cluster: Cluster, kinds: dict[Kind, int]) -> dict[str, list[dict[str, Any]]]:
    return {traffic_of.name: await table(cluster, traffic_of, kinds) for traffic_of in (Chat, Rag)}


def main() -> None:
    kinds = {Kind.of(name, CARDS[name][1]): number for name, number in NUMBERS.items()}
    os.environ["HF_HUB_OFFLINE"] = "1"
    with local_ray(num_cpus=4):
        found = asyncio.run(tables(Cluster(kinds), kinds))
    notes = [
        f"real gateway, replicas, scheduler and cache; engines that sleep as long as {stream_routing.MODEL} in bf16 would take; "
        + ", ".join(f"{number} {kind.name}" for kind, number in kinds.items()),
        f"engines and traffic are {SLOW:g} times as slow as the cards, the table has the cards' time; {WARM_S:g} s of warm-up, "
        f"then {MEASURED_S:g} s; good: the first token within {OBJECTIVE_S:g} s",
        f"load: {LOAD:.0%} of the requests/s that the cards could do if each page were computed once",
        "traffic and policies as in stream_routing, 30 system prompts and 30 documents; chats that have begun before run from "
        "the start; one gateway, so each policy knows all streams",
        "round robin, power of two and prefix only answer late, so fewer turns of chats come; the clients share the cores, and "
        "send a few percent fewer questions than drawn where the machine is busy",
        f"load average of the machine's {os.cpu_count()} cores at the end: {psutil.getloadavg()[0]:.1f}; other work ran on them",
    ]
    write("stream_lab", "python -m loadtests.stream_lab", found, notes)


if __name__ == "__main__":
    main()
