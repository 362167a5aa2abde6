"""The GPU runner of stages without a GPU: the inputs of each stage, graphs of all stages, and the waits between passes."""

import ctypes
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cuda_runner import CPU, Event, Stream, Torch
from test_cuda_streams import KINDS, MIXED, PAGE_SIZE, NoContext, Pool, Streaming, same, streams_of
from tiny_generators import folder_without_pooling, prompts

from engine import Engine
from engine.draws import Row
from engine.errors import BackendError, DeviceLost
from engine.kernels.tiles import Tiling
from engine.loop import EngineLoop
from engine.options import EmbedOptions, SamplingOptions
from engine.passes import BatchReport, Passes
from engine.run import cuda, cuda_layers, cuda_pipeline, cuda_streams, departures, ring_streams, stage_layers, tune
from engine.run.arrivals import Arriving
from engine.run.cuda_layers import CudaLayers
from engine.run.cuda_pipeline import CudaPipeline, EarlierStage
from engine.run.kv_cache import KVCache
from engine.run.pipeline import Pipeline
from engine.run.ring import Kind, Message, Received, with_text
from engine.run.ring_streams import RingStreams
from engine.run.streams import StreamPacker
from engine.run.work import read
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.request import Request


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Torch()
    made.cuda.device = made.cuda.stream = NoContext  # type: ignore[attr-defined]
    made.cuda.current_stream = Stream  # type: ignore[attr-defined]
    for module in (cuda, cuda_layers, cuda_pipeline, cuda_streams, departures, ring_streams, stage_layers, tune):
        monkeypatch.setattr(module, "torch", made)
    for module in (stage_layers, cuda_streams):
        monkeypatch.setattr(module, "GraphPool", Pool)
    monkeypatch.setattr(departures, "post_after", lambda _, semaphore: departures._libc.sem_post(ctypes.c_void_p(semaphore)))
    for module in (cuda_pipeline, stage_layers):
        monkeypatch.setattr(module, "used_in", lambda tensor, stream: None)


class Staged(Streaming):
    """An engine whose streams run on the GPUs' pipeline. With `unlike`, the GPUs of the stages have different numbers of SMs."""

    def __init__(self, engine: Engine, num_pages: int, budget: int, unlike: bool = False) -> None:
        assert isinstance(engine.runner, Pipeline)
        config, self._engine, self.budget = engine.config, engine, budget
        group = config.n_heads // config.n_kv_heads
        models = [*engine.runner._earlier, engine.model]
        windows = tuple(dict.fromkeys(window for model in models for window in model.windows))
        capabilities = [(9, 0), (8, 0), (12, 0)] if unlike else [(8, 0)] * 3
        packers = [
            StreamPacker(
                Tiling(config.head_dim, group, config.n_kv_heads, capability, 4 + index * unlike, causal=True), windows, 8
            )
            for index, capability in enumerate(capabilities[: engine.num_stages])
        ]
        caches = [KVCache(stage.config, num_pages * PAGE_SIZE, torch.float32, CPU) for stage in engine.stages]
        self.pages = Pages(num_pages, PAGE_SIZE)
        self.runner = CudaPipeline(models[:-1], engine.network, packers, caches)
        self.passes_in_flight = self.runner.passes_in_flight
        self.num_stages = self.num_groups = self.runner.num_stages
        self.max_graph_tokens = self.speculation_rows = self.cohort_size = 0
        self.reports: list[BatchReport] = []


@pytest.fixture(scope="module")
def engines(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Engine]:
    made: dict[tuple[str, int], Engine] = {}

    def make(kind: str, num_stages: int) -> Engine:
        if (kind, num_stages) not in made:
            path = tmp_path_factory.getbasetemp() / f"staged-{kind}"
            config = {"tie_word_embeddings": False, "num_hidden_layers": 4} | KINDS[kind]
            folder = folder_without_pooling(tiny, kind, path, **config)
            how = {"dtype": "float32", "devices": ["cpu"] * num_stages, "cache_tokens": 64 * PAGE_SIZE}
            made[kind, num_stages] = Engine.load(folder, **how)  # type: ignore[arg-type]
        return made[kind, num_stages]

    return make


def check_same(ours: Staged, alone: Engine, graph_tokens: int, plain: Sequence[Any], embedded: Request) -> None:
    """Compares tokens and vectors with those of one device: of eager passes, and with `graph_tokens` also of graphs."""
    if graph_tokens:
        ours.with_graphs(graph_tokens)
    for _ in range(3 if graph_tokens else 1):  # eager, then from graphs
        request = Request(embedded.sequences, EmbedOptions())
        for mine, theirs in zip(ours.generate(streams_of(alone, MIXED), [request]), plain, strict=True):
            same(mine, theirs.future.result(0))
        np.testing.assert_allclose(request.future.result(0).vectors, embedded.future.result(0).vectors, atol=1e-5)
    graphs: Any = ours.runner.graphs._graphs.values()
    assert bool(sum(graph.last.count for graph in graphs)) == bool(graph_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_lm", "gemma3_lm"])  # stages do not depend on the family; one of these has windows
@pytest.mark.parametrize("num_stages", [2, 3])
def test_streams_get_the_tokens_that_one_device_gives(engines: Callable[[str, int], Engine], kind: str, num_stages: int) -> None:
    """Whole prompts and chunks, with and without graphs, with many and with few pages, on equal and on different GPUs."""
    alone, engine = engines(kind, 1), engines(kind, num_stages)
    sequences = [np.array(ids, dtype=np.int32) for ids in prompts((1, 300, 128, 7))]
    plain, embedded = streams_of(alone, MIXED), Request(sequences, EmbedOptions())
    Passes(alone, 4096).run([*plain, embedded])
    for num_pages, budget, graph_tokens, unlike in (
        (40, 4096, 0, False), (40, 50, 0, True), (7, 60, 0, False), (40, 4096, 4096, True), (7, 70, 512, False),
    ):  # fmt: skip
        ours = Staged(engine, num_pages, budget, unlike)
        check_same(ours, alone, graph_tokens, plain, embedded)
        graphs: Any = ours.runner.graphs._graphs.values()
        assert all(len({each.count for each in (*graph.earlier, graph.last)}) == 1 for graph in graphs)


class OneProcess:
    """A ring whose later stages are in this process. They compute a pass when it is sent.

    `fails`: the numbers of the passes that fail.
    """

    def __init__(self, later: Sequence[CudaLayers], fails: Sequence[int] = ()) -> None:
        self.later, self.fails, self.num_stages, self.arrivals = later, fails, len(later) + 1, self
        self.held: list[int] = []
        self._number = 0

    def start(self, on_message: Any, on_end: Any, place: Any) -> None:
        self.on_message, self.end, self.place = on_message, on_end, place

    def hold(self, stream: Stream, number: int) -> None:
        self.held.append(number)

    def send(self, message: Message) -> None:
        if message.hidden is None:
            return
        self._number += 1
        if self._number in self.fails:
            self.on_message(Received(*with_text(Kind.FAILED, "the second stage broke")[:2]))
            return
        rows = self._sent(message.hidden)
        for layers in self.later:
            last = layers is self.later[-1]
            rows = self._sent(layers.queue(read(message.about), self._here(rows), self, last))  # type: ignore[arg-type]
        back = self.place(len(rows)).copy_(rows)
        self.on_message(Received(Kind.PASS, message.about, self._here(back)))

    @staticmethod
    def _sent(leaving: Any) -> torch.Tensor:
        rows: torch.Tensor = leaving.wait(10.0).clone()
        leaving.give_back()
        return rows

    def _here(self, rows: torch.Tensor) -> Arriving:
        hidden = Arriving(rows, self._number)
        hidden.end()
        return hidden

    def leave(self) -> None: ...


class InARing(Staged):
    """An engine whose later stages are in a ring. `from_graphs`: the later stages' decode steps replay graphs."""

    def __init__(self, engine: Engine, num_pages: int, budget: int, from_graphs: bool, fails: Sequence[int] = ()) -> None:
        super().__init__(engine, num_pages, budget)
        staged, config = self.runner, engine.config
        packers = [*(each.packer for each in staged._earlier), staged.packer]
        caches = [KVCache(stage.config, num_pages * PAGE_SIZE, torch.float32, CPU) for stage in engine.stages]
        models = [*(each._model for each in staged._earlier), engine.model]
        self.layers = [
            CudaLayers(model, packer, cache, config.hidden_size, torch.float32)
            for model, packer, cache in zip(models[1:], packers[1:], caches[1:], strict=True)
        ]
        if not from_graphs:
            for each in self.layers:
                each._graphs = cuda_layers.Graphs(each._graphs._capture, most=0)
        self.ring, network = OneProcess(self.layers, fails), copy(engine.network)
        network.model = models[0]
        self.runner = RingStreams(network, packers[0], caches[0], CPU, self.ring)  # type: ignore[arg-type, assignment]
        self.passes_in_flight = self.runner.passes_in_flight
        self.num_stages = self.num_groups = self.runner.num_stages


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("graph_tokens", [0, 4096])
def test_stages_of_a_ring_give_the_tokens_of_one_device(
    engines: Callable[[str, int], Engine], num_stages: int, graph_tokens: int
) -> None:
    """Whole prompts and chunks. A later stage gets no token ids and no options."""
    alone, engine = engines("gemma3_lm", 1), engines("gemma3_lm", num_stages)
    sequences = [np.array(ids, dtype=np.int32) for ids in prompts((1, 300, 128, 7))]
    plain, embedded = streams_of(alone, MIXED), Request(sequences, EmbedOptions())
    Passes(alone, 4096).run([*plain, embedded])
    for budget in (4096, 50):
        ours = InARing(engine, 40, budget, from_graphs=bool(graph_tokens))
        check_same(ours, alone, graph_tokens, plain, embedded)
        for layers in ours.layers:
            theirs: Any = layers._graphs._graphs.values()
            assert bool(sum(graph.count for graph in theirs)) == bool(graph_tokens)


def test_a_pass_that_fails_in_a_later_stage_fails_alone(engines: Callable[[str, int], Engine]) -> None:
    engine = engines("qwen3_lm", 2)
    ours = InARing(engine, 40, 4096, from_graphs=False, fails=[2])
    options = SamplingOptions(max_tokens=6, temperature=0.0)
    (expected,) = engine.generate(prompts([5]), options)
    failed = engine.new_stream(prompts([5])[0], options)
    Passes(ours, 4096).run([failed])
    with pytest.raises(BackendError, match="the second stage broke"):
        failed.future.result(0)
    (answer,) = ours.generate([engine.new_stream(prompts([5])[0], options)])
    assert [token.id for token in answer.tokens] == [token.id for token in expected.tokens]
    assert ours.ring.held[-1] == ours.runner._number


def test_passes_of_a_ring_hear_of_its_end(engines: Callable[[str, int], Engine]) -> None:
    ours, heard = InARing(engines("qwen3_lm", 2), 40, 4096, from_graphs=False), list[Any]()
    runner: Any = ours.runner
    runner.on_lost = heard.append
    piece = Piece(np.array([3], np.int32), 0, (0,), Row(SamplingOptions(max_tokens=1)))
    flight, lost = runner.launch([], pieces=[piece]), DeviceLost("stage 2 of 2 is lost")
    ours.ring.end(lost)
    for act in (flight.wait, lambda: runner.launch([], pieces=[piece])):
        with pytest.raises(DeviceLost, match="stage 2 of 2 is lost"):
            act()
    assert heard == [lost]


@pytest.mark.slow
@pytest.mark.parametrize("graph_tokens", [0, 512])
def test_each_stage_keeps_its_keys_and_values_in_8_bits(tiny: Callable[..., Path], tmp_path: Path, graph_tokens: int) -> None:
    folder = folder_without_pooling(tiny, "qwen3_lm", tmp_path / "model", tie_word_embeddings=False, num_hidden_layers=4)
    alone, engine = (
        Engine.load(folder, dtype="float32", devices=["cpu"] * count, cache_tokens=64 * PAGE_SIZE, kv_cache_dtype="fp8")
        for count in (1, 2)
    )
    plain = streams_of(alone, MIXED)
    Passes(alone, 4096).run(plain)
    ours = Staged(engine, 40, 70)
    if graph_tokens:
        ours.with_graphs(graph_tokens)
    for _ in range(2):
        for mine, theirs in zip(ours.generate(streams_of(alone, MIXED)), plain, strict=True):
            same(mine, theirs.future.result(0))


Waits = list[int | None]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Waits]:
    """For each pass the number of the pass for whose tokens it waits; None if it waits for no tokens."""
    waited: list[Event | None] = []
    run = EarlierStage.run

    def spy(stage: EarlierStage, shape: Any, filled: Any, graph: Any, hidden: Any, after: Any) -> Any:
        waited.append(after)
        return run(stage, shape, filled, graph, hidden, after)

    monkeypatch.setattr(EarlierStage, "run", spy)
    copied: list[Event] = []
    chosen = CudaPipeline._chosen

    def spy_on_chosen(runner: CudaPipeline, laid: Any) -> None:
        chosen(runner, laid)
        copied.append(runner._foreseen._events[-1][1])  # type: ignore[arg-type]

    monkeypatch.setattr(CudaPipeline, "_chosen", spy_on_chosen)
    return lambda: [None if event is None else copied.index(event) for event in waited]  # type: ignore[arg-type]


def test_a_pass_waits_for_the_pass_that_chose_its_tokens_and_for_no_later_one(
    engines: Callable[[str, int], Engine], waits: Callable[[], Waits]
) -> None:
    ours = Staged(engines("qwen3_lm", 2), 40, 4096)
    options = SamplingOptions(max_tokens=10, temperature=0.0)
    ours.generate([ours._engine.new_stream(prompt, options) for prompt in prompts([5, 6, 7, 8])])
    found = waits()
    assert found[0] is None, "the pass of the prompts waits for no tokens"
    foreseen = [(number, wait) for number, wait in enumerate(found) if wait is not None]
    assert len(foreseen) >= 14
    assert all(wait == number - 2 for number, wait in foreseen[2:]), "two groups take turns"


@pytest.mark.slow
def test_no_pass_waits_for_the_one_before_while_prompts_fill_it(
    engines: Callable[[str, int], Engine], waits: Callable[[], Waits]
) -> None:
    """If a pass waited, the first stage would be idle until the last stage has ended."""
    ours = Staged(engines("qwen3_lm", 2), 64, 100)
    options = SamplingOptions(max_tokens=30, temperature=0.0)
    ours.generate([ours._engine.new_stream(prompt, options) for prompt in prompts([50] * 20)])
    found = waits()
    assert len(found) > 40
    assert all(wait is None or wait <= number - 2 for number, wait in enumerate(found[:10]))


def test_prompts_without_pages_hold_up_no_stream(engines: Callable[[str, int], Engine]) -> None:
    engine = engines("qwen3_lm", 2)
    ours = Staged(engine, 2, 4096)
    options = SamplingOptions(max_tokens=20, temperature=0.0)
    answers = ours.generate([engine.new_stream(prompt, options) for prompt in prompts([50] * 6)])
    assert [len(each.tokens) for each in answers] == [20] * 6


@pytest.mark.slow
def test_tuning_finds_a_budget_and_captures_graphs_of_all_stages(engines: Callable[[str, int], Engine]) -> None:
    engine = engines("qwen3_lm", 2)
    ours = Staged(engine, 40, 4096)
    budget = tune.tune_streams(ours.runner, engine.config, torch.float32, 40 * PAGE_SIZE, 512)
    assert budget == 512
    graphs: Any = ours.runner.graphs._graphs.values()
    assert len(graphs) > 5
    assert all(len(graph.earlier) == 1 for graph in graphs)


@pytest.mark.slow
def test_many_streams_through_the_loop(engines: Callable[[str, int], Engine]) -> None:
    engine = engines("qwen3_lm", 3)
    ours = Staged(engine, 400, 8192).with_graphs(512)
    options = SamplingOptions(max_tokens=16, temperature=0.0)
    (expected,) = engine.generate(prompts([128])[:1], options)
    for count in (1, 7, 40):
        loop = EngineLoop(ours, 8192)
        streams = [engine.new_stream(prompts([128])[0], replace(options, max_tokens=10 + index % 7)) for index in range(count)]
        loop.submit(streams)
        for index, each in enumerate(streams):
            assert [token.id for token in each.future.result(60).tokens] == [t.id for t in expected.tokens][: 10 + index % 7]
        loop.stop()
    ours.pages.check_integrity()
    ours.runner.graphs.wait()


def test_a_gpu_of_an_earlier_stage_that_is_lost_ends_the_engine(
    engines: Callable[[str, int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Staged(engines("qwen3_lm", 2), 40, 4096)
    ours.runner._devices = first, _ = torch.device("cuda", 0), torch.device("cuda", 1)
    asked = []

    def synchronize(device: torch.device) -> None:
        asked.append(device)
        if device == first:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(cuda.torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(EarlierStage, "_compute", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    passes = Passes(ours, 4096)
    stream = ours._engine.new_stream([1, 2, 3], SamplingOptions(max_tokens=4))
    passes.run([stream])
    assert passes.device_lost
    assert asked == [first]
    with pytest.raises(DeviceLost, match="can no longer be used"):
        stream.future.result(0)
