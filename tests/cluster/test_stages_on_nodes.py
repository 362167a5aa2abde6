"""One model in stages on two and three nodes, each in its own network namespace. A stage that is killed breaks no stream."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from cluster.models_file import ModelsFile
from cluster.nodes import GIB, Node
from cluster.plan import Plan
from cluster.serve_config import serve_config
from engine.hub import EMBEDDED_GENERATOR
from loadtests import cluster
from loadtests.cluster_load import Site
from loadtests.lab import Lab, lab, possible, wait_for

pytestmark = [
    pytest.mark.skipif("EMBERFORGE_TEST_NODES" not in os.environ, reason="takes minutes: make test-nodes"),
    pytest.mark.skipif(not possible(), reason="needs network namespaces"),
]

# The memory sizes are for the plan only. No node can hold the whole model, and the nodes differ.
SMALL = Node("s1", "amd64", int(2.2 * GIB), 2, reserve_bytes=0)
NODES = (SMALL, replace(SMALL, name="s2", ram_bytes=int(2.3 * GIB)), replace(SMALL, name="s3"))
STREAMS, TOKENS = 6, 48

# Sends all requests at once, prints a line once every stream has begun, and at the end prints each text and each error.
CLIENTS = """
import asyncio, json, random, sys, httpx
port, streams, tokens = map(int, sys.argv[1:])
begun = 0

async def one(client, seed):
    global begun
    prompt = random.Random(seed).choices(range(300, 10_000), k=12)
    body = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    text, chunks = "", 0
    async with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text, ""
            if line.startswith("data: "):
                said = json.loads(line[6:])
                if "error" in said:
                    return text, said["error"]["message"]
                text, chunks = text + said["choices"][0]["text"], chunks + 1
                if chunks == 3:
                    begun += 1
                    if begun == streams:
                        print("begun", flush=True)
    return text, f"ended with {answer.status_code}"

async def main():
    async with httpx.AsyncClient(timeout=300) as client:
        print(json.dumps(await asyncio.gather(*(one(client, seed) for seed in range(streams)), return_exceptions=False)))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Lab]:
    with lab() as made:
        cluster.build(made, NODES)
        yield made


def config(nodes: Sequence[Node]) -> dict[str, Any]:
    """The Serve config of the plan, with the gateway on the head."""
    entry: dict[str, Any] = {"name": "chat", "model": EMBEDDED_GENERATOR, "dtype": "float32", "context": 512, "streams": STREAMS}
    entry["pipeline"] = len(nodes)
    file = ModelsFile.model_validate({"models": [entry], "settings": {"request_timeout_s": 300}})
    plan = Plan(file, nodes)
    assert [sorted(each.members) for each in plan.assigned] == [[f"{node.name}:cpu" for node in nodes]], plan.unplaced
    content = serve_config(plan) | {"proxy_location": "HeadOnly"}
    gateway = content["applications"][-1]
    gateway["deployments"][0]["ray_actor_options"] |= {"label_selector": {"emberforge-node": "head"}, "num_cpus": 0.25}
    return content


def ask(laboratory: Lab) -> "subprocess.Popen[str]":
    """Starts the clients. Returns when every stream has begun."""
    clients = laboratory.start("head", "-c", CLIENTS, "8000", str(STREAMS), str(TOKENS))
    assert clients.stdout is not None
    assert clients.stdout.readline() == "begun\n"
    return clients


def texts(clients: "subprocess.Popen[str]") -> list[str]:
    output, _ = clients.communicate(timeout=300)
    found = json.loads(output)
    assert [fault for _, fault in found] == [""] * STREAMS
    return [text for text, _ in found]


def stages(laboratory: Lab) -> list[int]:
    """The process ids of the later stages on all nodes."""
    everyone = [each for node in NODES for each in laboratory.members[node.name].processes()]
    return [each.pid for each in everyone if each.is_running() and "ray::_Stage" in " ".join(each.cmdline())]


@pytest.mark.parametrize("count", [2, 3])
def test_a_stage_that_is_killed_breaks_no_stream(laboratory: Lab, tmp_path: Path, count: int) -> None:
    site, nodes = Site(laboratory), NODES[-count:]
    cluster.apply(laboratory, config(nodes), tmp_path)
    wait_for("the replica", lambda: site.ready() == 1 and len(stages(laboratory)) == count - 1, 300)
    expected = texts(ask(laboratory))
    before = stages(laboratory)
    clients = ask(laboratory)
    sleep(1)
    laboratory.process("ray::_Stage", *(node.name for node in NODES)).kill()  # Ray may have chosen an equal node
    assert texts(clients) == expected
    after = stages(laboratory)
    assert len(after) == count - 1
    assert not set(before) & set(after)
    assert texts(ask(laboratory)) == expected
