"""Puts a mixed load on a server for an hour, with clients that leave, time out and send invalid bytes.

The test fails on a wrong answer, on memory that grows, and on a traceback in a log. It also fails if the server still holds a
request, a page of the KV cache, a task or a file descriptor after the load.

python -m loadtests.soak [--minutes N] [--rate REQUESTS_A_SECOND] [--seed S]
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from typing import Any

import grpc
import httpx
import psutil

from loadtests.fuzz import MODELS, Outcome, send, serving
from loadtests.fuzz_cases import Case, Site, cases, http
from loadtests.report import write
from loadtests.usage import Key, Usage, tracebacks, usage
from serve_app.grpc import tei_pb2 as tei

_WHOLE_MINUTES = 60
_SETTLED_MINUTES = 10  # memory may grow until then: caches fill, allocators learn the sizes
_WINDOW_MINUTES = 10  # memory goes up and down with the load, so its growth is measured by the median of these minutes
_FLAT = 1.03
_WARM_S = 20.0  # seconds of load before the first count of an idle server's resources
_MOST_CLIENTS = 64  # at a time
_MOST_TEXTS, _LONGEST = 32, 250  # the default of `max_client_batch_size`; words, nearly MiniLM's longest input
_JSON = (("content-type", b"application/json"),)
_WORDS = [
    "the",
    "a",
    "of",
    "rose",
    "sea",
    "red",
    "blue",
    "what",
    "is",
    "where",
    "house",
    "tree",
    "light",
    "seven",
    "walks",
    "sees",
]
_HELD = ("requests_in_flight", "pool_kv_pages_held", "pool_queue_tokens", "tasks")  # metrics of a gateway


class Clients:
    """Makes clients of every kind. `seed` decides their order and their requests."""

    def __init__(self, seed: int, site: Site, document: dict[str, Any], models: Sequence[str]) -> None:
        """
        Args:
            models: an embedder, a generator, and perhaps a reranker.
        """
        self.outcome = Outcome()
        self._random, self._site = Random(seed), site
        self._embedder, self._generator, *self._rerankers = models
        self._rubbish = cases(seed, site, document, models)
        self._channel = grpc.aio.insecure_channel(f"{site.host}:{site.grpc_port}")

    async def run(self, rate: float, number: int, most: int = _MOST_CLIENTS) -> None:
        """Runs `number` clients that begin at random moments, at most `most` at a time."""
        running: set[asyncio.Task[None]] = set()
        for _ in range(number):
            await asyncio.sleep(self._random.expovariate(rate))
            if len(running) == most:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            kinds = (self._honest, self._leaving, self._hurried, self._grpc, lambda: self._send(next(self._rubbish)))
            (kind,) = self._random.choices(kinds, (45, 25, 5, 10, 15))
            running.add(task := asyncio.create_task(kind()))
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def send_largest(self) -> None:
        """Sends the largest bodies of the routes, as many at once as there are clients.

        Then each process has needed its most memory. Allocators keep the memory of the most and the largest requests. Without
        these bodies they would come at a random minute, and their memory would look like a leak.
        """
        texts = [" ".join(self._random.choices(_WORDS, k=_LONGEST)) for _ in range(_MOST_TEXTS)]
        for path, model, fields in (
            ("/embed", self._embedder, {"inputs": texts}),
            ("/embed_all", self._embedder, {"inputs": texts}),
            ("/v1/embeddings", self._embedder, {"input": texts}),
            ("/tokenize", self._embedder, {"inputs": texts}),
            *(("/rerank", model, {"query": texts[0], "texts": texts}) for model in self._rerankers),
        ):
            case = replace(self._post(path, fields | {"model": model}), has_deadline=True)
            await asyncio.gather(*(self._send(case) for _ in range(_MOST_CLIENTS)))

    async def close(self) -> None:
        await self._channel.close()

    async def _honest(self) -> None:
        """Waits for its answer and checks it."""
        case = self._request()
        await self._send(case, expects="200")

    async def _hurried(self) -> None:
        """Has a deadline that may be too short."""
        deadline = str(self._random.randrange(1, 200)).encode()
        await self._send(replace(self._request([("x-request-deadline-ms", deadline)]), has_deadline=True))

    async def _send(self, case: Case, expects: str = "") -> None:
        status, fault = await send(case, self._site, self._channel)
        self.outcome.add(case, status, fault or (f"not {expects}" if expects not in ("", status) else ""))

    async def _leaving(self) -> None:
        """Leaves within its body, before the answer, or within the answer. Some clients close the connection, some reset it."""
        random, case = self._random, self._request(is_long=True)
        stays = random.choice(("within the body", "until the answer", "within the answer"))
        reader, writer = await asyncio.open_connection(self._site.host, self._site.port)
        writer.write(case.data[: random.randrange(1, len(case.data))] if stays == "within the body" else case.data)
        if stays == "within the answer":
            with suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await reader.read(random.randrange(1, 600))
        else:
            await asyncio.sleep(random.choice((0.0, 0.02, 0.3)))
        if random.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
        self.outcome.add(case, f"left {stays}", "")

    async def _grpc(self) -> None:
        """Sends a call, or a stream that may be cancelled after its first answer."""
        metadata, case = [("x-model", self._embedder)], Case("grpc", "/tei.v1.Embed/EmbedStream", b"")
        if self._site.application:
            metadata.append(("application", self._site.application))
        texts = [tei.EmbedRequest(inputs=self._text()).SerializeToString() for _ in range(self._random.randrange(1, 5))]
        call = self._channel.stream_stream(case.route)(iter(texts), metadata=metadata, timeout=case.waits_s)
        try:
            async for _ in call:
                if self._random.random() < 0.2:
                    call.cancel()
                    self.outcome.add(case, "left within the answer", "")
                    return
        except grpc.aio.AioRpcError as error:
            self.outcome.add(case, error.code().name, str(error.details()))
        else:
            self.outcome.add(case, "OK", "")

    def _request(self, headers: Sequence[tuple[str, bytes]] = (), is_long: bool = False) -> Case:
        """`is_long`: a text that takes longer than any client waits."""
        random, path = self._random, "/embed"
        body: dict[str, Any] = {"model": self._embedder}
        kinds = ("chat", "complete") if is_long else ("embed", "embed", "rerank", "tokenize", "chat", "complete")
        match random.choice(kinds):
            case "rerank" if self._rerankers:
                path, body = "/rerank", {"model": self._rerankers[0], "query": self._text(), "texts": self._texts()}
            case "tokenize":
                path, body = "/tokenize", body | {"inputs": self._texts()}
            case "chat":
                path, messages = "/v1/chat/completions", [{"role": "user", "content": self._text()}]
                body = {"messages": messages, "stream": True, "model": self._generator, "max_tokens": random.randrange(1, 24)}
            case "complete":
                path, body = "/v1/completions", {"prompt": self._text(), "model": self._generator, "max_tokens": 4}
            case _:
                body["inputs"] = self._texts()
        if is_long:
            body |= {"max_tokens": 1500, "ignore_eos": True}
        return self._post(path, body, headers)

    def _post(self, path: str, body: dict[str, Any], headers: Sequence[tuple[str, bytes]] = ()) -> Case:
        content = json.dumps(body).encode()
        return Case("body", path, http(self._site, "POST", path, [*_JSON, *headers], content), self._site.prefix + path)

    def _texts(self) -> list[str]:
        return [self._text() for _ in range(self._random.choice((1, 1, 2, 8)))]

    def _text(self) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randrange(1, 60)))


def held(site: Site) -> dict[str, float]:
    """The resources that the gateway and the replicas hold, by the gateway's metrics."""
    lines = httpx.get(f"http://{site.host}:{site.port}{site.prefix}/metrics", timeout=10).text.splitlines()
    return {
        name: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"emberforge_{name}{{")) for name in _HELD
    }


async def left_over(
    site: Site, count: Callable[[], dict[Key, Usage]], before: dict[Key, Usage], tasks: float, seconds: float, spare: int = 0
) -> list[str]:
    """The resources that an idle server holds and did not hold before. Waits until there are none, or until the time is up.

    Args:
        tasks: the number of tasks of the gateway's event loop before.
        spare: the number of descriptors that a process may have more than before, for connections that wait for reuse.
    """
    deadline = monotonic() + seconds
    while True:
        now, used = held(site), count()
        more = [f"{name} is {value:g}" for name, value in now.items() if value > (tasks if name == "tasks" else 0)]
        more += [f"{role} {pid} is gone" for role, pid in before if (role, pid) not in used]
        more += [
            f"{role} {pid} has {used[role, pid].descriptors} descriptors, before {each.descriptors}"
            for (role, pid), each in before.items()
            if (role, pid) in used and used[role, pid].descriptors > each.descriptors + spare
        ]
        if not more or monotonic() > deadline:
            return more
        await asyncio.sleep(0.5)


async def _soak(site: Site, server: psutil.Process, minutes: int, rate: float, seed: int) -> tuple[Outcome, list[Any], list[str]]:
    def count() -> dict[Key, Usage]:
        return usage(server.children(recursive=True))

    document = httpx.get(f"http://{site.host}:{site.port}/openapi.json").json()
    clients = Clients(seed, site, document, MODELS)
    await clients.run(rate, int(_WARM_S * rate))
    await clients.send_largest()
    await asyncio.sleep(120)  # until idle connections are closed
    before, tasks, samples = count(), held(site)["tasks"], []
    for minute in range(minutes):
        await clients.run(rate, int(60 * rate))
        samples.append(count())
        total = sum(each.mib for each in samples[-1].values())
        print(f"minute {minute + 1}: {total:.0f} MiB, {clients.outcome.num_faults} faults", flush=True)
    await clients.close()
    return clients.outcome, samples, await left_over(site, count, before, tasks, seconds=180)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.soak")
    parser.add_argument("--minutes", type=int, default=_WHOLE_MINUTES)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (site, server):
        outcome, samples, left = asyncio.run(_soak(site, server, given.minutes, given.rate, given.seed))
        logged = tracebacks(Path(folder) / "said")
    rows = [_row(key, samples) for key in samples[0]]
    grown = [row["process"] for row in rows if row.get("growth %", 0.0) > 100 * (_FLAT - 1)]
    answers = [{"kind": kind, "outcome": status, "clients": count} for (kind, status), count in sorted(outcome.counts.items())]
    faults = [f"{fault} ({case.kind} {case.route})" for fault, case in outcome.faults]
    wrong = [*faults, *(f"left over: {each}" for each in left), *(f"traceback: {each}" for each in logged)]
    wrong += [f"grown: {each}" for each in grown]
    for line in (*rows, *answers, *wrong[:40]):
        print(line)
    if given.minutes >= _WHOLE_MINUTES:
        notes = [
            f"seed {given.seed}, {given.rate:g} clients/s, {given.minutes} minutes",
            f"{outcome.num_faults} wrong answers, {len(left)} things left over, {len(logged)} tracebacks",
            f"{len(grown)} processes grown. Memory: anonymous, in swap too. Growth: median of the last 10 over minutes 11 to 20",
            *wrong[:40],
        ]
        write("soak", "python -m loadtests.soak", {"Processes": rows, "Clients": answers}, notes)
    return int(bool(wrong))


def _row(key: Key, samples: Sequence[dict[Key, Usage]]) -> dict[str, Any]:
    """A process's row: its memory every ten minutes, its growth, and the first and last counts of descriptors and threads."""
    found = [each[key] for each in samples if key in each]
    row: dict[str, Any] = {"process": key[0]}
    row |= {
        f"MiB at {minute + 1} min": found[minute].mib
        for minute in range(len(found))
        if minute in (0, len(found) - 1) or minute % 10 == 9
    }
    if len(found) >= _SETTLED_MINUTES + 2 * _WINDOW_MINUTES:
        mib = [each.mib for each in found[_SETTLED_MINUTES:]]
        row["growth %"] = 100 * (median(mib[-_WINDOW_MINUTES:]) / median(mib[:_WINDOW_MINUTES]) - 1)
    return row | {
        "descriptors": f"{found[0].descriptors} to {found[-1].descriptors}",
        "threads": f"{found[0].threads} to {found[-1].threads}",
    }


if __name__ == "__main__":
    sys.exit(main())
