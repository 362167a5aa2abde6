"""Measures streams while replicas, nodes and gateways fail: how many streams break, and how long the others pause.

python -m loadtests.stream_faults [FAULT ...]

The nodes and the load balancer are those of `loadtests.cluster`. The engines compute nothing. Each token is a function of its
position. So a stream with a lost or repeated token has another text than an undisturbed stream.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, takewhile
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import orjson
import yaml
from httptools import HttpResponseParser
from tokenizers import Tokenizer

from cluster.models_file import ModelsFile
from cluster.plan import Plan
from cluster.serve_config import serve_config
from engine.model_id import EMBEDDED_GENERATOR
from loadtests.balancer import haproxy
from loadtests.cluster import apply, balanced, build, rtx_5080
from loadtests.cluster_load import Site
from loadtests.faults import Fault, drain, kill, measure_faults
from loadtests.lab import lab, wait_for
from loadtests.report import write
from loadtests.stub_streams import token_at

NODES = tuple(rtx_5080(name) for name in ("pc1", "pc2", "pc3"))
INGRESS = ("pc1", "pc2")
STREAMS, TOKENS, PASS_S = 100, 500, 0.05
PROMPT_TOKENS = 4
FAULT_AT_S = 8.0  # seconds after the first request
DRAIN_S = 10  # the drained node's deadline
TITLE = "Streams under faults"
MOST_S = 120.0  # a stream without an end by then counts as broken


def config() -> dict[str, Any]:
    """The Serve config of one model with a replica on each node, and of gateways on the ingress nodes."""
    entry: dict[str, Any] = {"name": "chat", "model": EMBEDDED_GENERATOR, "dtype": "float32", "context": 1024, "streams": 64}
    entry |= {"min_replicas": len(NODES), "max_replicas": len(NODES)}
    settings = {"request_timeout_s": MOST_S, "payload_limit": 2_000_000}
    file = ModelsFile.model_validate({"models": [entry], "gateways": 2, "settings": settings})
    content = serve_config(Plan(file, NODES)) | {"proxy_location": "EveryNode"}
    *pools, gateway = content["applications"]
    for pool in pools:
        pool["import_path"] = "loadtests.stub_streams:build"
        pool["args"] |= {"pass_s": PASS_S}
    # A client loses its stream with a gateway or an ingress, so pc3 has neither.
    where = {"emberforge-node": f"in({','.join(INGRESS)})"}
    gateway["deployments"][0] |= {"max_replicas_per_node": 2}
    gateway["deployments"][0]["ray_actor_options"] |= {"label_selector": where, "num_cpus": 0.25}
    return content


@contextmanager
def running(folder: Path) -> Iterator[Site]:
    """Deploys the cluster."""
    with lab() as laboratory:
        build(laboratory, NODES)
        site = balanced(laboratory, folder, INGRESS)
        apply(laboratory, config(), folder)
        yield site


def whole(site: Site) -> None:
    """Waits until all replicas are ready and answer."""
    wait_for("all replicas", lambda: site.pools() and site.ready() >= len(NODES), 400)
    wait_for("a whole answer", lambda: outcomes(ask(site, 1, 2)) == {"whole": 1}, 120)


def ask(site: Site, streams: int = STREAMS, tokens: int = TOKENS) -> "subprocess.Popen[str]":
    """Starts all clients at once. Returns when they have begun."""
    arguments = json.dumps({"port": site.port, "streams": streams, "tokens": tokens})
    process = site.laboratory.start(site.member, "-m", "loadtests.stream_faults", "--clients", arguments)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def results(process: "subprocess.Popen[str]") -> list[tuple[str, float, float]]:
    """For each stream: "whole" or its fault, its longest pause in s, and its duration in s."""
    output, _ = process.communicate()
    return [(outcome, pause, seconds) for outcome, pause, seconds in json.loads(output)]


def outcomes(process: "subprocess.Popen[str]") -> dict[str, int]:
    return dict(Counter(outcome for outcome, *_ in results(process)))


def change(site: Site, folder: Path, part: int | slice, edit: Callable[[dict[str, Any]], object]) -> None:
    """Deploys the present config again with changed applications. The last application is the gateway."""
    content = yaml.safe_load((folder / "serve.yaml").read_text(encoding="utf-8"))
    chosen = content["applications"][part]
    for application in chosen if isinstance(chosen, list) else [chosen]:
        edit(application)
    apply(site.laboratory, content, folder)


def raise_limit(application: dict[str, Any]) -> None:
    """Replaces all processes of an application."""
    application["args"]["settings"]["payload_limit"] += 1_000_000


def redeploy_gateways(site: Site, folder: Path) -> None:
    change(site, folder, -1, raise_limit)


def redeploy_replicas(site: Site, folder: Path) -> None:
    change(site, folder, slice(-1), raise_limit)


def add_gateway(site: Site, folder: Path) -> None:
    """The HAProxy of every node is reloaded when the number of gateways changes."""
    change(site, folder, -1, lambda gateway: gateway["deployments"][0].update(num_replicas=3))


def kill_node(site: Site, _: Path) -> None:
    site.laboratory.members["pc3"].kill()


def unplug_node(site: Site, _: Path) -> None:
    site.laboratory.members["pc3"].unplug()


def kill_head(site: Site, _: Path) -> None:
    site.laboratory.members["head"].kill()


def reload_balancer(site: Site, folder: Path) -> None:
    """Does the same as `systemctl reload haproxy`: a new process takes the port, and the old one ends after its last answer."""
    old = next(each for each in site.laboratory.members["front"].processes() if "haproxy.cfg" in " ".join(each.cmdline()))
    site.laboratory.start("front", "-f", str(folder / "haproxy.cfg"), "-sf", str(old.pid), program=haproxy())


# A cluster recovers from these faults and serves for the next one.
MENDED: dict[str, Fault] = {
    "a replica is killed": kill("ServeReplica:chat", "pc3"),
    "the replicas are redeployed": redeploy_replicas,
    "the gateways are redeployed": redeploy_gateways,
    "a gateway is added (the nodes' HAProxy is reloaded)": add_gateway,
    "the load balancer's HAProxy is reloaded": reload_balancer,
    "a gateway is killed": kill("ServeReplica:gateway", *INGRESS),
}
LASTING: dict[str, Fault] = {
    "the head is killed": kill_head,
    "a node is killed": kill_node,
    "a node is unplugged (packets vanish)": unplug_node,
    f"a node is drained, and switched off {DRAIN_S} s later": drain("pc3", DRAIN_S),
}


def main(wanted: Sequence[str]) -> None:
    """Measures the faults that are named, or all."""
    measure_faults("stream_faults", TITLE, (list(MENDED), list(LASTING)), wanted, running, measured, report)


def measured(site: Site, folder: Path, name: str) -> dict[str, Any]:
    """Measures a fault while all streams run."""
    whole(site)
    clients = ask(site)
    sleep(FAULT_AT_S)
    (MENDED | LASTING)[name](site, folder)
    return row(results(clients))


def report(rows: Sequence[dict[str, Any]]) -> None:
    notes = [
        f"{STREAMS} streams at once, {TOKENS} tokens each, {PASS_S * 1e3:.0f} ms a pass; the fault after {FAULT_AT_S:.0f} s",
        "three nodes in network namespaces on one machine, a replica on each; two of the nodes have two gateways and the HAProxy "
        "behind cluster/deploy/haproxy.cfg; the third one is the node that is killed, unplugged or drained",
        "the faults that a cluster mends ran in one cluster, one after the other; each of the last four rows ended a cluster",
        "other work ran on the machine's two cores: the pauses are upper bounds",
        "a client that loses its gateway, or its ingress, loses its stream, because the gateway alone knows what it has sent; no "
        "other fault reaches a client",
        "whole: the text of an undisturbed stream, and its end; broken: the answer ended early or with an error; other text: a "
        "token is missing or comes twice",
        "longest pause: between two tokens of one stream, over all whole streams",
    ]
    write("stream_faults", "python -m loadtests.stream_faults", {TITLE: rows}, notes)


def row(found: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    kinds = Counter(outcome for outcome, *_ in found)
    others = sum(number for kind, number in kinds.items() if kind not in ("whole", "other text"))
    pauses = sorted(pause for outcome, pause, _ in found if outcome == "whole")
    print(kinds.most_common(5), flush=True)
    return {
        "whole": kinds["whole"],
        "broken": others,
        "other text": kinds["other text"],
        "longest pause s": pauses[-1] if pauses else "-",
        "median of the streams' longest pauses s": pauses[len(pauses) // 2] if pauses else "-",
    }


class Client(asyncio.Protocol):
    """Sends one request. Keeps the text, the times of its events, and the way in which the answer ended.

    The HTTP parser joins chunks: a proxy may begin a chunk in the middle of an event.
    """

    def __init__(self, request: bytes) -> None:
        self._request, self._parser, self._data = request, HttpResponseParser(self), bytearray()
        self.text, self.error, self.times = "", "", [perf_counter()]
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._end(f"no [DONE]: {bytes(self._data[:80])!r}")

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._data += data
        *events, rest = self._data.split(b"\n\n")
        self._data = bytearray(rest)
        for event in events:
            if not event.startswith(b":"):  # a comment
                self._take(event.removeprefix(b"data: "))

    def _take(self, content: bytearray) -> None:
        if content == b"[DONE]":
            return self._end("")
        answer = orjson.loads(content)
        if "error" in answer:
            return self._end(f"error: {answer['error']['message'][:80]}")
        self.text += answer["choices"][0]["text"]
        self.times.append(perf_counter())

    def connection_lost(self, _: Exception | None) -> None:
        self._end(f"closed: {bytes(self._data[:80])!r}")

    def _end(self, error: str) -> None:
        self._transport.close()
        if not self.ended.done():
            self.error = error
            self.ended.set_result(None)


def expected(num_tokens: int) -> str:
    """The text of an undisturbed stream."""
    from engine.hub import resolve_model

    tokenizer = Tokenizer.from_file(str(resolve_model(EMBEDDED_GENERATOR) / "tokenizer.json"))
    text: str = tokenizer.decode([token_at(PROMPT_TOKENS + index) for index in range(num_tokens)])
    return text


async def clients(port: int, streams: int, tokens: int) -> list[tuple[str, float, float]]:
    whole, loop = expected(tokens), asyncio.get_running_loop()
    print("started", flush=True)

    async def one() -> Client:
        # Prompts differ, as clients' do. A prompt that is in flight at two deaths is refused (docs/decisions/034). The last token
        # is a word: after a part of a character the answer would begin with the rest of the character.
        prompt = [*(random.randint(300, 10_000) for _ in range(PROMPT_TOKENS - 1)), token_at(0)]
        body = orjson.dumps({"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        _, client = await loop.create_connection(lambda: Client(request), "127.0.0.1", port)
        try:
            await asyncio.wait_for(client.ended, MOST_S)
        except TimeoutError:
            client.error = "no end"
        return client

    found = await asyncio.gather(*(one() for _ in range(streams)))
    for each in found:
        if not each.error and each.text != whole:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(each.text, whole, strict=False)))
            print(f"other text after {same} characters: {each.text[same:][:80]!r}", file=sys.stderr)
    return [(each.error or ("whole" if each.text == whole else "other text"), *_pause(each.times)) for each in found]


def _pause(times: Sequence[float]) -> tuple[float, float]:
    return max((after - before for before, after in pairwise(times)), default=0.0), times[-1] - times[0]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--clients"]:
        print(json.dumps(asyncio.run(clients(**json.loads(sys.argv[2])))))
    else:
        main(sys.argv[1:])
