"""An open-loop load on a cluster in a laboratory, from a process on the machine of the clients, and its results."""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, perf_counter, sleep
from typing import Any

import httpx
import orjson

from loadtests.client import Connection
from loadtests.lab import Lab
from loadtests.traces import percentile, request_lengths

LONGEST = 256  # tokens of a text
DEADLINE_S = 2.0  # later answers count as late
_GIVE_UP_S = 60.0
_LOOK_EVERY_S = 0.5

WRONG = "wrong vectors"
Result = tuple[float, float, str]  # due at seconds after the start, latency, "200" or the error; `WRONG` for a wrong answer


@dataclass(frozen=True, slots=True)
class Site:
    """The machine of the clients, and the port that they use."""

    laboratory: Lab
    member: str = "head"
    port: int = 8000

    def load(self, *phases: tuple[float, float], seed: int = 1) -> "Load":
        """Starts loads of (tokens/s, seconds), one after the other."""
        return Load(self, phases, seed)

    def pools(self) -> list[dict[str, Any]]:
        """The pools in `GET /v1/models`. Empty as long as there is no gateway."""
        script = (
            "import httpx, sys\n"
            f"try: print(httpx.get('http://127.0.0.1:{self.port}/v1/models', timeout=5).text)\n"
            "except httpx.HTTPError: print('{}')"
        )
        try:
            listed = json.loads(self.laboratory.run(self.member, "-c", script)).get("data", [])
        except (ValueError, RuntimeError):
            return []
        return [pool for model in listed for pool in model["pools"]]

    def ready(self) -> int:
        """The number of ready replicas of all pools."""
        return sum(pool["replicas"] for pool in self.pools())


class Load:
    """A load that runs."""

    def __init__(self, site: Site, phases: Sequence[tuple[float, float]], seed: int) -> None:
        arguments = json.dumps({"port": site.port, "phases": phases, "seed": seed})
        self._process = site.laboratory.start(site.member, "-m", "loadtests.cluster_load", arguments)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it says when it starts
        self.started = monotonic()
        self.replicas: list[tuple[float, int]] = []  # (seconds after the start, number of replicas); complete at the end

    def at(self, seconds: float) -> None:
        """Waits until a time after the start."""
        sleep(max(0.0, self.started + seconds - monotonic()))

    def results(self) -> list[Result]:
        """The results of all requests, in the order in which they were due."""
        output, _ = self._process.communicate()
        said = json.loads(output)
        self.replicas = [(seconds, number) for seconds, number in said["replicas"]]
        return [(due, latency, status) for due, latency, status in said["requests"]]


def summary(results: Sequence[Result], between: tuple[float, float] = (0, 1e9)) -> dict[str, Any]:
    """The results of requests that were due between two times."""
    chosen = [each for each in results if between[0] <= each[0] < between[1]]
    good = [latency for _, latency, status in chosen if status == "200"] or [float("nan")]
    return {
        "requests": len(chosen),
        "failed": sum(status != "200" for *_, status in chosen),
        "p50 ms": 1e3 * percentile(good, 50),
        "p99 ms": 1e3 * percentile(good, 99),
        "slowest ms": 1e3 * max(good),
        "in time %": 100 * sum(latency <= DEADLINE_S for latency in good) / max(1, len(chosen)),
    }


def failures(results: Sequence[Result]) -> dict[str, int]:
    return dict(Counter(status for *_, status in results if status != "200").most_common(5))


def main(port: int, phases: Sequence[tuple[float, float]], seed: int) -> None:
    """Sends requests of 1, 4, 16 or 64 texts as token ids at Poisson times, independent of earlier requests."""
    rng = random.Random(seed)
    mean = sum(sum(request_lengths(rng, LONGEST)) for _ in range(20_000)) / 20_000
    due: list[tuple[float, list[range]]] = []
    start = 1.0
    for tokens_per_s, seconds in phases:
        now = start + rng.expovariate(tokens_per_s / mean)
        while now < start + seconds:
            firsts = ((rng.randrange(1000, 20_000), length) for length in request_lengths(rng, LONGEST))
            due.append((now, [range(first, first + length) for first, length in firsts]))
            now += rng.expovariate(tokens_per_s / mean)
        start += seconds
    print(json.dumps(asyncio.run(_send(port, due))))


async def _send(port: int, due: Sequence[tuple[float, list[range]]]) -> dict[str, Any]:
    idle: list[Connection] = []
    results: list[Result] = []
    replicas: list[tuple[float, int]] = []
    print("started", flush=True)
    start = perf_counter()

    async def send(at: float, texts: Sequence[range]) -> None:
        connection = idle.pop() if idle else Connection("127.0.0.1", port, "/embed")
        status = "200"
        try:
            answer = await asyncio.wait_for(connection.post(orjson.dumps({"inputs": [list(ids) for ids in texts]})), _GIVE_UP_S)
            idle.append(connection)
            # `loadtests.stub_pool`: the first number of a vector is the sum of the ids.
            if [vector[0] for vector in orjson.loads(answer)] != [sum(ids) for ids in texts]:
                status = WRONG
        except Exception as error:
            status = f"{type(error).__name__}: {error}"[:200]
            connection.close()
        results.append((at, perf_counter() - start - at, status))

    async def look() -> None:
        async with httpx.AsyncClient(timeout=2) as client:
            while True:
                with suppress(httpx.HTTPError, ValueError, KeyError):
                    models = (await client.get(f"http://127.0.0.1:{port}/v1/models")).json()["data"]
                    number = sum(pool["replicas"] for model in models for pool in model["pools"])
                    replicas.append((perf_counter() - start, number))
                await asyncio.sleep(_LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    tasks = []
    for at, texts in due:
        await asyncio.sleep(max(0.0, start + at - perf_counter()))
        tasks.append(asyncio.create_task(send(at, texts)))
    await asyncio.gather(*tasks)
    looking.cancel()
    return {"requests": sorted(results), "replicas": replicas}


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
