"""The GPU runner's logic without a GPU: padding, graphs, results, tuning. CUDA streams, events and captures are stubs."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import BackendError, DeviceLost, InvalidInput, OutOfMemory
from engine.heads.chunks import ChunkHead
from engine.heads.pool import Pool
from engine.heads.tokens import TokenHead
from engine.kernels.tiles import Tiling
from engine.model.config import ModelConfig, Pooling
from engine.options import EmbedOptions
from engine.run import cuda, graphs, tune
from engine.run.batch import BatchShape, PackedBatch
from engine.run.cuda import CudaRunner
from engine.run.graphs import Graphs
from engine.run.network import Network
from engine.run.pack import BatchPacker
from engine.run.runner import CpuRunner
from engine.schedule.queue import MOST_SEQS

CPU = torch.device("cpu")


class Model:
    """A hidden state contains its token and its position. `room`: the most tokens that fit into memory."""

    room = 1 << 30

    def __init__(self) -> None:
        self.passes: list[int] = []

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        self.passes.append(batch.num_tokens)
        if batch.num_tokens > self.room:
            raise torch.OutOfMemoryError("no room")
        columns = [batch.token_ids, batch.positions, torch.ones_like(batch.positions), batch.token_ids * batch.positions]
        hidden = torch.stack(columns, 1).float()
        return hidden.index_select(0, batch.pooled_rows) if pooled_only else hidden


class Event:
    def __init__(self, **_: Any) -> None: ...
    def record(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 2.0


class Stream:
    def __init__(self, device: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Cuda:
    Event, Stream = Event, Stream
    lost = False

    def synchronize(self, device: object) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access")

    def empty_cache(self) -> None: ...


class Torch:
    """torch without pinned memory, and with a stub of its CUDA functions."""

    def __init__(self) -> None:
        self.cuda = Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *sizes: int, pin_memory: bool = False, **how: Any) -> Tensor:
        return torch.empty(*sizes, **how)


@dataclass
class Graph:
    """Computes the pass again from its own buffer, and writes the results to the graph's memory."""

    network: Network
    shape: BatchShape
    heads: Any
    results: Any

    def replay(self, staging: Tensor) -> Any:
        buffer = staging.clone()
        vectors, rows = self.network(self.shape.view(buffer), self.heads)
        self.results[0].copy_(vectors)
        for mine, computed in zip(self.results[1], rows, strict=True):
            mine.copy_(computed)
        return self.results


class Capturer:
    def __init__(self, network: Network, device: object, passes: object) -> None:
        self.network = network
        self.captured: list[tuple[BatchShape, bool]] = []
        self.threads: list[str] = []
        self.error: Exception | None = None

    def __call__(self, key: graphs.Key, eager_first: bool) -> Graph:
        if self.error is not None:
            raise self.error
        self.captured.append((key[0], eager_first))
        self.threads.append(threading.current_thread().name)
        (vectors, *rows) = (torch.empty(size) for size in self.network.result_shapes(*key))
        return Graph(self.network, *key, (vectors, rows))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setattr(cuda, "torch", made)
    monkeypatch.setattr(tune, "torch", made)
    monkeypatch.setattr(cuda, "Capturer", Capturer)
    return made


Made = Callable[..., tuple[CudaRunner, CpuRunner, Model]]


@pytest.fixture
def made(stand_in: Torch) -> Iterator[Made]:
    runners: list[CudaRunner] = []

    def make(pooling: Pooling = "mean", tiled: bool = True) -> tuple[CudaRunner, CpuRunner, Model]:
        model, head = Model(), Pool(pooling)
        network = Network("a model", model, head, {"tokens": TokenHead(4), "chunks": ChunkHead(head)}, 4)  # type: ignore[arg-type]
        packer = BatchPacker(pooling, 4, Tiling(64, 2, 2, (9, 0), 132) if tiled else None)
        runners.append(CudaRunner(network, packer, CPU))
        return runners[-1], CpuRunner(network, BatchPacker(pooling, 4, None)), model

    yield make
    for each in runners:
        each.graphs.wait()


def batch(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 1000, size=length).astype(np.int32) for length in lengths]


BATCHES = [batch(9), batch(3, 40, 7), batch(*[5] * 60), batch(300, 300), batch(*[1] * 500), batch(900, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "last_token", "cls"])
@pytest.mark.parametrize("outputs", [(), ("tokens",)])
@pytest.mark.parametrize("max_graph_tokens", [0, 512, 4096])
def test_a_pass_gives_what_the_cpu_gives_graphed_and_not(
    made: Made, pooling: Pooling, outputs: Any, max_graph_tokens: int
) -> None:
    ours, exact, _ = made(pooling)
    ours.max_graph_tokens = max_graph_tokens
    for _ in range(3):  # eager, then from a graph, in memory that other passes have used
        flights = []
        for each in BATCHES:
            options = [EmbedOptions(normalize=bool(row % 2), dimensions=2 + row % 3) for row in range(len(each))]
            flights.append((ours.launch(each, options, outputs), exact.launch(each, options, outputs)))
        for mine, theirs in flights:
            assert mine.done
            mine, theirs = mine.wait(), theirs.wait()
            np.testing.assert_allclose(mine.vectors, theirs.vectors, rtol=1e-6)
            assert mine.device_s == 0.002
            for row in range(len(mine.vectors)):
                for name in outputs:
                    np.testing.assert_array_equal(mine.ragged[name][row], theirs.ragged[name][row])
        ours.graphs.wait()
    assert bool(len(ours.graphs)) == (max_graph_tokens > 0)


def test_spans_run_without_a_graph(made: Made) -> None:
    ours, exact, _ = made()
    ours.max_graph_tokens = 4096
    options = [EmbedOptions(outputs=("chunks",), spans=((0, 2), (1, 5))), EmbedOptions(spans=((3, 4),), outputs=("chunks",))]
    mine, theirs = (each.launch(batch(9, 6), options, ("chunks",)).wait() for each in (ours, exact))
    for row in range(2):
        np.testing.assert_allclose(mine.ragged["chunks"][row], theirs.ragged["chunks"][row], rtol=1e-6)
    ours.graphs.wait()
    assert len(ours.graphs) == 0


def test_an_output_that_nobody_gives_is_refused(made: Made) -> None:
    for each in made()[:2]:
        with pytest.raises(InvalidInput, match="a model has no output sparse"):
            each.launch(batch(3), None, ("sparse",))


def test_no_capture_is_on_a_requests_way(made: Made) -> None:
    """A shape without a graph runs eagerly. Another thread captures it, and later passes replay it."""
    ours, _, model = made()
    ours.max_graph_tokens = 512
    capturer: Capturer = ours.graphs._capture  # type: ignore[assignment]
    for _ in range(3):
        ours.launch(batch(9)).wait()
        ours.graphs.wait()
    assert len(model.passes) == 3  # one eager, two replayed, and no other
    assert capturer.threads == ["engine-graphs"]
    assert [eager_first for _, eager_first in capturer.captured] == [False]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("operation not permitted")])
def test_a_capture_that_fails_costs_its_shape_the_graph_and_nothing_else(made: Made, error: Exception) -> None:
    ours, exact, _ = made()
    ours.max_graph_tokens = 512
    capturer: Capturer = ours.graphs._capture  # type: ignore[assignment]
    ours.launch(batch(9)).wait()
    ours.graphs.wait()
    capturer.error = error
    for _ in range(3):
        output = ours.launch(batch(40, 50)).wait()
        np.testing.assert_allclose(output.vectors, exact.launch(batch(40, 50), None, ()).wait().vectors, rtol=1e-6)
        ours.graphs.wait()
    capturer.error = None
    ours.launch(batch(40, 50)).wait()  # the capture of this shape is not tried again
    ours.launch(batch(200)).wait()
    ours.graphs.wait()
    assert [shape.num_tokens for shape, _ in capturer.captured] == [16, 256]


def test_graphs_end_where_their_number_does() -> None:
    captured: list[graphs.Key] = []
    kept = Graphs(lambda key, eager: captured.append(key), most=2)  # type: ignore[arg-type, func-returns-value]
    keys: list[graphs.Key] = [(BatchShape(16 * size, 1, 1), ()) for size in (1, 2, 3)]
    kept.capture_all(keys)
    assert captured == keys[:2]
    assert [kept.may_have(key) for key in keys] == [True, True, False]
    kept.want(keys[2])
    kept.wait()
    assert len(kept) == 2
    kept = Graphs(lambda key, eager: captured.append(key), most=9)  # type: ignore[arg-type, func-returns-value]
    kept.capture_all(keys, most_s=-1.0)
    assert len(kept) == 0


@pytest.mark.parametrize(("error", "lost", "expected"), [
    (torch.OutOfMemoryError("no room"), False, OutOfMemory),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), False, OutOfMemory),
    (RuntimeError("an assertion"), False, BackendError),
    (RuntimeError("an assertion"), True, DeviceLost),
])  # fmt: skip
def test_errors_are_ours(made: Made, stand_in: Torch, error: Exception, lost: bool, expected: type[Exception]) -> None:
    ours, _, model = made()
    stand_in.cuda.lost = lost

    def broken(*_: object) -> Tensor:
        raise error

    model.forward = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(expected) as caught:
        ours.launch(batch(3, 4))
    assert type(caught.value) is expected
    assert "2 sequences, 7 tokens" in str(caught.value)


def config(**changes: Any) -> ModelConfig:
    shape = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2}
    sizes = {"head_dim": 32, "norm_eps": 1e-6, "max_position_embeddings": 512, "max_input_length": 512, "causal": False}
    return ModelConfig(**(shape | sizes | {"architecture": "BertModel", "pooling": "mean"} | changes))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family with few parameters and without a checkpoint."""
    monkeypatch.setattr(tune, "body_parameters", lambda config: 1_000)
    monkeypatch.setattr(tune, "most_graph_tokens", lambda config, dtype: 16384)


@pytest.mark.parametrize(("parameters", "dtype", "budget"), [
    (85_000_000, torch.bfloat16, 16384), (440_000_000, torch.bfloat16, 8192), (440_000_000, torch.float8_e4m3fn, 16384),
])  # fmt: skip
def test_the_budget_follows_from_the_model(
    made: Made, monkeypatch: pytest.MonkeyPatch, small: None, parameters: int, dtype: torch.dtype, budget: int
) -> None:
    monkeypatch.setattr(tune, "body_parameters", lambda config: parameters)
    for _ in range(2):
        assert tune.tune(made()[0], config(), dtype, None, MOST_SEQS) == budget
    assert tune.tune(made()[0], config(), dtype, 3000, MOST_SEQS) == 3000


def test_a_budget_that_does_not_fit_is_halved(made: Made, small: None) -> None:
    ours, _, model = made()
    model.room = 5000
    assert tune.tune(ours, config(), torch.bfloat16, None, MOST_SEQS) == 4096
    model.room = 100
    with pytest.raises(OutOfMemory, match="does not fit beside the weights"):
        tune.tune(ours, config(), torch.bfloat16, None, MOST_SEQS)


def test_a_slow_card_gets_a_smaller_budget(made: Made, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, _ = made()
    monkeypatch.setattr(Event, "elapsed_time", lambda self, end: 300.0)
    assert tune.tune(ours, config(), torch.bfloat16, None, MOST_SEQS) == 1024


def test_the_longest_input_is_what_fits(made: Made, small: None) -> None:
    ours, _, model = made()
    model.room = 20_000
    assert tune.tune(ours, config(max_input_length=65_536), torch.bfloat16, 2048, MOST_SEQS) == 2048
    assert ours.longest_input == 16_384


def test_graphs_are_captured_at_load_the_largest_first(made: Made, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, _ = made()
    monkeypatch.setattr(tune._Trials, "_find_graph_limit", lambda self: 1024)
    tune.tune(ours, config(), torch.bfloat16, None, MOST_SEQS)
    capturer: Capturer = ours.graphs._capture  # type: ignore[assignment]
    sizes = [shape.num_tokens for shape, _ in capturer.captured]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {16, 32, *range(64, 513, 64), *range(640, 1025, 128)}
    assert all(eager_first for _, eager_first in capturer.captured)
    assert ours.max_graph_tokens == 1024
    captured = len(capturer.captured)
    for each in BATCHES:
        if sum(map(len, each)) <= 1024 and len(each) < 400:
            ours.launch(each).wait()
    ours.graphs.wait()
    assert len(capturer.captured) == captured


def test_without_our_attention_there_are_no_graphs(made: Made, small: None) -> None:
    ours, _, _ = made(tiled=False)
    tune.tune(ours, config(), torch.bfloat16, None, MOST_SEQS)
    assert ours.max_graph_tokens == len(ours.graphs) == 0


@pytest.mark.slow
def test_a_process_may_end_while_a_graph_is_captured() -> None:
    """torch aborts a process whose interpreter ends during a call of torch."""
    code = """if True:
        import time, torch
        from engine.run.batch import BatchShape
        from engine.run.graphs import Graphs

        a = torch.ones(300, 300)

        def capture(key, eager_first):
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                a @ a

        graphs = Graphs(capture)
        for num_tokens in range(100):
            graphs.want((BatchShape(num_tokens, 1, 0), ()))
        time.sleep(0.1)
    """
    started = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert time.monotonic() - started < 40, "the end waits only for the current capture"
