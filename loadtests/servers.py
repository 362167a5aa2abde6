"""Starts the servers of the benchmarks, each as a separate process: `python -m loadtests.servers KIND PORT`.

KIND is one of
  stub           emberforge with a stub engine that gives a fixed vector: what serving costs
  stub-gateway   the same engine in a pool, behind a gateway
  stub-streams   emberforge with a stub engine that generates a token for each stream every BENCH_PASS_S
  stub-streams-gateway  the same engine in a pool, behind a gateway
  fast-gateways  an engine about as fast as an H200 in a pool, behind BENCH_GATEWAYS gateways
  stub-uvicorn   the same API and stub on plain uvicorn, no Ray: the floor of the API
  model          emberforge with the embedded model
  model-cut      the same, but `@serve.batch` cuts the batches instead of the packer
  st             sentence-transformers behind FastAPI with its own batching, as one would write it in an afternoon
  serve          what `emberforge serve FOLDER --gateways 0` starts, the folder in BENCH_MODEL
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import IO, Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import torch

from loadtests.startup import import_path

MAX_CLIENT_BATCH = 2048
SERVED_NAME = "model"  # of what BENCH_MODEL names
MOST_REQUESTS = 4096  # in flight; more than any load test has


@contextmanager
def running(kind: str, port: int, **environment: str) -> Iterator[psutil.Process]:
    """Starts a server process and waits until it answers. At the end ends it and its descendants by pid."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": import_path()} | environment
    command = [sys.executable, "-m", "loadtests.servers", kind, str(port)]
    with tempfile.TemporaryFile() as said:
        process = psutil.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said)
        try:
            deadline = monotonic() + 120
            while not _answers(port):
                assert process.poll() is None, f"{kind} ended: {_end_of(said)}"
                assert monotonic() < deadline, f"{kind} does not answer: {_end_of(said)}"
                sleep(0.2)
            yield process
        finally:
            descendants = process.children(recursive=True) if process.is_running() else []
            process.stdin.close()  # the end of stdin tells it to stop
            try:
                process.wait(20)
            except psutil.TimeoutExpired:
                process.kill()
            for descendant in descendants:
                if descendant.is_running():
                    descendant.kill()


@contextmanager
def serving(said: Path, *arguments: str) -> Iterator[psutil.Process]:
    """Starts `emberforge serve` with arguments and waits until it answers. `said` gets its output; an error prints its end."""
    with said.open("wb") as output:
        command = [str(Path(sys.executable).with_name("emberforge")), "serve", *arguments]
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            deadline = monotonic() + 180
            while b"curl " not in said.read_bytes():
                assert process.poll() is None, "the server has ended"
                assert monotonic() < deadline, "the server does not answer"
                sleep(0.3)
            yield process
        except BaseException:  # Ctrl+C, too: a run may end by a time limit
            print(said.read_text()[-4000:], file=sys.stderr, flush=True)
            raise
        finally:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
                try:
                    process.wait(90)
                except psutil.TimeoutExpired:
                    for each in (*process.children(recursive=True), process):
                        each.kill()


def _end_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")[-2000:]


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except (URLError, OSError):
        return False


def cpu_seconds(server: psutil.Process) -> dict[str, float]:
    """CPU time so far, by role, of a server process and its descendants."""
    roles: dict[str, float] = {}
    for process, role in _with_roles(server):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            roles[role] = roles.get(role, 0.0) + times.user + times.system
    return roles


def thread_seconds(server: psutil.Process, roles: Sequence[str]) -> dict[tuple[str, int, int], float]:
    """CPU time so far of each thread, by (role, process, thread), of the processes that have one of these roles."""
    found: dict[tuple[str, int, int], float] = {}
    for process, role in _with_roles(server):
        if role in roles:
            with suppress(psutil.NoSuchProcess):
                found |= {(role, process.pid, each.id): each.user_time + each.system_time for each in process.threads()}
    return found


def _with_roles(server: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    for process in [server, *server.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            name = " ".join(process.cmdline()[:1])
            yield process, next((role for mark, role in ROLES if mark in name), "other")


ROLES = [
    ("ServeReplica:gateway", "gateway"),
    ("ServeReplica", "replica"),
    ("haproxy", "haproxy"),
    ("HAProxyManager", "haproxy manager"),
    ("ProxyActor", "proxy"),
    ("ServeController", "controller"),
    ("gcs_server", "gcs"),
    ("raylet", "raylet"),
]


class StubEngine:
    """A fixed vector for every sequence, at once."""

    def __init__(self) -> None:
        from engine.hub import EMBEDDED_MODEL, resolve_model
        from engine.model.folder import load_model_config
        from engine.schedule.queue import MOST_SEQS
        from engine.text.tokenizer import Tokenizer

        folder = resolve_model(EMBEDDED_MODEL)
        self.config = load_model_config(folder)
        self.tokenizer = Tokenizer.load(folder, self.config)
        self.max_batch_tokens, self.dtype_name, self.device = 16384, "float32", torch.device("cpu")
        self.passes_in_flight = self.num_stages = self.num_groups = 1
        self.max_graph_tokens, self.max_batch_seqs = 0, MOST_SEQS
        self.speculation_rows = self.cohort_size = 0
        self.pages = None
        self.used_bytes = 0
        self._vector = torch.rand(1, self.config.embedding_size).numpy()

    def launch(self, sequences: Sequence[Any], options: Any = None, outputs: Any = ()) -> Any:
        from engine.run.flight import Finished, Output

        start = perf_counter()
        self.compute(sequences)
        return Finished(Output(self._vector.repeat(len(sequences), 0), device_s=perf_counter() - start))

    def planned_bytes(self, max_batch_tokens: int | None) -> int:
        return 0

    def close(self) -> None:
        """Does nothing, because there are no stages in other processes."""

    def compute(self, sequences: Sequence[Any]) -> None:
        """Takes no time."""


def _serve(kind: str, port: int) -> None:
    """emberforge on a Ray of its own, until standard input closes."""
    from cluster.local_ray import local_ray

    with local_ray(os.cpu_count() or 1, MOST_REQUESTS):
        from ray import serve

        from loadtests.replicas import REPLICAS
        from serve_app.app import ModelArgs, bind
        from serve_app.settings import Settings

        settings = Settings(
            models=(_model_of(kind),),
            num_threads=os.cpu_count(),
            max_client_batch_size=MAX_CLIENT_BATCH,
            max_concurrent_requests=MOST_REQUESTS,
            access_log="BENCH_ACCESS_LOG" in os.environ,
        )
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(bind(ModelArgs(model=settings.models[0], settings=settings), REPLICAS[kind]), name="bench", route_prefix="/")
        sys.stdin.read()


def _model_of(kind: str) -> str:
    from engine.model_id import EMBEDDED_GENERATOR, EMBEDDED_MODEL

    return EMBEDDED_GENERATOR if kind.startswith("stub-streams") else EMBEDDED_MODEL


def _serve_stub_behind_gateways(kind: str, port: int) -> None:
    """Until standard input closes."""
    from cluster.local_ray import local_ray

    with local_ray(num_cpus=os.cpu_count() or 1):
        from ray import serve

        from loadtests.stub_pool import FastPool, FreePool
        from loadtests.stub_streams import StreamingPool
        from serve_app.gateway import app as gateway
        from serve_app.gateway.config import GatewayArgs
        from serve_app.replica import pool

        server = {"fast-gateways": FastPool, "stub-streams-gateway": StreamingPool}.get(kind, FreePool)
        ref, spec = {"tokens_per_s": server.planned_tokens_per_s}, {"name": SERVED_NAME, "model": _model_of(kind)}
        given = {"spec": spec, "pools": [ref | {"name": "stub", "node_class": "stub"}]}
        args = GatewayArgs.model_validate(
            {"models": [given], "default": SERVED_NAME, "settings": {"max_concurrent_requests": 4096}}
        )
        of_pool = pool.PoolArgs.model_validate(ref | {"pool": "stub", "spec": spec})
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        small = {"ray_actor_options": {"num_cpus": 0.1}}
        number = int(os.environ.get("BENCH_GATEWAYS", "1"))
        applications = [
            serve.RunTarget(pool.bind(of_pool, server, **small), "stub", None),
            serve.RunTarget(gateway.bind(args, num_replicas=number, **small), "gateway", "/"),
        ]
        serve.run_many(applications)
        sys.stdin.read()


def _serve_folder(port: int) -> None:
    """As the command does without gateways, until standard input closes."""
    from cluster.inventory import available_cpus
    from cluster.local_ray import local_ray

    with local_ray(available_cpus()):
        from serve_app import app
        from serve_app.settings import Settings

        settings = Settings(models=(os.environ["BENCH_MODEL"],), served_model_name=(SERVED_NAME,), host="127.0.0.1", port=port)
        app.run(settings, app.machine_share(1, available_cpus(), torch.cuda.device_count()))
        sys.stdin.read()


def _uvicorn(port: int) -> None:
    """The API of a replica without Ray around it."""
    import uvicorn

    from engine.loop import EngineLoop
    from engine.options import EmbedOptions, EncodeOptions
    from engine.schedule.request import Request
    from serve_app.http.app import Api
    from serve_app.models import ModelInfo
    from serve_app.observe.metrics import Metrics
    from serve_app.replica.health import Health
    from serve_app.replica.local import LocalModel, LocalModels
    from serve_app.settings import Settings

    engine = StubEngine()
    loop = EngineLoop(engine, engine.max_batch_tokens)
    info = ModelInfo("stub", "stub", "float32", "stub", "mean", 384, 256, 16384, 0)

    async def collect(job: Request) -> None:
        loop.submit([job], polled=True)

    canary = engine.tokenizer.encode(["health"], EncodeOptions())
    health = Health(loop, lambda: Request(canary, EmbedOptions()))
    backend = LocalModels(LocalModel(info, engine.tokenizer, loop, collect), loop, health)
    api = Api(backend, Settings(), Metrics("stub"))
    _until_stdin_closes(uvicorn.Server(uvicorn.Config(api.app, port=port, log_level="warning", access_log=False)))


def _sentence_transformers(port: int) -> None:
    """FastAPI, a queue, and a thread that encodes up to 32 waiting texts at a time."""
    import fastapi
    import uvicorn
    from pydantic import BaseModel
    from sentence_transformers import SentenceTransformer

    from engine.hub import EMBEDDED_MODEL, resolve_model

    model = SentenceTransformer(str(resolve_model(EMBEDDED_MODEL)), device="cpu")
    app = fastapi.FastAPI()
    waiting: asyncio.Queue[tuple[str, asyncio.Future[list[float]]]] = asyncio.Queue()

    class Body(BaseModel):
        inputs: str

    @app.get("/health")
    async def health() -> None:
        return None

    @app.post("/embed")
    async def embed(body: Body) -> list[list[float]]:
        future = asyncio.get_running_loop().create_future()
        await waiting.put((body.inputs, future))
        return [await future]

    async def encode() -> None:
        while True:
            batch = [await waiting.get()]
            while len(batch) < 32 and not waiting.empty():
                batch.append(waiting.get_nowait())
            texts = [text for text, _ in batch]
            vectors = await asyncio.to_thread(
                model.encode, texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False
            )
            for (_, future), vector in zip(batch, vectors, strict=True):
                if not future.done():
                    future.set_result(vector.tolist())

    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False))
    _until_stdin_closes(server, encode)


def _until_stdin_closes(server: Any, background: Any = None) -> None:
    async def main() -> None:
        serving = asyncio.create_task(server.serve())
        task = asyncio.create_task(background()) if background else None
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving
        if task:
            task.cancel()

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


if __name__ == "__main__":
    chosen, on = sys.argv[1], int(sys.argv[2])
    if chosen == "stub-uvicorn":
        _uvicorn(on)
    elif chosen == "st":
        _sentence_transformers(on)
    elif chosen in ("stub-gateway", "fast-gateways", "stub-streams-gateway"):
        _serve_stub_behind_gateways(chosen, on)
    elif chosen == "serve":
        _serve_folder(on)
    else:
        _serve(chosen, on)
